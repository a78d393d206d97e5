"""Adam's second moment as factors on a gradient's rows and columns.

Adam divides every element of the gradient by sqrt(v), v the bias-corrected average of its squares. Of a layer's v
[out, in + 1], the bias as the last column, the row sums r and column sums c are kept, v ~ r_o c_i / sum(v), so that
1 / sqrt(v) is a factor per row times one per column, which can be folded into random projections and into the two
sides of a rank-one gradient.

Source of the factored form: Shazeer and Stern, "Adafactor", arXiv 1804.04235, section 3.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import local
from torchtitan.gns.taps import Scales

# Rows and columns that have hardly seen a gradient (a class not met yet) count as this share of the average one.
_FLOOR = 1e-4

# Matrices of up to as many elements are summed together with others of their shape: copying them takes less than
# starting two sums for each, on a device a few microseconds, on a host less than one.
_SMALL, _SMALL_ON_HOST = 2**21, 2**14


class AdamFactors:
    """Factors of all layers as one vector: every layer's rows, then every layer's columns.

    A model has hundreds of small tensors. Apart from the sums over its matrices, all layers are computed at once, since
    a device takes as long to start an operation on one layer as to compute it on all.

    Attributes:
        num_rows: rows of all layers.
        values: factors of all rows, then of all columns; of the last measured step.
    """

    def __init__(self, modules: Sequence[nn.Module], scales: Sequence[Scales]) -> None:
        """
        Args:
            modules: layers, in the same order on all ranks, each with `weight` [out, ...], or [out] for gains, and maybe
                `bias` [out]; all plain or sharded over rows. A gain is a matrix of one column, and counts as its bias.
            scales: of each layer.
        """
        self._modules, self._scales = modules, scales
        first, layers = scales[0].rows, len(scales)
        device, dtype = first.device, first.dtype
        self._rows, self._columns = ([getattr(s, side).shape[1] for s in scales] for side in ("rows", "columns"))
        self.num_rows, num_columns = sum(self._rows), sum(self._columns)
        rows, columns = (torch.tensor(counts, device=device) for counts in (self._rows, self._columns))
        # What is summed over the ranks: rows of the weights, their columns, vectors.
        total = 2 * self.num_rows + num_columns
        self._sums = torch.zeros(total, dtype=dtype, device=device)
        # Of each of these its side: rows are numbered by layer, then columns, then vectors.
        self._side_of = torch.arange(3 * layers, device=device).repeat_interleave(
            torch.cat((rows, columns, rows)), output_size=total
        )
        self._layer_of = self._side_of % layers
        self._parameter_of = self._layer_of + layers * (self._side_of >= 2 * layers)  # weights, then vectors
        # Of every layer its rows, padded to a matrix that is summed at once.
        places = torch.arange(max(self._rows), device=device).expand(layers, -1)
        self._padded = ((rows.cumsum(0) - rows)[:, None] + places).clamp_(max=self.num_rows - 1)  # [layers, most rows]
        self._outside = places >= rows[:, None]
        self._last_columns = self.num_rows + columns.cumsum(0) - 1
        self._floor_of_total = _FLOOR / torch.stack((rows, columns)).to(dtype)  # [2, layers]
        self._step_of_none = torch.ones((), device=device)
        self.values = torch.zeros(self.num_rows + num_columns, dtype=dtype, device=device)

    def places(self, layer: int, rows: bool) -> Tensor:
        """Places of a layer's rows, or of its columns, in `values`, int64 [rows] or [columns]."""
        before = sum(self._rows[:layer]) if rows else self.num_rows + sum(self._columns[:layer])
        return before + torch.arange((self._rows if rows else self._columns)[layer])

    @torch.no_grad()
    def write(self, state: dict[Tensor, dict], beta2: float, layout: Layout) -> None:
        """Write 1 / sqrt(v) of the optimizer's present state into every layer's last geometry; collective when sharded.

        A layer whose second moment is all zeros, as before the first step, gets factors of zero.

        Args:
            state: parameter -> its state, with `exp_avg_sq` and `step`, as AdamW keeps it; empty before the first step.
            beta2: decay of the second moment.
            layout: sums are added over its shard axis.
        """
        correction = self._correction(state, beta2)
        self._sum_local(state, layout)
        if layout.sharded:
            dist.all_reduce(self._sums, group=layout.shard_group)
        self.values = self._inverse_roots(correction)
        targets = [scales.rows[-1] for scales in self._scales] + [scales.columns[-1] for scales in self._scales]
        torch._foreach_copy_(targets, list(self.values.split([*self._rows, *self._columns])))

    def _correction(self, state: dict[Tensor, dict], beta2: float) -> Tensor:
        """Divisors of the averages that began at zero, of all weights and then of all vectors, [2 layers]."""
        weights = [cast(nn.Parameter, module.weight) for module in self._modules]
        vectors = [w if w.ndim == 1 else getattr(m, "bias", None) for w, m in zip(weights, self._modules, strict=True)]
        steps: list[Tensor] = [
            self._step_of_none if parameter is None else state.get(parameter, {}).get("step", self._step_of_none)
            for parameter in (*weights, *vectors)
        ]
        if any(step.device != self._sums.device for step in steps):
            steps = [step.to("cpu") for step in steps]  # an optimizer that counts on the host
        return 1.0 - beta2 ** torch.stack(steps).to(self._sums.device, self._sums.dtype)

    def _sum_local(self, state: dict[Tensor, dict], layout: Layout) -> None:
        """Sum this rank's part of every second moment by rows and by columns."""
        self._sums.zero_()
        of_rows, of_columns, of_vectors = self._sums.split([self.num_rows, sum(self._columns), self.num_rows])
        sources, targets = [], []
        most = _SMALL_ON_HOST if self._sums.device.type == "cpu" else _SMALL
        small: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for module, rows, columns, vector in zip(
            self._modules, of_rows.split(self._rows), of_columns.split(self._columns), of_vectors.split(self._rows),
            strict=True,
        ):  # fmt: skip
            for parameter in module.parameters(recurse=False):
                v = _second_moment(parameter, state)
                if v is None or not v.numel():
                    continue
                v = v.flatten(1) if v.ndim > 2 else v
                here = slice(first := first_row(parameter, layout), first + len(v))
                if v.ndim == 1:
                    sources.append(v)
                    targets.append(vector[here])
                elif v.numel() <= most:
                    small.setdefault(v.shape, []).append((v, rows[here], columns[:-1]))
                else:
                    torch.sum(v, 1, dtype=rows.dtype, out=rows[here])
                    torch.sum(v, 0, dtype=rows.dtype, out=columns[:-1])
        for alike in small.values():
            matrices, rows_of, columns_of = zip(*alike, strict=True)
            stacked = torch.stack(matrices)
            sources += [*stacked.sum(2), *stacked.sum(1)]
            targets += [*rows_of, *columns_of]
        if sources:
            torch._foreach_copy_(targets, sources)

    def _inverse_roots(self, correction: Tensor) -> Tensor:
        """Factors of all rows and columns from the sums over all ranks."""
        corrected = self._sums / correction[self._parameter_of]
        sums, vectors = corrected.tensor_split([len(self.values)])
        of_layers = self._by_layer(torch.stack((sums[: self.num_rows], vectors)))  # [2, layers]
        sums[: self.num_rows] += vectors
        sums.index_add_(0, self._last_columns, of_layers[1])
        totals = of_layers.sum(0)
        floors = (totals * self._floor_of_total).flatten()  # of every side, a share of its mean
        floored = torch.maximum(sums, floors[self._side_of[: len(sums)]])
        found = floored.rsqrt_() * totals.pow(0.25)[self._layer_of[: len(sums)]]
        return found.nan_to_num_(0.0, posinf=torch.inf)  # where nothing is known, 0 x infinity

    def _by_layer(self, rows: Tensor) -> Tensor:
        """Sum vectors [n, rows] of all rows by layers, [n, layers]."""
        return rows[:, self._padded].masked_fill_(self._outside, 0.0).sum(2)


def _second_moment(parameter: nn.Parameter, state: dict[Tensor, dict]) -> Tensor | None:
    moments = state.get(parameter, {})
    if "exp_avg_sq" not in moments:
        return None
    v = local(moments["exp_avg_sq"])
    return v.dequantize() if hasattr(v, "codes") else v


def first_row(parameter: nn.Parameter, layout: Layout) -> int:
    """First of the rows of a parameter that this rank has."""
    if not isinstance(parameter, DTensor) or not layout.sharded or layout.mesh is None:
        return 0
    per_rank = -(-parameter.shape[0] // layout.shards)
    return min(per_rank * layout.mesh["shard"].get_local_rank(), parameter.shape[0])
