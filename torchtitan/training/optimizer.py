"""Optimizer: parameter groups by name, one update rule for each parameter."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchtitan.distributed.parallelize import local
from torchtitan.errors import TrainingError
from torchtitan.extras import quiet_torchao
from torchtitan.training.config import UPDATE_RULES, OptimizerConfig
from torchtitan.training.muon import Muon


class OptimizerError(Exception):
    """Parameter groups that do not fit the model; the message is one line."""


class OptimizerSet:
    """Optimizers that step together, each with its own parameters; param_groups: all of their dicts."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._numbers = [_numbers(group) for group in self.param_groups]  # as built: checkpoints do not hold them
        self._on_host = any(p.device.type == "cpu" for group in self.param_groups for p in group["params"])

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """State by parameter; the dicts themselves."""
        return {parameter: state for optimizer in self._optimizers for parameter, state in optimizer.state.items()}

    def lr_scales(self) -> dict[nn.Parameter, float]:
        """Learning rates of all parameters, as multiples of the run's."""
        return {parameter: group["lr_scale"] for group in self.param_groups for parameter in group["params"]}

    def matrices(self) -> dict[nn.Parameter, float]:
        """Matrices that Muon updates, and the sizes of its updates over the learning rate."""
        of_muon = [optimizer for optimizer in self._optimizers if isinstance(optimizer, Muon)]
        return {parameter: size for optimizer in of_muon for parameter, size in optimizer.sizes()}

    def require_tensors(self) -> None:
        """Require, after a step, that checkpoints hold all that the optimizers keep. Raises TrainingError: they keep numbers."""
        states = (item for state in self.state.values() for item in state.items())
        kept = {f"state {key!r}" for key, value in states if not isinstance(value, Tensor)}
        for group, before in zip(self.param_groups, self._numbers, strict=True):
            kept |= {f"group entry {key!r}" for key, value in _numbers(group).items() if before.get(key) != value}
        if kept:
            raise TrainingError(f"the optimizer keeps {', '.join(sorted(kept))}, and checkpoints hold its state's tensors alone")

    def step(self, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            skip: bool scalar on the device; where it is true, weights and states stay as they are, whatever the
                gradients. AdamW8bit, every rule that is neither FusedAdamW nor Muon, and weights in host memory make the
                host wait for it.
        """
        for optimizer in self._optimizers:
            if isinstance(optimizer, FusedAdamW):
                # torch's own copy to the host would not be waited for.
                optimizer.update(skip.cpu() if skip is not None and self._on_host else skip)
            elif isinstance(optimizer, Muon):
                optimizer.step(skip)
            elif skip is None or not skip.item():
                optimizer.step()

    def zero_grad(self) -> None:
        """Set the gradients to None."""
        for group in self.param_groups:  # torch's own takes four times as long on the host
            for parameter in group["params"]:
                parameter.grad = None


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a parameter group except the learning rate, which every step sets."""
    return {key: value for key, value in group.items() if key != "lr" and isinstance(value, int | float)}


def build_optimizer(
    parameters: dict[str, nn.Parameter],
    config: OptimizerConfig,
    blocks: Iterable[nn.Module] = (),
    lr_scales: dict[str, float] | None = None,
    fan_in_ratios: Mapping[str, float] | None = None,
) -> OptimizerSet:
    """Build the optimizer of named parameters; by default vectors (gains, biases) are not decayed.

    Args:
        parameters: name -> parameter, plain or sharded.
        lr_scales: parameters in separate groups, not decayed, with multiples of the rate, unless in `param_groups`.
        fan_in_ratios: fan-in over a base network's, by which rates fall and decays rise: as 1 / ratio under Adam and under Muon
            as its own scale wants it. Source: Yang et al., "Tensor programs V", arXiv 2203.03466, table 3.

    Raises:
        OptimizerError: a pattern of `param_groups` selects no parameter, or a rule's groups have no rate.
    """
    matrices = set(matrices_of(blocks, config))
    own = lr_scales or {}
    groups: dict[str, dict[tuple, dict[str, Any]]] = {}
    for name, (lr_scale, weight_decay) in _group_settings(parameters, config, own).items():
        parameter = parameters[name]
        rule = update_rule(parameter, config, parameter in matrices)
        if (ratio := (fan_in_ratios or {}).get(name, 1.0)) != 1.0:
            factor = ratio**-_width_power(rule, config)
            lr_scale, weight_decay = lr_scale * factor, weight_decay / factor
        new = {"params": [], "lr_scale": lr_scale, "weight_decay": weight_decay}
        # Fused updates take no plain tensors, as an objective has, beside the shards of a network.
        key = (lr_scale, weight_decay, name in own, isinstance(parameter, DTensor))
        groups.setdefault(rule, {}).setdefault(key, new)["params"].append(parameter)
    optimizers = [(UPDATE_RULES[rule].build or _RULES[rule])(list(of_rule.values()), config) for rule, of_rule in groups.items()]
    for rule, optimizer in zip(groups, optimizers, strict=True):  # a plugin's may be anything
        if any("lr" not in group for group in optimizer.param_groups):
            raise OptimizerError(f"optimizer.name: {rule}: its parameter groups have no lr (give its defaults one, which is set)")
    set_lr(together := OptimizerSet(optimizers), config.lr)
    return together


def matrices_of(blocks: Iterable[nn.Module], config: OptimizerConfig) -> list[nn.Parameter]:
    """Matrices that are orthogonalised: all of the blocks, with the scale fan without those of adaLN and embeddings."""
    left = _LEFT_TO_ADAM if config.muon_scale == "fan" else None
    named = (pair for block in blocks for pair in block.named_parameters())
    return [parameter for name, parameter in named if parameter.ndim == 2 and not (left and left.search(name))]


def update_rule(parameter: nn.Parameter, config: OptimizerConfig, in_matrices: bool) -> str:
    """Name of a parameter's update rule, plain or sharded: the configuration's, or "AdamW"; in_matrices: of `matrices_of`."""
    if config.rule.orthogonalises:
        return config.name if in_matrices else "AdamW"
    return config.name if not config.rule.quantised or _quantisable(parameter) else "AdamW"


def _width_power(rule: str, config: OptimizerConfig) -> float:
    """Power of the width by which a rate falls. An update of Muon's has a spectral norm of sqrt(width) or, with fan, 1."""
    if not UPDATE_RULES[rule].orthogonalises:
        return 1.0
    return 0.0 if config.muon_scale == "fan" else 0.5


def set_lr(optimizer: OptimizerSet, lr: float) -> None:
    """Set the learning rate of every parameter group to its multiple of `lr`."""
    for group in optimizer.param_groups:
        rate = lr * group["lr_scale"]
        if isinstance(group["lr"], Tensor):  # what a compiled step reads
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_tensors(optimizer: OptimizerSet, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Tensors of the optimizer's state by parameter name, as `<name>.<state>`; the tensors themselves, not copies.

    Quantised state is two tensors, its codes and their scales, so it is stored and restored without rounding.
    """
    states = optimizer.state
    return {
        f"{name}.{part_name}": part
        for name, parameter in parameters.items()
        for key, value in states.get(parameter, {}).items()
        for part_name, part in state_parts(key, value)
    }


def _group_settings(
    parameters: dict[str, nn.Parameter], config: OptimizerConfig, own: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Settings by name: (multiple of the learning rate, decay), by the first matching pattern."""
    settings = {name: (1.0, config.weight_decay if p.ndim > 1 else 0.0) for name, p in parameters.items()}
    settings |= {name: (scale, 0.0) for name, scale in own.items()}
    free = set(parameters)
    for index, group in enumerate(config.param_groups):
        found = {name for name in parameters if re.search(group.pattern, name)}
        if not found & free:
            closest = ", ".join(difflib.get_close_matches(group.pattern, parameters, n=3, cutoff=0.0))
            reason = "only parameters of earlier groups" if found else f"no parameter (closest: {closest})"
            raise OptimizerError(f"optimizer.param_groups[{index}].pattern: {group.pattern!r} fits {reason}")
        for name in found & free:
            decay = settings[name][1] if group.weight_decay is None else group.weight_decay
            settings[name] = (group.lr_scale, decay)
        free -= found
    return settings


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return FusedAdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def _adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    with quiet_torchao():
        from torchao.optim import AdamW8bit

    return AdamW8bit(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, block_size=QUANTISED_BLOCK
    )


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return Muon(groups, lr=config.lr, scale=config.muon_scale)


_RULES = {"AdamW": _adamw, "AdamW8bit": _adamw_8bit, "Muon": _muon}

QUANTISED_BLOCK = 256
_LEFT_TO_ADAM = re.compile("modulation|embed")  # names within a block


def _quantisable(parameter: nn.Parameter) -> bool:
    """Check whether every rank holds the same number of whole blocks, and enough of them to be worth quantising."""
    size = local(parameter.detach()).numel()
    if isinstance(parameter, DTensor):
        shards = parameter.device_mesh.size() // _replicas(parameter)
        if parameter.shape[0] % shards:
            return False
    return size >= 16 * QUANTISED_BLOCK and size % QUANTISED_BLOCK == 0


def _replicas(tensor: DTensor) -> int:
    copies = 1
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copies *= tensor.device_mesh.size(dimension)
    return copies


def state_parts(key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Ordinary tensors, plain or sharded, of one entry of the state."""
    held: Any = local(value)
    if not hasattr(held, "codes"):
        yield key, value
        return
    for name, part in ((f"{key}.codes", held.codes), (f"{key}.scale", held.scale)):
        if isinstance(value, DTensor):
            # Blocks follow one another as rows do, so the scales are sharded as the parameter is.
            rows = part.shape[0] * value.device_mesh.size() // _replicas(value)
            shape = torch.Size((rows, *part.shape[1:]))
            part = DTensor.from_local(
                part, value.device_mesh, value.placements, run_check=False, shape=shape, stride=part.stride()
            )
        yield name, part


@dataclass(frozen=True)
class _Prepared:
    """One call of the kernel: on parameters of one group, device and dtype, and their states, of which `counts` are the steps."""

    group: dict[str, Any]
    parameters: list[Tensor]
    counts: Tensor
    kernel: Callable[..., None]  # without gradients, rate and verdict


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with the same kernel and the same states, at less cost to the host.

    torch gathers parameters and states anew in each step and counts the steps of each parameter by operations of their own,
    which takes longer than the kernel of a small model. Here both are done once, for plain tensors that all have gradients;
    any other step is torch's.
    """

    def __init__(self, groups: list[dict[str, Any]], **arguments: Any) -> None:
        super().__init__(groups, fused=True, **arguments)
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._prepared: list[_Prepared] = []

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Update parameters that have a gradient, but where skip is true: bool scalar, moved to their device."""
        found = None if skip is None else skip.to(torch.float32)
        if not (self._prepared or self._prepare()) or any(parameter.grad is None for parameter in self._parameters):
            cast(Any, self).found_inf = found
            super().step()
            return
        for prepared in self._prepared:
            gradients = [cast(Tensor, parameter.grad) for parameter in prepared.parameters]
            broken = None if found is None else found.to(prepared.counts.device)
            prepared.counts.add_(1)
            prepared.kernel(grads=gradients, lr=prepared.group["lr"], found_inf=broken)
            if broken is not None:
                prepared.counts.sub_(broken)

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
            group = self.param_groups[number]
            beta1, beta2 = group["betas"]
            kernel = partial(
                torch._fused_adamw_, parameters, exp_avgs=averages, exp_avg_sqs=squares, max_exp_avg_sqs=[], state_steps=steps,
                beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                amsgrad=False, maximize=False, grad_scale=None,
            )  # fmt: skip
            self._prepared.append(_Prepared(group, parameters, counts, kernel))
        return True
