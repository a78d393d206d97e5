"""Random projections of all sketched layers, and the factors of Adam's geometry that multiply them.

Adam divides every element of the gradient by sqrt(v), v the bias-corrected average of its squares. Of a layer's v
[out, in + 1], the bias as the last column, the row sums r and column sums c are kept, v ~ r_o c_i / sum(v), so that
1 / sqrt(v) is a factor per row times one per column, which can be folded into random projections and into the two
sides of a rank-one gradient. A parameter's multiple of the learning rate multiplies the factors of its columns.

Source of the factored form: Shazeer and Stern, "Adafactor", arXiv 1804.04235, section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan import philox
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import local
from torchtitan.distributed.shard_drawing import own_rows
from torchtitan.gns.taps import FOLDED_ROWS, Fold, SketchedLinear

# Rows and columns that have hardly seen a gradient (a class not met yet) count as this share of the average one.
_FLOOR = 1e-4

# Matrices of up to as many elements are summed together with others of their shape: copying them takes less than
# starting two sums for each, on a device a few microseconds, on a host less than one.
_SMALL, _SMALL_ON_HOST = 2**21, 2**14

Side = Literal["left", "right"]

# Columns on the left of a layer of one vector per sample; on the right it has as many more as its sketch is to be long.
_LEFT_COLUMNS = 16

_BYTES_PER_WORD, _WORDS_PER_BLOCK = 4, 4


class AdamFactors:
    """Factors of all layers as one vector: every layer's rows, then every layer's columns.

    A model has hundreds of small tensors. Apart from the sums over its matrices, all layers are computed at once, since
    a device takes as long to start an operation on one layer as to compute it on all.

    Attributes:
        num_rows: rows of all layers.
        values: factors of all rows, then of all columns; of the last measured step.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        """
        Args:
            modules: layers, in the same order on all ranks, each with `rows` and `columns` (see `TappedLinear`), `weight`
                [out, ...], or [out] for gains, and maybe `bias` [out]; all plain or sharded over rows. A gain is a matrix of
                one column, and counts as its bias.
        """
        self._modules, layers = modules, len(modules)
        device, dtype = modules[0].rows.device, modules[0].rows.dtype
        self._targets = [layer.rows[-1] for layer in modules] + [layer.columns[-1] for layer in modules]
        self._rows, self._columns = ([getattr(m, side).shape[1] for m in modules] for side in ("rows", "columns"))
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
        self._most = _SMALL_ON_HOST if device.type == "cpu" else _SMALL
        self.values = torch.zeros(self.num_rows + num_columns, dtype=dtype, device=device)
        self._rates: Tensor | None = None  # of all columns; None: all are 1
        # Of the wrapped model: the weights of all layers, then their vectors; and each with the sums of this rank's part.
        self._counted: list[Any] = []
        self._parts: list[tuple[nn.Parameter, Tensor, Tensor, Tensor]] = []

    def places(self, layer: int, rows: bool) -> Tensor:
        """Places of a layer's rows, or of its columns, in `values`, int64 [rows] or [columns]."""
        before = sum(self._rows[:layer]) if rows else self.num_rows + sum(self._columns[:layer])
        return before + torch.arange((self._rows if rows else self._columns)[layer])

    def attach(self, layout: Layout, multiples: Mapping[Any, float]) -> None:
        """Attach to the parameters of the wrapped model; multiples: of the learning rate of each, 1 where it has none."""
        weights = [layer.weight for layer in self._modules]
        vectors = [layer.weight if layer.weight.ndim == 1 else getattr(layer, "bias", None) for layer in self._modules]
        self._counted = weights + vectors
        of_rows, of_columns, of_vectors = self._sums.split([self.num_rows, sum(self._columns), self.num_rows])
        sums = of_rows.split(self._rows), of_columns.split(self._columns), of_vectors.split(self._rows)
        for layer, rows, columns, vector in zip(self._modules, *sums, strict=True):
            for parameter in layer.parameters(recurse=False):
                here = slice(first := first_row(parameter, layout), first + len(local(parameter.detach())))
                self._parts.append((parameter, rows[here], columns[:-1], vector[here]))
        rates: list[float] = []
        for weight, vector, columns in zip(weights, vectors, self._columns, strict=True):
            rates += [multiples.get(weight, 1.0)] * (columns - 1) + [multiples.get(vector, 1.0)]
        if set(rates) != {1.0}:
            self._rates = torch.tensor(rates, dtype=self.values.dtype, device=self.values.device)

    @torch.no_grad()
    def write(self, state: dict[Tensor, dict], beta2: float, layout: Layout) -> None:
        """Write 1 / sqrt(v) of the optimizer's present state into every layer's last geometry; collective when sharded.

        The layers are attached, or else are now.

        A layer with a second moment of zeros, as before the first step, gets factors of zero.

        Args:
            state: parameter -> its state, with `exp_avg_sq` and `step`, as AdamW keeps it; empty before the first step.
        """
        if not self._parts:
            self.attach(layout, {})
        correction = self._correction(state, beta2)
        self._sum_local(state)
        if layout.sharded:
            dist.all_reduce(self._sums, group=layout.shard_group)
        self.values = self._inverse_roots(correction)
        if self._rates is not None:
            self.values[self.num_rows :] *= self._rates
        torch._foreach_copy_(self._targets, list(self.values.split([*self._rows, *self._columns])))

    def _correction(self, state: dict[Tensor, dict], beta2: float) -> Tensor:
        """Divisors of the averages that began at zero, of all weights and then of all vectors, [2 layers]."""
        steps = [state.get(parameter, {}).get("step", self._step_of_none) for parameter in self._counted]
        if any(step.device != self._sums.device for step in steps):
            steps = [step.to("cpu") for step in steps]  # an optimizer that counts on the host
        return 1.0 - beta2 ** torch.stack(steps).to(self._sums.device, self._sums.dtype)

    def _sum_local(self, state: dict[Tensor, dict]) -> None:
        """Sum this rank's part of every second moment by rows and by columns."""
        self._sums.zero_()
        sources, targets = [], []
        small: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for parameter, rows, columns, vector in self._parts:
            moments = state.get(parameter, {})
            if "exp_avg_sq" not in moments or not len(rows):
                continue
            v = local(moments["exp_avg_sq"])
            v = v.dequantize() if hasattr(v, "codes") else v
            if v.ndim == 1:
                sources.append(v)
                targets.append(vector)
            elif v.numel() <= self._most:
                small.setdefault(v.flatten(1).shape, []).append((v.flatten(1), rows, columns))
            else:
                torch.sum(v.flatten(1), 1, dtype=rows.dtype, out=rows)
                torch.sum(v.flatten(1), 0, dtype=rows.dtype, out=columns)
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
        of_rows = torch.stack((sums[: self.num_rows], vectors))
        of_layers = of_rows[:, self._padded].masked_fill_(self._outside, 0.0).sum(2)  # [2, layers]
        sums[: self.num_rows] += vectors
        sums.index_add_(0, self._last_columns, of_layers[1])
        totals = of_layers.sum(0)
        floors = (totals * self._floor_of_total).flatten()  # of every side, a share of its mean
        floored = torch.maximum(sums, floors[self._side_of[: len(sums)]])
        found = floored.rsqrt_() * totals.pow(0.25)[self._layer_of[: len(sums)]]
        return found.nan_to_num_(0.0, posinf=torch.inf)  # where nothing is known, 0 x infinity


@dataclass(frozen=True)
class _Signs:
    """Projections of one side of many layers in a common tensor, since a device takes as long for one as for all.

    Attributes:
        values: signs over the root of their number, times factors: of all lines, [lines, G, columns].
        places: of the lines in the values of Adam's factors, int64 [lines]; None without Adam's geometry.
    """

    values: Tensor
    places: Tensor | None


@dataclass(frozen=True)
class _Folds:
    """Folds of many layers in common tensors.

    Attributes:
        all: of all layers, one after another.
        first: row of a layer at the beginning of every place's block, int64 [places].
        rows: of every place's layer, int64 [places].
    """

    all: Fold
    first: Tensor
    rows: Tensor


class Projections:
    """Projections `left`, `right` and `fold` of layers, see `torchtitan.gns.taps.TappedLinear`."""

    def __init__(
        self, layers: Sequence[Any], sketch_size: int, geometries: int, seed: int, factors: AdamFactors | None,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Give every layer its projections, empty until they are drawn.

        Args:
            layers: sketched ones, with `rows` and `columns`.
            sketch_size: k, columns over tokens: a sketch has FOLDED_ROWS k numbers.
            factors: of Adam's geometry, the last: of these layers, and maybe of others behind them; None without it.
        """
        self._seed, self._factors, self._geometries, self._dtype = seed, factors, geometries, dtype
        numbers = range(len(layers))
        over_tokens = [n for n in numbers if isinstance(layers[n], SketchedLinear)]
        vectors = [n for n in numbers if n not in over_tokens]
        groups: tuple[tuple[list[int], Side, int], ...] = (
            (over_tokens, "right", sketch_size),
            (vectors, "left", _LEFT_COLUMNS),
            (vectors, "right", FOLDED_ROWS * sketch_size // _LEFT_COLUMNS),
        )
        self._signs = [self._attach_signs(layers, *group) for group in groups if group[0]]
        self._folds = self._attach_folds([layers[n] for n in over_tokens]) if over_tokens else None
        # Random bytes of a step: of the signs of each group, then of the folds' signs and rotations.
        self._bytes = [len(signs.values) * -(-signs.values.shape[2] // 8) for signs in self._signs]
        if self._folds:
            self._bytes += [-(-len(self._folds.first) // 8), len(self._folds.first) // FOLDED_ROWS]
        self._blocks = -(-sum(self._bytes) // (_BYTES_PER_WORD * _WORDS_PER_BLOCK))  # of random words of a step
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        # Signs of the bits of every byte: to look them up takes a third of the time of shifting.
        self._byte_signs = (2.0 * bits - 1.0).to(layers[0].rows) if layers else bits

    def _attach_signs(self, layers: Sequence[Any], chosen: Sequence[int], side: Side, columns: int) -> _Signs:
        lines = [(layers[n].rows if side == "left" else layers[n].columns).shape[1] for n in chosen]
        values = layers[0].rows.new_zeros(sum(lines), self._geometries, columns, dtype=self._dtype)
        for n, part in zip(chosen, values.split(lines), strict=True):
            setattr(layers[n], side, part.flatten(1))
        if self._factors is None:
            return _Signs(values, None)
        places = torch.cat([self._factors.places(n, rows=side == "left") for n in chosen])
        return _Signs(values, places.to(values.device))

    def _attach_folds(self, layers: Sequence[Any]) -> _Folds:
        rows = torch.tensor([layer.rows.shape[1] for layer in layers])
        places = (-(-rows // FOLDED_ROWS) * FOLDED_ROWS).tolist()
        first = torch.cat([torch.arange(count) // FOLDED_ROWS * FOLDED_ROWS for count in places])
        device = layers[0].rows.device
        fold = Fold(torch.zeros(sum(places), dtype=torch.int64, device=device), layers[0].rows.new_zeros(sum(places)))
        for layer, *of_layer in zip(layers, fold.places.split(places), fold.signs.split(places), strict=True):
            layer.fold = Fold(*of_layer)
        return _Folds(fold, first.to(device), rows.repeat_interleave(torch.tensor(places)).to(device))

    def draw(self, step: int) -> None:
        """Draw the projections of a step, a function of its number, and multiply by the present factors."""
        if not self._bytes:
            return
        indices = torch.arange(step * self._blocks, (step + 1) * self._blocks, device=self._byte_signs.device)
        words = philox.random_words(self._seed, "gns_projection", indices, _WORDS_PER_BLOCK)
        drawn = words.to(torch.int32).flatten().view(torch.uint8)[: sum(self._bytes)].int().split(self._bytes)
        for group, of_group in zip(self._signs, drawn, strict=False):
            lines, _, columns = group.values.shape
            signs = F.embedding(of_group, self._byte_signs).view(lines, 1, -1)[..., :columns]
            torch.mul(signs, columns**-0.5, out=group.values[:, :1])
            if group.places is not None and self._factors is not None:
                factors = self._factors.values[group.places] * columns**-0.5
                torch.mul(signs, factors[:, None, None], out=group.values[:, 1:])
        if folds := self._folds:
            of_signs, rotations = drawn[-2:]
            places = torch.arange(len(folds.first), device=rotations.device)
            places = folds.first + (places - rotations.repeat_interleave(FOLDED_ROWS)) % FOLDED_ROWS
            known = places < folds.rows
            torch.mul(places, known, out=folds.all.places)
            torch.mul(F.embedding(of_signs, self._byte_signs).flatten()[: len(known)], known, out=folds.all.signs)


def first_row(parameter: nn.Parameter, layout: Layout) -> int:
    """First of the rows of a parameter that this rank has."""
    if not isinstance(parameter, DTensor) or not layout.sharded:
        return 0
    return own_rows(tuple(parameter.shape), layout).start
