"""Estimates of the gradient noise scale from sums over samples.

Of the gradients g_i of single samples in timestep bin b, G_b is the mean and Sigma_b the covariance. Estimated are the
signal |G_b|^2, the noise tr Sigma_b, their quotient B_simple = tr Sigma_b / |G_b|^2, which is the batch size at which
the noise of a batch's mean gradient is as large as the signal, and the inner products M_bc = G_b . G_c.

Everything here is a quotient of sums, so sums are what is added up over ranks and steps; a mean of quotients would be
biased, and has no mean at all where the signal is weak. Signals are kept with their sign: an unbiased estimate of a
small |G_b|^2 is often negative, and leaving those out would make the rest too large.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1, extended to
groups of unequal sizes.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairSums:
    """Sums over the samples of one step, or of several, from which every estimate follows; float64, K bins.

    A group is a set of samples all of whose inner products are known: all of a step's where sums of gradients (or of
    sketches of them) were reduced over the ranks, else those of one rank's microbatch. Groups of different steps must
    not be joined, since the weights have moved in between.

    Attributes:
        count: samples, [K].
        squares: sum over samples of |g_i|^2, [K].
        products: sum over groups of <sum of g_i in bin b, sum of g_j in bin c>, [K, K]; self-products included.
        pairs: ordered pairs i != j in `products`, [K, K]: sum over groups of n_b n_c, of n_b (n_b - 1) on the diagonal.
    """

    count: Tensor
    squares: Tensor
    products: Tensor
    pairs: Tensor

    @classmethod
    def zeros(cls, num_bins: int) -> Self:
        """Sums of no samples."""
        vector, matrix = (num_bins,), (num_bins, num_bins)
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in (vector, vector, matrix, matrix)))

    @classmethod
    def of_group(cls, count: Tensor, squares: Tensor, products: Tensor) -> Self:
        """Sums of one group; its pairs follow from its counts [K]."""
        count, squares, products = (tensor.to(torch.float64) for tensor in (count, squares, products))
        return cls(count, squares, products, torch.outer(count, count) - count.diag())

    @classmethod
    def of_estimates(cls, k: int, num_bins: int, count: float, noise: Tensor | float, signal: Tensor | float) -> Self:
        """Sums as if `count` samples of bin k had given these unbiased estimates, scalars."""
        moment, pairs = count * (noise + signal), count**2
        sums = torch.zeros(4, num_bins, dtype=torch.float64)
        sums[:, k] = torch.tensor([count, moment, moment + pairs * signal, pairs], dtype=torch.float64)
        return cls(sums[0], sums[1], sums[2].diag(), sums[3].diag())

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(torch.add, vars(self).values(), vars(other).values()))

    def combined(self, bin_of: Tensor, num_bins: int) -> Self:
        """Combine bins: the sums as if bin b were part of bin `bin_of[b]` of fewer, larger bins.

        All bins combined make the sums of the whole objective, with samples drawn as they were here.

        Args:
            bin_of: new bin of each bin, int64 [K], 0 <= bin_of < num_bins.
        """
        belongs = torch.eye(num_bins, dtype=torch.float64, device=self.count.device)[:, bin_of]  # [num_bins, K]
        products, pairs = belongs @ self.products @ belongs.T, belongs @ self.pairs @ belongs.T
        return type(self)(belongs @ self.count, belongs @ self.squares, products, pairs)

    def is_finite(self) -> bool:
        """True if every sum is a finite number."""
        return bool(torch.cat([*map(torch.flatten, vars(self).values())]).isfinite().all())


# ---------------------------------------------------------------------- estimates per bin


def signal(sums: PairSums) -> Tensor:
    """Unbiased |G_b|^2 [K]: mean inner product of two different samples. May be negative; NaN without pairs."""
    return _quotient(sums.products.diagonal() - sums.squares, sums.pairs.diagonal())


def second_moment(sums: PairSums) -> Tensor:
    """Unbiased E|g|^2 = |G_b|^2 + tr Sigma_b, [K]; NaN without samples."""
    return _quotient(sums.squares, sums.count)


def noise(sums: PairSums) -> Tensor:
    """Unbiased tr Sigma_b [K], E|g|^2 less |G_b|^2; NaN without pairs.

    Where a step spreads its timesteps evenly over the bin instead of drawing them independently, let D be the part of
    tr Sigma_b that the spreading takes out of the mean gradient: tr Cov(mean of N) = (tr Sigma_b - D) / N. Two samples
    are then less alike than independent ones, so the signal is low by D / (N - 1), this is high by as much, and exceeds
    the tr Sigma_b - D that acts on the mean by D N / (N - 1). D is at most the variance of E[g | t] within the bin.
    """
    return second_moment(sums) - signal(sums)


def cross_products(sums: PairSums) -> Tensor:
    """Unbiased M_bc = G_b . G_c, [K, K]; the signal on the diagonal; NaN where no pair was seen."""
    others = _quotient(sums.products, sums.pairs)
    return torch.where(torch.eye(len(sums.count), dtype=torch.bool, device=others.device), signal(sums).diag(), others)


def cosines(matrix: Tensor, diagonal_stderr: Tensor, least_errors: float = 2.0) -> Tensor:
    """Cosines between the bins' mean gradients, corrected for noise: M_bc / sqrt(M_bb M_cc).

    The cosine of two measured mean gradients is smaller than that of the true ones by about
    sqrt((1 + B_b / N_b) (1 + B_c / N_c)), with B the noise scales and N the samples.

    Args:
        matrix: estimates of M, [K, K].
        diagonal_stderr: standard errors of its diagonal, [K].
        least_errors: standard errors that a diagonal entry must exceed.

    Returns:
        [K, K]; NaN, no statement, where either diagonal entry is not that far above 0. May exceed 1 by its error.
    """
    diagonal = matrix.diagonal()
    norms = torch.where(diagonal > least_errors * diagonal_stderr, diagonal, torch.nan).sqrt()
    return matrix / torch.outer(norms, norms)


def cosine_stderr(matrix: Tensor, matrix_stderr: Tensor) -> Tensor:
    """Upper bound of the standard errors of `cosines`, [K, K], linearised, whatever the correlations of M's entries.

    The standard errors of the three entries' shares are added, not their squares, since M_bc and M_bb come from the
    same samples. 0 on the diagonal, where the cosine is 1 by definition.
    """
    diagonal = matrix.diagonal()
    norms = diagonal.sqrt()
    relative = 0.5 * matrix_stderr.diagonal() / diagonal
    scale = torch.outer(norms, norms)
    bound = matrix_stderr / scale + (matrix / scale).abs() * (relative[:, None] + relative[None, :])
    return bound - bound.diag().diag()


def _quotient(numerator: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight > 0, numerator / weight, torch.nan)  # without pairs a numerator is 0 only up to rounding


# ---------------------------------------------------------------------- the whole objective


@dataclass(frozen=True)
class WholeObjective:
    """Noise scale of the whole objective, all bins together; scalars.

    Attributes:
        signal: |G|^2 of G = sum_b pi_b G_b, sum_bc pi_b pi_c M_bc; may be negative.
        within: noise within the bins, sum_b pi_b tr Sigma_b.
        between: noise from the bin that a sample falls into, sum_b pi_b |G_b|^2 - |G|^2.
        noise: of a batch's mean gradient: within + between, or within alone where batches are stratified.
        b_simple: noise / signal; not an average of the bins' own.
    """

    signal: Tensor
    within: Tensor
    between: Tensor
    noise: Tensor
    b_simple: Tensor


def whole_objective(sums: PairSums, mass: Tensor, stratified: bool) -> WholeObjective:
    """Combine the bins into the whole objective.

    Batches whose shares of the bins are fixed have no noise between bins. Where they are stratified more finely, the
    noise within a bin is smaller too, by D_b, and this estimate of it is conservative: see `noise`.

    Args:
        sums: of gradients weighted as in the objective (`PairSums.rescaled`).
        mass: probability pi_b of each bin in the objective, [K], summing to 1; how often it was sampled is irrelevant.
        stratified: whether every batch has its share of each bin, as with low_discrepancy or stratified timesteps.
    """
    matrix = cross_products(sums)
    total = _weighted_sum(torch.outer(mass, mass), matrix)
    within = _weighted_sum(mass, noise(sums))
    between = _weighted_sum(mass, matrix.diagonal()) - total
    acting = within if stratified else within + between
    return WholeObjective(total, within, between, acting, acting / total)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    return torch.where(weights == 0, 0.0, weights * values).sum()  # an unknown value of weight 0 does no harm


# ---------------------------------------------------------------------- ratios pooled over steps


@dataclass(frozen=True)
class RatioMoments:
    """Sums over steps of (numerator, weight) of m ratios, and of their products: the ratios and their standard errors.

    Attributes:
        first: sum over steps of lambda v, [..., m, 2]; lambda is 1, or the step's remaining weight after decay.
        second: sum over steps of lambda^2 v v^T, [..., m, 2, m, 2].
    """

    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Ratios of one step, from numerators and weights [..., m, 2]."""
        return cls(values, values[..., None, None] * values[..., None, None, :, :])

    def __add__(self, other: Self) -> Self:
        return type(self)(self.first + other.first, self.second + other.second)

    def with_step(self, kept: Tensor, values: Tensor) -> Self:
        """Add a step of these numerators and weights [..., m, 2], of which all steps before keep the share `kept` [...]."""
        first = self.first * kept[..., None, None] + values
        squares = values[..., None, None] * values[..., None, None, :, :]
        return type(self)(first, self.second * (kept**2)[..., None, None, None, None] + squares)

    @property
    def ratios(self) -> Tensor:
        """Ratios [..., m]; NaN without weight."""
        return _quotient(self.first[..., 0], self.first[..., 1])

    @property
    def steps(self) -> Tensor:
        """Number of equally weighted steps worth the last ratio's, (sum of weights)^2 / sum of their squares, [...]."""
        steps = self.first[..., -1, 1] ** 2 / self.second[..., -1, 1, -1, 1]
        return torch.where(self.first[..., -1, 1] > 0, steps, 0.0)

    @property
    def covariance(self) -> Tensor:
        """Covariance of the ratios, [..., m, m], from the variation between steps; infinite variances below two steps.

        A step changes a ratio R = sum x / sum w by (x - R w) / sum w to first order. The sum of these products is
        multiplied by n / (n - 1), n the effective steps, which makes it unbiased for steps of equal weights; under
        exponential decay it stays low by about 0.7 / n.
        """
        weight = self.first[..., 1]
        influence = torch.stack([1.0 / weight, -self.ratios / weight], dim=-1)  # [..., m, 2]
        covariance = torch.einsum("...ia,...iajb,...jb->...ij", influence, self.second, influence)
        steps = self.steps[..., None, None]
        enough = (steps >= 2.0 - 1e-9) & covariance.isfinite()
        diagonal = torch.eye(covariance.shape[-1], dtype=torch.bool, device=covariance.device)
        covariance = covariance * steps / (steps - 1.0)
        covariance.diagonal(dim1=-2, dim2=-1).clamp_min_(0.0)  # rounding can leave -1e-30
        return torch.where(enough, covariance, torch.where(diagonal, torch.inf, 0.0).to(covariance))


def moments_of_groups(sizes: Tensor, square_norms: Tensor, mean_square_norm: Tensor | float) -> RatioMoments:
    """Ratios (noise, signal) of one step from the mean gradients h_j of m groups of n_j samples of one bin, and their mean g:

        tr Sigma = (sum_j n_j |h_j|^2 - N |g|^2) / (m - 1),     |G|^2 = |g|^2 - tr Sigma / N,     N = sum_j n_j

    Unbiased for any sizes that do not depend on the gradients. With equal sizes it is McCandlish et al.'s; with groups of one
    sample it is `signal` and `noise` of PairSums. Over steps, numerators and denominators of noise and signal are each summed:
    a step counts m - 1 in the noise and N^2 (m - 1) / m in the signal, which is the inverse of its variance where noise
    dominates, and the number of pairs where groups are of one sample. A step of fewer than two groups adds nothing.

    Args:
        sizes: n_j, [m]; an empty group (0) drops out, whatever its norm.
        square_norms: |h_j|^2, [m].
        mean_square_norm: |g|^2 of g = sum_j n_j h_j / N, scalar.
    """
    sizes, square_norms = sizes.to(torch.float64), square_norms.to(torch.float64)
    mean_square_norm = torch.as_tensor(mean_square_norm, dtype=torch.float64, device=sizes.device)
    total, groups = sizes.sum(), (sizes > 0).sum()
    if groups < 2:
        return no_groups()
    scatter = torch.where(sizes > 0, sizes * square_norms, 0.0).sum() - total * mean_square_norm
    degrees, pairs = groups - 1.0, total**2 * (groups - 1.0) / groups
    signal_numerator = pairs * (mean_square_norm - scatter / (degrees * total))
    return RatioMoments.of(torch.stack([torch.stack([scatter, degrees]), torch.stack([signal_numerator, pairs])]))


def no_groups() -> RatioMoments:
    """Ratios (noise, signal) of no steps."""
    return RatioMoments.of(torch.zeros(2, 2, dtype=torch.float64))
