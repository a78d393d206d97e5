"""Random projections of all sketched layers: fresh on every measured step, the same on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan import philox
from torchtitan.gns.second_moment import AdamFactors
from torchtitan.gns.taps import FOLDED_ROWS, Fold, SketchedLinear

Side = Literal["left", "right"]

# Columns on the left of a layer of one vector per sample; on the right it has as many more as its sketch is to be long.
_LEFT_COLUMNS = 16

_BYTES_PER_WORD, _WORDS_PER_BLOCK = 4, 4


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
            geometries: G.
            factors: of Adam's geometry, the last: of these layers, and maybe of others behind them; None without it.
            dtype: of `left` and `right`.
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
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
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
        counts = [len(signs.values) * -(-signs.values.shape[2] // 8) for signs in self._signs]
        if self._folds:
            places = len(self._folds.first)
            counts += [-(-places // 8), places // FOLDED_ROWS]
        blocks = -(-sum(counts) // (_BYTES_PER_WORD * _WORDS_PER_BLOCK))
        if not blocks:
            return
        indices = torch.arange(step * blocks, (step + 1) * blocks, device=self._byte_signs.device)
        words = philox.random_words(self._seed, "gns_projection", indices, _WORDS_PER_BLOCK)
        drawn = words.to(torch.int32).flatten().view(torch.uint8)[: sum(counts)].int().split(counts)
        for signs, of_signs in zip(self._signs, drawn, strict=False):
            self._draw_signs(signs, of_signs)
        if self._folds:
            self._draw_folds(self._folds, *drawn[-2:])

    def _draw_signs(self, group: _Signs, drawn: Tensor) -> None:
        lines, _, columns = group.values.shape
        signs = self._looked_up(drawn).view(lines, 1, -1)[..., :columns]
        torch.mul(signs, columns**-0.5, out=group.values[:, :1])
        if group.places is not None and self._factors is not None:
            factors = self._factors.values[group.places] * columns**-0.5
            torch.mul(signs, factors[:, None, None], out=group.values[:, 1:])

    def _draw_folds(self, folds: _Folds, of_signs: Tensor, rotations: Tensor) -> None:
        places = torch.arange(len(folds.first), device=rotations.device)
        places = folds.first + (places - rotations.repeat_interleave(FOLDED_ROWS)) % FOLDED_ROWS
        known = places < folds.rows
        torch.mul(places, known, out=folds.all.places)
        torch.mul(self._looked_up(of_signs).flatten()[: len(known)], known, out=folds.all.signs)

    def _looked_up(self, drawn: Tensor) -> Tensor:
        """Signs of the bits of bytes, [bytes, 8]: a third of the time of shifting them."""
        return F.embedding(drawn, self._byte_signs)
