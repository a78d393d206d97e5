"""Record that travels with weights: the configuration that builds and samples their network, and what is known of its data.

A safetensors file has it in its header, as TOML; a checkpoint in its state. It names nothing that is opened.
"""

import dataclasses
import json
import math
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import tomli_w
import torch

from torchtitan.checkpoint.reading import read_state
from torchtitan.conditions import POOLED, TEXT, Classes, Embeddings, Entries, Texts, Unconditional, class_kind
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.config.latent_cache import store_of_latents, trained_info
from torchtitan.data import DatasetInfo
from torchtitan.diffusion.guidance import HEAD
from torchtitan.diffusion.objectives import OBJECTIVES
from torchtitan.errors import CheckpointError
from torchtitan.files.regular import read_toml
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import CONFIG, header_of, recorded_data
from torchtitan.latents.captions import NULL_CAPTION
from torchtitan.settings import setting
from torchtitan.settings.record import config_differences, effective
from torchtitan.settings.schema import validate_section

if TYPE_CHECKING:
    from torchtitan.latents.index import StoreIndex

RECORD = "recorded_data"  # entry of a checkpoint's state: the table of the data, or nothing
_OF_WEIGHTS = ("model", "objective", "sampling", "autoencoder", "debug")
_OF_RUNS = (*_OF_WEIGHTS, "ema")
_TRAINED_WITH = ("model", "objective", "ema", "lora")
_OF_ADAPTERS = ("lora", "checkpoint")  # the frozen network is filled from checkpoint.initial_weights


@dataclass(frozen=True)
class ModelRecord:
    """Configuration of a network, and what drawing from it needs of its data.

    Attributes:
        latents: of latents, their normalisation and autoencoder; None for images.
        elsewhere: whether the data are known by this record alone, and `config.data` must not be opened.
        null_caption, encoders: of captions, the text for no condition and the identities of their encoders, if known.
    """

    config: JobConfig
    info: DatasetInfo
    latents: "StoreIndex | None" = None
    elsewhere: bool = False
    null_caption: str = ""
    encoders: Mapping[str, Any] = field(default_factory=dict)

    def data_table(self) -> dict[str, Any]:
        """Table of the data, for a header or a state; empty where something else than classes or captions conditions it."""
        info, kind = self.info, self.info.condition_kind
        table: dict[str, Any] = {
            "shape": list(info.image_shape), "num_classes": info.num_classes, "class_names": list(info.class_names)
        }
        if isinstance(kind, Embeddings) and {TEXT, POOLED} == kind.entries.keys():
            (length, dim), (pooled_dim,) = (kind.entries[name][0] for name in (TEXT, POOLED))
            table |= {"text_length": length, "text_dim": dim, "pooled_dim": pooled_dim}
            table |= {"text_dtype": str(kind.entries[TEXT][1]).removeprefix("torch."), "null_caption": self.null_caption}
            table |= {"text_encoders": json.dumps(self.encoders), "trigger_word": self.config.data.trigger_word}
        elif not isinstance(kind, Classes | Unconditional):
            return {}
        of_objective = info.trained_entries if OBJECTIVES[self.config.objective.name].reads_features else info.entries
        if of_objective:
            table["entries"] = json.dumps({name: [shape, str(dtype)] for name, (shape, dtype) in of_objective.items()})
        if self.latents:
            normalization = self.latents.normalization
            table |= {
                "shift": list(normalization.shift), "scale": list(normalization.scale),
                "encoder": json.dumps(self.latents.autoencoder), "image_size": self.latents.image_size or 0,
            }  # fmt: skip
        return table

    def without_head(self) -> "ModelRecord":
        """Record of the network without its intermediate head, as published layouts hold it."""
        config, sampling = self.config, self.config.sampling
        if sampling.guide_track == HEAD:
            sampling = dataclasses.replace(
                sampling, guide_track="", guidance_scale=1.0, null_guidance_scale=1.0, null_guidance_interval=[0.0, 1.0]
            )
        model = dataclasses.replace(config.model, intermediate_head=None)
        objective = dataclasses.replace(cast(Any, config.objective), intermediate_share=None)
        config = dataclasses.replace(config, model=model, objective=objective, sampling=sampling)
        return dataclasses.replace(self, config=config)

    def header(self) -> dict[str, str]:
        """Entry for the header of a file of weights; none where there is no table of the data."""
        table = self.data_table()
        if not table:
            return {}
        tables = effective(self.config)
        tables = {name: tables[name] for name in _OF_WEIGHTS if tables.get(name)}
        return {CONFIG: tomli_w.dumps(_without_paths(tables) | {"data": table})}


@dataclass(kw_only=True)
class _DataTable:
    """Keys of the table of the data; latents have `scale`."""

    shape: list[int] = setting([], "channels, height and width")
    num_classes: int = setting(0, "classes of the images; 0: none", ge=0, le=100_000_000)
    class_names: list[str] = setting([], "one per class, or none")
    text_length: int = setting(0, "tokens of the texts that condition the network; 0: the class does", ge=0, le=8192)
    text_dim: int = setting(4096, "width of each token's embedding", ge=1, le=65536)
    pooled_dim: int = setting(768, "width of the embedding of the whole text", ge=1, le=65536)
    text_dtype: Literal["float32", "float16", "bfloat16"] = setting("float32", "dtype of the embeddings")
    text_encoders: str = setting("{}", "identities of the texts' encoders by entry, as JSON; {}: unknown")
    null_caption: str = setting("", "text that stands for no condition")
    trigger_word: str = setting("", "word that stands for [trigger] in prompts")
    entries: str = setting("", "shape and dtype of the other entries of a batch, as JSON; empty: there are none")
    shift: list[float] = setting([], "subtracted from each channel, or element, of the autoencoder's latents; empty: 0")
    scale: list[float] = setting([], "then multiplied with each; empty: 1")
    encoder: str = setting("", "the autoencoder that made the latents, as JSON; empty: unknown")
    image_size: int = setting(0, "pixels of each side of the encoded images; 0: unknown", ge=0, le=1_000_000)


def record_of(config: JobConfig, info: DatasetInfo | None = None) -> ModelRecord:
    """Record of a configuration with its data here, whose properties may be known already. Raises DatasetError."""
    store, info = store_of_latents(config), info or trained_info(config)
    null_caption, encoders = "", {}
    if store and store.captions:
        null_caption, encoders = store.captions.text(NULL_CAPTION), store.captions.plan.encoders
    elif isinstance(info.condition_kind, Texts):
        null_caption, _ = config.data.filled_texts()
    return ModelRecord(config, info, store.index if store else None, null_caption=null_caption, encoders=encoders)


def trained_for(config: JobConfig) -> str:
    objective = config.objective
    return f"trained for {objective.prediction} on {objective.path} with {objective.preconditioning} preconditioning"


def record_of_weights(path: Path) -> ModelRecord | None:
    """Record in the header of a file of weights, maybe a stranger's, if any. Raises WeightsError, ConfigError."""
    text = header_of(path).get(CONFIG)
    if not text:
        return None
    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError([f"{path}: its configuration is no TOML: {error}"]) from error
    data = tables.get("data")
    if not isinstance(data, Mapping) or "shape" not in data:
        return None
    return load_record({name: tables[name] for name in (*_OF_WEIGHTS, "data") if name in tables}, str(path))


def class_names_of_weights(path: Path) -> list[str]:
    """Names of the classes by the record in a file of weights; none where it has none. Raises WeightsError."""
    names = recorded_data(path).get("class_names", [])
    return [str(name) for name in names] if isinstance(names, list) else []


def record_of_checkpoint(folder: Path, checkpoint: AnyPath, as_trained: bool = False) -> ModelRecord | None:
    """Record of a run by its checkpoint, if that has one, where its data are not here, or have changed.

    Args:
        folder: of the run; or a folder without config.toml, if the configuration is the checkpoint's.
        as_trained: with the checkpoint's configuration, and not that of the folder.

    Raises:
        ConfigError: it cannot be used; CheckpointError: it is of adapters alone.
    """
    try:
        state = read_state(checkpoint)
        of_run = (folder / "config.toml").exists()
        tables = read_toml(folder / "config.toml") if of_run and not as_trained else state.get("config", {})
    except (CheckpointError, OSError, ValueError):
        return None
    table = state.get(RECORD)
    if not (table and isinstance(table, Mapping) and isinstance(tables, Mapping)):
        return None
    if not of_run and tables.get("lora", {}).get("enable", False):
        advice = "put it back into RUN/checkpoint, or draw with BASE --lora ADAPTER.safetensors"
        raise CheckpointError(f"{checkpoint}: is of adapters alone, and their base is not known here ({advice})")
    kept = [*_OF_RUNS, *(_OF_ADAPTERS if tables.get("lora", {}).get("enable", False) else ())]
    kept_tables = {name: tables[name] for name in kept if name in tables} | {"data": dict(table)}
    return load_record(kept_tables, f"{folder}, with its data as recorded", with_paths=of_run, earlier=True)


def record_as_trained(folder: Path, checkpoint: AnyPath, record: ModelRecord) -> tuple[ModelRecord, str]:
    """Record of a run, with the network and objective of a checkpoint that was trained with others; what is to be said."""
    try:
        state = read_state(checkpoint)
    except CheckpointError:
        return record, ""  # which is reported when weights are read
    lines = config_differences(state.get("config") or {}, record.config) if state.get("config") else []
    keys = [key for key in (line.partition(": ")[0] for line in lines) if key.partition(".")[0] in _TRAINED_WITH]
    if not keys:
        return record, ""
    said = f"{checkpoint}: was trained with another {', '.join(keys)} than the run has now"
    if keys == ["lora.base_dtype"]:  # a copy of the run changes it to merge its adapters
        return record, f"{said} (the run's is used)"
    if (found := record_of_checkpoint(folder, checkpoint, as_trained=True)) is None:
        return record, f"{said}, and has no record of the data: the run's keys are used"
    own, then = record.config, found.config
    config = dataclasses.replace(own, **{name: getattr(then, name) for name in {key.partition(".")[0] for key in keys}})
    config.lora = dataclasses.replace(config.lora, base_dtype=own.lora.base_dtype)
    if own.sampling.ema_track not in ("none", *(track.name for track in then.ema.tracks)):
        config.sampling = dataclasses.replace(own.sampling, ema_track=then.sampling.ema_track)
    return dataclasses.replace(record, config=config), f"{said} (the checkpoint's are used)"


def load_record(tables: Mapping[str, Any], place: str, with_paths: bool = False, earlier: bool = False) -> ModelRecord:
    """Load a record from tables of a configuration, of which `data` is the table of the data. Raises ConfigError.

    Args:
        earlier: whether keys that are no more are left out, as of a run's checkpoint; else they are refused.
    """
    info, latents, data = _read_data(tables["data"], place)
    kept = tables if with_paths else _without_paths(tables)
    # Neither names a folder, so neither can be opened.
    kept = dict(kept) | {"data": {"name": "latents" if latents else "image_folder"}}
    if "ema" not in kept:  # of a file, which names the tracks alone
        names = [kept.get("sampling", {}).get(key) for key in ("ema_track", "guide_track")]
        tracks = dict.fromkeys(["ema", *(name for name in names if isinstance(name, str))])
        kept["ema"] = {"tracks": [{"name": name} for name in tracks if name not in ("", "none", HEAD)]}
    if "sampling" in kept:  # for pixels, or for prompts of the data
        idle = {"clip_x0"} if latents else set()
        idle |= set() if info.condition_kind.choices else {"classes"}
        kept["sampling"] = {key: value for key, value in kept["sampling"].items() if key not in idle}
    if "autoencoder" in kept:  # its latents are drawn, whatever made those that were trained on
        kept["autoencoder"] = {key: value for key, value in kept["autoencoder"].items() if key not in ("encode", "statistics")}
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(tomli_w.dumps(kept))
        file.flush()
        try:
            config = load_config(["--job.config_file", file.name], 1, info=info, earlier=earlier)
        except ConfigError as error:
            raise ConfigError([line.replace(file.name, place) for line in error.problems]) from None
    config.data.trigger_word = data.trigger_word
    return ModelRecord(config, info, latents, True, data.null_caption, json.loads(data.text_encoders))


def _read_data(table: Mapping[str, Any], place: str) -> tuple[DatasetInfo, "StoreIndex | None", _DataTable]:
    from torchtitan.data.synthetic import text_kind
    from torchtitan.latents.index import Normalization, StoreIndex

    known = {field.name for field in dataclasses.fields(_DataTable)}
    data, refused = validate_section("data", _DataTable(), {key: value for key, value in table.items() if key in known})
    problems = [f"{problem.key}: {problem.text}" for problem in refused]
    if not problems and (len(data.shape) != 3 or min(data.shape) < 1):
        problems.append(f"data.shape: {data.shape} is not three positive numbers: channels, height, width")
    if not problems and len(data.class_names) not in (0, data.num_classes):
        problems.append(f"data.class_names: {len(data.class_names)} names of {data.num_classes} classes")
    for key in ("shift", "scale"):
        if not problems and len(getattr(data, key)) not in (0, data.shape[0], math.prod(data.shape)):
            problems.append(f"data.{key}: {len(getattr(data, key))} numbers for {data.shape[0]} channels")
    encoder: Any = {"name": "unknown"}
    if data.encoder:
        with suppress(ValueError, RecursionError):
            encoder = json.loads(data.encoder)
        if not (isinstance(encoder, dict) and isinstance(encoder.get("name"), str)):
            problems.append("data.encoder: is no autoencoder's record")
    if not _is_of_encoders(data.text_encoders):
        problems.append("data.text_encoders: is no record of encoders")
    if (entries := _read_entries(data.entries)) is None:
        problems.append("data.entries: is no record of shapes and dtypes")
    if problems:
        raise ConfigError([f"{place}: {problem}" for problem in problems])
    kind = class_kind(data.num_classes, data.class_names)
    if data.text_length:
        kind = text_kind(data, getattr(torch, data.text_dtype))
    channels, height, width = data.shape
    info = DatasetInfo((channels, height, width), kind, has_validation=False, entries=entries or {})
    if "scale" not in table:
        return info, None, data
    normalization = Normalization.model_construct(
        shift=data.shift or [0.0] * channels, scale=data.scale or [1.0] * channels, source="given"
    )
    latents = StoreIndex.model_construct(
        shape=info.image_shape, num_classes=data.num_classes, class_names=data.class_names,
        image_size=data.image_size or None, autoencoder=encoder, normalization=normalization, captions=None,
        num_images=0, shards=[], posterior=False, mirrored=False,
    )  # fmt: skip
    return info, latents, data


def _is_of_encoders(text: str) -> bool:
    try:
        found = json.loads(text)
        return not found or found.keys() == {TEXT, POOLED} and all(isinstance(each["name"], str) for each in found.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _read_entries(text: str) -> Entries | None:
    dtypes = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    try:
        found = json.loads(text or "{}").items()
        return {name: (tuple(map(int, shape)), dtypes[dtype]) for name, (shape, dtype) in found}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _without_paths(table: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Tables without the keys of files and folders; objective.path names a diffusion path."""
    kept = [key for key in table if not key.endswith("_path") and (section, key) != ("autoencoder", "path")]
    return {key: _without_paths(table[key], key) if isinstance(table[key], Mapping) else table[key] for key in kept}
