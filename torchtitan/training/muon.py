"""Muon: momentum with equalised singular values in each step, for weights that are matrices."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.distributed.parallelize import local

# An odd polynomial whose iteration drives every singular value in (0, 1] into [0.68, 1.21] within a few steps:
# steep at 0, so that small ones rise fast, and without exact convergence, which the method doesn't need.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5

# Root mean square of AdamW's typical update: scaled to it, one learning rate and decay serve both.
_UPDATE_RMS = 0.2


def orthogonalise(matrix: Tensor) -> Tensor:
    """Orthogonalise a matrix: nearly replace every singular value by 1, U S V' becomes about U V'.

    Args:
        matrix: [M, N], float32; not sharded. Computed in bfloat16 on CUDA.

    Returns:
        [M, N], float32, zero where the matrix is zero; singular values above 1 % of the matrix's norm come to
        lie in [0.65, 1.25].

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
    """Muon: w <- (1 - lr decay) w - lr 0.2 sqrt(max(M, N)) orthogonalise(look-ahead momentum), for matrices [M, N].

    A sharded matrix is gathered, orthogonalised whole on every rank, and each rank takes its part: the result does not
    depend on the layout.

    Args:
        groups: parameter groups; all parameters are matrices, plain or sharded.
        lr: learning rate of groups without one.
        momentum: decay of the average gradient per step.

    Source: Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982 (scale and decay).
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]  # a verdict instead of a closure
        """Update every parameter that has a gradient; where `skip`, a bool scalar, is true, all stays as it is."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, skip)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], skip: Tensor | None) -> None:
        state, momentum, lr = self.state[parameter], group["momentum"], group["lr"]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        gradient, average, weight = local(gradient), local(state["momentum"]), local(parameter)
        if skip is not None:
            gradient = torch.where(skip, average, gradient)  # which leaves the average as it is
        average.lerp_(gradient, 1.0 - momentum)
        ahead = gradient.lerp(average, momentum)
        direction = _on_whole(ahead, parameter)
        size = _UPDATE_RMS * math.sqrt(max(parameter.shape))
        updated = (weight * (1.0 - lr * group["weight_decay"])).add_(direction, alpha=-lr * size)
        weight.copy_(updated if skip is None else torch.where(skip, weight, updated))


def _on_whole(part: Tensor, parameter: Tensor) -> Tensor:
    """Orthogonalise a matrix that is sharded like the parameter; return this rank's part of the result."""
    if not isinstance(parameter, DTensor):
        return orthogonalise(part)
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    whole = orthogonalise(sharded.full_tensor()).contiguous()
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        placements=placements
    ).to_local()
