"""Configurations of tests: loaded, or refused with their problems."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from torchtitan.config.job import ConfigError, JobConfig, load_config


def load(toml: str | None = None, arguments: list[str] | None = None, world_size: int = 1) -> JobConfig:
    """Load a text as a file run.toml, with these words of the command line."""
    argv = list(arguments or [])
    with TemporaryDirectory() as folder:  # not the working folder, which other test processes have too
        if toml is not None:
            Path(folder, "run.toml").write_text(toml, encoding="utf-8")
            argv += ["--job.config_file", f"{folder}/run.toml"]
        try:
            config = load_config(argv, world_size)
            config.job.config_file = config.job.config_file.replace(f"{folder}/", "")
            return config
        except ConfigError as error:
            raise ConfigError([text.replace(f"{folder}/", "") for text in error.problems]) from error


def problems(toml: str | None = None, arguments: list[str] | None = None, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(toml, arguments, world_size)
    return caught.value.problems
