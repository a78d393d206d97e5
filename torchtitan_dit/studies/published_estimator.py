"""Published estimator of the gradient noise scale with its two errors, for comparison only, and their correction.

With g_b and g_B mean gradients of two independent batches of b and B samples, S = tr(Sigma) and |G|^2 are estimated as

    S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B),      |G|^2 = (B |g_B|^2 - b |g_b|) / (B - b),      noise scale = S / |G|^2

The correct |G|^2 has b |g_b|^2: the square is missing. And a batch is computed in sub-batches of 32 whose means are
averaged with equal weight although the last one is short, so that it counts as `effective_size` samples, not as b or B.
S is of one pair of batches, |G|^2 a mean over several pairs of which the negative draws are left out.

Source: the repository Longzz0824/Critical-Multitask-Batch-Sizes-in-Diffusion-Models and its result tables.
"""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from torchtitan.evaluation.offline_gradients import SUB_BATCH, EstimateFailed, sub_batch_sizes

COLUMNS = (
    "model", "true_portion", "diff_steps", "B", "b", "reps", "t_min", "t_max", "accumulate", "epoch", "verbose",
    "no_seed", "no_warnings", "ckpt_dir", "vis_dir", "save_fig", "date", "gns_est", "g_norm", "b_true", "runtime",
    "user", "host",
)  # fmt: skip
_NEEDED = ("model", "B", "b", "reps", "t_min", "t_max", "gns_est", "g_norm", "b_true")


class TableError(Exception):
    """Result table that cannot be read; the message is one line."""


def effective_size(batch: int, sub_batch: int = SUB_BATCH) -> float:
    """Effective size of an equally weighted mean of the sub-batches' means, in samples: m^2 / sum of 1 / n_j over m of
    them.
    """
    sizes = sub_batch_sizes(batch, sub_batch)
    return len(sizes) ** 2 / sum(1 / size for size in sizes)


def published_estimate(
    b: int, big_b: int, noise_pair: tuple[float, float], signal_pairs: Iterable[tuple[float, float]]
) -> tuple[float, float]:
    """Compute the published estimate, errors included: for comparison only.

    Args:
        b, big_b: samples in a small and in a large batch, b < big_b.
        noise_pair: |g_b|^2 and |g_B|^2 of the pair that S is estimated from.
        signal_pairs: the same of each pair that |G|^2 is estimated from.

    Returns:
        (|G|^2, S) as published; the noise scale is their quotient S / |G|^2.

    Raises:
        EstimateFailed: S is not positive, or no draw of |G|^2 is.
    """
    noise = (noise_pair[0] - noise_pair[1]) / (1 / b - 1 / big_b)
    if noise <= 0:
        raise EstimateFailed(f"S = {noise:.3g} is not positive: the published estimator stops here")
    draws = [(big_b * large - b * math.sqrt(small)) / (big_b - b) for small, large in signal_pairs]
    positive = [draw for draw in draws if draw >= 0]
    if not positive:
        raise EstimateFailed(f"all {len(draws)} draws of |G|^2 are negative: the published estimator stops here")
    return fmean(positive), noise


def corrected(
    gns: float, grad_norm: float, b: int, big_b: int, true_size: int, sub_batch: int = SUB_BATCH
) -> tuple[float, float]:
    """Correct a published estimate: solve for |G|^2 and S, given the logged gradient norm.

    Every square norm is set to its expectation |G|^2 + S / n with n the effective size of its batch, both in the
    estimate and in the norm. With u = |g_b| that leaves one quadratic equation. The effect of the omitted draws on the
    estimate is not corrected.

    Args:
        gns: the published estimate.
        grad_norm: norm of the mean gradient of `true_size` samples.
        b, big_b: samples in a small and in a large batch.
        true_size: samples behind grad_norm, more than b.
        sub_batch: samples in a sub-batch.

    Returns:
        (|G|^2, S).

    Raises:
        EstimateFailed: no pair of values gives these two numbers.
    """
    small, large, true = (1 / effective_size(size, sub_batch) for size in (b, big_b, true_size))
    noise_factor = (small - large) / (1 / b - 1 / big_b)  # what S is multiplied by in the estimate
    above_true = small - true
    try:
        square = grad_norm**2
        quadratic = (gns * big_b * (large - true) - noise_factor * (big_b - b)) / above_true
        constant = gns * big_b * square - quadratic * square
        root = math.sqrt((gns * b) ** 2 - 4 * quadratic * constant)
        noise = (((gns * b - root) / (2 * quadratic)) ** 2 - square) / above_true
    except (ValueError, ArithmeticError) as error:
        raise EstimateFailed(f"no |G|^2 and S give an estimate of {gns:.4g} at norm {grad_norm:.4g}") from error
    return square - noise * true, noise


# ---------------------------------------------------------------------- allocations

SOFTMAX_TEMPERATURES = (1, 2, 5, 10)


def p1_shares(noise_scales: Sequence[float]) -> list[float]:
    """Shares of the published "p1" allocation, in proportion to the bins' noise scales."""
    total = sum(noise_scales)
    return [scale / total for scale in noise_scales]


def softmax_shares(noise_scales: Sequence[float], temperature: float) -> list[float]:
    """Shares of the published "softmax T" allocation, which saturates: a noise scale has no bound, and 10 T more is
    all.
    """
    largest = max(noise_scales)
    weights = [math.exp((scale - largest) / temperature) for scale in noise_scales]
    return [weight / sum(weights) for weight in weights]


# ---------------------------------------------------------------------- result tables


@dataclass(frozen=True)
class PublishedRow:
    """Row of a result table.

    Attributes:
        step: training steps of the checkpoint.
        b, big_b, reps: batch sizes and pairs.
        t_min, t_max: DDPM indices [t_min, t_max) of the bin; None for all.
        gns: the estimate.
        grad_norm, true_size: norm of the mean gradient, and its number of samples.
        true_portion: those samples as a share of the data, None where it is not given.
        seconds: run time, None where it is not given.
    """

    step: int
    b: int
    big_b: int
    reps: int
    t_min: int | None
    t_max: int | None
    gns: float
    grad_norm: float
    true_size: int
    true_portion: float | None
    seconds: float | None


def read_tables(folder: Path) -> dict[str, list[PublishedRow]]:
    """Read every CSV file of a folder (or one file), by its name without the ending.

    Raises:
        TableError: there is none, or one is not such a table.
    """
    paths = sorted(folder.glob("*.csv")) if folder.is_dir() else [folder]
    if not paths:
        raise TableError(f"{folder}: holds no CSV file")
    return {path.stem: _read_table(path) for path in paths}


class Cell(NamedTuple):
    """Cell of a table: its rows are repetitions with one setting. Fields as of `PublishedRow`."""

    step: int
    t_min: int | None
    b: int
    big_b: int
    reps: int
    true_portion: float | None


def reported_table(rows: Iterable[PublishedRow]) -> dict[Cell, float]:
    """Table of the noise scales as published: the mean over the rows of each cell."""
    return {cell: fmean(row.gns for row in same) for cell, same in _cells(rows).items()}


def corrected_table(rows: Iterable[PublishedRow]) -> dict[Cell, tuple[float, float, float]]:
    """Table (noise scale, |G|^2, S) of each cell with both errors corrected: each `known_median` over the rows."""
    table = {}
    for cell, same in _cells(rows).items():
        scales, signals, noises = (known_median(column) for column in zip(*map(corrected_row, same), strict=True))
        table[cell] = scales, signals, noises
    return table


def corrected_row(row: PublishedRow) -> tuple[float, float, float]:
    """(noise scale, |G|^2, S) of a row with both errors corrected.

    The noise scale is infinite where |G|^2 is not positive but S is; NaN where neither is, and all three are where no
    values give the row's numbers.
    """
    try:
        signal, noise = corrected(row.gns, row.grad_norm, row.b, row.big_b, row.true_size)
    except EstimateFailed:
        return math.nan, math.nan, math.nan
    if signal > 0:
        return noise / signal, signal, noise
    return math.inf if noise > 0 else math.nan, signal, noise


def known_median(values: Iterable[float]) -> float:
    """Median; NaN if one of the values is, since the order is then unknown."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else median(values)


def _cells(rows: Iterable[PublishedRow]) -> dict[Cell, Sequence[PublishedRow]]:
    found = defaultdict(list)
    for row in rows:
        found[Cell(row.step, row.t_min, row.b, row.big_b, row.reps, row.true_portion)].append(row)
    return dict(sorted(found.items(), key=lambda item: [-1.0 if value is None else value for value in item[0]]))


def _read_table(path: Path) -> list[PublishedRow]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise TableError(f"{path}: has no column {missing[0]!r}")
            rows = []
            for number, record in enumerate(reader, 2):
                try:
                    rows.append(_parse_row(record))
                except ValueError as error:
                    raise TableError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: is no CSV file: {error}") from error
    if not rows:
        raise TableError(f"{path}: has no rows")
    return rows


def _parse_row(record: dict[str, str | None]) -> PublishedRow:
    row = PublishedRow(
        step=_step(record["model"] or ""),
        b=_whole(record, "b"),
        big_b=_whole(record, "B"),
        reps=_whole(record, "reps"),
        t_min=_optional_whole(record, "t_min"),
        t_max=_optional_whole(record, "t_max"),
        gns=_number(record, "gns_est"),
        grad_norm=_number(record, "g_norm"),
        true_size=_whole(record, "b_true"),
        true_portion=_portion(record.get("true_portion") or ""),
        seconds=_seconds(record.get("runtime") or ""),
    )
    if not 0 < row.b < row.big_b or row.true_size <= row.b:
        raise ValueError(f"needs 0 < b < B and b < b_true, has b = {row.b}, B = {row.big_b}, b_true = {row.true_size}")
    return row


def _step(model: str) -> int:
    digits = "".join(filter(str.isdecimal, Path(model).stem))
    if not digits:
        raise ValueError(f"model: {model!r} names no step")
    return int(digits)


def _number(record: dict[str, str | None], column: str) -> float:
    text = record[column] or ""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{column}: {text!r} is no number") from None


def _whole(record: dict[str, str | None], column: str) -> int:
    """Read a whole number; `2.0` is one, as other programs write it."""
    number = _number(record, column)
    if not number.is_integer():  # nor is one that is not finite
        raise ValueError(f"{column}: {record[column]!r} is no whole number")
    return int(number)


def _optional_whole(record: dict[str, str | None], column: str) -> int | None:
    return None if record[column] in ("", "None", "nan") else _whole(record, column)


def _portion(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if math.isfinite(share) else None


def _seconds(text: str) -> float | None:
    """Read a run time as Python writes it, `1 day, 0:04:30.5`; None for others."""
    found = re.fullmatch(r"(?:(\d+) days?, )?(\d+):(\d+):(\d+(?:\.\d*)?)", text.strip(), re.ASCII)
    if not found:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return 86_400 * days + 3600 * hours + 60 * minutes + seconds
