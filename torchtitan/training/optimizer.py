"""The optimizer: one fused call per step, states ready from the start."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from torchtitan.settings import setting


@dataclass(kw_only=True)
class OptimizerConfig:
    """`[optimizer]`"""

    name: Literal["AdamW"] = setting("AdamW", "update rule")
    lr: float = setting(1e-4, "peak learning rate", gt=0)
    beta1: float = setting(0.9, "decay of the first moment per step", ge=0, lt=1)
    beta2: float = setting(0.999, "decay of the second moment per step", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.0, "decoupled decay of matrices; gains and biases have none", ge=0)


def build_optimizer(parameters: dict[str, nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of named parameters; vectors (gains, biases) are not decayed."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that an optimizer otherwise makes in its first step, so that a checkpoint can fill it.

    A step with zero gradients and zero learning rate: weights stay as they are, bit for bit.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """State of the optimizer by parameter name, as `<name>.<state>`; the tensors themselves, not copies."""
    return {
        f"{name}.{key}": value for name, parameter in parameters.items() for key, value in optimizer.state[parameter].items()
    }
