"""Statistics of conflict matrices: measured changes of losses against first-order predictions, and the decision."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan.experiments.cells import Row
from torchtitan.statistics.interval import Interval
from torchtitan.statistics.rank_correlation import correlation, spearman
from torchtitan_dit.studies.bin_conflict import SMALL
from torchtitan_dit.studies.frame import number
from torchtitan_dit.studies.gns_calibration_statistics import percentile_interval
from torchtitan_dit.studies.records import numbers_of

MOVES = ("small", "whole", "several")
LEAST_CORRELATION = 0.8
SLOPES = (0.75, 1.33)
LEAST_SIGNS = 0.9
ERRORS = 2.0  # standard errors that a resolved number exceeds
MOST_DIVERGED = 0.1  # of the cells
_RESAMPLES = 4000


@dataclass(frozen=True)
class Effects:
    """Effects of training one bin on another, over pairs of bins and checkpoints; positive where the loss falls.

    All are divided by step size x steps x sqrt(M_bb M_cc), so that the prediction is the cosine of the bins' gradients.

    Attributes:
        checkpoint: number of each pair's checkpoint, int [N].
        trained, measured: bins of the pair, int [N].
        predicted, changed, along: first order at the frozen gradients, measured, first order by the real displacement, [N].
        resolved: prediction and measurement exceed ERRORS standard errors, bool [N].
        left_out: pairs without a bounded normalisation.
        cells: number of cells.
        diverged: number of cells in which the move ended without a finite loss; they contribute no pairs.
    """

    checkpoint: np.ndarray
    trained: np.ndarray
    measured: np.ndarray
    predicted: np.ndarray
    changed: np.ndarray
    along: np.ndarray
    resolved: np.ndarray
    left_out: int
    cells: int
    diverged: int

    @property
    def diverges(self) -> bool:
        """True if the move diverged in too many cells for a prediction, which is finite, to hold."""
        return self.diverged > MOST_DIVERGED * self.cells

    def of(self, chosen: np.ndarray) -> "Effects":
        """Effects of the chosen pairs, bool [N]."""
        return Effects(
            self.checkpoint[chosen], self.trained[chosen], self.measured[chosen], self.predicted[chosen],
            self.changed[chosen], self.along[chosen], self.resolved[chosen], self.left_out,
            self.cells, self.diverged,
        )  # fmt: skip


def effects(rows: Sequence[Row], update: str, move: str) -> Effects:
    """Effects of a move of an update, from the rows with an answer."""
    rows = [row for row in rows if row["status"] == "ok"]
    places: dict[tuple[str, ...], int] = {}
    found, left_out, diverged = [], 0, 0
    for row in rows:
        place = places.setdefault((row["data"], row["run_seed"], row["checkpoint"]), len(places))
        trained, shrink = int(row["bin"]), {"small": SMALL, "whole": 1.0, "several": number(row, "several")}[move]
        products, errors, signals, signals_se, changes, changes_se, along = (
            np.array(numbers_of(row, f"{update}_{name}")) for name in (
                "products", "products_se", "signals", "signals_se", f"{move}_change", f"{move}_change_se", f"{move}_along",
            )
        )  # fmt: skip
        if not np.isfinite(changes).all():
            diverged += 1
            continue
        known = signals > ERRORS * signals_se
        known &= known[trained]
        left_out += int((~known).sum())
        norms = np.sqrt(np.where(known, signals * signals[trained], np.nan))
        unit = number(row, f"{update}_step_size") * shrink * norms
        resolved = (np.abs(products) > ERRORS * errors) & (np.abs(changes) > ERRORS * changes_se)
        for other in np.flatnonzero(known):
            numbers = (products[other] / norms[other], -changes[other] / unit[other], -along[other] / unit[other])
            found.append((place, trained, other, *numbers, resolved[other]))
    columns = np.array(found, dtype=float).reshape(-1, 7).T
    place, trained_bin, measured_bin = columns[:3].astype(int)
    predicted, changed, moved = columns[3:6]
    resolved_pair = columns[6].astype(bool)
    return Effects(
        place, trained_bin, measured_bin, predicted, changed, moved, resolved_pair, left_out, len(rows), diverged
    )


@dataclass(frozen=True)
class Finding:
    """Agreement of measured effects with predicted ones, over pairs of different bins.

    Attributes:
        correlation, rank: Pearson's and Spearman's.
        slope: of measured on predicted, through zero.
        slope_along: of measured on the first order by the real displacement.
        signs: share of resolved pairs of equal sign.
        own: mean measured by predicted effect of a bin on itself.
        conflicts, harms: resolved pairs that are predicted to harm, and that are measured to.
        resolved, pairs, left_out: numbers of pairs.
    """

    correlation: Interval
    rank: Interval
    slope: Interval
    slope_along: Interval
    signs: Interval
    own: Interval
    conflicts: int
    harms: int
    resolved: int
    pairs: int
    left_out: int


def finding(found: Effects, seed: int = 0) -> Finding | None:
    """Agreement with 95 % percentiles of resampled checkpoints; None without two checkpoints or without resolved pairs."""
    count = int(found.checkpoint.max()) + 1 if len(found.checkpoint) else 0
    other = found.trained != found.measured
    off, own = found.of(other), found.of(~other)
    if len(np.unique(off.checkpoint)) < 2 or not off.resolved.any() or not len(own.checkpoint):
        return None
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    times = np.concatenate((np.ones((1, count)), drawn))
    counts = times[:, off.checkpoint]
    x, y = off.predicted, off.changed
    same = (np.sign(x) == np.sign(y)) & off.resolved
    with np.errstate(invalid="ignore", divide="ignore"):
        signs = counts @ same / (counts @ off.resolved)
        slope = counts @ (x * y) / (counts @ (x * x))
        slope_along = counts @ (off.along * y) / (counts @ off.along**2)
        counts_own = times[:, own.checkpoint]
        ratio = counts_own @ own.changed / (counts_own @ own.predicted)
    return Finding(
        percentile_interval(correlation(x, y, counts)), percentile_interval(spearman(x, y, counts)),
        percentile_interval(slope), percentile_interval(slope_along), percentile_interval(signs), percentile_interval(ratio),
        int((off.resolved & (x < 0)).sum()), int((off.resolved & (y < 0)).sum()), int(off.resolved.sum()), len(x),
        found.left_out,
    )  # fmt: skip


def predicts(found: Finding) -> bool:
    """True if the matrix predicts the move, by the criteria of docs/critical_batch.md."""
    slope = SLOPES[0] <= found.slope.lower and found.slope.upper <= SLOPES[1]
    return found.correlation.lower >= LEAST_CORRELATION and slope and found.signs.lower >= LEAST_SIGNS


def refuted(found: Finding) -> bool:
    """True if the matrix is refuted as a prediction of the move, by the criteria of docs/critical_batch.md."""
    outside = found.slope.upper < SLOPES[0] or found.slope.lower > SLOPES[1]
    return found.correlation.upper < LEAST_CORRELATION or outside or found.signs.upper < LEAST_SIGNS
