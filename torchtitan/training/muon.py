"""Muon: momentum with equalised singular values in each step, for weights that are matrices."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.distributed.parallelize import local

# An odd polynomial whose iteration drives every singular value in (0, 1] into [0.68, 1.21] within a few steps:
# steep at 0, so that small ones rise fast, and without exact convergence, which the method doesn't need.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5

# Size of an update by the shape of a weight, [outputs, inputs].
SCALES: dict[str, Callable[[Sequence[int]], float]] = {
    # 0.2 is the root mean square of AdamW's typical update: one learning rate and decay serve both.
    "rms": lambda shape: 0.2 * math.sqrt(max(shape)),
    # One norm of the change in outputs at any width, so that a rate serves all widths.
    "fan": lambda shape: math.sqrt(shape[0] / shape[1]),
}


def orthogonalise(matrix: Tensor) -> Tensor:
    """Orthogonalise a matrix: nearly replace every singular value by 1, U S V' becomes about U V'.

    Args:
        matrix: [M, N], float32; not sharded. Computed in bfloat16 on CUDA.

    Returns:
        [M, N], float32, zero where the matrix is zero; singular values above 1 % of its norm come to [0.65, 1.25].

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = _COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T  # the smaller Gram matrix
    x = x / x.norm().clamp_min(torch.finfo(torch.float32).tiny)
    if x.device.type == "cuda":
        x = x.to(torch.bfloat16)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).to(torch.float32)


class Muon(torch.optim.Optimizer):
    """Muon: w <- (1 - lr decay) w - lr s orthogonalise(look-ahead momentum), for matrices [M, N].

    s is 0.2 sqrt(max(M, N)) with the scale rms, and sqrt(M / N) with fan.

    Processes that hold the same matrices, whole or in shards, divide them: each orthogonalises its share, whole, and the
    others receive the result, which does not depend on the layout. Copies of shards (HSDP) each do so for themselves.

    Args:
        groups: parameter groups; all parameters are matrices, plain or sharded by rows.
        lr: learning rate of groups without one.
        scale: key of SCALES.

    Sources: Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982 (rms, and decay); Bernstein and Newhouse,
    "Modular duality in deep learning", arXiv 2410.21265 (fan).
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float = 0.95, scale: str = "rms") -> None:
        self._size = SCALES[scale]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def sizes(self) -> Iterator[tuple[nn.Parameter, float]]:
        """List every matrix with the spectral norm of its updates, over the learning rate: s, times its group's multiple."""
        for group in self.param_groups:
            yield from ((p, self._size(p.shape) * group.get("lr_scale", 1.0)) for p in group["params"])

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]  # a verdict instead of a closure
        """Update every parameter that has a gradient; where `skip`, a bool scalar, is true, all stays as it is; collective."""
        settings = {p: group for group in self.param_groups for p in group["params"] if p.grad is not None}
        ahead = partial(self._look_ahead, settings=settings, skip=skip)
        sharded = [parameter for parameter in settings if isinstance(parameter, DTensor)]
        whole = [parameter for parameter in settings if not isinstance(parameter, DTensor)]
        for directions in (_of_whole(whole, ahead), _of_sharded(sharded, ahead)):
            for parameter, direction in directions:
                _apply(parameter, self._size(parameter.shape) * settings[parameter]["lr"], direction, settings[parameter], skip)

    def _look_ahead(self, parameter: Tensor, settings: dict[Tensor, dict[str, Any]], skip: Tensor | None) -> Tensor:
        """Update the average gradient; return it with the gradient counted once more, this rank's part."""
        state, momentum = self.state[parameter], settings[parameter]["momentum"]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, average = local(cast(Tensor, parameter.grad)), local(state["momentum"])
        if skip is not None:
            gradient = torch.where(skip, average, gradient)  # which leaves the average as it is
        average.lerp_(gradient, 1.0 - momentum)
        return gradient.lerp(average, momentum)


_Directions = Iterator[tuple[Tensor, Tensor]]  # parameter, this rank's part of its orthogonalised matrix


def _apply(parameter: Tensor, size: float, direction: Tensor, settings: dict[str, Any], skip: Tensor | None) -> None:
    weight = local(parameter)
    updated = (weight * (1.0 - settings["lr"] * settings["weight_decay"])).add_(direction, alpha=-size)
    weight.copy_(updated if skip is None else torch.where(skip, weight, updated))


def _of_whole(parameters: list[Tensor], ahead: Callable[[Tensor], Tensor]) -> _Directions:
    """Divide matrices that every process holds: each orthogonalises one of a batch, and sends it to the others."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    for batch in _batches(parameters, ranks):
        own = None
        for owner, parameter in enumerate(batch):
            part = ahead(parameter)  # the average is every process's
            own = part if owner == rank else own
        own = None if own is None else orthogonalise(own).contiguous()
        for owner, parameter in enumerate(batch):
            direction = own if own is not None and owner == rank else torch.empty_like(parameter)
            if ranks > 1:
                dist.broadcast(direction, src=owner)
            yield parameter, direction


def _of_sharded(sharded: list[DTensor], ahead: Callable[[Tensor], Tensor]) -> _Directions:
    """Divide matrices that are sharded by rows: each process receives all rows of one of a batch, and returns the results."""
    if not sharded:
        return
    axis = next(axis for axis, placement in enumerate(sharded[0].placements) if placement.is_shard(0))
    group = sharded[0].device_mesh.get_group(axis)
    ranks, rank = group.size(), group.rank()
    for batch in _batches(sharded, ranks):
        parts = [ahead(parameter) for parameter in batch]
        sent = [part.numel() for part in parts] + [0] * (ranks - len(batch))  # to the owner of each matrix
        received = [0] * ranks
        if rank < len(batch):
            rows, columns = batch[rank].shape
            received = [count * columns for count in _rows_of_ranks(rows, ranks)]
        matrix = parts[0].new_empty(sum(received))
        dist.all_to_all_single(matrix, torch.cat([part.flatten() for part in parts]), received, sent, group=group)
        if rank < len(batch):
            matrix = orthogonalise(matrix.view(batch[rank].shape)).flatten()
        results = matrix.new_empty(sum(sent))
        dist.all_to_all_single(results, matrix, sent, received, group=group)
        for parameter, part, result in zip(batch, parts, results.split(sent), strict=False):
            yield parameter, result.view_as(part)


def _batches(parameters: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """Cut matrices into batches of similar cost; the order is the same on every rank."""
    ordered = sorted(parameters, key=lambda p: p.numel() * min(p.shape), reverse=True)
    return (ordered[start : start + size] for start in range(0, len(ordered), size))


def _rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """Rows of each rank's shard: equal shares rounded up, of which the last ranks may have fewer or none."""
    share = -(-rows // ranks)
    return [min(share, max(rows - rank * share, 0)) for rank in range(ranks)]
