"""Estimates from sums over samples, held to planted means and covariances and to sums over explicit pairs."""

import math

import pytest
import torch
from torch import Tensor

from torchtitan.gns import statistics
from torchtitan.gns.decayed import DecayedSums
from torchtitan.gns.statistics import PairSums, moments_of_groups, no_groups
from torchtitan.statistics.ratio_intervals import fieller
from torchtitan.statistics.student import student_quantile

BINS, DIM, SEEDS = 3, 6, 1000


class Planted:
    """Gaussian gradients with given means G [K, D] and covariances diag(scales^2) [K, D]."""

    def __init__(self, means: Tensor, scales: Tensor) -> None:
        self.means, self.scales = means.double(), scales.double()
        self.matrix = self.means @ self.means.T
        self.noise = self.scales.square().sum(1)

    def draw(self, counts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Gradients [N, D] and their bins [N]."""
        bins = torch.arange(len(counts)).repeat_interleave(counts.long())
        noise = torch.randn(len(bins), self.means.shape[1], generator=generator, dtype=torch.float64)
        return self.means[bins] + self.scales[bins] * noise, bins


def anisotropic() -> Planted:
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(BINS, DIM, generator=generator)
    return Planted(means, torch.rand(BINS, DIM, generator=generator) * torch.tensor([[0.5], [1.0], [2.0]]))


def sums_of(gradients: Tensor, bins: Tensor, num_bins: int = BINS) -> PairSums:
    one_hot = torch.nn.functional.one_hot(bins, num_bins).double()
    totals = one_hot.T @ gradients
    return PairSums.of_group(one_hot.sum(0), one_hot.T @ gradients.square().sum(1), totals @ totals.T)


def random_counts(means: list[float], generator: torch.Generator) -> Tensor:
    return torch.poisson(torch.tensor(means), generator=generator)


def assert_unbiased(estimates: Tensor, truth: Tensor, what: str) -> None:
    """The mean over seeds [S, ...], of those that have an estimate, is within 3 standard errors of the truth."""
    known = ~estimates.isnan()
    number = known.sum(0)
    assert (number > SEEDS // 10).all()
    mean = estimates.nansum(0) / number
    variance = torch.where(known, (estimates - mean) ** 2, 0.0).sum(0) / (number - 1)
    errors = (mean - truth) / (variance / number).sqrt()
    assert errors.abs().max() <= 3.0, f"{what}: {errors} standard errors"


def test_estimates_are_unbiased_with_random_counts_empty_bins_and_unequal_ranks() -> None:
    planted, mass = anisotropic(), torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    found: dict[str, list[Tensor]] = {"signal": [], "noise": [], "matrix": [], "whole": []}
    for _ in range(SEEDS):
        ranks = [random_counts(means, generator) for means in ([4.0, 2.0, 0.7], [1.0, 3.0, 0.7])]
        sums = sum((sums_of(*planted.draw(counts, generator)) for counts in ranks), PairSums.zeros(BINS))
        whole = statistics.whole_objective(sums, mass, stratified=False)
        found["signal"].append(statistics.signal(sums))
        found["noise"].append(statistics.noise(sums))
        found["matrix"].append(statistics.cross_products(sums))
        found["whole"].append(torch.stack([whole.signal, whole.within, whole.between, whole.noise]))
    signal, within = mass @ planted.matrix @ mass, mass @ planted.noise
    between = mass @ planted.matrix.diagonal() - signal
    truth = {
        "signal": planted.matrix.diagonal(),
        "noise": planted.noise,
        "matrix": planted.matrix,
        "whole": torch.stack([signal, within, between, within + between]),
    }
    assert (torch.stack(found["signal"]) < 0).any(), "weak signals are to be negative at times"
    for name, estimates in found.items():
        assert_unbiased(torch.stack(estimates), truth[name], name)


def test_estimate_of_groups_is_unbiased_with_unequal_and_empty_groups() -> None:
    generator = torch.Generator().manual_seed(3)
    mean = torch.full((DIM,), 0.3, dtype=torch.float64)
    sizes = torch.poisson(torch.tensor([0.5, 1.0, 2.0, 5.0, 9.0]).expand(SEEDS, 5), generator=generator).double()
    noise = torch.randn(SEEDS, 5, DIM, generator=generator, dtype=torch.float64)
    group_means = mean + 2.0 * noise / sizes.sqrt()[..., None]  # infinite where the group is empty
    total = torch.where(sizes[..., None] > 0, sizes[..., None] * group_means, 0.0).sum(1)
    mean_norms = (total / sizes.sum(1, keepdim=True)).square().sum(1)
    steps = zip(sizes, group_means.square().sum(2), mean_norms, strict=True)
    noise, signal = torch.stack([moments_of_groups(*step).ratios for step in steps]).unbind(1)
    assert_unbiased(signal, mean.square().sum(), "signal")
    assert_unbiased(noise, torch.tensor(4.0 * DIM), "noise")


def test_pooled_groups_are_unbiased_and_give_their_own_error() -> None:
    planted, generator = anisotropic(), torch.Generator().manual_seed(4)
    pooled = []
    for _ in range(200):
        sums = no_groups()
        for _ in range(10):
            sizes = random_counts([1.0, 2.0, 5.0], generator)
            gradients, groups = planted.draw(sizes, generator)
            gradients = gradients - planted.means[groups] + planted.means[1]  # groups of one bin, unequal noise
            means = torch.stack([gradients[groups == group].mean(0) for group in range(3)])
            sums = sums + moments_of_groups(sizes, means.square().sum(1), gradients.mean(0).square().sum())
        pooled.append(torch.stack([sums.ratios[1], sums.covariance[1, 1]]))
    signal, variance = torch.stack(pooled).unbind(1)
    error = (signal.mean() - planted.matrix[1, 1]) / (signal.std() / math.sqrt(len(signal)))
    assert abs(error) < 3.0
    assert 0.8 < (variance.mean() / signal.var()).item() < 1.2


def test_one_sample_per_group_has_no_signal_even_up_to_rounding() -> None:
    generator = torch.Generator().manual_seed(19)
    sums, decayed = PairSums.zeros(BINS), DecayedSums(BINS, math.inf)
    for _ in range(9):
        gradients, _ = anisotropic().draw(torch.tensor([1, 1, 1]), generator)
        one = PairSums.of_group(torch.ones(BINS), gradients.square().sum(1), gradients @ gradients.T * (1 + 1e-15))
        sums = sums + one
        decayed.add(one)
    for signal in (statistics.signal(sums), statistics.cross_products(sums).diagonal(), decayed.estimate().signal):
        assert signal.isnan().all()


@pytest.mark.parametrize("sizes", [[0.0, 0.0], [0.0, 7.0]])
def test_fewer_than_two_groups_say_nothing(sizes: list[float]) -> None:
    step = torch.tensor(sizes), torch.tensor([math.nan, 3.0]), 3.0
    assert moments_of_groups(*step).ratios.isnan().all()
    other = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]), torch.tensor(1.2)
    assert (moments_of_groups(*step) + moments_of_groups(*other)).ratios[1] == moments_of_groups(*other).ratios[1]


def test_all_pairs_of_one_group_equal_groups_of_one_sample() -> None:
    generator = torch.Generator().manual_seed(5)
    gradients, bins = anisotropic().draw(torch.tensor([7, 5, 2]), generator)
    sums = sums_of(gradients, bins)
    for b in range(BINS):
        own = gradients[bins == b]
        group = torch.ones(len(own)), own.square().sum(1), own.mean(0).square().sum()
        one = moments_of_groups(*group)
        noise, signal = one.ratios
        torch.testing.assert_close(statistics.signal(sums)[b], signal, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(statistics.noise(sums)[b], noise, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((one + one).ratios, one.ratios)
    means = torch.stack([gradients[bins == b].mean(0) for b in range(BINS)])
    off_diagonal = ~torch.eye(BINS, dtype=torch.bool)
    torch.testing.assert_close(
        statistics.cross_products(sums)[off_diagonal], (means @ means.T)[off_diagonal], rtol=1e-12, atol=1e-12
    )


def test_samples_may_be_spread_over_steps_and_ranks_in_any_way() -> None:
    """Groups pool to a sum over explicit pairs of each group, in whatever order they come."""
    generator = torch.Generator().manual_seed(6)
    groups = [anisotropic().draw(random_counts([3.0, 2.0, 1.0], generator), generator) for _ in range(4)]
    numerator, pairs = torch.zeros(BINS, BINS, dtype=torch.float64), torch.zeros(BINS, BINS, dtype=torch.float64)
    for gradients, bins in groups:
        for i in range(len(bins)):
            for j in range(len(bins)):
                if i != j:
                    numerator[bins[i], bins[j]] += gradients[i] @ gradients[j]
                    pairs[bins[i], bins[j]] += 1
    forward = sum((sums_of(*group) for group in groups), PairSums.zeros(BINS))
    backward = sum((sums_of(*group) for group in reversed(groups)), PairSums.zeros(BINS))
    for sums in (forward, backward):
        assert torch.equal(sums.pairs, pairs)
        torch.testing.assert_close(statistics.cross_products(sums), numerator / pairs, rtol=1e-12, atol=1e-12)


def test_combined_bins_equal_sums_of_the_samples_in_wider_bins() -> None:
    gradients, bins = anisotropic().draw(torch.tensor([4, 3, 5]), torch.Generator().manual_seed(7))
    bin_of = torch.tensor([1, 0, 1])
    combined, expected = sums_of(gradients, bins).combined(bin_of, 2), sums_of(gradients, bin_of[bins], 2)
    for name in ("count", "squares", "products", "pairs"):
        torch.testing.assert_close(getattr(combined, name), getattr(expected, name))


def test_whole_objective_is_that_of_all_samples_in_one_bin() -> None:
    """With sampling in proportion to the objective, pooling all bins into one estimates the same noise scale."""
    planted = anisotropic()
    counts = torch.tensor([50_000, 20_000, 30_000])
    sums = sums_of(*planted.draw(counts, torch.Generator().manual_seed(8)))
    mass = counts.double() / counts.sum()
    one = sums.combined(torch.zeros(BINS, dtype=torch.int64), 1)
    free, stratified = (statistics.whole_objective(sums, mass, stratified=value) for value in (False, True))
    torch.testing.assert_close(free.signal, statistics.signal(one)[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(free.b_simple, (statistics.noise(one) / statistics.signal(one))[0], rtol=1e-4, atol=0)
    assert stratified.noise == free.within
    torch.testing.assert_close(free.noise, free.within + free.between, rtol=1e-12, atol=0)
    padded = sums_of(*planted.draw(counts, torch.Generator().manual_seed(8)), num_bins=BINS + 1)
    with_an_empty_bin = statistics.whole_objective(padded, torch.cat([mass, mass.new_zeros(1)]), stratified=False)
    torch.testing.assert_close(with_an_empty_bin.b_simple, free.b_simple)


# ---------------------------------------------------------------------- decayed


def two_bins() -> Planted:
    return Planted(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0, 1.0], [0.5, 0.5]]))


def step(generator: torch.Generator, means: tuple[float, float] = (6.0, 3.0)) -> PairSums:
    return sums_of(*two_bins().draw(random_counts(list(means), generator), generator), num_bins=2)


def only_counts(count: list[float]) -> PairSums:
    zeros = PairSums.zeros(2)
    return PairSums(torch.tensor(count, dtype=torch.float64), zeros.squares, zeros.products, zeros.pairs)


def test_older_samples_decay_by_the_samples_of_their_bin() -> None:
    first = step(torch.Generator().manual_seed(10))
    whole, halves = DecayedSums(2, 16.0), DecayedSums(2, 16.0)
    for decayed, later in ((whole, [[8.0, 0.0]]), (halves, [[4.0, 0.0], [4.0, 0.0]])):
        decayed.add(first)
        for count in later:
            decayed.add(only_counts(count))
    left = torch.tensor([0.5**0.5, 1.0], dtype=torch.float64)
    for decayed in (whole, halves):
        torch.testing.assert_close(decayed.sums().squares, first.squares * left)
        torch.testing.assert_close(decayed.sums().pairs, first.pairs * torch.outer(left, left).sqrt())
    torch.testing.assert_close(whole.estimate().signal_stderr, halves.estimate().signal_stderr)
    torch.testing.assert_close(whole.estimate().matrix, statistics.cross_products(first))


def test_estimates_and_errors_equal_explicitly_weighted_sums() -> None:
    generator, half_life = torch.Generator().manual_seed(11), 200.0
    steps = [step(generator) for _ in range(30)]
    decayed = DecayedSums(2, half_life)
    for sums in steps:
        decayed.add(sums)
    estimates = decayed.estimate()
    counts = torch.stack([sums.count for sums in steps])
    later = counts.flip(0).cumsum(0).flip(0) - counts
    weights = 0.5 ** (later / half_life)  # [steps, 2]
    numerators = torch.stack([sums.products.diagonal() - sums.squares for sums in steps])
    pairs = torch.stack([sums.pairs.diagonal() for sums in steps])
    squares = torch.stack([sums.squares for sums in steps])
    signal = (weights * numerators).sum(0) / (weights * pairs).sum(0)
    moment = (weights * squares).sum(0) / (weights * counts).sum(0)
    number = (weights * pairs).sum(0) ** 2 / (weights * pairs).square().sum(0)
    of_signal = weights * (numerators - signal * pairs) / (weights * pairs).sum(0)
    of_noise = weights * (squares - moment * counts) / (weights * counts).sum(0) - of_signal
    torch.testing.assert_close(estimates.signal, signal)
    torch.testing.assert_close(estimates.noise, moment - signal)
    torch.testing.assert_close(estimates.steps, number)
    correction = number / (number - 1)
    torch.testing.assert_close(estimates.signal_stderr, (of_signal.square().sum(0) * correction).sqrt())
    torch.testing.assert_close(estimates.noise_stderr, (of_noise.square().sum(0) * correction).sqrt())
    torch.testing.assert_close(estimates.matrix_stderr.diagonal(), estimates.signal_stderr)
    degrees = (weights * pairs).square().sum(0) ** 2 / (weights * pairs).pow(4).sum(0) - 1
    of_moment = of_noise + of_signal
    lower, upper, _ = fieller(
        moment,
        signal,
        of_moment.square().sum(0) * correction,
        of_signal.square().sum(0) * correction,
        (of_moment * of_signal).sum(0) * correction,
        student_quantile(0.975, degrees),
    )
    torch.testing.assert_close(estimates.lower, lower - 1)
    torch.testing.assert_close(estimates.upper, upper - 1)
    torch.testing.assert_close(estimates.matrix, statistics.cross_products(decayed.sums()))


def test_steps_without_pairs_or_samples_leave_the_signal_as_it_is() -> None:
    generator = torch.Generator().manual_seed(13)
    steps = [step(generator) for _ in range(5)]
    plain, padded = DecayedSums(2, math.inf), DecayedSums(2, math.inf)
    for sums in steps:
        plain.add(sums)
        padded.add(sums)
        padded.add(PairSums.zeros(2))
        padded.add(sums_of(*two_bins().draw(torch.tensor([1, 0]), generator), num_bins=2))
    assert torch.equal(plain.estimate().signal, padded.estimate().signal)
    assert torch.equal(plain.estimate().signal_stderr, padded.estimate().signal_stderr)
    assert torch.equal(padded.estimate().samples - plain.estimate().samples, torch.tensor([5.0, 0.0]).double())


def test_nothing_is_claimed_from_no_step_or_one() -> None:
    decayed = DecayedSums(2, 100.0)
    assert decayed.estimate().signal.isnan().all() and decayed.estimate().unbounded.all()
    decayed.add(sums_of(*two_bins().draw(torch.tensor([5, 0]), torch.Generator().manual_seed(14)), num_bins=2))
    estimates = decayed.estimate()
    assert estimates.signal[0].isfinite() and estimates.signal[1].isnan()
    assert estimates.unbounded.all() and estimates.signal_stderr.isinf().all()
    assert torch.equal(estimates.lower, torch.zeros(2)) and estimates.upper.isinf().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped(bad: float) -> None:
    generator = torch.Generator().manual_seed(15)
    decayed = DecayedSums(2, 50.0)
    for _ in range(3):
        decayed.add(step(generator))
    before = decayed.state_dict()
    sums = step(generator)
    sums.products[0, 1] = bad
    decayed.add(sums)
    assert decayed.state_dict() == before


# ---------------------------------------------------------------------- cosines


def directions(noise_scales: list[float], dim: int = 100) -> Planted:
    """Bins whose means have cosines 0.7 (0 and 1), 0 (0 and 2), -0.5 (0 and 3), and a fifth along the first."""
    means = torch.zeros(5, dim)
    for row, cosine in enumerate((1.0, 0.7, 0.0, -0.5, 1.0)):
        means[row, 0], means[row, row + 1] = cosine, math.sqrt(1 - cosine**2)
    scales = (torch.tensor(noise_scales) / dim).sqrt()[:, None].expand(5, dim)
    return Planted(means, scales)


def pooled_directions(planted: Planted, steps: int, generator: torch.Generator) -> DecayedSums:
    decayed = DecayedSums(5, math.inf)
    for _ in range(steps):
        decayed.add(sums_of(*planted.draw(random_counts([20.0] * 5, generator), generator), num_bins=5))
    return decayed


def test_planted_cosines_are_recovered_and_a_bin_without_signal_abstains() -> None:
    planted = directions([30.0, 60.0, 100.0, 60.0, 20_000.0])
    decayed = pooled_directions(planted, 200, torch.Generator().manual_seed(17))
    estimates = decayed.estimate()
    cosine = statistics.cosines(estimates.matrix, estimates.signal_stderr)
    expected = torch.tensor([1.0, 0.7, 0.0, -0.5], dtype=torch.float64)
    assert (cosine[0, :4] - expected).abs().max() < 0.1
    assert cosine[4].isnan().all() and cosine[:, 4].isnan().all()
    torch.testing.assert_close(cosine[:4, :4].diagonal(), torch.ones(4, dtype=torch.float64))


def test_error_of_a_cosine_is_bounded_and_not_by_much() -> None:
    planted, generator = directions([30.0, 30.0, 30.0, 30.0, 30.0], dim=20), torch.Generator().manual_seed(18)
    values, bounds = [], []
    for _ in range(100):
        estimates = pooled_directions(planted, 20, generator).estimate()
        values.append(statistics.cosines(estimates.matrix, estimates.signal_stderr)[0, :4])
        bounds.append(statistics.cosine_stderr(estimates.matrix, estimates.matrix_stderr)[0, :4])
    spread, bound = torch.stack(values)[:, 1:].std(0), torch.stack(bounds)[:, 1:].mean(0)
    assert torch.stack(bounds)[:, 0].abs().max() < 1e-12
    assert (spread < 1.15 * bound).all() and (bound < 3.0 * spread).all()
