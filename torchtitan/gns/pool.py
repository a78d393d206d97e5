"""Pools of noise scales over many steps: every estimator with its sums, outlier steps, and agreement of the bins' gradients."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from torchtitan.gns.composite import Composite, ControlledSums, FreeSums
from torchtitan.gns.decayed import WINDOW_SHARES, BinEstimates, DecayedSums, narrowest
from torchtitan.gns.statistics import PairSums, cosine_stderr, cosines, whole_objective
from torchtitan.gns.step_sums import FREE_PARTS, GEOMETRIES, StepSums

# sketch: the whole model on measured steps, pairs of the whole step
# composite: the whole model, from measured steps and what the free parts say on all others, see torchtitan.gns.composite
# modulation: adaLN alone on every step, pairs within microbatches
ESTIMATORS = ("sketch", "composite", "modulation")

# Estimators of the whole model, without bias; of equally narrow ones the first counts.
WHOLE_MODEL = ESTIMATORS[:2]

# Of the outlier rule.
_STEPS = 64  # remembered of each bin
_LEAST_STEPS = 32  # before which nothing stands out
_LEAST_RATIO = 1e6  # of the mean square to its running median
_DEVIATIONS = 8.0  # robust standard deviations of its ln

_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation

# A cosine is known to this standard error, which tells conflict from agreement.
_LARGEST_ERROR = 0.5


class _Sums:
    """Sums of every estimator in one geometry, of the bins or of all bins as one."""

    def __init__(self, num_bins: int, geometry: int, half_life: float) -> None:
        """geometry: index of GEOMETRIES; half_life: see Pool."""
        self.composite = Composite(num_bins, geometry, half_life)
        self.controlled = ControlledSums(num_bins, len(WINDOW_SHARES))
        self.sketch = DecayedSums(num_bins, half_life, WINDOW_SHARES)
        self.modulation = DecayedSums(num_bins, half_life, WINDOW_SHARES)

    def add(self, sketch: PairSums, modulation: PairSums, controlled: tuple[PairSums, Tensor], trained: Tensor) -> None:
        """Add the entry of a measured step, of finite sums; trained: its samples, [K]."""
        self.controlled.add(*controlled, cast(Tensor, self.sketch.add(sketch, trained)))
        self.modulation.add(modulation, trained)

    def estimate(self, estimator: str, window: int) -> BinEstimates:
        if estimator == "composite":
            return self.controlled.estimate(self.sketch, window)
        return (self.sketch if estimator == "sketch" else self.modulation).estimate(window)

    def state_dict(self) -> dict:
        return {name: part.state_dict() for name, part in vars(self).items()}

    def load_state_dict(self, state: dict) -> None:
        for name, part in vars(self).items():
            part.load_state_dict(state[name])


class Pool:
    """Decayed sums of every geometry and estimator, by bin and over all bins; on the host, in float64.

    The steps between measured steps are one entry of all sums: the mean gradient swings from step to step, and
    intervals take entries as independent. All estimators of a geometry count half after the same samples trained, and
    estimate from the same window, which follows the drift of the sketch: see `DecayedSums.window`.
    """

    def __init__(self, num_bins: int, num_geometries: int, half_life: float) -> None:
        """`half_life`: samples trained of a bin after which a step counts half, at most."""
        self.num_bins = num_bins
        self.geometries = GEOMETRIES[:num_geometries]
        self._half_life = half_life
        self._losses = torch.zeros(2, num_bins, dtype=torch.float64)  # samples, sum of squared losses
        self._by_bin = {geometry: _Sums(num_bins, n, half_life) for n, geometry in enumerate(self.geometries)}
        self._whole = {geometry: _Sums(1, n, half_life * num_bins) for n, geometry in enumerate(self.geometries)}
        # Of the steps since the last measured one; none before the geometry's first.
        self._no_steps = FreeSums.zeros(num_bins)
        self._entries = dict.fromkeys(self.geometries, self._no_steps)
        self.agreement = Agreement(num_bins, num_geometries, half_life)
        # Of the free parts on every step, and of the whole model on measured ones, in plain geometry: the other's scale
        # changes with its factors.
        self._free_outliers, self._whole_outliers = OutlierRule(num_bins), OutlierRule(num_bins)

    @property
    def outliers(self) -> int:
        """Count of steps left out as outliers, see `OutlierRule`."""
        return self._free_outliers.count + self._whole_outliers.count

    def add(self, sums: StepSums) -> bool:
        """Add one step unless its gradients are outliers; return whether it was counted."""
        squares = sums.squares[:, 0] / sums.count  # [P, K]
        if self._free_outliers.stands_out(squares[: len(FREE_PARTS)].sum(0)):
            return False
        if sums.measured and self._whole_outliers.stands_out(squares.sum(0)):
            return False
        if sums.square_losses.isfinite().all():
            kept = 0.5 ** (sums.count / self._half_life)
            self._losses = self._losses * kept + torch.stack((sums.count, sums.square_losses))
        for index, geometry in enumerate(self.geometries):
            free = FreeSums.of(sums, index)
            if free.squares.any() and free.is_finite():  # or no second moment yet
                self._entries[geometry] = self._entries[geometry] + free
                if sums.measured:
                    self._close_entry(geometry, sums)
        self.agreement.add(sums)
        return True

    def _close_entry(self, geometry: str, sums: StepSums) -> None:
        """Add the entry that a measured step ends to the sums of a geometry, all of it or, where a sum is not finite, nothing."""
        by_bin, whole = self._by_bin[geometry], self._whole[geometry]
        entry, self._entries[geometry] = self._entries[geometry], self._no_steps
        of_bins, of_all = by_bin.composite.add(entry, sums), whole.composite.add(entry.of_all_bins(), sums.of_all_bins())
        if of_bins is None or of_all is None:
            return
        sketch, modulation, as_one = of_bins[0], entry.modulation(), torch.zeros(self.num_bins, dtype=torch.int64)
        by_bin.add(sketch, modulation, of_bins, entry.count)
        whole.add(sketch.combined(as_one, 1), modulation.combined(as_one, 1), of_all, entry.count.sum(0, keepdim=True))

    def window(self, geometry: str) -> int:
        """Window that all estimates of a geometry are from."""
        return self._by_bin[geometry].sketch.window()

    def narrowest(self, geometry: str) -> str:
        """Name of the estimator of the whole model whose intervals by bin are the narrowest: see `narrowest`."""
        return narrowest({name: self.by_bin(geometry, name) for name in WHOLE_MODEL})

    def by_bin(self, geometry: str, estimator: str) -> BinEstimates:
        """Estimates by bin."""
        return self._by_bin[geometry].estimate(estimator, self.window(geometry))

    def whole(self, geometry: str, estimator: str, mass: Tensor | None = None, stratified: bool = False) -> BinEstimates:
        """Estimates of the whole objective as a single bin.

        Without `mass` samples are taken as independent draws of the objective's timesteps. With it the bins are put
        together by `whole_objective`, which accounts for stratified batches and for shares that are not the masses; the
        interval keeps its relative width, since the samples are the same; NaN where a signal is not positive.

        Args:
            mass: probability of each bin in the objective, [K].
            stratified: whether every batch has its share of each bin.
        """
        window, sums = self.window(geometry), self._whole[geometry]
        found = sums.estimate(estimator, window)
        if mass is None:
            return found
        # Between bins the composite has the sketch's inner products: what masses change is taken from there.
        base = "modulation" if estimator == "modulation" else "sketch"
        as_drawn = sums.estimate(base, window)
        parts = whole_objective(getattr(self._by_bin[geometry], base).sums(window), mass, stratified)
        ratio = parts.b_simple / as_drawn.b_simple
        known = (ratio > 0) & (found.b_simple > 0)  # or else no interval follows from the other's
        return replace(
            found, signal=found.signal * (parts.signal / as_drawn.signal), noise=found.noise * (parts.noise / as_drawn.noise),
            b_simple=found.b_simple * ratio,
            lower=torch.where(known, found.lower * ratio, 0.0), upper=torch.where(known, found.upper * ratio, torch.inf),
            unbounded=found.unbounded | ~known,
        )  # fmt: skip

    def parts_of_whole(self, geometry: str, mass: Tensor, stratified: bool) -> dict[str, float]:
        """Noise of the objective split into within and between bins, from measured steps; see `whole_objective`."""
        whole = whole_objective(self._by_bin[geometry].sketch.sums(self.window(geometry)), mass, stratified)
        return {"noise_within": whole.within.item(), "noise_between": whole.between.item()}

    def mean_square_loss(self) -> Tensor:
        """Mean square loss E[L^2] of each bin [K]; NaN without samples."""
        return self._losses[1] / self._losses[0]

    def state_dict(self) -> dict:
        return {
            "losses": self._losses.tolist(),
            "by_bin": {geometry: sums.state_dict() for geometry, sums in self._by_bin.items()},
            "whole": {geometry: sums.state_dict() for geometry, sums in self._whole.items()},
            "entries": {
                key: {name: tensor.tolist() for name, tensor in vars(sums).items()} for key, sums in self._entries.items()
            },
            "outliers": [rule.state_dict() for rule in (self._free_outliers, self._whole_outliers)],
        }

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of the same bins and geometries."""
        self._losses = torch.tensor(state["losses"], dtype=torch.float64)
        for geometry in self.geometries:
            self._by_bin[geometry].load_state_dict(state["by_bin"][geometry])
            self._whole[geometry].load_state_dict(state["whole"][geometry])
        for key, of_geometry in state["entries"].items():
            self._entries[key] = FreeSums(**{
                name: torch.tensor(values, dtype=torch.float64) for name, values in of_geometry.items()
            })  # fmt: skip
        for rule, found in zip((self._free_outliers, self._whole_outliers), state["outliers"], strict=True):
            rule.load_state_dict(found)


class OutlierRule:
    """Outlier rule: mean squared gradients of the latest steps by bin, against which a new one is compared.

    One sample whose gradient is a million times the others' has 10^12 times their square. It decides a pooled second
    moment for as long as it is remembered, and the signal, a small difference of such sums, comes out anywhere.

    A bin's mean square is an outlier if it exceeds the median of its latest 64 a million times (a norm
    a thousand times), and its ln by 8 standard deviations, estimated by 1.4826 times the median absolute deviation of
    theirs. Nothing is an outlier of fewer than 32. Squared norms of single samples that are lognormal, however wide,
    thus practically never do; the mean of a step's samples varies less. Every value is remembered, outliers too, so
    that a lasting change is ordinary after half of the memory at the latest.
    """

    def __init__(self, num_bins: int) -> None:
        self.count = 0
        self._logs = torch.full((num_bins, _STEPS), torch.nan, dtype=torch.float64)  # a ring in each bin
        self._seen = torch.zeros(num_bins, dtype=torch.int64)

    def stands_out(self, mean_squares: Tensor) -> bool:
        """Check whether a step is an outlier by the mean squared gradient of each bin [K], in any bin, and remember it.

        A bin without samples (NaN), or with a square that is zero or infinite, is left out.
        """
        logs = mean_squares.log()
        known = logs.isfinite()
        found = self._exceed_limit(logs, known & (self._seen >= _LEAST_STEPS))
        self._logs[known, self._seen[known] % _STEPS] = logs[known]
        self._seen += known
        self.count += found
        return found

    def _exceed_limit(self, logs: Tensor, judged: Tensor) -> bool:
        lowest = self._logs.nan_to_num(nan=torch.inf).amin(1)  # at most the median: ordinary steps end here
        if not (judged & (logs > lowest + math.log(_LEAST_RATIO))).any():
            return False
        median = self._logs.nanmedian(1).values
        deviation = _NORMAL * (self._logs - median[:, None]).abs().nanmedian(1).values
        limit = median + (_DEVIATIONS * deviation).clamp_min(math.log(_LEAST_RATIO))
        return bool((judged & (logs > limit)).any())

    def state_dict(self) -> dict:
        """Return plain numbers: of each bin the latest steps' ln by their places in the ring, and how many there were."""
        rings = [ring[: int(seen)].tolist() for ring, seen in zip(self._logs, self._seen, strict=True)]
        return {"count": self.count, "seen": self._seen.tolist(), "logs": rings}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of as many bins."""
        self.count, self._seen = state["count"], torch.tensor(state["seen"], dtype=torch.int64)
        self._logs.fill_(torch.nan)
        for ring, logs in zip(self._logs, state["logs"], strict=True):
            ring[: len(logs)] = torch.tensor(logs, dtype=torch.float64)


class Agreement:
    """Decayed sums of all pairs of measured steps, in half as many bins, a quarter, and so on down to two.

    The signals of many narrow bins are each a small difference of large sums, and their cosines are noise. Samples of
    neighbours put together have as many more pairs, so the bins' mean gradients are compared in the finest bins in which
    their agreement is known.
    """

    def __init__(self, num_bins: int, num_geometries: int, half_life: float) -> None:
        """`half_life`: samples trained of a bin, one of `num_bins`, after which a step counts half, at most."""
        self.num_bins = num_bins
        self._sums = {
            geometry: [DecayedSums(count, half_life * num_bins / count, WINDOW_SHARES) for count in coarser(num_bins)]
            for geometry in GEOMETRIES[:num_geometries]
        }
        # Samples trained since the last measured step, by geometry: none before the geometry's first.
        self._trained = torch.zeros(num_geometries, num_bins, dtype=torch.float64)

    def add(self, sums: StepSums) -> None:
        """Add a step; one that was not measured says only how many samples were trained."""
        for index, levels in enumerate(self._sums.values()):
            if not sums.squares[:, index].any():
                continue  # no second moment yet
            self._trained[index] += sums.count
            if not sums.measured:
                continue
            found, trained = sums.whole(index), self._trained[index].clone()
            self._trained[index] = 0.0
            for level in levels:
                wide = wider_bins(self.num_bins, level.num_bins)
                of_level = torch.zeros(level.num_bins, dtype=torch.float64).index_add_(0, wide, trained)
                level.add(found.combined(wide, level.num_bins), of_level)

    def estimates(self, geometry: str, window: int) -> list[BinEstimates]:
        """Estimates in fewer and fewer bins, from a window of `DecayedSums`."""
        return [level.estimate(window=window) for level in self._sums[geometry]]

    def state_dict(self) -> dict:
        levels = {geometry: [level.state_dict() for level in found] for geometry, found in self._sums.items()}
        return {"levels": levels, "trained": self._trained.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state of the same bins and geometries."""
        for geometry, levels in self._sums.items():
            for level, found in zip(levels, state["levels"][geometry], strict=True):
                level.load_state_dict(found)
        self._trained = torch.tensor(state["trained"], dtype=torch.float64)


def coarser(num_bins: int) -> Iterator[int]:
    """Numbers of bins below K: each half of the one before, rounded up, down to two."""
    while num_bins > 2:
        num_bins = -(-num_bins // 2)
        yield num_bins


def wider_bins(num_bins: int, count: int) -> Tensor:
    """Wide bin of each bin, int64 [K]: neighbours share one, as many as possible in each."""
    return torch.arange(num_bins) * count // num_bins


def finest_known(levels: Sequence[BinEstimates]) -> Tensor | None:
    """Cosines of the first level of which at least half of the pairs of bins are known; None if there is none."""
    for found in levels:
        # NaN where a signal is too weak or the error is too large.
        values = cosines(found.matrix, found.matrix_stderr.diagonal())
        values = torch.where(cosine_stderr(found.matrix, found.matrix_stderr) <= _LARGEST_ERROR, values, torch.nan)
        pairs = values[torch.triu(torch.ones_like(values, dtype=torch.bool), diagonal=1)]
        if len(pairs) and 2 * int(pairs.isfinite().sum()) >= len(pairs):
            return values
    return None
