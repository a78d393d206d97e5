"""The published estimator shows its bias, the right one the truth."""

import math
from statistics import median

import pytest
import torch

from research.offline_gradients import EstimateFailed, GroupNorms, noise_scale, sub_batch_sizes
from research.published_estimator import effective_size, p1_shares, published_estimate, softmax_shares
from tests.research.synthetic_gradients import SyntheticGradients
from torchtitan.gns.allocate import gradient_variance

PROBLEM = SyntheticGradients()


def test_effective_size_is_the_variance_of_an_equally_weighted_mean():
    for batch in (1, 32, 50, 100, 500, 5000):
        sizes = sub_batch_sizes(batch)
        assert sum(sizes) == batch and max(sizes) <= 32
        variance = sum((1 / len(sizes)) ** 2 / size for size in sizes)
        assert effective_size(batch) == pytest.approx(1 / variance, rel=1e-12)
    assert effective_size(100) == pytest.approx(46.545, abs=1e-3)
    assert effective_size(96) == pytest.approx(96)


@pytest.mark.parametrize(
    ("b", "big_b", "published"), [(50, 500, 147), (50, 5000, 12.4), (100, 1000, 359), (100, 10000, 24.9)]
)
def test_published_formula_has_its_published_bias(b, big_b, published):
    generator = torch.Generator().manual_seed(b * big_b)
    draws = []
    for _ in range(2000):
        try:
            signal, noise = PROBLEM.published(b, big_b, 2, generator)
        except EstimateFailed:
            continue  # as published: no row
        draws.append(noise / signal)
    assert len(draws) > 1900
    assert median(draws) == pytest.approx(published, rel=0.1)


def test_right_estimator_has_the_truth_within_its_interval():
    """200 estimates of the problem in 16 blocks of 320 samples: covered 95 % of the time, and without bias."""
    generator = torch.Generator().manual_seed(3)
    covered, estimates = 0, []
    sizes = torch.tensor(sub_batch_sizes(320))
    for _ in range(200):
        blocks = []
        for _ in range(16):
            means = PROBLEM.means(sizes, generator)
            total = (means * sizes[:, None]).sum(0) / sizes.sum()
            blocks.append(GroupNorms(sizes, means.square().sum(1), total.square().sum().item()))
        found = noise_scale(blocks)
        covered += found.lower <= PROBLEM.noise_scale <= found.upper and not found.unbounded
        estimates.append(found.noise / found.signal)
    assert 182 <= covered <= 198  # 95 % of 200 are 190; three standard deviations are 9
    assert median(estimates) == pytest.approx(10.5, rel=0.02)


def test_a_mean_of_samples_is_drawn_from_its_law():
    """The vectors that stand for batches against means of single samples, drawn one by one."""
    problem = SyntheticGradients(signal=0.5, noise=3.0, dimension=7)
    generator = torch.Generator().manual_seed(1)
    singles = problem.means(torch.ones(40 * 4000), generator).view(4000, 40, 7)
    parts = [part.mean(1) for part in singles.split(32, dim=1)]  # 32 samples and 8
    slow = (0.5 * (parts[0] + parts[1])).square().sum(1)
    fast = problem.means(torch.full((4000,), effective_size(40)), generator).square().sum(1)
    for power in (1, 2):
        a, b = slow**power, fast**power
        error = math.sqrt((a.var() + b.var()).item() / 4000)
        assert abs(a.mean() - b.mean()).item() < 4 * error
    assert slow.mean().item() == pytest.approx(0.5 + 3.0 / effective_size(40), rel=0.03)


def test_published_estimator_fails_where_it_did():
    with pytest.raises(EstimateFailed, match="not positive"):
        published_estimate(50, 500, (0.01, 0.02), [(0.01, 0.02)])
    with pytest.raises(EstimateFailed, match="all 2 draws"):
        published_estimate(50, 500, (2e-4, 1e-4), [(2e-4, 1e-4)] * 2)
    signal, _ = published_estimate(10, 100, (4.0, 1.0), [(4.0, 1.0), (4.0, 0.1)])
    assert signal == pytest.approx((100 * 1.0 - 10 * 2.0) / 90)  # the second draw is negative and left out


def test_published_allocations():
    assert p1_shares([1.0, 3.0]) == pytest.approx([0.25, 0.75])
    assert softmax_shares([183.0, 253.0, 29.0], 10) == pytest.approx([math.exp(-7), 1.0, math.exp(-22.4)], rel=2e-3)
    assert sum(softmax_shares([1e6, 1.0], 1)) == 1.0  # without overflow


def test_published_allocations_by_the_variances_of_their_table():
    mass = torch.full((10,), 0.1, dtype=torch.float64)
    noise = torch.tensor([0.448, 0.233, 0.116, 0.053, 0.049, 0.050, 0.022, 0.0046, 0.0042, 0.0035], dtype=torch.float64)
    scale = [125, 132, 19.9, 7.3, 5.6, 4.4, 1.8, 0.4, 0.4, 0.3]

    def ratio(shares):
        new = gradient_variance(mass, torch.tensor(shares, dtype=torch.float64), noise, stratified=True)
        return (new / gradient_variance(mass, mass, noise, stratified=True)).item()

    # p1 gives least to the bins of scales printed as 0.3 and 0.4, whose missing digits are worth more than this bound.
    assert ratio(p1_shares(scale)) == pytest.approx(2.5, abs=0.1)
    assert ratio(softmax_shares(scale, 10)) > 1e3
