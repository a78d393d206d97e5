"""Predictions, densities of t and the objective against closed forms, brute force and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from tests.objectives import timesteps
from torchtitan import philox
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Draw, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.predictions import PREDICTIONS, noise_error_weight, target, to_x0_and_noise
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, LogitNormal, TimestepSampler, Uniform

# --- paths and predictions


@pytest.mark.parametrize("name", PATHS)
def test_path_has_the_common_time_and_the_derivatives_it_says(name):
    path = PATHS[name]()
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    a, b = path.coefficients(t)
    torch.testing.assert_close(b / a, t / (1 - t), rtol=1e-12, atol=0)
    h = 1e-6
    shifted = path.coefficients(t + h), path.coefficients(t - h)
    for slope, ahead, behind in zip(path.derivatives(t), *shifted, strict=True):
        torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-7, atol=1e-7)
    a, b = path.coefficients(torch.tensor([0.0, 1.0]))
    assert a[0] == 1 and b[0] == 0 and (b[1] == 1 if name != "edm" else 1e7 < b[1] < 2e7)


def coefficients(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """10,000 pairs (a, b) of a family of paths, ln sigma in [-3, 3]."""
    sigma = torch.exp(6 * torch.rand(10_000, generator=generator, dtype=torch.float64) - 3)
    a = {
        "flow": 1 / (1 + sigma), "variance preserving": 1 / torch.sqrt(1 + sigma**2), "EDM": torch.ones_like(sigma),
        "any": torch.exp(torch.rand(10_000, generator=generator, dtype=torch.float64)),
    }[kind]
    return a, a * sigma


@pytest.mark.parametrize("kind", ["flow", "variance preserving", "EDM", "any"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_conversions_solve_the_two_by_two_system(prediction, kind):
    generator = torch.Generator().manual_seed(sum(map(ord, prediction + kind)))
    a, b = coefficients(kind, generator)
    x_t, y = torch.randn(2, 10_000, generator=generator, dtype=torch.float64)
    p, q = (np.broadcast_to(c, 10_000) for c in PREDICTIONS[prediction](a, b, 0.5))
    matrices = np.stack((np.stack((a, b), -1), np.stack((p, q), -1)), -2)
    wanted = np.linalg.solve(matrices, np.stack((x_t, y), -1)[..., None])[..., 0]
    x0, noise = to_x0_and_noise(prediction, y, x_t, a, b)
    np.testing.assert_allclose(np.stack((x0, noise), -1), wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(target(prediction, x0, noise, a, b), y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(a * x0 + b * noise, x_t, rtol=1e-10, atol=1e-10)


def test_targets_are_the_literature_s():
    generator = torch.Generator().manual_seed(1)
    x0, noise = torch.randn(2, 10_000, generator=generator, dtype=torch.float64)
    close = lambda found, wanted: torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)  # noqa: E731
    a, b = coefficients("flow", generator)
    close(target("x0", x0, noise, a, b), x0)
    close(target("noise", x0, noise, a, b), noise)
    # dx_t/dt of (1 - t) x0 + t noise
    close(target("velocity", x0, noise, a, b), noise - x0)
    a, b = coefficients("variance preserving", generator)
    close(target("v", x0, noise, a, b), a * noise - b * x0)


@pytest.mark.parametrize("kind", ["flow", "variance preserving", "EDM", "any"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_noise_error_weight_is_the_ratio_of_squared_errors(prediction, kind):
    generator = torch.Generator().manual_seed(2)
    a, b = coefficients(kind, generator)
    x_t, y, error = torch.randn(3, 10_000, generator=generator, dtype=torch.float64)
    _, noise = to_x0_and_noise(prediction, y, x_t, a, b)
    _, other = to_x0_and_noise(prediction, y + error, x_t, a, b)
    ratio = noise_error_weight(prediction, b / a, a) * (other - noise) ** 2 / error**2
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-7, atol=0)


# --- densities of t

DENSITIES = {
    "uniform": (Uniform(), stats.logistic()),
    "logit-normal (0, 1)": (LogitNormal(), stats.norm()),
    "EDM": (LogitNormal(-1.2, 1.2), stats.norm(-1.2, 1.2)),
    "narrow": (LogitNormal(2.0, 0.1), stats.norm(2.0, 0.1)),
}


SPREADS = ["none", "stratified", "low_discrepancy"]


@pytest.mark.parametrize("name", DENSITIES)
def test_quantiles_and_densities_are_those_of_scipy(name):
    density, log_sigma = DENSITIES[name]
    u = torch.cat((torch.linspace(0, 1, 1001, dtype=torch.float64)[1:-1], torch.tensor([1e-12, 1e-6, 1 - 1e-6])))
    wanted = special.expit(log_sigma.ppf(u.numpy()))
    np.testing.assert_allclose(density.quantile(u), wanted, rtol=1e-9, atol=0)
    points = np.linspace(log_sigma.ppf(1e-9), log_sigma.ppf(1 - 1e-9), 2001)
    found = density.log_sigma_density(torch.from_numpy(points)).numpy()
    np.testing.assert_allclose(found, log_sigma.pdf(points), rtol=1e-6)
    assert integrate.simpson(found, x=points) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", DENSITIES)
def test_drawn_timesteps_follow_the_density(name, spread):
    density, log_sigma = DENSITIES[name]
    sampler = TimestepSampler(density, 1, spread)
    draws = [sampler.sample(GlobalBatch(n, 500), torch.arange(n, n + 500)) for n in range(0, 50_000, 500)]
    t, importance = (torch.cat(parts) for parts in zip(*draws, strict=True))
    assert t.dtype == importance.dtype == torch.float32 and (importance == 1).all()
    distribution = lambda value: log_sigma.cdf(special.logit(value))  # noqa: E731
    assert stats.kstest(t.double().numpy(), distribution).pvalue > 1e-3
    # One sample's draws over the steps, where strata could spoil the marginal.
    assert stats.kstest(t[7::500].double().numpy(), distribution).pvalue > 1e-3


def test_timesteps_depend_on_the_sample_number_only():
    for spread in SPREADS:
        sampler = TimestepSampler(LogitNormal(), 3, spread)
        batch = GlobalBatch(2**32 - 20, 48, attempt=2)
        members = torch.arange(batch.first_sample, batch.first_sample + batch.size)
        whole, _ = sampler.sample(batch, members)
        for part in (*members.split(8), members[5:6], members[torch.arange(0, 48, 7)], members.flip(0)):
            assert torch.equal(sampler.sample(batch, part)[0], whole[part - batch.first_sample])
        for seed, attempt in ((4, 2), (3, 1)):
            other = TimestepSampler(LogitNormal(), seed, spread)
            assert not torch.equal(other.sample(GlobalBatch(batch.first_sample, 48, attempt), members)[0], whole)


def test_every_stratum_is_hit_once_in_an_order_of_its_own():
    size, orders = 96, []
    sampler = TimestepSampler(Uniform(), 0, "stratified")
    for first in (0, size, 5 * size):
        batch = GlobalBatch(first, size)
        # As 4 ranks with 3 microbatches of 8 see it.
        parts = torch.arange(first, first + size).split(8)
        t = torch.cat([sampler.sample(batch, part)[0] for part in parts])
        strata = torch.floor(t.double() * size).long()
        assert sorted(strata.tolist()) == list(range(size))
        orders.append(strata.tolist())
    assert orders[0] != orders[1] != orders[2]
    # Place and stratum are unrelated: Spearman's rank correlation within 4 standard errors.
    for order in orders:
        assert abs(stats.spearmanr(np.arange(size), order).statistic) < 4 / math.sqrt(size - 1)


# --- objective


class Affine(torch.nn.Module):
    """output = scale x + time / 1000 + class: each input has its own mark on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, x, time, condition):
        shift = time / 1000 + (0 if condition is None else condition)
        return self.scale * x + shift.reshape(-1, 1, 1, 1)


def microbatch(size: int = 5):
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, size, 2, 3, 4, generator=generator)
    t = torch.rand(size, generator=generator)
    return x0, torch.arange(size), Draw(t, noise, 1 + torch.rand(size, generator=generator))


@pytest.mark.parametrize("conditional", [True, False])
def test_loss_and_its_gradient_equal_the_written_formula(conditional):
    x0, classes, draw = microbatch()
    model, objective = Affine(), build_objective(DenoisingConfig(), seed=0)
    terms = objective.loss(model, Microbatch(x0, classes if conditional else None), draw)
    terms.loss.mean().backward()

    data, noise = x0.double().numpy(), draw.noise.double().numpy()
    t, importance = (v.double().numpy().reshape(-1, 1, 1, 1) for v in (draw.t, draw.importance))
    x_t = (1 - t) * data + t * noise
    residual = 0.3 * x_t + t - (noise - data)
    if conditional:
        residual += np.arange(5).reshape(-1, 1, 1, 1)
    error = (residual**2).mean((1, 2, 3))
    np.testing.assert_allclose(terms.error, error, rtol=1e-5)
    np.testing.assert_allclose(terms.loss.detach(), importance[:, 0, 0, 0] * error, rtol=1e-5)
    assert terms.loss.dtype == terms.error.dtype == torch.float32
    assert not terms.error.requires_grad and terms.t is draw.t
    gradient = (importance * 2 * residual * x_t).mean()
    assert model.scale.grad.item() == pytest.approx(gradient, rel=1e-5)


def test_weighting_multiplies_the_error_as_a_function_of_sigma():
    x0, classes, draw = microbatch()
    draw = Draw(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), draw.noise, draw.importance)
    objective, seen = build_objective(DenoisingConfig(), seed=0), []

    def weighting(sigma):
        seen.append(sigma)
        return 1 / (1 + sigma)

    objective.weighting = weighting
    terms = objective.loss(Affine(), Microbatch(x0, classes), draw)
    assert seen[0][:4].tolist() == pytest.approx([0, 1 / 3, 1, 3]) and torch.isfinite(seen[0]).all()
    wanted = draw.importance * terms.error * torch.tensor([1, 0.75, 0.5, 0.25, 0])
    torch.testing.assert_close(terms.loss.detach(), wanted)


def test_half_precision_output_is_compared_in_float32():
    x0, _, draw = microbatch()
    model = lambda x, t, c: torch.zeros_like(x, dtype=torch.bfloat16)  # noqa: E731
    terms = build_objective(DenoisingConfig(), 0).loss(model, Microbatch(x0), draw)
    wanted = (draw.noise - x0).double().square().mean((1, 2, 3))
    assert terms.loss.dtype == torch.float32
    torch.testing.assert_close(terms.error.double(), wanted, rtol=1e-6, atol=0)


def test_draw_takes_timesteps_and_noise_of_their_own_streams():
    config = DenoisingConfig(timesteps=timesteps("uniform"))
    batch, indices = GlobalBatch(100, 16, attempt=1), torch.arange(104, 112)
    draw = build_objective(config, seed=7).draw((2, 3, 5), batch, indices)
    assert torch.equal(draw.t, philox.uniform(7, "timestep", indices, 1).float())
    assert torch.equal(draw.noise, philox.normal(7, "noise", indices, (2, 3, 5), 1))
    assert torch.equal(draw.importance, torch.ones(8))


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_predict_inverts_a_perfect_network(t):
    x0, _, draw = microbatch()
    time = torch.full((5,), t)
    x_t = (1 - t) * x0 + t * draw.noise
    found = build_objective(DenoisingConfig(), 0).predict(lambda *_: draw.noise - x0, x_t, time, None)
    for estimate, wanted in zip(found, (x0, draw.noise), strict=True):
        torch.testing.assert_close(estimate, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sampler", "closed_form"), [
    # logistic density sigma / (1 + sigma)^2 times (1 + sigma)^2
    ("uniform", lambda sigma: sigma),
    ("logit_normal", lambda sigma: stats.norm(0.4, 1.3).pdf(np.log(sigma)) * (1 + sigma) ** 2),
])
def test_effective_weight_has_its_closed_form(sampler, closed_form):
    config = DenoisingConfig(timesteps=timesteps(sampler, **({"mean": 0.4, "std": 1.3} if sampler == "logit_normal" else {})))
    log_sigma = torch.linspace(-6, 6, 121, dtype=torch.float64)
    found = build_objective(config, 0).effective_weight(log_sigma).numpy()
    np.testing.assert_allclose(found, closed_form(np.exp(log_sigma.numpy())), rtol=1e-10)
