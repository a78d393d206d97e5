"""Configuration that goes with weights: what builds the network and samples from it where the training data are not."""

import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from torchtitan.checkpoint.reading import read_state
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.data import DATASETS, DataConfig, DatasetInfo
from torchtitan.data.recorded import RECORDS, record_of
from torchtitan.errors import CheckpointError
from torchtitan.evaluation.config import LATENT_DATASETS
from torchtitan.files.regular import read_toml
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import header_of
from torchtitan.settings.record import effective

CONFIG = "config"  # entry of a safetensors header: the configuration, as TOML
RECORD = "recorded_data"  # entry of a checkpoint's state: `[data]` of the record, or nothing
_OF_WEIGHTS = ("model", "objective", "sampling", "autoencoder", "data", "debug")
_OF_RUNS = (*_OF_WEIGHTS, "ema")
_OF_ADAPTERS = ("lora", "checkpoint")  # the frozen network is filled from checkpoint.initial_weights


def data_record(config: JobConfig, info: DatasetInfo) -> dict[str, Any]:
    """`[data]` to sample with where the data are not; empty where captions condition the network."""
    index = DATASETS[config.data.name].store(config.data).index if config.data.name in LATENT_DATASETS else None
    record = record_of(config.data, info, index)
    return _with_data(config, record)["data"] if record else {}


def header_config(config: JobConfig, info: DatasetInfo) -> dict[str, str]:
    """Entry for the header of a file of weights; none where captions condition the network."""
    record = data_record(config, info)
    if not record:
        return {}
    tables = effective(config) | {"data": record}
    return {CONFIG: tomli_w.dumps(_without_paths({name: tables[name] for name in _OF_WEIGHTS if tables.get(name)}))}


def config_of_weights(path: Path) -> JobConfig | None:
    """Configuration in a file of weights; None where it has none, or one that opens a dataset.

    The file may be anybody's: nothing that it names is opened, fetched or written.

    Raises:
        WeightsError, ConfigError.
    """
    text = header_of(path).get(CONFIG)
    if not text:
        return None
    with suppress(ValueError):  # what is wrong with the text is reported by load_text
        tables = tomllib.loads(text)
        data = tables.get("data")
        if not isinstance(data, Mapping) or data.get("name") not in RECORDS:
            return None
        text = tomli_w.dumps(_without_paths({name: tables[name] for name in _OF_WEIGHTS if name in tables}))
    return load_text(text, str(path))


def _without_paths(table: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Tables without the keys of files and folders; objective.path names a diffusion path."""
    kept = [key for key in table if not key.endswith("_path") and (section, key) != ("autoencoder", "path")]
    return {key: _without_paths(table[key], key) if isinstance(table[key], Mapping) else table[key] for key in kept}


def class_names_of_weights(path: Path) -> list[str]:
    """Names of the classes by the configuration in a file of weights; none where it has none. Raises WeightsError."""
    try:
        return [str(name) for name in tomllib.loads(header_of(path).get(CONFIG, ""))["data"]["class_names"]]
    except (ValueError, TypeError, KeyError):
        return []


def config_without_data(folder: Path, checkpoint: AnyPath) -> JobConfig | None:
    """Configuration of a run, with the record of its data for `[data]`.

    Args:
        folder: of the run; or a folder without config.toml, if the configuration is the checkpoint's.
        checkpoint: of the run.

    Returns:
        it; None where the checkpoint has no such record.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        state = read_state(checkpoint)
        of_run = (folder / "config.toml").exists()
        tables = read_toml(folder / "config.toml") if of_run else state.get("config", {})
    except (CheckpointError, OSError, ValueError):
        return None
    record = state.get(RECORD)
    if not (record and isinstance(record, Mapping) and isinstance(tables, Mapping)):
        return None
    adapters = tables.get("lora", {}).get("enable", False)
    tables = tables if of_run else _without_paths(tables)  # a checkpoint alone may be anybody's
    kept = [*_OF_RUNS, *(_OF_ADAPTERS if adapters else ())]
    tables = {name: tables[name] for name in kept if name in tables} | {"data": dict(record)}
    return load_text(tomli_w.dumps(tables), f"{folder}, with its data as recorded")


def _with_data(config: JobConfig, data: DataConfig) -> dict[str, Any]:
    before, config.data = config.data, data
    try:
        return effective(config)
    finally:
        config.data = before


def load_text(text: str, place: str) -> JobConfig:
    """Load a configuration from the text of a TOML file; errors name its `place`. Raises ConfigError."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return load_config(["--job.config_file", file.name], 1)
        except ConfigError as error:
            lines = [line.replace(file.name, place) for line in error.problems]
            raise ConfigError(lines) from None
