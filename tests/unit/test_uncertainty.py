"""The learned ln of the loss: what it is at first, what it converges to, and that nothing else changes."""

import pytest
import torch

from tests.objectives import timesteps, weighting
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Draw, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.diffusion.uncertainty import LogUncertainty

EDM = dict(path="edm", prediction="x0", preconditioning="edm", weighting=weighting("edm"), timesteps=timesteps("lognormal_sigma"))


def test_the_loss_is_the_weighted_error_at_first_and_1_on_data_of_sigma_data():
    """EDM's weighting makes a network that says 0 have loss 1 at every level, for data of deviation sigma_data."""
    objective = build_objective(DenoisingConfig(**EDM, sigma_data=0.5, learned_uncertainty=True), 0)
    plain = build_objective(DenoisingConfig(**EDM, sigma_data=0.5), 0)
    x0 = 0.5 * torch.randn(4000, 1, 10, 10, generator=torch.Generator().manual_seed(0))
    draw = objective.draw((1, 10, 10), GlobalBatch(0, 4000), torch.arange(4000))

    def zero(x, *_):
        return torch.zeros_like(x)

    terms = objective.loss(zero, Microbatch(x0), draw)
    assert terms.loss.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(terms.loss, plain.loss(zero, Microbatch(x0), draw).loss)
    # The best u is 0 then: its gradient vanishes but for the noise of 400,000 numbers.
    terms.loss.mean().backward()
    assert objective.uncertainty.weight.grad.abs().max() < 0.01


def test_u_converges_to_the_log_of_the_loss_on_gaussian_data():
    """With the best denoiser of N(0, s) the noise error is s snr / (1 + s snr), over four orders of magnitude."""
    variance = 0.25
    keys = dict(path="ddpm_linear", prediction="noise", preconditioning="index", timesteps=timesteps("uniform"))
    objective = build_objective(DenoisingConfig(**keys, spread="stratified", learned_uncertainty=True), 0)

    def best(x_t, time, _):
        a, b = (per_image(c, x_t) for c in objective.path.coefficients(objective.path.index_to_t(time)))
        return b * x_t / (a**2 * variance + b**2)

    optimizer = torch.optim.Adam(objective.parameters().values(), lr=0.3, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)
    steps, size = 500, 256
    for step in range(steps):
        indices = torch.arange(step * size, (step + 1) * size)
        draw = objective.draw((1, 4, 4), GlobalBatch(step * size, size), indices)
        x0 = variance**0.5 * torch.randn(size, 1, 4, 4, generator=generator)
        optimizer.zero_grad()
        objective.loss(best, Microbatch(x0), draw).loss.mean().backward()
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / steps)
        optimizer.step()
    index = torch.arange(0, 1000, 9)
    log_sigma = objective.path.index_to_log_sigma(index)
    snr = torch.exp(-2 * log_sigma)
    wanted = torch.log(variance * snr / (1 + variance * snr))
    assert wanted.max() - wanted.min() > 9
    found = objective.uncertainty(log_sigma)[0].detach()
    assert (found - wanted).abs().max() < 0.15
    # Every level then counts alike: the weight is 1 / its loss.
    weight = objective.learned_weighting(torch.exp(log_sigma))
    torch.testing.assert_close(weight, torch.exp(-wanted), rtol=0.17, atol=0)


def test_waves_are_the_same_in_every_process_and_of_unit_norm():
    one, other = (LogUncertainty(2, 4096, (-9.0, 9.0)) for _ in range(2))
    assert torch.equal(one.frequency, other.frequency) and torch.equal(one.phase, other.phase)
    level = torch.tensor([-3.0, 0.0, 4.0])
    with torch.no_grad():
        one.weight.fill_(1.0)
        one.weight[1] = 2.0
    u = one(level)
    torch.testing.assert_close(u[1], 2 * u[0])
    # cos^2 is 1/2 on average, so that the squares of the waves sum to 1.
    waves = torch.cos(2 * torch.pi * (one.frequency * 0.25 * level[:, None] + one.phase)) * (2 / 4096) ** 0.5
    torch.testing.assert_close(u[0], waves.sum(1))
    torch.testing.assert_close(waves.square().sum(1), torch.ones(3), rtol=0.05, atol=0)


def test_u_stays_beyond_the_levels_that_train_it():
    """Where waves would say anything: 1 in 1,000 timesteps lies beyond each end."""
    objective = build_objective(DenoisingConfig(learned_uncertainty=True), 0)
    ends = torch.logit(objective.timestep_sampler.density.quantile(torch.tensor([1e-3, 1 - 1e-3], dtype=torch.float64)))
    with torch.no_grad():
        objective.uncertainty.weight.normal_(generator=torch.Generator().manual_seed(0))
    low, high = objective.uncertainty(ends)[0].tolist()
    beyond = objective.uncertainty(torch.tensor([-50.0, ends[0] - 1, ends[1] + 1, torch.inf]))[0].tolist()
    assert beyond == pytest.approx([low, low, high, high]) and low != pytest.approx(high)


def test_validation_and_the_guard_see_the_loss_without_u():
    """The loss itself may be negative; held-out losses of runs with and without u are one and the same quantity."""
    keys = dict(path="ddpm_linear", prediction="v", preconditioning="index", timesteps=timesteps("uniform"))
    keys["weighting"] = weighting("min_snr")
    learned = build_objective(DenoisingConfig(**keys, learned_uncertainty=True), 0)
    plain = build_objective(DenoisingConfig(**keys), 0)
    with torch.no_grad():
        learned.uncertainty.weight.normal_(generator=torch.Generator().manual_seed(0))
    x0 = torch.randn(64, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    draw = plain.draw((1, 2, 2), GlobalBatch(0, 64), torch.arange(64))
    found, wanted = (one.loss(lambda x, *_: 0.5 * x, Microbatch(x0), draw) for one in (learned, plain))
    assert torch.equal(found.weighted, wanted.loss) and torch.equal(wanted.weighted, wanted.loss)
    u = learned.uncertainty(torch.logit(draw.t))[0]
    torch.testing.assert_close(found.loss, wanted.loss * torch.exp(-u) + u)


def test_t_of_1_has_a_finite_u():
    objective = build_objective(DenoisingConfig(learned_uncertainty=True), 0)
    t = torch.tensor([0.0, 0.5, 1.0])
    draw = Draw(t, torch.randn(3, 1, 2, 2), torch.ones(3))
    terms = objective.loss(lambda x, *_: torch.zeros_like(x), Microbatch(torch.randn(3, 1, 2, 2)), draw)
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all() and objective.uncertainty.weight.grad.isfinite().all()
