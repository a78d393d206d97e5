"""Weights in published layouts: read without a run, written from any weights, with what says how they are sampled."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.config.job import JobConfig
from torchtitan.evaluation.config import AutoencoderConfig
from torchtitan.files.regular import read_regular
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import (
    INDEX_SUFFIX,
    NotTensors,
    WeightsError,
    header_of,
    read_state_dict,
    saved_buffers,
    written_whole,
)
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel
from torchtitan.models.published_layouts import ComputedTensors, ConversionError, PublishedLayout
from torchtitan.weights.model_record import ModelRecord, load_record, record_of_weights, trained_for
from torchtitan.weights.network import network_on_meta
from torchtitan.weights.pipeline_folder import PIPELINE, check_pipeline, latents_of, scheduler_problems, write_around

OWN = "safetensors"
_TORCH_SUFFIXES = (".pt", ".pth")
LAYOUTS = tuple(dict.fromkeys(name for family in MODELS.values() for name in family.layouts))
WRITTEN = (OWN, *LAYOUTS, PIPELINE)
_COMFYUI = "model.diffusion_model."  # prefix of the network in checkpoints with all parts of a pipeline
_WRAPPERS = ("_orig_mod.", "module.")  # prefixes of the names in torch.compile's and DistributedDataParallel's state dicts
_OBJECTIVE = tuple(f"objective.{key}" for key in ("path", "prediction", "preconditioning", "sigma_data", "noise_std"))


@dataclass(frozen=True)
class OwnWeights:
    """A network's weights: every parameter and saved buffer by its own name, and the record of its configuration."""

    source: Path
    record: ModelRecord
    model: DiffusionModel
    tensors: Mapping[str, Tensor]
    label: str


def open_published(path: Path, layout_name: str, record: ModelRecord | None) -> tuple[OwnWeights, list[str]]:
    """Open weights of a published layout, or of this program's own.

    Args:
        path: file, or folder of diffusers.
        record: of the model; None: the one in the file's header, or what its tensors show.

    Returns:
        the weights, and a line for each thing left out or to know.

    Raises:
        WeightsError: they are of another layout, another model, or of a model that they do not show; ConfigError.
    """
    source, document, problems = published_file(path)
    if problems := problems or scheduler_problems(path):
        raise WeightsError("\n".join(f"{path}: {problem}" for problem in problems))
    if record is not None and layout_name != OWN:
        layout_of(layout_name, record.config)  # before a large file is read
    published, notes = _read_published(source, layout_name)
    header, latents = record_of_weights(source) if source.suffix == ".safetensors" else None, latents_of(path)
    if record is None:
        if header is None:
            header = _record_shown(source, layout_name, published, document, _class_names(path), latents)
            if header.latents and not latents:
                scale = header.latents.normalization.scale[0]
                text = f"its latents are taken as scaled by {scale:g}, which tensors do not show (add CONFIG for another)"
                notes = [*notes, text]
        record = header
        record.config.autoencoder = _autoencoder_beside(path, record.config)
    config, info = record.config, record.info
    model = network_on_meta(config, info)
    if layout_name == OWN:
        _check_constants(source, record, dict.fromkeys(_OBJECTIVE), header)
        wanted, found = set(dict(model.named_parameters()) | saved_buffers(model)), set(published)
        if wanted != found:
            raise WeightsError(f"{source}: is not in this program's layout, or of another model ({len(wanted ^ found)} names)")
        return OwnWeights(path, record, model, published, source.name), notes
    layout = layout_of(layout_name, config)
    if document and (problems := layout.folder_config_problems(dict(document), model)):
        raise WeightsError("\n".join(f"{path}: {problem}" for problem in problems))
    try:
        tensors, left_out = layout.import_weights(published, model)
    except ConversionError as error:
        raise WeightsError(prefixed(source, error)) from error
    _check_constants(source, record, layout.constants(model), header, latents or layout.latents.get(info.image_shape[0]))
    return OwnWeights(path, record, model, tensors, source.name), [*left_out, *notes, layout.convention]


def write_weights(
    weights: OwnWeights, output: Path, layout_name: str, *, dtype: str, overwrite: bool, approximate: bool = False,
    vae: Path | None = None,
) -> list[str]:  # fmt: skip
    """Write weights in a layout, with a header that says how they are sampled; a line for each omission.

    A published layout of one file, named .pt or .pth, is a torch checkpoint, as published code reads it, without a header.

    Args:
        approximate: accept that the layout's network computes another sinusoid of the timestep.
        vae: folder of the AutoencoderKL for a pipeline; None: the autoencoder of the training.

    Raises:
        WeightsError: the layout cannot hold them, or they cannot be written.
    """
    record, model, tensors = weights.record, weights.model, weights.tensors
    config, num_classes = record.config, record.info.num_classes
    pipeline = layout_name == PIPELINE
    if vae is not None and not pipeline:
        raise WeightsError(f"--vae: has no effect on {layout_name} (leave it out, or write {PIPELINE})")
    layout, unrounded, notes = None, frozenset(saved_buffers(model)), []
    as_checkpoint = output.suffix in _TORCH_SUFFIXES
    if as_checkpoint and layout_name == OWN:
        name = output.with_suffix(".safetensors").name
        raise WeightsError(f"--output {output.name}: only published layouts are torch checkpoints (name it {name})")
    if layout_name != OWN:
        layout = layout_of("diffusers" if pipeline else layout_name, config)
        if problems := _export_problems(layout, model, approximate):
            raise WeightsError("\n".join(f"{weights.source}: {problem}" for problem in problems))
        if pipeline:
            vae = check_pipeline(weights.source, record, vae)
        try:
            tensors, left_out = layout.export_weights(tensors, model)
        except ConversionError as error:
            raise WeightsError(prefixed(weights.source, error)) from error
        unrounded = layout.unrounded
        notes = [*left_out, f"{trained_for(config)}; {layout.convention}"]
        if getattr(config.model, "intermediate_head", None):
            record = record.without_head()
        if differing := _differing(config, layout.constants(model)):
            notes.append(f"its code computes another function unless it is changed: {', '.join(differing)}")
        if pipeline and num_classes != 1000:
            notes.append(f"DiTPipeline's null class is number 1000: guidance of {num_classes} classes fails there")
    elif getattr(config.model, "intermediate_head", None):
        use = "training alone" if config.objective.two_times else "--guide head"
        notes.append(f"model.intermediate_head: kept, for {use}")
    header = {
        "layout": "diffusers" if pipeline else layout_name,
        "weights": weights.label,
        "model": config.model.flavor,
        "trained_for": trained_for(config),
    } | record.header()
    with written_whole(output, overwrite) as path:
        if layout and layout.folder_files:
            folder = path / "transformer" if pipeline else path
            folder.mkdir(parents=True)
            text = json.dumps(layout.folder_config(model), indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
            _write_converted(folder / layout.folder_files[0], weights.source, tensors, dtype, unrounded, header)
            if pipeline and vae is not None:
                write_around(path, vae, record)
        else:
            _write_converted(path, weights.source, tensors, dtype, unrounded, None if as_checkpoint else header)
    return notes


def _export_problems(layout: PublishedLayout, model: DiffusionModel, approximate: bool) -> list[str]:
    """Everything that stands against an export; --approximate is advised only where nothing else does."""
    problems, difference = layout.problems(model), layout.approximation(model)
    if difference and not problems:
        return [] if approximate else [f"{difference} (or add --approximate)"]
    return [difference, *problems] if difference else problems


def _autoencoder_beside(path: Path, config: JobConfig) -> AutoencoderConfig:
    named = config.autoencoder.name not in ("none", "diffusers") or config.autoencoder.path
    if named or not (path / "vae" / "config.json").is_file():
        return config.autoencoder
    return AutoencoderConfig(name="diffusers", path=str(path / "vae"))


def _class_names(path: Path) -> list[str]:
    """Class names of a pipeline's folder; none for anything else."""
    try:
        document = json.loads(read_regular(path / "model_index.json"))
        names = document.get("id2label") or {}
        ordered = [names[str(number)] for number in range(len(names))]
    except (OSError, ValueError, RecursionError, AttributeError, KeyError):
        return []
    return ordered if all(isinstance(name, str) for name in ordered) else []


def _record_shown(
    source: Path, layout_name: str, published: Mapping[str, Tensor], document: Mapping[str, Any],
    class_names: list[str], latents: tuple[float, float] | None,
) -> ModelRecord:  # fmt: skip
    """Record that the tensors show, of latents with a given shift and scale. Raises WeightsError: they show none."""
    for name, family in MODELS.items():
        layout = family.layouts.get(layout_name)
        if layout is None or (tables := layout.settings(published, document)) is None:
            continue
        channels = tables["data"]["shape"][0]
        data = ({"scale": []} if channels not in (1, 3) else {}) | tables["data"]
        if latents and "scale" in data:
            data |= {"shift": [latents[0]] * channels, "scale": [latents[1]] * channels}
        data |= {"class_names": class_names} if class_names and len(class_names) == data["num_classes"] else {}
        return load_record(tables | {"model": {"name": name} | tables["model"], "data": data}, str(source))
    raise WeightsError(f"{source}: its tensors show no model of a named size in the {layout_name} layout (add CONFIG)")


def layout_of(name: str, config: JobConfig) -> PublishedLayout:
    """Layout of a configuration's networks, for the units in which it has its data. Raises WeightsError."""
    known = MODELS[config.model.name].layouts
    if name not in known:
        has = f"its published layouts are {', '.join(known)}" if known else "it has no published layout"
        raise WeightsError(f"--format {name}: is not of model.name = {config.model.name} ({has})")
    objective = config.objective
    return known[name].at(objective.sigma_data) if objective.preconditioning == "edm" else known[name]


def _check_constants(
    source: Path, record: ModelRecord, wanted: Mapping[str, Any], header: ModelRecord | None,
    latents: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    """Refuse weights for a configuration in which they would be another function. Raises WeightsError.

    Args:
        wanted: constants of the published network by key of the configuration.
        header: of weights that this program wrote, with their constants.
    """
    config = record.config
    if header is not None:
        wanted, latents = {key: attrgetter(key)(header.config) for key in wanted}, None
    elif source.suffix == ".safetensors" and header_of(source).get("trained_for") == trained_for(config):
        wanted, latents = {}, None  # of captions: without a configuration
    found = _differing(config, {key: value for key, value in wanted.items() if value is not None})
    if latents and record.latents:
        normalization = record.latents.normalization
        for key, values, value in zip(("shift", "scale"), (normalization.shift, normalization.scale), latents, strict=True):
            if any(abs(each - value) > 1e-3 * abs(value) for each in values):
                found.append(f"latents with {key} = {list(values)} (there {value:g})")
    if found:
        advice = "set it so; a run that starts from the imported file may have another"
        raise WeightsError("\n".join(f"{source}: {line}, which tensors do not show ({advice})" for line in found))


def _differing(config: JobConfig, wanted: Mapping[str, Any]) -> list[str]:
    given = {key: attrgetter(key)(config) for key in wanted}
    # A continuous path has the times of the discrete one, and others.
    same = {key for key in wanted if given[key] in (wanted[key], f"{wanted[key]}_continuous")}
    return [f"{key} = {given[key]} (there {wanted[key]})" for key in wanted if key not in same]


def published_file(path: Path) -> tuple[Path, Mapping[str, Any], list[str]]:
    """File of weights, the config.json beside it where `path` is a folder, and what is wrong with the folder."""
    if not path.is_dir():
        return path, {}, []
    path = path / "transformer" if (path / "transformer" / "config.json").is_file() else path  # of a pipeline
    whole = {name for family in MODELS.values() for layout in family.layouts.values() for name in layout.folder_files}
    names = sorted(whole, reverse=True)
    names += [name.replace(".safetensors", INDEX_SUFFIX) for name in names if name.endswith(".safetensors")]
    source = next((path / name for name in names if (path / name).is_file()), None)
    if source is None:
        return path, {}, [f"holds no {' or '.join(names)}"]
    try:
        document = json.loads(read_regular(path / "config.json"))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        return source, {}, ["config.json is missing or damaged"]
    return source, document, []


def _read_published(path: Path, layout_name: str) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of the network alone, and a line on where they were taken from. Raises WeightsError."""
    try:
        published, nested = read_state_dict(path)
    except NotTensors as error:
        layouts = (family.layouts.get(layout_name) for family in MODELS.values())
        advice = next((layout.advice for layout in layouts if layout and layout.advice), "")
        raise WeightsError(f"{error} ({advice})" if advice else str(error)) from error
    notes = [f"taken from {nested!r} of the file"] if nested else []
    while published and (prefix := next((each for each in _WRAPPERS if all(name.startswith(each) for name in published)), None)):
        published = {name.removeprefix(prefix): tensor for name, tensor in published.items()}
        notes.append(f"names are without their {prefix!r}, of a wrapped network")
    network = {name.removeprefix(_COMFYUI): tensor for name, tensor in published.items() if name.startswith(_COMFYUI)}
    if not network:
        return published, notes
    others = Counter(name.partition(".")[0] for name in published if not name.startswith(_COMFYUI))
    counts = ", ".join(f"{count} tensors of {part}" for part, count in others.items())
    return network, [*notes, *([f"left out beside {_COMFYUI}: {counts}"] if others else [])]


def _write_converted(
    path: Path, source: Path, weights: Mapping[str, Tensor], dtype: str, unrounded: frozenset[str],
    metadata: dict[str, str] | None,
) -> None:  # fmt: skip
    """Write weights in another dtype, except `unrounded`: singly; as a torch checkpoint if `metadata` is None.

    Raises:
        OSError; WeightsError: they hold values that are not finite.
    """

    def entry(name: str) -> tuple[tuple[int, ...], torch.dtype]:
        shape = weights.shapes[name] if isinstance(weights, ComputedTensors) else tuple(weights[name].shape)
        return shape, weights[name].dtype if name in unrounded else getattr(torch, dtype)

    def converted(name: str, kept: torch.dtype) -> Tensor:
        tensor = weights[name].to(kept)
        if not tensor.isfinite().all():
            advice = " in float16 (give --dtype float32)" if dtype == "float16" else ""
            raise WeightsError(f"{source}: {name} holds values that are not finite{advice}")
        return tensor

    entries = {name: entry(name) for name in weights}
    entries = dict(sorted(entries.items(), key=lambda item: (-item[1][1].itemsize, item[0])))
    tensors = (converted(name, kept) for name, (_, kept) in entries.items())
    if metadata is None:
        torch.save(dict(zip(entries, tensors, strict=True)), path)
    else:
        write_tensors(path, entries, tensors, metadata)


def prefixed(path: Path, error: Exception) -> str:
    return "\n".join(f"{path}: {line}" for line in str(error).splitlines())


