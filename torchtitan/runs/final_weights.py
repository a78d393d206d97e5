"""Final weights of a run: what trained, in one safetensors file of the run's folder whose name carries its step."""

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.checkpoint.comparison import TensorSource, open_checkpoint
from torchtitan.config.job import JobConfig
from torchtitan.distributed.precision import DTYPES
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import written_whole

_MODEL = "model."


def final_weights_path(folder: Path, name: str, step: int) -> Path:
    """Path of the final weights in a run's folder."""
    return folder / f"{name}-step-{step:08d}.safetensors"


def write_final_weights(path: Path, checkpoint: AnyPath, config: JobConfig, step: int, buffers: Collection[str]) -> None:
    """Write the weights that `sampling.ema_track` names, as scripts/checkpoint.py export does, from the last checkpoint.

    With adapters, they alone. One tensor at a time is in memory; saved buffers keep their dtype.

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


def _read(
    source: TensorSource, places: dict[str, str], entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[Tensor]:
    for name, (_, dtype) in entries.items():
        yield source.read([places[name]])[places[name]].to(dtype)
