"""Trained model, read back for sampling: from a run folder's checkpoint, or from a file of weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import (
    CheckpointError,
    checkpoint_path,
    checkpoint_steps,
    newest_good,
    read_state,
    read_tensors,
    verify,
)
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.checkpoint.manifest import MANIFEST, RENAMED
from torchtitan.conditions import POOLED, TEXT
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.data.base import DatasetInfo
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import attach, build_objective
from torchtitan.distributed.degrees import degrees_of
from torchtitan.files.regular import read_text, read_toml
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import (
    WeightsError,
    fill,
    header_of,
    mismatches,
    named_weights,
    read_state_dict,
    saved_buffers,
    tensor_sizes,
)
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapters import trained_parameters, trained_updates
from torchtitan.models.adapters.layouts import are_of_an_adapter
from torchtitan.models.base import DiffusionModel
from torchtitan.models.published_layouts import ConversionError
from torchtitan.settings.record import CONFIG_HEADER
from torchtitan.training.snapshot_series import SnapshotError
from torchtitan.weights.adapted_network import adapted_network, adapted_network_on_meta
from torchtitan.weights.data_changes import change_of_classes, change_of_store, plugin_changes
from torchtitan.weights.model_record import (
    ModelRecord,
    record_as_trained,
    record_of,
    record_of_checkpoint,
    record_of_weights,
)
from torchtitan.weights.network import check_base, network_on_meta
from torchtitan.weights.post_hoc_ema import Reconstruction, reconstruct, stored_averages
from torchtitan.weights.published import layout_of, open_published

_ENCODERS = {TEXT: "text_encoder_2", POOLED: "text_encoder"}  # folders of Flux's pipeline
RECONSTRUCTED = "std="  # prefix of tracks that are reconstructed from snapshots


@dataclass(frozen=True)
class TrainedModel:
    """Model ready to sample from.

    Attributes:
        info: of the data, or with prompts instead of its conditions.
        model: in eval mode, float32, whole, on the given device.
        label: origin of the weights, such as `step 1000, ema`.
        step: of the checkpoint or snapshot; None for a file of weights.
        track: EMA track, "none" for the trained weights; "" for a file of weights.
        warnings: damaged checkpoints that were skipped, or limits of a reconstruction's accuracy.
        encoders: places of the text encoders in a published pipeline's folder, by entry.
    """

    record: ModelRecord
    info: DatasetInfo
    model: DiffusionModel
    objective: Objective
    label: str
    warnings: tuple[str, ...] = ()
    step: int | None = None
    track: str = ""
    encoders: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> JobConfig:
        return self.record.config


def load_run(
    folder: Path, track: str | None, step: int | None, device: torch.device, base: bool = True
) -> TrainedModel:
    """Load a checkpoint of a run. Raises WeightsError, ConfigError, CheckpointError.

    Args:
        track: name of an EMA track, "none" for the trained weights, `std=0.15` for an average of that length from the
            run's snapshots, None for the run's own choice.
        step: of the checkpoint, or of the snapshot; None for the newest good one.
        base: whether the frozen network of adapters is read; without it, only they have values.
    """
    folder, checkpoints, step = checkpoints_of_source(folder, step)
    record, missing = record_of_run(folder, checkpoints, step)
    if (track or "").startswith(RECONSTRUCTED) and track not in [entry.name for entry in record.config.ema.tracks]:
        return _reconstructed(folder, track or "", step, device)
    step, warnings = _choose_step(checkpoints, step)
    record, other = record_as_trained(folder, checkpoint_path(checkpoints, step), record)
    config, info = record.config, record.info
    track = track or config.sampling.ema_track
    tracks = [entry.name for entry in config.ema.tracks]
    if track not in ("none", *tracks):
        there = ", ".join(["none", *tracks, *([f"{RECONSTRUCTED}LENGTH"] if config.ema.snapshot_interval else [])])
        raise WeightsError(f"{folder}: has no EMA track {track!r} (there are: {there})")
    alone = config.lora.enable and not base
    model = _adapter_alone(config, info) if alone else _empty_model(config, info, device, checkpoint_path(checkpoints, step))
    prefix = "model." if track == "none" else f"ema.{track}."
    trained = trained_parameters(dict(model.named_parameters()))
    wanted = {prefix + name: parameter.detach() for name, parameter in trained.items()}
    wanted |= {f"model.{name}": buffer for name, buffer in saved_buffers(model).items() if not alone}
    read_tensors(checkpoint_path(checkpoints, step), wanted)
    objective = _objective(record, model, device)
    changed = plugin_changes(read_state(checkpoint_path(checkpoints, step)).get("plugins", {}))
    learned = {f"objective.{name}": tensor for name, tensor in objective.tensors().items()}
    if learned:
        read_tensors(checkpoint_path(checkpoints, step), learned)
    label = f"step {step}, {'trained weights' if track == 'none' else track}"
    said = (*missing, *warnings, *filter(None, [other]), *changed)
    return TrainedModel(record, info, model, objective, label, said, step, track)


def load_weights(path: Path, config_file: Path | None, device: torch.device) -> TrainedModel:
    """Load a safetensors file of weights, without adapters.

    Args:
        path: of the file, with tensors under the names of the model or, if its header says so, of a published layout; or of a
            folder of diffusers, which shows its model itself.
        config_file: configuration of the model; None: the one in the header of the file.

    Raises:
        WeightsError: not a safetensors file, its header has no configuration, tensors are missing, superfluous or of another
            shape, or the heads' shares are in a checkpoint only.
        ConfigError: the configuration is refused.
    """
    if path.is_dir():
        return _published_folder(path, config_file, device)
    if said := no_weights(path):
        raise WeightsError(f"{path}: {said}")
    if are_of_an_adapter(tensor_sizes(path)):
        raise WeightsError(f"{path}: is an adapter (give it with --lora, after the network that it was trained on)")
    try:
        record = record_of(read_config(config_file)) if config_file else record_of_weights(path)
    except ConfigError as error:
        if not config_file or record_of_weights(path) is None:
            raise
        raise ConfigError([*error.problems, f"{path}: describes its model in its header (leave {config_file} out)"]) from error
    if record is None:
        raise WeightsError(f"{path}: which model is this? (add CONFIG, its configuration)")
    config, info = record.config, record.info
    config.lora.enable = False  # the file is of a whole network
    model = _empty_model(config, info, device)
    objective = _objective(record, model, device)
    if objective.reads_by_state:
        raise WeightsError(f"{path}: holds weights alone, but {objective.reads_by_state}")
    _fill(model, path, config)
    return TrainedModel(record, info, model, objective, path.stem)


def no_weights(path: Path) -> str:
    """What a file is that holds no network's weights, and what to give instead; "" where it may hold them."""
    if path.name == "config.toml":
        return "is the record of a run (give the run's folder)"
    if (path.parent / MANIFEST).is_file():
        return "is a part of a checkpoint (give the checkpoint's folder, or its run's)"
    return ""


def empty_trained_model(folder: Path, device: torch.device) -> TrainedModel:
    """Model and objective of a run's folder without values, for `fill_reconstructed`. Raises ConfigError."""
    record, missing = record_of_run(folder, run_checkpoints(folder))
    model = _empty_model(record.config, record.info, device)
    return TrainedModel(record, record.info, model, _objective(record, model, device), "", missing)


@torch.no_grad()
def fill_reconstructed(trained: TrainedModel, found: Reconstruction) -> None:
    """Fill model and objective from a run's snapshots. Raises SnapshotError, WeightsError."""
    weights = trained_parameters(dict(trained.model.named_parameters())) | saved_buffers(trained.model)
    wanted = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    learned = trained.objective.tensors()
    wanted_beside = {name: tuple(tensor.shape) for name, tensor in learned.items()}
    beside = found.beside()
    problems = mismatches(wanted, {name: shape for name, (shape, _) in found.shapes.items()})
    problems += mismatches(wanted_beside, {name: tuple(tensor.shape) for name, tensor in beside.items()})
    if problems:
        raise WeightsError(f"{found.stored.last.path}: is not of config.toml's model: {problems[0]}")
    for name, tensor in found.tensors():
        weights[name].copy_(tensor)
    for name, tensor in beside.items():
        learned[name].copy_(tensor)


def _reconstructed(folder: Path, track: str, step: int | None, device: torch.device) -> TrainedModel:
    try:
        std = float(track.removeprefix(RECONSTRUCTED))
    except ValueError as error:
        raise SnapshotError(f"{track}: names no length (as {RECONSTRUCTED}0.15)") from error
    found = reconstruct(stored_averages(folder, step), std)
    trained = empty_trained_model(folder, device)
    fill_reconstructed(trained, found)
    step = found.stored.last.step
    label, warnings = f"step {step}, {RECONSTRUCTED}{std:g}", (*trained.warnings, *found.warnings)
    return dataclasses.replace(trained, label=label, step=step, track=track, warnings=warnings)


def read_config(
    path: Path, words: Sequence[str] = (), elsewhere: bool = False, info: DatasetInfo | None = None
) -> JobConfig:
    """Read a configuration, maybe an earlier version's, for its number of processes; `words` override its keys."""
    degrees, earlier = None, False
    with suppress(OSError, ValueError, AttributeError):  # what is wrong is reported by load_config
        earlier = read_text(path).startswith(CONFIG_HEADER)
        table = read_toml(path).get("parallelism", {})
        degrees = degrees_of({f"parallelism.{key}": value for key, value in table.items()})
    processes = degrees.processes if degrees else 1
    return load_config(
        ["--job.config_file", str(path), *words], processes, elsewhere=elsewhere, info=info, earlier=earlier
    )


def checkpoints_of_source(folder: Path, step: int | None) -> tuple[Path, AnyPath, int | None]:
    """Folder of a run, of its checkpoints, and the step; of a checkpoint in RUN/checkpoint, or by itself somewhere, its own."""
    single = folder.resolve() if folder.is_symlink() else folder.absolute()
    if not (folder / "config.toml").exists() and (single / MANIFEST).is_file():
        number = next((step for step in checkpoint_steps(single.parent) if checkpoint_path(single.parent, step) == single), None)
        if number is None:
            raise WeightsError(f"{folder}: {RENAMED}")
        if step not in (None, number):
            raise WeightsError(f"--step {step}: {folder} is the checkpoint of step {number} (leave --step out, or give the run)")
        run = single.parents[1]
        own = False
        with suppress(OSError, ValueError):  # else the checkpoint's record serves
            own = single.parent.name == "checkpoint" and bool(read_toml(run / "config.toml"))
        return run if own else folder, single.parent, number
    return folder, run_checkpoints(folder), step


def record_of_run(folder: Path, checkpoints: AnyPath, step: int | None = None) -> tuple[ModelRecord, tuple[str, ...]]:
    """Record of a run: with its data, or by its checkpoint where they are not here or have other classes; what is to be said."""
    try:
        return _with_trained_classes(folder, checkpoints, step, record_of(read_config(folder / "config.toml")))
    except ConfigError as error:
        steps = checkpoint_steps(checkpoints)
        with suppress(ConfigError):
            if steps and (found := record_of_checkpoint(folder, checkpoint_path(checkpoints, step or steps[0]))):
                said = f"{error.problems[0]} (the checkpoint's record of the data is used)"
                return found, (said,) if (folder / "config.toml").exists() else ()
        if not (folder / "config.toml").exists():
            raise WeightsError(f"{folder}: is no run folder, it has no config.toml (give the folder of one run)") from error
        raise


def _with_trained_classes(
    folder: Path, checkpoints: AnyPath, step: int | None, record: ModelRecord
) -> tuple[ModelRecord, tuple[str, ...]]:
    """Record as given, or the checkpoint's where the data have other classes or latents now. Raises WeightsError: it has none."""
    steps, change = checkpoint_steps(checkpoints), ""
    if steps and (record.info.class_names or record.latents):
        checkpoint = checkpoint_path(checkpoints, step or steps[0])
        with suppress(CheckpointError):  # of a damaged one, which is skipped or reported when weights are read
            state = read_state(checkpoint)
            text = change_of_classes(state, record.info) if record.info.class_names else ""
            text = text or change_of_store(state, record.data_table())
            change = text and f"{checkpoint}: {text}"
    if not change:
        return record, ()
    if recorded := record_of_checkpoint(folder, checkpoint):
        return recorded, (f"{change} (the checkpoint's record of the data is used)",)
    raise WeightsError(f"{change}, and has no record of the data (give the classes in order with data.classes_file)")


def _published_folder(path: Path, config_file: Path | None, device: torch.device) -> TrainedModel:
    weights, _ = open_published(path, "diffusers", record_of(read_config(config_file)) if config_file else None)
    config, info = weights.record.config, weights.record.info
    config.lora.enable = False  # the folder is of a whole network
    model = _empty_model(config, info, device)
    objective = _objective(weights.record, model, device)
    _copy(model, weights.tensors)
    encoders = {entry: str(path / name) for entry, name in _ENCODERS.items() if (path / name).is_dir()}
    return TrainedModel(weights.record, info, model, objective, path.resolve().name, encoders=encoders)


def _fill(model: DiffusionModel, path: Path, config: JobConfig) -> None:
    """Fill a model from a file in its names, or in those of the published layout in the header. Raises WeightsError."""
    layout = header_of(path).get("layout", "")
    if layout not in MODELS[config.model.name].layouts:
        fill(model, path)
        return
    try:
        weights, _ = layout_of(layout, config).import_weights(read_state_dict(path)[0], model)
    except ConversionError as error:
        raise WeightsError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
    _copy(model, weights)


@torch.no_grad()
def _copy(model: DiffusionModel, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in named_weights(model).items():
        tensor.copy_(weights[name])


def _choose_step(checkpoints: AnyPath, step: int | None) -> tuple[int, list[str]]:
    steps = checkpoint_steps(checkpoints)
    there = ", ".join(map(str, steps)) or "none"
    if step is not None:
        if step not in steps:
            raise CheckpointError(f"{checkpoints}: holds no checkpoint of step {step} (checkpoints: {there})")
        problem = verify(checkpoint_path(checkpoints, step))
        if problem:
            raise CheckpointError(f"{checkpoint_path(checkpoints, step)}: {problem} (checkpoints: {there})")
        return step, []
    newest, skipped = newest_good(checkpoints)
    if newest is None:
        advice = "with checkpoint.enable a run saves every checkpoint.interval steps"
        lines = [*skipped, f"{checkpoints}: holds no good checkpoint ({advice})"]
        raise CheckpointError("\n".join(lines))
    return newest, skipped


def _objective(record: ModelRecord, model: DiffusionModel, device: torch.device) -> Objective:
    """Objective of a record, attached to its network. Raises ConfigError."""
    objective = build_objective(record.config.objective, record.config.debug.seed)
    attach(objective, model, record.info.trained_entries)
    return objective.to(device)


def _empty_model(
    config: JobConfig, info: DatasetInfo, device: torch.device, checkpoint: AnyPath | None = None
) -> DiffusionModel:
    """Network without values of its trained weights; frozen ones are read and compared with a checkpoint's."""
    if config.lora.enable:
        if (base := config.checkpoint.initial_weights) and not Path(base).exists():
            advice = "name it in the run's config.toml, or draw with BASE --lora ADAPTER.safetensors"
            raise WeightsError(f"{base}: no such file of weights, the base of the adapters ({advice})")
        model, digest = adapted_network(config, info, device)
        if checkpoint is not None:
            check_base(read_state(checkpoint), digest, str(checkpoint), config)
    else:
        model = network_on_meta(config, info)
        model.to_empty(device=device)
        model.init_buffers()
    return model.eval().requires_grad_(False)


def _adapter_alone(config: JobConfig, info: DatasetInfo) -> DiffusionModel:
    """Network on the meta device but for the adapter that the run trains."""
    model = adapted_network_on_meta(config, info)
    for _, update in trained_updates(model):
        update.to_empty(device="cpu")
    return model.eval().requires_grad_(False)


__all__ = ["ConfigError", "TrainedModel", "WeightsError", "load_run", "load_weights", "read_config"]
