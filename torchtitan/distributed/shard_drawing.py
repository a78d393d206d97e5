"""Weights of a sharded model drawn tensor by tensor, of which each rank keeps its rows.

A rank's memory is its shard and one whole tensor, not the model. The values are those of the model drawn whole: torch's
generators determine an element by all that is drawn before it, so that every rank draws every tensor and drops what is
not its own. (A counter-based generator by parameter and element would draw the rows alone, and other weights than runs
have started from so far.)
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import named_parameters


class NotByShards(Exception):
    """Initialisation that needs whole parameters: it reads one, or changes it through a view."""


def own_rows(shape: tuple[int, ...], layout: Layout) -> slice:
    """Rows of a parameter that this rank holds under FSDP2, which cuts dimension 0 into equal chunks but for the last."""
    assert layout.mesh is not None
    rows = -(-shape[0] // layout.shards)
    begin = min(layout.mesh["shard"].get_local_rank() * rows, shape[0])
    return slice(begin, min(begin + rows, shape[0]))


@torch.no_grad()
def draw_shards(
    model: nn.Module, init_weights: Callable[[], None], rows_of: Callable[[tuple[int, ...]], slice], device: torch.device
) -> dict[str, Tensor]:
    """Draw a model on the meta device, whose parameters stay there; its buffers are then on the device, with values.

    Args:
        init_weights: draws it, by operations in place on whole parameters, from torch's global random state.
        rows_of: rows that are kept of a parameter of a shape.

    Returns:
        the rows kept of each parameter, by name.

    Raises:
        NotByShards: the model must be drawn whole.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    shards = {name: _rows(parameter, rows_of, device) for name, parameter in model.named_parameters()}
    with _ShardDrawing({id(parameter): (shards[name], rows_of) for name, parameter in model.named_parameters()}):
        init_weights()
    return shards


@torch.no_grad()
def place_shards(model: nn.Module, shards: dict[str, Tensor], on_host: bool = False) -> None:
    """Give a sharded model on meta its `shards`, then emptied; on_host: in host memory, as of CPUOffloadPolicy."""
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}

    def placed(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        whole, shard = cast(DTensor, tensor), shards.pop(names[id(tensor)])
        if on_host:  # `from_local` would move a part of the host to the mesh's device
            there = cast(DTensor, torch.empty_like(whole, device="cpu"))
            there.to_local().copy_(shard)
            return there
        # Of the class that the part has: weights that are gathered in float8 have torchao's.
        part = torch.empty_like(whole.to_local(), device=shard.device)
        part.copy_(shard)
        return DTensor.from_local(
            part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    model._apply(placed)


class _ShardDrawing(TorchDispatchMode):
    """Apply operations on meta parameters to their shards; what is random is drawn whole, and cut."""

    def __init__(self, shards: dict[int, tuple[Tensor, Callable[[tuple[int, ...]], slice]]]) -> None:
        super().__init__()
        self._shards = shards  # by the id of the parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given, named = args, kwargs or {}
        if not args or id(args[0]) not in self._shards:
            if any(isinstance(value, Tensor) and value.is_meta for value in (*given, *named.values())):
                raise NotByShards(str(func))
            return func(*given, **named)
        parameter, others = args[0], args[1:]
        if not func._schema.name.endswith("_") or any(isinstance(value, Tensor) and value.ndim for value in others):
            raise NotByShards(str(func))
        shard, rows_of = self._shards[id(parameter)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=shard.device)
            func(whole, *others, **named)
            shard.copy_(whole[rows_of(tuple(parameter.shape))])
        else:
            func(shard, *others, **named)
        return parameter


def _rows(parameter: Tensor, rows_of: Callable[[tuple[int, ...]], slice], device: torch.device) -> Tensor:
    rows = rows_of(tuple(parameter.shape))
    return torch.empty(rows.stop - rows.start, *parameter.shape[1:], dtype=parameter.dtype, device=device)
