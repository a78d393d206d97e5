"""Shares of timestep bins and what they should save, held to closed forms, brute force and simulated gradients."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torchtitan.gns.allocate import (
    FROM_WEIGHT,
    NEYMAN,
    STRATIFIED,
    PredictedRatio,
    SharesSchedule,
    gradient_variance,
    neyman_shares,
    predicted_ratios,
    sampler_advice,
    weight_shares,
)

MASS = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
NOISE = torch.tensor([9.0, 1.0, 4.0, 0.25], dtype=torch.float64)
SIGNAL = torch.tensor([0.5, 0.2, 3.0, 0.1], dtype=torch.float64)
TEN = torch.full((10,), 0.1, dtype=torch.float64)
# tr Sigma and noise scale by bin at 50,000 steps: the published tables, corrected.
PUBLISHED_NOISE = torch.tensor([0.448, 0.233, 0.116, 0.053, 0.049, 0.050, 0.022, 0.0046, 0.0042, 0.0035]).double()
PUBLISHED_SCALE = torch.tensor([125, 132, 19.9, 7.3, 5.6, 4.4, 1.8, 0.4, 0.4, 0.3]).double()


def measured(noise: Tensor, error: float | Tensor = 0.0, signal: Tensor | None = None) -> SimpleNamespace:
    """Bins whose mean gradients are orthogonal, with relative standard errors."""
    signal = torch.zeros_like(noise) if signal is None else signal
    return SimpleNamespace(
        noise=noise, noise_stderr=noise * error, signal=signal, signal_stderr=signal * error,
        matrix=signal.diag(), matrix_stderr=signal.diag() * error,
    )  # fmt: skip


# ---------------------------------------------------------------------- shares


def test_neyman_gain_is_the_closed_form():
    shares = neyman_shares(MASS, NOISE, floor=1e-12)
    present, best = (gradient_variance(MASS, q, NOISE, stratified=True) for q in (MASS, shares))
    closed_form = (MASS * NOISE).sum() / (MASS * NOISE.sqrt()).sum() ** 2
    assert (present / best).item() == pytest.approx(closed_form.item(), rel=1e-9)
    moment, whole = NOISE + SIGNAL, 0.3
    independent = neyman_shares(MASS, NOISE, SIGNAL, floor=1e-12)
    found = gradient_variance(MASS, independent, NOISE, SIGNAL, whole, stratified=False).item()
    assert found == pytest.approx(((MASS * moment.sqrt()).sum() ** 2 - whole).item(), rel=1e-9)


@pytest.mark.parametrize("stratified", [True, False])
def test_no_shares_beat_neyman(stratified):
    best = neyman_shares(MASS, NOISE, None if stratified else SIGNAL, floor=1e-12)
    generator = torch.Generator().manual_seed(0)
    others = best * torch.exp(0.3 * torch.randn(2000, 4, generator=generator, dtype=torch.float64))
    others = others / others.sum(-1, keepdim=True)
    arguments = (NOISE, SIGNAL, 0.3)
    least = gradient_variance(MASS, best, *arguments, stratified=stratified)
    assert (gradient_variance(MASS, others, *arguments, stratified=stratified) > least).all()


def test_variances_of_the_published_tables():
    def ratio(shares):
        new = gradient_variance(TEN, torch.as_tensor(shares).double(), PUBLISHED_NOISE, stratified=True)
        return (new / gradient_variance(TEN, TEN, PUBLISHED_NOISE, stratified=True)).item()

    assert ratio(neyman_shares(TEN, PUBLISHED_NOISE, floor=1e-12)) == pytest.approx(0.64, abs=0.005)
    assert ratio(PUBLISHED_SCALE.sqrt() / PUBLISHED_SCALE.sqrt().sum()) == pytest.approx(0.71, abs=0.005)


@pytest.mark.parametrize("floor", [0.05, 0.1, 0.5, 1.0])
def test_importance_is_at_most_the_floor_s_inverse(floor):
    generator = torch.Generator().manual_seed(1)
    mass = torch.rand(500, generator=generator, dtype=torch.float64) ** 8
    mass = mass / mass.sum()
    noise = torch.exp(12 * torch.randn(500, generator=generator, dtype=torch.float64))
    shares = neyman_shares(mass, noise, floor=floor)
    assert shares.sum().item() == pytest.approx(1, abs=1e-12)
    assert (mass / shares).max() <= (1 + 1e-12) / floor
    if floor < 1.0:
        assert (mass / shares).max() > 0.99 / floor


def test_bins_of_unknown_noise_keep_their_mass():
    bad = torch.tensor([math.nan, -1.0, math.inf, 1.0], dtype=torch.float64)
    torch.testing.assert_close(neyman_shares(MASS, bad), MASS)
    one_bad = NOISE.clone()
    one_bad[1] = math.nan
    shares = neyman_shares(MASS, one_bad)
    assert shares[1].item() == pytest.approx(0.4) and shares.sum().item() == pytest.approx(1)
    known = torch.tensor([0, 2, 3])
    rest = neyman_shares(MASS[known] / 0.6, NOISE[known])
    torch.testing.assert_close(shares[known], 0.6 * rest)
    for nothing in (torch.zeros(4), torch.full((4,), math.nan)):
        torch.testing.assert_close(neyman_shares(MASS, nothing), MASS)
    empty_bin = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(neyman_shares(empty_bin, torch.tensor([1.0, math.nan, 1.0])), empty_bin)


# ---------------------------------------------------------------------- simulated gradients


@pytest.mark.parametrize("stratified", [True, False])
def test_realised_variance_and_mean_are_the_predicted_ones(stratified):
    batches, size, dim = 4000, 200, 5
    generator = torch.Generator().manual_seed(2)
    directions = torch.nn.functional.normalize(torch.randn(4, dim, generator=generator, dtype=torch.float64), dim=1)
    means = directions * SIGNAL.sqrt()[:, None]
    whole = MASS @ means
    shares = torch.tensor([0.3, 0.3, 0.3, 0.1], dtype=torch.float64)
    realised = []
    for q in (MASS, shares):
        if stratified:
            counts = (q * size).round().expand(batches, 4)
        else:
            counts = torch.distributions.Multinomial(size, q.expand(batches, 4))
            torch.manual_seed(3)
            counts = counts.sample()
        # The sum over n gradients of a bin: n G_b and sqrt(n S_b / dim) normal in each direction.
        normal = torch.randn(batches, 4, dim, generator=generator, dtype=torch.float64)
        sums = counts[..., None] * means + (counts * NOISE / dim).sqrt()[..., None] * normal
        gradients = ((MASS / q)[:, None] * sums).sum(1) / size  # [batches, dim]
        deviations = (gradients - whole).square().sum(1) * size
        predicted = gradient_variance(MASS, q, NOISE, SIGNAL, whole.square().sum(), stratified=stratified).item()
        assert abs(deviations.mean().item() - predicted) < 3 * deviations.std().item() / batches**0.5
        errors = (gradients.mean(0) - whole) / (gradients.std(0) / batches**0.5)
        assert errors.abs().max() < 3
        realised.append((deviations.mean() / predicted, deviations.std() / predicted / batches**0.5))
    (old, old_error), (new, new_error) = realised
    assert abs(new / old - 1) < 3 * (old_error**2 + new_error**2) ** 0.5  # realised over predicted ratio


# ---------------------------------------------------------------------- intervals


def test_ratio_of_exact_measurements_is_the_quotient_of_variances():
    found = predicted_ratios(MASS, measured(NOISE, signal=SIGNAL), {"uniform": TEN[:4] * 2.5}, stratified=False)
    assert [ratio.name for ratio in found] == [NEYMAN, STRATIFIED, "uniform"]
    whole = (MASS**2 * SIGNAL).sum()
    present = gradient_variance(MASS, MASS, NOISE, SIGNAL, whole, stratified=False)
    shares = neyman_shares(MASS, NOISE, SIGNAL)
    expected = (
        gradient_variance(MASS, shares, NOISE, SIGNAL, whole, stratified=False) / present,
        gradient_variance(MASS, MASS, NOISE, stratified=True) / present,
        gradient_variance(MASS, TEN[:4] * 2.5, NOISE, SIGNAL, whole, stratified=False) / present,
    )
    for ratio, wanted in zip(found, expected, strict=True):
        assert (ratio.lower, ratio.ratio, ratio.upper) == pytest.approx([wanted.item()] * 3, rel=1e-12)


@pytest.mark.parametrize(("noise", "error"), [(PUBLISHED_NOISE, 0.2), (torch.ones(10).double(), 0.2)])
def test_intervals_cover_what_the_chosen_shares_are_worth(noise, error):
    generator = torch.Generator().manual_seed(4)
    trials, covered = 200, {NEYMAN: 0, "uniform": 0}
    other = torch.linspace(1, 3, 10, dtype=torch.float64)
    other = other / other.sum()
    for _ in range(trials):
        seen = noise * (1 + error * torch.randn(10, generator=generator, dtype=torch.float64))
        errors = measured(seen)
        errors.noise_stderr = noise * error
        for ratio in predicted_ratios(TEN, errors, {"uniform": other}, stratified=True):
            shares = neyman_shares(TEN, seen) if ratio.name == NEYMAN else other
            new, old = (gradient_variance(TEN, q, noise, stratified=True) for q in (shares, TEN))
            covered[ratio.name] += ratio.lower <= (new / old).item() <= ratio.upper
    assert min(covered.values()) >= 0.90 * trials, covered


def test_unknown_noise_gives_no_statement():
    unknown = measured(NOISE)
    unknown.noise_stderr = torch.tensor([math.inf, 0.1, 0.1, 0.1])
    nothing_known = measured(NOISE.clone())
    nothing_known.noise[2] = math.nan
    for values in (unknown, nothing_known):
        ratio = predicted_ratios(MASS, values, stratified=True)[0]
        assert math.isnan(ratio.ratio) and (ratio.lower, ratio.upper) == (0.0, math.inf)
    harmless = measured(torch.cat((NOISE, torch.tensor([math.nan]))), 0.01)
    mass = torch.cat((MASS, torch.zeros(1)))
    assert predicted_ratios(mass, harmless, stratified=True)[0].upper < 1


# ---------------------------------------------------------------------- advice


def test_a_wasteful_multiplier_is_named():
    # Equal noise of unweighted gradients; the weight (1 - t)^2 of a noise prediction's loss on velocity, ten bins in t.
    edges = torch.linspace(0, 1, 11, dtype=torch.float64)
    multiplier = ((1 - edges[:-1]) ** 3 - (1 - edges[1:]) ** 3) / 3 * 10
    shares = weight_shares(TEN, multiplier)
    ratios = predicted_ratios(TEN, measured(multiplier**2, 0.05), {FROM_WEIGHT: shares}, stratified=True)
    text = sampler_advice(ratios)
    saved = (multiplier**2).mean().item() / multiplier.mean().item() ** 2
    assert text.startswith(
        "the loss multiplier wastes samples: drawing t from the weight instead of multiplying by it would give the same"
        f" gradient variance with {saved:.1f}x ["
    ) and text.endswith("fewer samples") and ";" not in text


def test_advice_of_a_clear_gain_and_of_stratified_timesteps():
    clear = sampler_advice(predicted_ratios(TEN, measured(PUBLISHED_NOISE, 0.03), stratified=True))
    assert clear.startswith("drawing t in proportion to the measured noise") and "with 1.6x [1.5, 1.6] fewer" in clear
    spread = sampler_advice(predicted_ratios(TEN, measured(torch.ones(10).double(), 0.01, TEN * 5), stratified=False))
    assert spread.startswith("stratified timesteps would give the same gradient variance")


def test_no_change_is_recommended_where_there_is_nothing_to_gain():
    generator = torch.Generator().manual_seed(5)
    for _ in range(200):
        seen = measured(1 + 0.3 * torch.randn(10, generator=generator, dtype=torch.float64))
        seen.noise_stderr = torch.full((10,), 0.3, dtype=torch.float64)
        assert sampler_advice(predicted_ratios(TEN, seen, stratified=True)) is None
    for error in (1.5, math.inf):  # too few samples
        assert sampler_advice(predicted_ratios(TEN, measured(PUBLISHED_NOISE, error), stratified=True)) is None


def test_an_interval_with_1_in_it_is_no_recommendation():
    assert sampler_advice([PredictedRatio(NEYMAN, 0.8, 0.6, 1.01)]) is None
    assert sampler_advice([PredictedRatio(NEYMAN, 0.95, 0.94, 0.96)]) is None  # certain, but below a factor of 1.1
    assert "would give" in sampler_advice([PredictedRatio(NEYMAN, 0.9, 0.88, 0.92)])
    both = [PredictedRatio(NEYMAN, 0.5, 0.45, 0.55), PredictedRatio(FROM_WEIGHT, 0.7, 0.6, 0.8)]
    assert sampler_advice(both).count("would give") == 2
    assert "from the weight" not in sampler_advice([both[0], PredictedRatio(FROM_WEIGHT, 0.9, 0.7, 1.1)])


# ---------------------------------------------------------------------- schedule


def test_shares_change_late_rarely_and_for_a_gain_only():
    schedule = SharesSchedule(TEN, warmup=1000, interval=10, least_gain=1.05)
    good, flat = measured(PUBLISHED_NOISE, 0.03), measured(torch.ones(10).double(), 0.01)
    assert schedule.update(9, 999, good, stratified=True) is None
    assert schedule.update(10, 1000, flat, stratified=True) is None
    assert schedule.update(19, 1900, good, stratified=True) is None
    changed = schedule.update(20, 2000, good, stratified=True)
    assert changed == neyman_shares(TEN, PUBLISHED_NOISE).tolist() == schedule.shares
    assert schedule.update(30, 3000, good, stratified=True) is None  # nothing more to gain
    drift = measured(PUBLISHED_NOISE * torch.linspace(1, 4, 10).double(), 1e-4)
    gain = predicted_ratios(TEN, drift, stratified=True, present=torch.tensor(changed))[0]
    assert 1 / 1.05 < gain.ratio <= gain.upper < 1  # certain, but small
    assert schedule.update(40, 4000, drift, stratified=True) is None
    other = SharesSchedule(TEN, warmup=1000, interval=10)
    other.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert other.state_dict() == schedule.state_dict()
    assert other.update(49, 4900, flat, stratified=True) is None
    assert other.update(50, 5000, flat, stratified=True) == pytest.approx(TEN.tolist())
