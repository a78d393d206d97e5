"""Comparison of two checkpoints or files of weights, tensor by tensor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import CheckpointError, read_state, verify
from torchtitan.checkpoint.reading import reader, tensor_shapes
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import read_state_dict

READ_AT_ONCE = 1 << 30  # bytes

# Parts of the state that are no part of what is trained: names and paths, times.
_ABOUT_THE_RUN = {"config", "ema_snapshots", "reports"}


@dataclass(frozen=True)
class TensorSource:
    """Tensors by name, read when asked for.

    Attributes:
        shapes: name -> shape and dtype.
        read: names -> tensors.
        state: a checkpoint's content besides tensors, None for a file of weights.
    """

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    read: Callable[[list[str]], dict[str, Tensor]]
    state: dict | None


@dataclass(frozen=True)
class Difference:
    """Difference of one tensor; largest: of |a - b|; relative: norm of a - b over norm of a."""

    name: str
    largest: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """Differences between A and B; `reshaped` are tensors of another shape or dtype."""

    only_a: list[str]
    only_b: list[str]
    reshaped: list[str]
    different: list[Difference]
    num_equal: int
    state_keys: list[str]

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.reshaped or self.different or self.state_keys)


def open_checkpoint(checkpoint: AnyPath) -> TensorSource:
    """Open the tensors of a checkpoint's folder, which is verified first. Raises CheckpointError."""
    if problem := verify(checkpoint):
        raise CheckpointError(f"{checkpoint}: {problem}")
    return TensorSource(tensor_shapes(checkpoint), reader(checkpoint), read_state(checkpoint))


def open_weights(path: Path) -> TensorSource:
    """Open the tensors of a safetensors file or torch checkpoint. Raises WeightsError."""
    tensors, _ = read_state_dict(path)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return TensorSource(shapes, lambda names: {name: tensors[name] for name in names}, None)


def ema_tracks(source: TensorSource) -> list[str]:
    """Names of the averages in a checkpoint."""
    weights = [name.removeprefix("model.") for name in source.shapes if name.startswith("model.")]
    if not weights:
        return []
    ending = f".{weights[0]}"
    found = (name for name in source.shapes if name.startswith("ema.") and name.endswith(ending))
    return sorted(name.removeprefix("ema.").removesuffix(ending) for name in found)


def is_counter(name: str) -> bool:
    """Check whether a tensor of a checkpoint is an optimizer's count of steps."""
    return name.startswith("optimizer.") and name.endswith(".step")


def compare(a: TensorSource, b: TensorSource) -> Comparison:
    """Compare every tensor, and the state of two checkpoints."""
    both = sorted(a.shapes.keys() & b.shapes.keys())
    same_shape = [name for name in both if a.shapes[name] == b.shapes[name]]
    different = []
    for names in _portions(same_shape, a):
        ours, theirs = a.read(names), b.read(names)
        different += [
            _difference(name, ours[name], theirs[name]) for name in names if not same_bits(ours[name], theirs[name])
        ]
    states = (a.state, b.state) if a.state is not None and b.state is not None else ({}, {})
    return Comparison(
        only_a=sorted(a.shapes.keys() - b.shapes.keys()),
        only_b=sorted(b.shapes.keys() - a.shapes.keys()),
        reshaped=[name for name in both if a.shapes[name] != b.shapes[name]],
        different=different,
        num_equal=len(same_shape) - len(different),
        state_keys=sorted(
            key for key in (states[0] | states[1]).keys() - _ABOUT_THE_RUN if states[0].get(key) != states[1].get(key)
        ),
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Check whether two tensors of one shape and dtype are equal bit for bit; a NaN equals itself."""
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def _difference(name: str, a: Tensor, b: Tensor) -> Difference:
    a, b = a.to(torch.float64), b.to(torch.float64)
    gap, size = (a - b).norm().item(), a.norm().item()
    return Difference(name, (a - b).abs().max().item(), gap / size if size else float("inf") if gap else 0.0)


def _portions(names: list[str], source: TensorSource) -> Iterator[list[str]]:
    portion, size = [], 0
    for name in names:
        shape, dtype = source.shapes[name]
        portion.append(name)
        size += torch.Size(shape).numel() * dtype.itemsize
        if size >= READ_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
