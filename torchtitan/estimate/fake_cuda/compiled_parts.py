"""Parts of a counted eager step that would be compiled: their counts, and those of compiled ones instead."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, register_dataclass, tree_leaves, tree_map

from torchtitan.diffusion.objective import Draw
from torchtitan.estimate.fake_cuda.compiled_function import (
    CompiledFunction,
    count_compiled,
    count_compiled_module,
    trained_attributes,
)
from torchtitan.estimate.fake_cuda.counter import Call, PhaseCounts, StepCounter
from torchtitan.estimate.fake_cuda.device import NoFakeCuda


def as_trained(x: Tensor) -> Tensor:
    """The tensor as a leaf that gets a gradient, if it has a floating dtype."""
    return x.detach().requires_grad_(x.is_floating_point())


def count_both(
    counter: StepCounter, function: Any, arguments: tuple[Any, ...], param_dtype: torch.dtype | None, output: Tensor | None = None
) -> tuple[dict[str, PhaseCounts], CompiledFunction]:
    """Count a function, or a module with its weights and `trained_attributes`, in both ways; inside `fake_cuda`.

    Args:
        counter: of the imitated device; its phases are empty afterwards.
        function: runs several times.
        arguments: of the function.
        param_dtype: of autocast; None: none.
        output: the argument that gets a gradient, besides those that require one.

    Returns:
        eager counts by "forward" and "backward", and compiled ones.
    """
    if Draw not in SUPPORTED_NODES:
        register_dataclass(Draw)
    arguments = tree_map(lambda x: as_trained(x) if isinstance(x, Tensor) and x is output else x, arguments)
    module = function if isinstance(function, torch.nn.Module) else None
    weights = [*module.parameters(), *trained_attributes(module)] if module else []
    counter.phases = {"forward": PhaseCounts(), "backward": PhaseCounts()}
    with counter.phase("forward"), torch.autocast("cuda", dtype=param_dtype, enabled=param_dtype is not None):
        found = [x for x in tree_leaves(function(*arguments)) if isinstance(x, Tensor) and x.requires_grad]
    trained = [x for x in (*weights, *tree_leaves(arguments)) if isinstance(x, Tensor) and x.requires_grad]
    gradients = [torch.empty_like(x) for x in found]
    with counter.phase("backward"):
        if found:
            torch.autograd.grad(found, trained, gradients, allow_unused=True)
    eager, counter.phases = counter.phases, {}
    count = count_compiled_module if module else count_compiled
    return eager, count(function, arguments, param_dtype=param_dtype)


def replace_eager(phase: PhaseCounts, eager: Counter[Call], compiled: Counter[Call], times: int) -> None:
    """Replace eager calls in a phase by compiled ones, `times` times each. Raises NoFakeCuda: the phase lacks some."""
    eager, compiled = (Counter({call: count * times for call, count in calls.items()}) for calls in (eager, compiled))
    if missing := eager - phase.calls:
        names = sorted({call.name for call in missing})
        raise NoFakeCuda(f"--compiled: the step lacks eager operations that would be compiled: {', '.join(names)}")
    phase.calls = phase.calls - eager + compiled
