"""Kernel distance (KID): unbiased squared MMD with a cubic polynomial kernel, and its standard error."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measurement import Measurement, Metric, Options
from torchtitan.fidelity.pairs import row_blocks
from torchtitan.statistics.interval import Interval

SUBSETS, SUBSET_SIZE, SUBSET_SEED = 100, 1000, 2020  # of torch-fidelity
_SMALLEST = 4  # rows that the standard error's estimators need


def measure_kid(samples: FeatureSet, reference: FeatureSet | None, output: str, options: Options) -> Measurement:
    """KID of all rows with its interval, and the mean and standard deviation over torch-fidelity's subsets.

    `kid` is `kernel_distance`: its interval covers that both sets are drawn, so that it says whether the distance differs
    from 0. `kid_subsets_mean` and `kid_subsets_sd` are torch-fidelity's numbers: 100 pairs of subsets of 1,000 rows each,
    drawn with its generator and seed. Their standard deviation belongs to one pair of subsets and is no standard error of
    the mean: the subsets overlap.
    Of fewer than 1,000 rows in a set there are no subsets.
    """
    assert reference is not None
    x, y = samples.rows_of(output), reference.rows_of(output)
    check_same_size(x, y)
    values, notes = {"kid": kernel_distance(x, y, options.confidence, options.device)}, []
    smaller = samples.name if len(x) < len(y) else reference.name
    fewest = min(len(x), len(y))
    if fewest >= SUBSET_SIZE:
        of_subsets = subset_distances(x, y)
        values["kid_subsets_mean"] = Interval(float(np.mean(of_subsets)), count=SUBSETS)
        values["kid_subsets_sd"] = Interval(float(np.std(of_subsets)), count=SUBSETS)
    else:
        notes.append(f"{smaller}: {fewest} images are too few for subsets of {SUBSET_SIZE}, so kid_subsets is left out")
    return Measurement(values, notes)


def kernel_distance(x: np.ndarray, y: np.ndarray, confidence: float = 0.95, device: str = "cpu") -> Interval:
    """Unbiased squared MMD of two sets with the kernel k(x, y) = (x·y / D + 1)³, with a normal interval.

    MMD² = E k(x, x') + E k(y, y') - 2 E k(x, y) is estimated by a mean over all pairs of different rows (a U-statistic), so
    it may be below 0. Its standard error is that of Hoeffding's decomposition, with unbiased estimates of each component
    from sums of rows and squares of the kernel matrices:

        Var = 4 Var[f(x)] / m + 4 Var[g(y)] / n                                              (first order)
              + 2 (Var k(x, x') - 2 Var E_x' k(x, x')) / (m (m - 1)), the same of y          (second order)
              + 4 (Var k(x, y) - Var E_y k(x, y) - Var E_x k(x, y)) / (m n)

    with f(x) = E_x' k(x, x') - E_y k(x, y), and g likewise. Where the sets have one distribution the first order is 0 and
    only the second is left. A first order estimated below 0 counts as 0, which makes the interval there wider than need be: in
    simulations with 30 to 100 rows a 95 % interval holds the truth in 99 % of draws where the sets have one distribution,
    in 91 % where they hardly differ, and in 92 to 94 % elsewhere.

    Args:
        x, y: rows [m, D] and [n, D], m, n >= 4.

    Source of the metric: Binkowski et al. 2018, "Demystifying MMD GANs", section 4. Source of the variance: Lee 1990,
    "U-Statistics: Theory and Practice", sections 1.3 and 2.2; for equal numbers of rows the estimate of Sutherland 2019,
    "Unbiased estimators for the variance of MMD estimators".
    """
    if min(len(x), len(y)) < _SMALLEST:
        raise EvaluationError(f"KID needs at least {_SMALLEST} rows in each set, not {len(x)} and {len(y)}")
    # Neither the distance nor its variance depends on a constant in the kernel; less is lost by rounding without it.
    level = _kernel(*(torch.from_numpy(each.mean(axis=0, dtype=np.float64))[None] for each in (x, y))).item()
    of_x, of_y, between = (_kernel_sums(a, b, level, device) for a, b in ((x, x), (y, y), (x, y)))
    distance = of_x.mean + of_y.mean - 2 * between.mean
    error = math.sqrt(_variance(of_x, of_y, between))
    half = statistics.NormalDist().inv_cdf(0.5 + 0.5 * confidence) * error
    return Interval(distance, distance - half, distance + half, min(len(x), len(y)), confidence)


def subset_distances(
    x: np.ndarray, y: np.ndarray, subsets: int = SUBSETS, size: int = SUBSET_SIZE, seed: int = SUBSET_SEED
) -> list[float]:
    """Unbiased squared MMD of pairs of subsets, drawn without replacement as torch-fidelity draws them."""
    generator = np.random.RandomState(seed)
    found = []
    for _ in range(subsets):
        chosen = [torch.from_numpy(rows[generator.choice(len(rows), size, replace=False)]).double() for rows in (x, y)]
        of_x, of_y, between = (_kernel(a, b) for a, b in ((chosen[0],) * 2, (chosen[1],) * 2, chosen))
        within = sum((each.sum() - each.trace()).item() for each in (of_x, of_y))
        found.append(within / (size * (size - 1)) - 2 * between.mean().item())
    return found


def check_same_size(x: np.ndarray, y: np.ndarray) -> None:
    """Refuse rows of two sets that differ in size."""
    if x.shape[1] != y.shape[1]:
        raise EvaluationError(f"samples have {x.shape[1]} features and the reference has {y.shape[1]}")


@dataclass(frozen=True)
class _KernelSums:
    """Sums over pairs of different rows, by row [m] and column [n]; of a set with itself all in `rows`."""

    rows: Tensor
    columns: Tensor
    squares: float
    pairs: int

    @property
    def mean(self) -> float:
        return self.rows.sum().item() / self.pairs


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T).div_(a.shape[1]).add_(1.0).pow_(3)  # [N, M]


def _kernel_sums(x: np.ndarray, y: np.ndarray, level: float, device: str) -> _KernelSums:
    """Sums of the kernel minus a constant; of a set with itself, without the diagonal."""
    own = x is y
    rows, columns = (torch.zeros(len(each), dtype=torch.float64, device=device) for each in (x, y))
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for place, block in row_blocks(x, device):
        for other_place, other in row_blocks(y, device):
            if own and other_place.start < place.start:
                continue  # the matrix is symmetric
            values = _kernel(block, other).sub_(level)
            diagonal = own and other_place == place
            if diagonal:
                values.fill_diagonal_(0.0)
            rows[place] += values.sum(dim=1)
            if not diagonal:
                columns[other_place] += values.sum(dim=0)
            squares += values.square_().sum() * (2 if own and not diagonal else 1)
    if own:
        rows += columns
    pairs = len(x) * (len(y) - 1 if own else len(y))
    return _KernelSums(rows.cpu(), columns.cpu(), squares.item(), pairs)


def _variance(of_x: _KernelSums, of_y: _KernelSums, between: _KernelSums) -> float:
    first_x, second_x = _within(of_x)
    first_y, second_y = _within(of_y)
    m, n = len(of_x.rows), len(of_y.rows)
    row_squares, column_squares = (each.square().sum().item() for each in (between.rows, between.columns))
    total = between.rows.sum().item()
    squared_mean = (total**2 - row_squares - column_squares + between.squares) / (m * (m - 1) * n * (n - 1))
    of_rows = (row_squares - between.squares) / (m * n * (n - 1)) - squared_mean
    of_columns = (column_squares - between.squares) / (m * n * (m - 1)) - squared_mean
    second = between.squares / (m * n) - squared_mean - of_rows - of_columns
    first_x += of_rows - 2 * _covariance(of_x, between.rows / n)
    first_y += of_columns - 2 * _covariance(of_y, between.columns / m)
    first_order = max(0.0, 4 * first_x / m + 4 * first_y / n)
    second_order = 2 * second_x / (m * (m - 1)) + 2 * second_y / (n * (n - 1)) + 4 * second / (m * n)
    return max(0.0, first_order + second_order)


def _within(sums: _KernelSums) -> tuple[float, float]:
    """Variance of E_x' k(x, x'), and that of k(x, x') without twice the former, each estimated without bias."""
    m, squares = len(sums.rows), sums.squares
    row_squares, total = sums.rows.square().sum().item(), sums.rows.sum().item()
    squared_mean = (total**2 - 4 * row_squares + 2 * squares) / (m * (m - 1) * (m - 2) * (m - 3))
    first = (row_squares - squares) / (m * (m - 1) * (m - 2)) - squared_mean
    return first, squares / (m * (m - 1)) - squared_mean - 2 * first


def _covariance(own: _KernelSums, across: Tensor) -> float:
    """Covariance of E_x' k(x, x') and E_y k(x, y) over x; `across` has the means over the rows y, [m]."""
    m, product, both = len(own.rows), (own.rows * across).sum().item(), own.rows.sum().item() * across.sum().item()
    return product / (m * (m - 1)) - (both - 2 * product) / (m * (m - 1) * (m - 2))


KID = Metric("KID", "pooled", "rows", {"kid": "lower", "kid_subsets_mean": "lower", "kid_subsets_sd": None}, measure_kid)
