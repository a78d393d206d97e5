"""Targets of low-rank adapters: which rows of which layers have one."""

import math
import re
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.layers import ADAPTED, AdaptedLayer
from torchtitan.models.adapters.target import AdapterError, Target
from torchtitan.models.base import DiffusionModel
from torchtitan.models.quantized import QuantizedWeight

BLOCKS = "blocks"

TargetSets = Mapping[str, Callable[[DiffusionModel], list[Target]]]


def find_targets(model: DiffusionModel, config: LoRAConfig, sets: TargetSets) -> list[Target]:
    """Find the targets that a configuration names, in the order of the network.

    Args:
        model: on any device, without adapters.
        sets: published sets of the model's family, by name.

    Raises:
        AdapterError: none is found, or a rank is above the smaller side of a layer.
    """
    targets = _matching(model, config.patterns) if config.patterns else _named(model, config.targets, sets)
    for target in targets:
        check_rank(model, target, config.rank, "lora.rank")
    return targets


def whole(model: DiffusionModel, module: str) -> Target:
    """Target of a whole layer."""
    return Target(module, 0, weight_of(model, module)[0])


def weight_of(model: DiffusionModel, module: str) -> tuple[int, ...]:
    """Shape of a layer's weight [outputs, inputs, ...]."""
    layer = model.get_submodule(module)
    assert isinstance(layer.weight, nn.Parameter | QuantizedWeight)
    return tuple(layer.weight.shape)


def check_rank(model: DiffusionModel, target: Target, rank: int, key: str) -> None:
    """Raise AdapterError if a rank is above the smaller side of a target."""
    outputs, inputs = target.stop - target.start, math.prod(weight_of(model, target.module)[1:])
    if rank > min(outputs, inputs):
        raise AdapterError(
            f"{key}: {rank} is above the smaller side of {target.module} ({outputs} x {inputs}), beyond which it adds nothing"
            f" (at most {min(outputs, inputs)})"
        )


def can_adapt(model: DiffusionModel, module: str) -> bool:
    """Check whether a network has a layer of that name that can have adapters."""
    try:
        layer = model.get_submodule(module)
    except AttributeError:
        return False
    return _is_adaptable(layer)


def adaptable(model: DiffusionModel, within: Iterable[nn.Module] = ()) -> list[str]:
    """Names of the layers that can have adapters, in the network's order; of the modules `within` only, if given."""
    wanted = {inner for module in within for inner in module.modules()}
    return [
        name for name, module in model.named_modules()
        if _is_adaptable(module) and (not wanted or module in wanted)
    ]  # fmt: skip


def _is_adaptable(layer: nn.Module) -> bool:
    return type(layer) in ADAPTED or isinstance(layer, AdaptedLayer)


def of_blocks(model: DiffusionModel) -> list[Target]:
    """Every linear and convolution in the blocks of a network, whole."""
    return [whole(model, name) for name in adaptable(model, model.blocks())]


def _named(model: DiffusionModel, name: str, sets: TargetSets) -> list[Target]:
    known: dict[str, Callable[[DiffusionModel], list[Target]]] = {BLOCKS: of_blocks, **sets}
    if name not in known:
        raise AdapterError(
            f"lora.targets: {name!r} is no set of layers of {type(model).__name__} (one of {', '.join(known)}, or give"
            " lora.patterns)"
        )
    return known[name](model)


def _matching(model: DiffusionModel, patterns: list[str]) -> list[Target]:
    names = adaptable(model)
    found = set()
    for index, pattern in enumerate(patterns):
        try:
            matching = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise AdapterError(f"lora.patterns[{index}]: {pattern!r} is no regular expression: {error}") from error
        if not matching:
            some = ", ".join([*names[:3], "..."])
            raise AdapterError(f"lora.patterns[{index}]: {pattern!r} fits no layer that can have an adapter (there are {some})")
        found |= matching
    return [whole(model, name) for name in names if name in found]
