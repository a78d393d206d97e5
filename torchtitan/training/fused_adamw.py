"""AdamW by torch's fused kernel, prepared once instead of in each step."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class _Prepared:
    """Arguments of one call of the kernel: parameters of one group, device and dtype, and their states."""

    group: dict[str, Any]
    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]  # views of `counts`
    counts: Tensor


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with the same kernel and the same states, at less cost to the host.

    torch gathers parameters and states anew in each step and counts the steps of each parameter by operations of their own,
    which takes longer than the kernel of a small model. Here both are done once, for plain tensors that all have gradients;
    any other step is torch's.
    """

    def __init__(self, groups: list[dict[str, Any]], **arguments: Any) -> None:
        super().__init__(groups, fused=True, **arguments)
        self._prepared: list[_Prepared] = []

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            skip: bool scalar; where it is true, weights and states stay as they are. Moved to the parameters' device.
        """
        found = None if skip is None else skip.to(torch.float32)
        gradients = self._gradients()
        if gradients is None:
            cast(Any, self).found_inf = found
            super().step()
            return
        for prepared, of_group in zip(self._prepared, gradients, strict=True):
            group, broken = prepared.group, None if found is None else found.to(prepared.counts.device)
            beta1, beta2 = group["betas"]
            prepared.counts.add_(1)
            torch._fused_adamw_(
                prepared.parameters, of_group, prepared.averages, prepared.squares, [], prepared.steps,
                amsgrad=False, lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
                eps=group["eps"], maximize=False, grad_scale=None, found_inf=broken,
            )  # fmt: skip
            if broken is not None:
                prepared.counts.sub_(broken)

    def _gradients(self) -> list[list[Tensor]] | None:
        """Gradients in the order of what is prepared; None where this step must be torch's."""
        if not self._prepared and not self._prepare():
            return None
        gradients = [[cast(Tensor, parameter.grad) for parameter in each.parameters] for each in self._prepared]
        if any(gradient is None for of_group in gradients for gradient in of_group):
            return None
        return gradients

    def _prepare(self) -> bool:
        """Prepare the calls of the kernel, if all parameters are plain and have a state."""
        together: dict[tuple, list[Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if is_traceable_wrapper_subclass(parameter) or not self.state.get(parameter):
                    return False
                together.setdefault((number, parameter.device, parameter.dtype), []).append(parameter)
        for (number, *_), parameters in together.items():
            states = [self.state[parameter] for parameter in parameters]
            counts = torch.stack([state["step"] for state in states])
            steps = list(counts.unbind())
            for state, step in zip(states, steps, strict=True):
                state["step"] = step
            averages, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
            self._prepared.append(_Prepared(self.param_groups[number], parameters, averages, squares, steps, counts))
        return True
