"""Configurations of tests: loaded, or refused with their problems."""

from pathlib import Path

import pytest

from torchtitan.config.job import ConfigError, JobConfig, load_config


def load(toml: str | None = None, arguments: list[str] | None = None, world_size: int = 1) -> JobConfig:
    """Load a text as run.toml of the working folder, with these words of the command line."""
    argv = list(arguments or [])
    if toml is not None:
        Path("run.toml").write_text(toml, encoding="utf-8")
        argv += ["--job.config_file", "run.toml"]
    return load_config(argv, world_size)


def problems(toml: str | None = None, arguments: list[str] | None = None, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(toml, arguments, world_size)
    return caught.value.problems
