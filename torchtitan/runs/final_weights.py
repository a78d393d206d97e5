"""Final weights of a run: what trained, in one safetensors file of the run's folder whose name carries its step."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from data import dataset_info
from torchtitan.checkpoint.comparison import TensorSource, open_checkpoint
from torchtitan.config.job import JobConfig
from torchtitan.distributed.precision import DTYPES
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import WeightsError, written_whole
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapter_files import known_layouts, write_adapter
from torchtitan.models.adapters.adapters import TRAINED, adapted_layers, add_trained_adapter
from torchtitan.models.adapters.layers import LowRank
from torchtitan.models.adapters.layouts import NATIVE
from torchtitan.models.adapters.target import AdapterError, LowRankWeights, Target
from torchtitan.runs.network import adapter_targets, network_on_meta

_MODEL = "model."


def final_weights_path(folder: Path, name: str, step: int) -> Path:
    """Path of the final weights in a run's folder."""
    return folder / f"{name}-step-{step:08d}.safetensors"


def write_final_weights(path: Path, checkpoint: AnyPath, config: JobConfig, step: int, buffers: Collection[str]) -> None:
    """Write the weights that `sampling.ema_track` names, as scripts/checkpoint.py export does, from the last checkpoint.

    One tensor at a time is in memory; saved buffers keep their dtype. With adapters, they alone, in the layout of diffusers
    if the network's family has it, else in this program's own.

    Args:
        path: of the file; an earlier one of this step is replaced.
        checkpoint: of the step.
        config: of the run.
        step: of the weights.
        buffers: names of the network's saved buffers.

    Raises:
        CheckpointError: the checkpoint is damaged.
        WeightsError: the file cannot be written.
    """
    source = open_checkpoint(checkpoint)
    if config.lora.enable:
        _write_adapter(path, source, config, step)
        return
    track, dtype = config.sampling.ema_track, DTYPES[config.checkpoint.final_weights]
    prefix = _MODEL if track == "none" else f"ema.{track}."
    places = {name.removeprefix(prefix): name for name in source.shapes if name.startswith(prefix)}
    places |= {name: f"{_MODEL}{name}" for name in buffers}
    entries = {
        name: (source.shapes[place][0], source.shapes[place][1] if name in buffers else dtype) for name, place in places.items()
    }
    entries = dict(sorted(entries.items(), key=lambda item: (-item[1][1].itemsize, item[0])))
    label = "trained weights" if track == "none" else track
    metadata = {"layout": "safetensors", "weights": f"{config.job.name}, step {step}, {label}", "model": config.model.flavor}
    with written_whole(path, overwrite=True) as unfinished:
        write_tensors(unfinished, entries, _read(source, places, entries), metadata)


def _write_adapter(path: Path, source: TensorSource, config: JobConfig, step: int) -> None:
    model = network_on_meta(config, dataset_info(config.data))
    add_trained_adapter(model, adapter_targets(config, model), config.lora)
    track = config.sampling.ema_track
    prefix = _MODEL if track == "none" else f"ema.{track}."
    weights = {}
    for name, layer in adapted_layers(model):
        for number, update in enumerate(cast(list[LowRank], layer.adapters[TRAINED])):
            down, up = (f"{prefix}{name}.adapters.{TRAINED}.{number}.{part}" for part in ("down", "up"))
            values = source.read([down, up])
            weights[Target(name, update.start, update.stop)] = LowRankWeights(values[down], values[up], update.alpha)
    layouts = known_layouts(MODELS[config.model.name].adapter_layouts)
    layout = layouts.get("diffusers", NATIVE)
    trigger_word = getattr(config.data, "trigger_word", "")
    metadata = {
        "step": str(step), "weights": f"{config.job.name}, step {step}, {'trained weights' if track == 'none' else track}",
        "model": f"{config.model.name} {config.model.flavor}",
        "base": config.checkpoint.initial_weights.rpartition("/")[2] or "drawn at random",
        **({"trigger_word": trigger_word} if trigger_word else {}),
    }  # fmt: skip
    try:
        dtype = config.checkpoint.final_weights
        write_adapter(path, weights, model, layout, dtype=dtype, metadata=metadata, overwrite=True)
    except AdapterError as error:
        raise WeightsError(str(error)) from error


def _read(
    source: TensorSource, places: dict[str, str], entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[Tensor]:
    for name, (_, dtype) in entries.items():
        yield source.read([places[name]])[places[name]].to(dtype)
