"""Adam's second moment as factors on a gradient's rows and columns.

Adam divides every element of the gradient by sqrt(v), v the bias-corrected average of its squares. Of a layer's v
[out, in + 1], the bias as the last column, the row sums r and column sums c are kept, v ~ r_o c_i / sum(v), so that
1 / sqrt(v) is a factor per row times one per column, which can be folded into random projections and into the two
sides of a rank-one gradient.

Source of the factored form: Shazeer and Stern, "Adafactor", arXiv 1804.04235, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import local
from torchtitan.gns.taps import Scales

# Rows and columns that have hardly seen a gradient (a class not met yet) count as this share of the average one.
_FLOOR = 1e-4


@dataclass(frozen=True)
class FactoredLayer:
    """Layer with a factored second moment.

    Attributes:
        module: has `weight` [out, in], or [out] for gains, and maybe `bias` [out]; all plain or sharded over rows.
        scales: where the factors go, in the last geometry.
    """

    module: nn.Module
    scales: Scales


@torch.no_grad()
def write_adam_factors(
    layers: Sequence[FactoredLayer], state: dict[Tensor, dict], beta2: float, layout: Layout
) -> None:
    """Write 1 / sqrt(v) of the optimizer's present state into every layer's last geometry; collective when sharded.

    A layer whose second moment is all zeros, as before the first step, gets factors of zero.

    Args:
        layers: in the same order on all ranks.
        state: parameter -> its state, with `exp_avg_sq` and `step`, as AdamW keeps it; empty before the first step.
        beta2: decay of the second moment.
        layout: over whose shard axis the sums are added.
    """
    sizes = [layer.scales.rows.shape[1] + layer.scales.columns.shape[1] for layer in layers]
    sums = layers[0].scales.rows.new_zeros(sum(sizes))
    for layer, part in zip(layers, sums.split(sizes), strict=True):
        rows, columns = part.split([layer.scales.rows.shape[1], layer.scales.columns.shape[1]])
        _add_local_sums(layer.module, state, beta2, rows, columns, layout)
    if layout.sharded:
        dist.all_reduce(sums, group=layout.shard_group)
    for layer, part in zip(layers, sums.split(sizes), strict=True):
        rows, columns = part.split([layer.scales.rows.shape[1], layer.scales.columns.shape[1]])
        total = rows.sum()
        root = total.pow(0.25)
        layer.scales.rows[-1] = _inverse_root(rows, root)
        layer.scales.columns[-1] = _inverse_root(columns, root)


def _inverse_root(sums: Tensor, root: Tensor) -> Tensor:
    floored = torch.maximum(sums, _FLOOR * sums.mean())
    return torch.where(floored > 0, root / floored.sqrt(), 0.0)


def _add_local_sums(
    module: nn.Module, state: dict[Tensor, dict], beta2: float, rows: Tensor, columns: Tensor, layout: Layout
) -> None:
    for parameter, is_bias in ((getattr(module, "weight", None), False), (getattr(module, "bias", None), True)):
        if parameter is None:
            continue
        moments = state.get(parameter, {})
        if "exp_avg_sq" not in moments:
            continue
        v = local(moments["exp_avg_sq"])
        v = v.dequantize() if hasattr(v, "codes") else v
        if v.numel() == 0:
            continue
        debias = 1.0 / (1.0 - beta2 ** moments["step"].to(v.device, v.dtype))
        first = _first_row(parameter, layout)
        of_rows = v if v.ndim == 1 else v.sum(1)
        rows[first : first + len(of_rows)] += of_rows * debias
        if v.ndim == 2:
            columns[:-1] += v.sum(0) * debias
        else:  # a bias is the last column; a gain is a matrix of one column
            columns[-1 if is_bias else 0] += v.sum() * debias


def _first_row(parameter: nn.Parameter, layout: Layout) -> int:
    if not isinstance(parameter, DTensor) or not layout.sharded or layout.mesh is None:
        return 0
    per_rank = -(-parameter.shape[0] // layout.shards)
    return min(per_rank * layout.mesh["shard"].get_local_rank(), parameter.shape[0])
