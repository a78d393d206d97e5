"""Timestep samplers that learn from losses: their rules written out by hand, unbiased weights, states that go on."""

import collections
import json

import pytest
import torch

from tests.objectives import LEARNING, timesteps
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.learning import BINNED_FLOOR, HISTORY, LearningTimesteps
from torchtitan.diffusion.timesteps.registry import build_density, build_sampler
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepSampler
from torchtitan.diffusion.timesteps.shares import bin_means

KEEP, SKIP = torch.tensor(False), torch.tensor(True)


def sampler_of(name: str, path: str = "ddpm_linear", half_life=None, **keys) -> LearningTimesteps:
    """A half-life has an effect on samplers that bin losses."""
    own = {"half_life": half_life} if half_life and name != "loss_second_moment" else {}
    return build_sampler(DenoisingConfig(path=path, timesteps=timesteps(name, **own), **keys), PATHS[path](), seed=1)


def step(sampler: TimestepSampler, loss_of, first: int, size: int, skip=KEEP, order=None) -> torch.Tensor:
    """A step with losses as a function of t and sample number; the timesteps drawn."""
    batch, indices = GlobalBatch(first, size), torch.arange(first, first + size)
    t, importance = sampler.sample(batch, indices)
    for part in (indices if order is None else indices[order]).chunk(2):  # two microbatches
        mine = part - first
        sampler.observe(batch, part, t[mine], importance[mine] * loss_of(t[mine], part))
    sampler.update(skip)
    return t


def noisy(t: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return (0.05 + t) * (1 + indices % 7)


# --- the rules


def test_second_moment_follows_improved_ddpm_written_out():
    sampler, path, size = sampler_of("loss_second_moment", spread="stratified"), PATHS["ddpm_linear"](), 1500
    histories = [collections.deque(maxlen=HISTORY) for _ in range(1000)]
    for number in range(14):
        shares = sampler.shares.clone()
        t = step(sampler, noisy, number * size, size)
        indices = torch.arange(number * size, (number + 1) * size)
        for index, loss in zip(path.t_to_index(t).tolist(), noisy(t, indices).tolist(), strict=True):
            histories[index].append(loss)
        if min(map(len, histories)) < HISTORY:
            assert torch.equal(sampler.shares, sampler.masses)
        else:
            moments = torch.tensor([list(history) for history in histories], dtype=torch.float64)
            weights = moments.square().mean(1).sqrt()
            expected = 0.999 * weights / weights.sum() + 0.001 / 1000
            # Losses come back from float32 products with the weights.
            torch.testing.assert_close(sampler.shares, expected, rtol=3e-7, atol=0)
            assert not torch.equal(sampler.shares, shares)
    assert not torch.equal(sampler.shares, sampler.masses)  # the warm-up is over


def test_of_many_losses_of_an_index_in_one_batch_the_last_ten_count():
    sampler = sampler_of("loss_second_moment")
    t = PATHS["ddpm_linear"]().index_to_t(torch.tensor([7] * 25 + [8] * 3)).float()
    for first in (0, 28):
        batch, indices = GlobalBatch(first, 28), torch.arange(first, first + 28)
        order = torch.randperm(28, generator=torch.Generator().manual_seed(first))
        sampler.observe(batch, indices[order], t[order], indices[order].float())
        sampler.update(KEEP)
    assert sorted(sampler._state["losses"][7].tolist()) == list(range(43, 53))
    assert sorted(sampler._state["losses"][8].tolist()) == [0, 0, 0, 0, 25, 26, 27, 53, 54, 55]
    assert sampler._state["count"][6:10].tolist() == [0, 50, 6, 0]


@pytest.mark.parametrize("path", ["ddpm_linear", "ddpm_cosine"])
@pytest.mark.parametrize("keys", [{}, dict(t_min=0.2, t_max=0.9)])
def test_the_one_timestep_of_a_bin_is_the_one_that_its_quantiles_lead_to(path, keys):
    sampler = sampler_of("loss_second_moment", path, **keys)
    for number in range(12):
        step(sampler, noisy, 3000 * number, 3000)
    batch, indices = GlobalBatch(36_000, 20_000), torch.arange(36_000, 56_000)
    t, importance = sampler.sample(batch, indices)
    assert importance.std() > 0.1 and sampler._bins.only_t is not None
    sampler._bins = sampler._bins._replace(only_t=None)
    sampler._use(sampler.shares)
    by_quantiles, same_importance = sampler.sample(batch, indices)
    assert torch.equal(t, by_quantiles) and torch.equal(importance, same_importance)


@pytest.mark.parametrize("name", ["time_warping", "adaptive_log_snr"])
@pytest.mark.parametrize("path", ["rectified_flow", "ddpm_cosine", "ddpm_linear_continuous"])
def test_binned_samplers_draw_each_bin_by_its_share_of_the_loss(name, path):
    sampler = sampler_of(name, path, spread="stratified", half_life=1e12)
    levels = 1 + torch.arange(len(sampler.masses)).float() % 7
    loss_of = lambda t, _: levels[torch.bucketize(t, sampler.edges)]  # noqa: E731
    step(sampler, loss_of, 0, 50_000)  # at first by the density itself
    step(sampler, loss_of, 50_000, 50_000)
    share = sampler.masses * levels
    expected = BINNED_FLOOR * sampler.masses + (1 - BINNED_FLOOR) * share / share.sum()
    seen = sampler._state["weight"]
    # A bin begins with a fiftieth of a loss, the mean of all.
    torch.testing.assert_close(sampler.shares, expected, rtol=(0.1 / seen[sampler.masses > 0].min()).item(), atol=0)
    t, importance = sampler.sample(GlobalBatch(100_000, 50_000), torch.arange(100_000, 150_000))
    bins = torch.bucketize(t, sampler.edges)
    counts = torch.bincount(bins, minlength=len(sampler.masses))
    assert ((counts - 50_000 * sampler.shares).abs() < 2).all()  # a stratum may straddle either end
    weights = (sampler.masses / sampler.shares)[bins] if name == "adaptive_log_snr" else torch.ones(50_000).double()
    torch.testing.assert_close(importance.double(), weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["time_warping", "adaptive_log_snr"])
def test_bins_of_very_little_loss_are_drawn_as_rarely_at_the_default_half_life(name):
    sampler = sampler_of(name, "rectified_flow", spread="stratified")
    loss_of = lambda t, _: 10.0 ** (-4 * t)  # noqa: E731
    for number in range(100):
        step(sampler, loss_of, 3000 * number, 3000)
    means = bin_means(sampler.density, sampler.edges, lambda t: loss_of(t, None)).nan_to_num()
    share = sampler.masses * means
    expected = BINNED_FLOOR * sampler.masses + (1 - BINNED_FLOOR) * share / share.sum()
    ratio = (sampler.shares / expected)[sampler.masses > 5e-3]
    assert 0.9 < ratio.min() and ratio.max() < 2.5 and 0.95 < ratio.median() < 1.4


def test_warped_time_has_equal_loss_in_equal_stretches():
    """With the loss t on the rectified flow F is t^2: its quantiles are square roots."""
    sampler = sampler_of("time_warping", "rectified_flow", spread="stratified", half_life=1e12)
    for number in range(4):
        step(sampler, lambda t, _: t, 20_000 * number, 20_000)
    t, _ = sampler.sample(GlobalBatch(80_000, 20_000), torch.arange(80_000, 100_000))
    u = (torch.arange(20_000).double() + 0.5) / 20_000
    # 0.01 of it is uniform, and the pieces are 0.01 wide.
    assert (t.sort().values - u.sqrt()).abs().max() < 0.012


# --- unbiased, whatever has been learned


@pytest.mark.parametrize(("name", "path"), [
    ("loss_second_moment", "ddpm_linear"), ("loss_second_moment", "ddpm_cosine"), ("adaptive_log_snr", "ddpm_linear"),
])
@pytest.mark.parametrize("keys", [{}, dict(t_min=0.2, t_max=0.9, shift=1.5)])
def test_probability_times_weight_is_the_density_at_every_index(name, path, keys):
    sampler, the_path = sampler_of(name, path, spread="stratified", half_life=5e4, **keys), PATHS[path]()
    for number in range(10):
        step(sampler, noisy, 3000 * number, 3000)
    assert not torch.equal(sampler.shares, sampler.masses)
    density = build_density(DenoisingConfig(path=path, timesteps=timesteps("uniform"), **keys), the_path)
    wanted = density.cumulative.diff()
    t, importance = sampler.sample(GlobalBatch(30_000, 40_000), torch.arange(30_000, 70_000))
    index = the_path.t_to_index(t)
    bins = torch.bucketize(t, sampler.edges)
    within = wanted[index] / sampler.masses[bins]  # of the index in its bin, 1 where bins are indices
    torch.testing.assert_close(sampler.shares[bins] * within * importance, wanted[index], rtol=1e-6, atol=0)
    loss = torch.sin(7 * t.double())
    all_t = the_path.index_to_t(torch.arange(1000))
    exact = (wanted * torch.sin(7 * all_t)).sum().item()
    products = importance * loss
    assert abs(products.mean().item() - exact) < 3 * products.std().item() / 40_000**0.5
    assert (wanted[index] > 0).all()


# --- state


@pytest.mark.parametrize("name", LEARNING)
def test_state_goes_on_to_the_last_bit_and_not_into_another_sampler(name):
    straight, first = (sampler_of(name, half_life=3000) for _ in range(2))
    for number in range(16):
        step(straight, noisy, 2000 * number, 2000)
        if number < 11:
            step(first, noisy, 2000 * number, 2000)
    assert not torch.equal(straight.shares, straight.masses)
    second = sampler_of(name, half_life=3000)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(second.shares, first.shares)
    for number in range(11, 16):
        step(second, noisy, 2000 * number, 2000)
    assert second.state_dict() == straight.state_dict() and torch.equal(second.shares, straight.shares)
    second.load_state_dict({})
    assert torch.equal(second.shares, second.masses) and second.state_dict() == sampler_of(name).state_dict()
    other = next(other for other in LEARNING if other != name)
    with pytest.raises(ValueError, match=f"not of {other}"):
        sampler_of(other).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="bins"):
        sampler_of(name, "ddpm_cosine").load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="no state"):
        TimestepSampler(first.density, 0).load_state_dict(first.state_dict())


@pytest.mark.parametrize("name", LEARNING)
def test_a_step_is_drawn_by_what_earlier_ones_have_shown_and_the_order_of_arrival_does_not_matter(name):
    one, other = sampler_of(name), sampler_of(name)
    for number in range(12):
        batch, indices = GlobalBatch(2000 * number, 2000), torch.arange(2000 * number, 2000 * (number + 1))
        before = one.sample(batch, indices)[0]
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(number))
        step(other, noisy, 2000 * number, 2000, order=order)
        assert torch.equal(step(one, noisy, 2000 * number, 2000), before)
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("name", LEARNING)
def test_skipped_steps_and_losses_that_are_not_finite_teach_nothing(name):
    sampler, other = sampler_of(name), sampler_of(name)
    for each in (sampler, other):
        step(each, noisy, 0, 3000)
    before = sampler.state_dict()
    step(sampler, noisy, 3000, 500, skip=SKIP)
    assert sampler.state_dict() == before
    step(sampler, lambda t, _: torch.full_like(t, torch.nan), 3500, 500)
    step(sampler, lambda t, _: torch.full_like(t, torch.inf), 4000, 500)
    assert sampler.state_dict() == before
    broken = lambda t, i: torch.where(i % 3 == 0, torch.nan, noisy(t, i))  # noqa: E731
    step(sampler, broken, 4500, 500)
    assert sampler.state_dict() != before and sampler.shares.isfinite().all()
    # Losses of 0 throughout are no reason to stop drawing.
    step(other, lambda t, _: torch.zeros_like(t), 3000, 30_000)
    assert other.shares.isfinite().all() and other.shares.sum().item() == pytest.approx(1, abs=1e-12)


def test_evaluation_and_the_effective_weight_stay_with_the_uniform_density():
    log_sigma = torch.linspace(-4, 4, 41, dtype=torch.float64)
    plain = build_objective(DenoisingConfig(path="ddpm_linear", timesteps=timesteps("uniform")), 0)
    for name in LEARNING:
        objective = build_objective(DenoisingConfig(path="ddpm_linear", timesteps=timesteps(name)), 0)
        step(objective.timestep_sampler, noisy, 0, 3000)
        assert torch.equal(objective.effective_weight(log_sigma), plain.effective_weight(log_sigma))
