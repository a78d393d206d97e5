"""A trained model, read back for sampling: from a run folder's checkpoint, or from a file of weights."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from data import DATASETS
from data.base import DatasetInfo
from torchtitan.config import ConfigError, JobConfig, load_config
from torchtitan.diffusion.objective import Objective
from torchtitan.models import MODELS
from torchtitan.training.checkpoint import (
    CheckpointError,
    checkpoint_path,
    checkpoint_steps,
    newest_good,
    read_tensors,
    verify,
)


class WeightsError(Exception):
    """Weights that cannot be used; one line per problem."""


@dataclass(frozen=True)
class TrainedModel:
    """A model ready to sample from.

    Attributes:
        config: the run's configuration.
        info: what the dataset held.
        model: in eval mode, float32, whole, on the device asked for.
        objective: what it was trained for.
        label: where the weights are from, such as `step 1000, ema`.
        warnings: damaged checkpoints that were skipped.
    """

    config: JobConfig
    info: DatasetInfo
    model: nn.Module
    objective: Objective
    label: str
    warnings: tuple[str, ...] = ()


def load_run(folder: Path, track: str | None, step: int | None, device: torch.device) -> TrainedModel:
    """Read a checkpoint of a run.

    Args:
        folder: the run's folder.
        track: name of an EMA track, "none" for the trained weights, None for the run's own choice.
        step: which checkpoint; None for the newest good one.
        device: where the model goes.

    Raises:
        WeightsError, ConfigError, CheckpointError.
    """
    config = _config_of(folder / "config.toml")
    track = track or config.sampling.ema_track
    tracks = [entry.name for entry in config.ema.tracks]
    if track not in ("none", *tracks):
        raise WeightsError(f"{folder}: has no EMA track {track!r} (there are: {', '.join(['none', *tracks])})")
    step, warnings = _choose_step(folder / "checkpoint", step)
    info = DATASETS[config.data.name].info(config.data)
    model = _empty_model(config, info, device)
    prefix = "model." if track == "none" else f"ema.{track}."
    read_tensors(
        checkpoint_path(folder / "checkpoint", step),
        {prefix + name: parameter.detach() for name, parameter in model.named_parameters()},
    )
    label = f"step {step}, {'trained weights' if track == 'none' else track}"
    return TrainedModel(config, info, model, Objective(config.objective, config.debug.seed), label, tuple(warnings))


def load_weights(path: Path, config_file: Path, device: torch.device) -> TrainedModel:
    """Read a safetensors file of weights, named as the model's parameters, for a configuration.

    Raises:
        WeightsError: not a safetensors file, or tensors are missing, superfluous or of another shape.
        ConfigError: the configuration is refused.
    """
    config = _config_of(config_file)
    info = DATASETS[config.data.name].info(config.data)
    model = _empty_model(config, info, device)
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        problems = _mismatches({name: tuple(p.shape) for name, p in parameters.items()}, shapes)
        if problems:
            raise WeightsError("\n".join(f"{path}: {problem}" for problem in problems))
        with torch.no_grad():
            for name, tensor in load_file(path).items():
                parameters[name].copy_(tensor)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: is not a readable safetensors file: {error}") from error
    return TrainedModel(config, info, model, Objective(config.objective, config.debug.seed), path.stem)


def _config_of(path: Path) -> JobConfig:
    """The configuration as it was resolved, for as many processes as it then had."""
    try:
        degrees = tomllib.loads(path.read_text(encoding="utf-8")).get("parallelism", {})
        processes = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
        processes = max(int(processes), 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        processes = 1  # what is wrong is reported by load_config
    return load_config(["--job.config_file", str(path)], processes)


def _choose_step(checkpoints: Path, step: int | None) -> tuple[int, list[str]]:
    there = ", ".join(map(str, checkpoint_steps(checkpoints))) or "none"
    if step is not None:
        problem = verify(checkpoint_path(checkpoints, step))
        if problem:
            raise CheckpointError(f"{checkpoint_path(checkpoints, step)}: {problem} (checkpoints: {there})")
        return step, []
    newest, skipped = newest_good(checkpoints)
    if newest is None:
        lines = [*skipped, f"{checkpoints}: holds no good checkpoint (train with checkpoint.enable = true)"]
        raise CheckpointError("\n".join(lines))
    return newest, skipped


def _empty_model(config: JobConfig, info: DatasetInfo, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[config.model.name].build(config.model, info.image_shape, info.num_classes)
    model.to_empty(device=device)
    model.init_buffers()
    return model.eval().requires_grad_(False)


def _mismatches(wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    other = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {_some(missing)}")
    if extra:
        problems.append(f"{len(extra)} tensors are not of this model: {_some(extra)}")
    if other:
        first = other[0]
        problems.append(
            f"{len(other)} tensors have another shape: {first} is {list(found[first])} instead of {list(wanted[first])}"
        )
    return problems


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


__all__ = ["ConfigError", "TrainedModel", "WeightsError", "load_run", "load_weights"]
