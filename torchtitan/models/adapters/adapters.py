"""Adapters of a network: added, drawn, filled, read back and merged."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchtitan.files.weight_files import named_weights
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.fusing import cut, join
from torchtitan.models.adapters.layers import ADAPTED, AdaptedLayer, LowRank, refuse_merging
from torchtitan.models.adapters.target import AdapterError, AdapterWeights, LowRankWeights, Target
from torchtitan.models.adapters.targets import can_adapt, weight_of
from torchtitan.models.base import DiffusionModel
from torchtitan.models.published_layouts import ComputedTensors
from torchtitan.models.quantized import quantized_weights

TRAINED = "lora"  # name of the adapter that trains


def add_trained_adapter(
    model: DiffusionModel, targets: list[Target], config: LoRAConfig, device: torch.device | None = None
) -> None:
    """Freeze a network and add the adapter that trains, without values, on `device` or the layers'; in place.

    Raises:
        AdapterError: targets overlap.
    """
    model.requires_grad_(False)
    for target in targets:
        alpha = config.rank if config.alpha is None else config.alpha
        update = _empty(model, target, config.rank, alpha, device)
        _adapted_layer(model, target.module).add(TRAINED, update)


def draw_adapter(model: nn.Module, seed: int) -> None:
    """Draw A of the adapter that trains, and set B to zero: the update is zero at first.

    Kaiming's uniform with a = sqrt(5), as of kohya's and ai-toolkit's scripts, is U(-1 / sqrt(inputs), 1 / sqrt(inputs)).

    Args:
        seed: of the run; the same values on any device and layout.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, update in trained_updates(model):
        values = torch.empty(update.down.shape)
        bound = 1.0 / math.sqrt(values[0].numel())
        values.uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            update.down.copy_(values)
            update.up.zero_()


def add_frozen_adapter(
    model: DiffusionModel, name: str, weights: AdapterWeights, training_weight: float, sampling_weight: float,
    source: str = "adapter", device: torch.device | None = None,
) -> None:  # fmt: skip
    """Add an adapter that does not train, with its values; in place.

    Args:
        name: without dots.
        training_weight, sampling_weight: multiples of its update in train mode and in eval mode.
        device: of the adapter; None: that of the layers.

    Raises:
        AdapterError: a target is not of this network, or has another shape.
    """
    for target, values in weights.items():
        check_shape(model, target, values, source)
        update = _empty(model, target, values.rank, values.alpha, device)
        update.training_weight, update.sampling_weight = training_weight, sampling_weight
        with torch.no_grad():
            update.down.copy_(values.down)
            update.up.copy_(values.up)
        _adapted_layer(model, target.module).add(name, update.requires_grad_(False))


@torch.no_grad()
def fill_adapter(model: DiffusionModel, weights: AdapterWeights, source: str = "adapter") -> None:
    """Fill the adapter that trains. Raises AdapterError: targets, ranks or scales differ."""
    wanted = adapter_weights(model)
    weights = _arranged_as(wanted, weights)
    if missing := sorted(wanted.keys() ^ weights.keys()):
        place = "lacks" if missing[0] in wanted else "also has"
        raise AdapterError(f"{source}: {place} {missing[0]}: set lora.targets to the layers that it has adapters of")
    for (target, update), values in zip(trained_updates(model), (weights[target] for target in wanted), strict=True):
        if values.rank != update.rank:
            raise AdapterError(f"{source}: has rank {values.rank} in {target}, the run {update.rank} (set lora.rank)")
        if not math.isclose(values.alpha, update.alpha, rel_tol=1e-6):  # files have it in float32
            found, wanted_alpha = f"{values.alpha:g}", f"{update.alpha:g}"
            raise AdapterError(f"{source}: has alpha {found} in {target}, the run {wanted_alpha} (set lora.alpha)")
        check_shape(model, target, values, source)
        update.down.copy_(values.down)
        update.up.copy_(values.up)


def _arranged_as(wanted: Iterable[Target], weights: AdapterWeights) -> dict[Target, LowRankWeights]:
    """Join targets that make up a wanted one, and cut one that wanted ones are parts of: files have layers split, or fused."""
    found, of_module = dict(weights), defaultdict(list)
    for target in sorted(wanted):
        of_module[target.module].append(target)
    for module, ours in of_module.items():
        theirs = sorted(target for target in found if target.module == module)
        if len(ours) == 1 < len(theirs) and theirs == _parts(ours[0], theirs):
            found[ours[0]] = join([found.pop(part) for part in theirs], [part.stop - part.start for part in theirs])
        elif len(theirs) == 1 < len(ours) and theirs[0].start <= ours[0].start and ours[-1].stop <= theirs[0].stop:
            parts = _parts(theirs[0], ours)
            values = cut(found.pop(theirs[0]), [part.stop - part.start for part in parts])
            found |= {part: value for part, value in zip(parts, values, strict=True) if value is not None}
    return found


def _parts(whole: Target, within: list[Target]) -> list[Target]:
    """Parts of a target's rows that others are, and those between them."""
    ends = sorted({whole.start, whole.stop, *(end for target in within for end in (target.start, target.stop))})
    return [Target(whole.module, start, stop) for start, stop in pairwise(ends)]


def check_shape(model: DiffusionModel, target: Target, values: LowRankWeights, source: str) -> None:
    """Raise AdapterError if an adapter's weights do not fit a network's layer."""
    if not can_adapt(model, target.module):
        raise AdapterError(f"{source}: is an adapter of another network, with {target.module}, which this one lacks")
    shape = weight_of(model, target.module)
    wanted = (values.rank, *shape[1:]), (target.stop - target.start, values.rank)
    found = tuple(values.down.shape), tuple(values.up.shape)
    if target.stop > shape[0] or found != wanted:
        raise AdapterError(
            f"{source}: is an adapter of another network: {target} needs A {list(wanted[0])} and B {list(wanted[1])},"
            f" and it has {list(found[0])} and {list(found[1])}"
        )


def trained_updates(model: nn.Module) -> Iterator[tuple[Target, LowRank]]:
    """Updates of the adapter that trains, by target, in the order of the network."""
    for name, layer in adapted_layers(model):
        if TRAINED in layer.adapters:
            for update in cast(list[LowRank], layer.adapters[TRAINED]):
                yield Target(name, update.start, update.stop), update


def adapter_weights(model: nn.Module) -> dict[Target, LowRankWeights]:
    """Weights of the adapter that trains; the tensors themselves."""
    return {
        target: LowRankWeights(update.down.detach(), update.up.detach(), update.alpha)
        for target, update in trained_updates(model)
    }


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """Layers with adapters, by name, in the order of the network."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLayer))


def merged_weights(model: nn.Module) -> ComputedTensors:
    """Weights of the network as if it had no adapters: their updates, in eval mode's multiples, are added in float32.

    Those of a layer with adapters are merged when they are asked for; all others are the tensors themselves.

    Raises:
        AdapterError: a weight is quantised.
    """
    for weight in quantized_weights(model).values():
        refuse_merging(weight)
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(model)}
    return ComputedTensors({
        name: (tuple(tensor.shape), partial(_weight_of, tensor, layers.get(name)))
        for name, tensor in named_weights(model).items() if not is_adapter_parameter(name)
    })


def is_adapter_parameter(name: str) -> bool:
    """Check whether a parameter's name is of an adapter, and not of the network that it was added to."""
    return ".adapters." in name


def trained_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters of a network that train, by name: those of its trained adapter or, where it has none, all."""
    adapters = {name: parameter for name, parameter in parameters.items() if f".adapters.{TRAINED}." in name}
    return adapters or dict(parameters)


def _weight_of(tensor: Tensor, layer: AdaptedLayer | None) -> Tensor:
    return tensor if layer is None else _merged(layer)


@torch.no_grad()
def _merged(layer: AdaptedLayer) -> Tensor:
    was_training = layer.training
    layer.eval()
    try:
        update = layer.update_of_weight()
    finally:
        layer.train(was_training)
    weight = layer.weight.detach()
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return weight.clone() if update is None else weight + update


def _empty(model: DiffusionModel, target: Target, rank: int, alpha: float, device: torch.device | None) -> LowRank:
    layer = model.get_submodule(target.module)
    inputs = weight_of(model, target.module)[1:]
    device = device or cast(nn.Parameter, layer.weight).device
    return LowRank(target.start, target.stop, inputs, rank=rank, alpha=alpha, device=device)


def _adapted_layer(model: DiffusionModel, name: str) -> AdaptedLayer:
    """Layer of that name, which is replaced where it has no adapters yet."""
    layer = model.get_submodule(name)
    if isinstance(layer, AdaptedLayer):
        return layer
    if type(layer) not in ADAPTED:
        raise AdapterError(f"{name}: is {type(layer).__name__}, which can have no adapter")
    parent, _, child = name.rpartition(".")
    adapted = cast(Any, ADAPTED)[type(layer)](layer)
    model.get_submodule(parent).register_module(child, adapted)
    return adapted
