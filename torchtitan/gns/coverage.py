"""What taps cover: every parameter, each layer once in a forward, and all of its gradient.

A weight that is used outside of its layer's forward (`F.linear(x, other.weight)`) has a gradient that no tap sees. The
measured sums and the gradient itself are both linear in the samples, so the gradient of the step, projected as the taps
project, equals the sum of what they measured, to rounding.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import local
from torchtitan.gns.config import cannot_measure
from torchtitan.gns.projections import first_row
from torchtitan.gns.taps import SketchedLinear, TappedEmbedding, VectorLinear, folded_rows
from torchtitan.models.base import DiffusionModel
from torchtitan.models.flops import forward_on_meta

# Relative roundings: of bfloat16; of a term in float32; and of products in float32, by their precision: exact but for the
# rounding of a sum of 2^16 terms, in TF32, in bfloat16.
_BFLOAT16, _OF_SUM = 2.0**-8, 2.0**-24
_OF_FLOAT32 = {"highest": 2.0**-16, "high": 2.0**-11, "medium": _BFLOAT16}
# Roundings on both sides: of inputs, projections, products and sums; of the gradient, and of its reduction.
_ROUNDINGS = 16

_IMAGES = 7  # of the forward that is looked at, unlike other sizes


def check_parameters(model: DiffusionModel, tapped: Iterable[str]) -> None:
    """Check that one tapped layer holds each parameter. Raises CannotMeasure."""
    holders: dict[nn.Parameter, str] = {}
    for name in tapped:
        layer = model.get_submodule(name)
        for own in ("weight", "bias") if isinstance(layer, nn.Linear) else ("weight",):
            parameter = getattr(layer, own)
            if parameter is None:
                continue
            if parameter in holders:
                raise cannot_measure(f"{holders[parameter]} and {name}.{own} are one parameter", "use two")
            holders[parameter] = f"{name}.{own}"
    for name, parameter in model.named_parameters():
        if parameter not in holders:
            holder = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise cannot_measure(
                f"{name} belongs to a {holder}; single gradients are measured at nn.Linear, nn.Embedding, and LayerNorm,"
                " RMSNorm, TokenBias and TokenGain of torchtitan.models.layers", "use one of these"
            )  # fmt: skip


def check_applications(model: DiffusionModel, tapped: Mapping[str, type[nn.Module]]) -> None:
    """Check on meta that each layer, by name, is applied once to inputs [B, ...] in a forward. Raises CannotMeasure."""
    inputs: dict[str, list[torch.Size]] = {name: [] for name in tapped}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, arguments: inputs[name].append(arguments[0].shape)

    hooks = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in tapped]
    forward_on_meta(model, _IMAGES)
    for hook in hooks:
        hook.remove()
    for name, shapes in inputs.items():
        if len(shapes) > 1:
            raise cannot_measure(f"{name} is applied {len(shapes)} times in a forward", "use as many layers")
        axes = {TappedEmbedding: 1, VectorLinear: 2}.get(tapped[name])
        for shape in shapes:
            if shape[0] != _IMAGES or axes not in (None, len(shape)):
                wanted = {1: "[B]", 2: "[B, D] by its role vector"}.get(axes or 0, "[B, ..., D]")
                raise cannot_measure(f"{name} is applied to {list(shape)} for {_IMAGES} images", f"give it {wanted}")


@torch.no_grad()
def unseen_gradient(
    layers: Mapping[str, Any], measured: list[Tensor], samples: Tensor, layout: Layout, dtype: torch.dtype
) -> tuple[str, float] | None:
    """Find the layer of which the taps missed the largest share of the gradient; None if they saw all; collective when sharded.

    Args:
        layers: tapped ones by name, with the reduced gradients of a step.
        measured: of each layer, sums over the samples of all ranks in the plain geometry, by bin [K, elements].
        dtype: the coarsest in which products or sums of gradients are computed.
    """
    flat = torch.cat([_projected_gradient(layer, layout) for layer in layers.values()]) * samples.to(measured[0])
    if layout.sharded:
        dist.all_reduce(flat, group=layout.shard_group)
    wanted = flat.split([sums.shape[1] for sums in measured])
    gradient = torch.stack([whole.norm() for whole in wanted])
    size = gradient + torch.stack([sums.norm() for sums in measured])
    if not size.isfinite().all():  # a step that the guard skips
        return None
    missed = torch.stack([(whole - sums.sum(0)).norm() for sums, whole in zip(measured, wanted, strict=True)])
    rounding = _BFLOAT16 if dtype == torch.bfloat16 else _OF_FLOAT32[torch.get_float32_matmul_precision()]
    # Where a layer's gradients cancel, what remains is rounding of others'.
    seen = missed <= _ROUNDINGS * (rounding * size + _OF_SUM * size.max())
    share = torch.where(seen, 0.0, missed / torch.maximum(missed, gradient))
    worst = int(share.argmax())
    return (list(layers)[worst], share[worst].item()) if share[worst] > 0 else None


def _projected_gradient(layer: Any, layout: Layout) -> Tensor:
    """Project this rank's part of a layer's gradient as its tap does in the plain geometry, [elements]."""
    (geometries, rows), columns = layer.rows.shape, layer.columns.shape[1]
    gradient = layer.rows.new_zeros(rows, columns)  # the bias as the last column, as in the taps
    for parameter, place in ((layer.weight, slice(0, max(columns - 1, 1))), (getattr(layer, "bias", None), slice(-1, None))):
        if parameter is None or parameter.grad is None:
            continue
        found = local(cast(Tensor, parameter.grad))
        target = gradient[(first := first_row(parameter, layout)) : first + len(found), place]
        target.copy_(found.reshape(target.shape))
    if not hasattr(layer, "right"):
        return gradient.flatten()
    one_sided = gradient @ layer.right.unflatten(1, (geometries, -1))[:, 0].to(gradient)  # [out, k]
    if isinstance(layer, SketchedLinear):
        return folded_rows(one_sided.T, layer.fold.places, layer.fold.signs).flatten()
    return (layer.left.unflatten(1, (geometries, -1))[:, 0].to(gradient).T @ one_sided).flatten()
