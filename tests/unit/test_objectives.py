"""Paths, weightings and whole objectives against golden values, closed forms and float64."""

import collections
import dataclasses
import itertools
import math
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from tests.objectives import timesteps, weighting
from torchtitan import philox
from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Draw, Microbatch
from torchtitan.diffusion.objectives import build_objective, objective_problems
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.predictions import PRECONDITIONINGS, PREDICTIONS, target
from torchtitan.diffusion.timesteps.registry import TIMESTEPS
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.diffusion.weightings import WEIGHTINGS, prediction_weighting
from torchtitan.models.dit.config import FLAVORS
from torchtitan.models.dit.model import DiT
from torchtitan.settings.declare import key_types

DDPM_PATHS = [name for name in PATHS if name.startswith("ddpm")]
DISCRETE = ["ddpm_linear", "ddpm_cosine"]


def with_slots(config: DenoisingConfig) -> DenoisingConfig:
    """The only sampler that cannot do without a key of its own gets it."""
    if config.timesteps.name != "slots":
        return config
    edges = [0.0, 10.0, 300.0, 1000.0] if config.path.startswith("ddpm") else [0.0, 0.2, 0.7, 1.0]
    return dataclasses.replace(config, timesteps=timesteps("slots", edges=edges))


def choices(key: str) -> list[str]:
    by_name = {"timesteps": TIMESTEPS, "weighting": WEIGHTINGS}
    return list(by_name.get(key, typing.get_args(key_types(DenoisingConfig)[key])))


def test_every_registered_name_is_a_choice():
    registries = {"path": PATHS, "prediction": PREDICTIONS, "preconditioning": PRECONDITIONINGS}
    for key, registry in registries.items():
        assert sorted(choices(key)) == sorted(registry), key


def test_recipes_of_the_documentation_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    recipes = [each for each in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[objective]" in each]
    assert len(recipes) == 4
    for recipe in recipes:
        Path("recipe.toml").write_text(recipe, encoding="utf-8")
        load_config(["--job.config_file", "recipe.toml"], 1)
    for key in ("path", "prediction", "preconditioning", "weighting", "timesteps", "spread"):
        assert all(f"`{name}`" in page or f'"{name}"' in page for name in choices(key)), key


# --- DDPM paths


def test_linear_schedule_has_its_published_values():
    path = PATHS["ddpm_linear"]()
    assert path.alphas_cumprod[999].item() == pytest.approx(4.03583e-5, rel=1e-5)
    snr = path.alphas_cumprod / (1 - path.alphas_cumprod)
    assert [int((snr < level).nonzero()[0]) for level in (20, 5, 1)] == [65, 130, 259]


def test_cosine_schedule_has_its_published_values():
    path = PATHS["ddpm_cosine"]()
    assert path.alphas_cumprod[499].item() == pytest.approx(0.493844, rel=2e-6)
    assert path.betas.max().item() == 0.999
    closed = np.cos((np.arange(1, 1000) / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2
    closed /= np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(path.alphas_cumprod[:999], closed, rtol=1e-10)


def test_posterior_coefficients_have_their_golden_values():
    path = PATHS["ddpm_linear"]()
    golden = {
        0: 1, 1: 0.54529, 2: 0.38871, 5: 0.22208, 10: 0.13628, 14: 0.1055, 15: 0.099946, 100: 0.018895,
        500: 0.0030581, 999: 1.2835e-4,
    }
    for index, value in golden.items():
        assert path.posterior_x0[index].item() == pytest.approx(value, rel=5e-5), index
    assert int((path.posterior_x0 < 0.1).nonzero()[0]) == 15
    assert int((path.posterior_x0 < path.posterior_x_t).nonzero()[0]) == 2


@pytest.mark.parametrize("name", DISCRETE)
def test_posterior_is_bayes_rule_for_two_gaussians(name):
    path = PATHS[name]()
    for k in (1, 2, 17, 500, 999):
        before, beta = path.alphas_cumprod[k - 1].item(), path.betas[k].item()
        x0, x_t = 0.7, -0.4
        # prior N(sqrt(before) x0, 1 - before), likelihood x_t ~ N(sqrt(1 - beta) x, beta)
        precision = 1 / (1 - before) + (1 - beta) / beta
        mean = (math.sqrt(before) * x0 / (1 - before) + math.sqrt(1 - beta) * x_t / beta) / precision
        found = path.posterior_x0[k] * x0 + path.posterior_x_t[k] * x_t
        assert found.item() == pytest.approx(mean, rel=1e-9)
        assert path.posterior_variance[k].item() == pytest.approx(1 / precision, rel=1e-9)


@pytest.mark.parametrize("name", DDPM_PATHS)
def test_time_of_an_index_has_the_table_s_coefficients_and_gives_the_index_back(name):
    path = PATHS[name]()
    index = torch.arange(1000)
    t = path.index_to_t(index)
    a, b = path.coefficients(t)
    torch.testing.assert_close(a**2, path.alphas_cumprod, rtol=1e-10, atol=0)
    torch.testing.assert_close(b**2, 1 - path.alphas_cumprod, rtol=1e-10, atol=0)
    rounded = path.t_to_index(t.float())
    if path.discrete:
        assert rounded.dtype == torch.int64 and torch.equal(rounded, index)
        assert torch.equal(path.t_to_index(torch.tensor([0.0, 1.0])), torch.tensor([0, 999]))
    else:
        torch.testing.assert_close(rounded, index.double(), rtol=0, atol=1e-3)
        between = torch.rand(1000, dtype=torch.float64) * 999
        torch.testing.assert_close(path.t_to_index(path.index_to_t(between)), between, rtol=0, atol=1e-8)
    assert path.t_max == t[-1].item() and (t.diff() > 0).all()


@pytest.mark.parametrize("name", DISCRETE)
def test_continuous_and_discrete_agree_at_the_integers(name):
    index = torch.arange(1000)
    discrete, continuous = PATHS[name](), PATHS[f"{name}_continuous"]()
    assert torch.equal(discrete.index_to_t(index), continuous.index_to_t(index.double()))
    torch.testing.assert_close(
        discrete.t_to_index(discrete.index_to_t(index)).double(), continuous.t_to_index(discrete.index_to_t(index)),
        rtol=0, atol=1e-8,
    )


@pytest.mark.parametrize("name", PATHS)
def test_sigma_and_time_are_each_other_s_inverse(name):
    path = PATHS[name]()
    sigma = torch.logspace(-3, 3, 61, dtype=torch.float64)
    t = path.sigma_to_t(sigma)
    a, b = path.coefficients(t)
    torch.testing.assert_close(b / a, sigma, rtol=1e-10, atol=0)
    torch.testing.assert_close(path.t_to_sigma(t), sigma, rtol=1e-10, atol=0)


def test_sampling_starts_where_each_path_ends():
    starts = {name: PATHS[name]().t_max for name in ("rectified_flow", "edm", "ddpm_linear")}
    assert starts == pytest.approx({"rectified_flow": 1.0, "edm": 80 / 81, "ddpm_linear": 0.99368716}, rel=1e-7)


# --- weightings


def weights(path: str, prediction: str, name: str, sigma: torch.Tensor, **keys) -> torch.Tensor:
    config = DenoisingConfig(path=path, prediction=prediction, weighting=weighting(name, **keys))
    return prediction_weighting(config, PATHS[path]())(sigma)


def test_weights_have_their_golden_values_on_the_linear_schedule():
    path = PATHS["ddpm_linear"]()
    sigma = path.t_to_sigma(path.index_to_t(torch.tensor([0, 50, 129, 130, 500])))
    found = weights("ddpm_linear", "noise", "min_snr", sigma).tolist()
    assert found[:4] == pytest.approx([5.0e-4, 0.1549, 0.98722, 1], rel=3e-4)
    assert weights("ddpm_linear", "v", "min_snr", sigma)[1].item() == pytest.approx(0.15024, rel=5e-5)
    assert weights("ddpm_linear", "noise", "p2", sigma)[4].item() == pytest.approx(0.9222, abs=5e-5)


def test_weights_have_their_closed_forms_in_every_parametrisation():
    sigma = torch.logspace(-2, 2, 41, dtype=torch.float64)
    snr = sigma**-2
    minimum = snr.clamp(max=3.0)
    wanted = {
        ("ddpm_linear", "x0", "min_snr"): minimum,
        ("ddpm_linear", "noise", "min_snr"): minimum / snr,
        ("ddpm_linear", "v", "min_snr"): minimum / (snr + 1),
        ("rectified_flow", "velocity", "min_snr"): minimum * (sigma / (1 + sigma)) ** 2,
        ("ddpm_linear", "x0", "soft_min_snr"): 1 / (sigma**2 + 1 / 3),
        ("edm", "x0", "truncated_snr"): torch.maximum(snr, torch.ones_like(snr)),
        ("ddpm_cosine", "v", "snr_plus_one"): torch.ones_like(snr),
        ("edm", "x0", "edm"): (sigma**2 + 0.25) / (0.5 * sigma) ** 2,
        ("edm", "edm", "edm"): torch.ones_like(snr),
        ("rectified_flow", "edm", "edm"): torch.ones_like(snr),
        ("ddpm_linear", "noise", "p2"): (1 + snr) ** -1.0,
        ("rectified_flow", "velocity", "none"): torch.ones_like(snr),
    }
    # All in float64: 1e-10 leaves room for cancellation in 1 - a^2 at small sigma, and none for a step in float32 (1e-7).
    for (path, prediction, name), expected in wanted.items():
        found = weights(path, prediction, name, sigma, **({"gamma": 3.0} if "min_snr" in name else {}))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0, msg=f"{path} {prediction} {name}")
    golden = weights("edm", "x0", "edm", torch.tensor([0.002, 0.5, 80.0], dtype=torch.float64))
    assert golden.tolist() == pytest.approx([250004, 8, 4.00015625], rel=1e-12)


def test_edm_network_output_is_minus_v_at_unit_data():
    x0, noise = torch.randn(2, 1000, dtype=torch.float64)
    a, b = PATHS["ddpm_linear"]().coefficients(torch.rand(1000, dtype=torch.float64))
    found = target("edm", x0, noise, a, b, sigma_data=1.0)
    torch.testing.assert_close(found, -target("v", x0, noise, a, b), rtol=1e-10, atol=1e-12)


# --- preconditioning


@pytest.mark.parametrize("path", ["edm", "rectified_flow", "ddpm_linear"])
def test_edm_preconditioning_equals_the_paper_s_on_the_unscaled_image(path):
    sigma, sigma_data = torch.logspace(-2, 2, 21, dtype=torch.float64), 0.7
    path = PATHS[path]()
    t = path.sigma_to_t(sigma)
    a, _ = path.coefficients(t)
    found = PRECONDITIONINGS["edm"](path, "x0", sigma_data).scaling(t)
    total = sigma**2 + sigma_data**2
    for value, wanted in (
        (found.c_in * a, total**-0.5),  # both act on x_t = a (x0 + sigma noise)
        (found.c_skip * a, sigma_data**2 / total),
        (found.c_out, sigma * sigma_data / total.sqrt()),
        (found.c_noise, sigma.log() / 4),
    ):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


def test_network_of_sit_is_read_in_its_own_convention():
    """SiT counts time from noise to data and predicts data - noise; here it does so exactly, for Gaussian data."""
    deviation = 0.7

    def network(x, tau, condition):
        tau = tau[:, None, None, None]
        return (tau * deviation**2 - (1 - tau)) / (tau**2 * deviation**2 + (1 - tau) ** 2) * x

    objective = build_objective(DenoisingConfig(preconditioning="sit"), seed=0)
    x_t, t = torch.randn(5, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 0.2, 0.5, 0.9, 1.0])
    x0, noise = objective.predict(network, x_t, t, None)
    time = t[:, None, None, None]
    variance = (1 - time) ** 2 * deviation**2 + time**2
    torch.testing.assert_close(x0, (1 - time) * deviation**2 / variance * x_t, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(noise, time / variance * x_t, rtol=1e-5, atol=1e-6)


def test_index_preconditioning_gives_whole_numbers_and_the_real_index():
    index = torch.arange(1000)
    for name in DISCRETE:
        path = PATHS[name]()
        found = PRECONDITIONINGS["index"](path, "noise", 0.5).scaling(path.index_to_t(index).float())
        assert torch.equal(found.c_noise, index.float())
        between = PATHS[f"{name}_continuous"]()
        time = PRECONDITIONINGS["index"](between, "noise", 0.5).scaling(between.index_to_t(index + 0.25)[:999])
        torch.testing.assert_close(time.c_noise, index[:999] + 0.25, rtol=0, atol=1e-8, check_dtype=False)


# --- draws


@pytest.mark.parametrize("sampler", choices("timesteps"))
@pytest.mark.parametrize("path", DISCRETE)
def test_every_draw_on_a_discrete_path_is_one_of_its_indices(path, sampler):
    objective = build_objective(with_slots(DenoisingConfig(path=path, timesteps=timesteps(sampler))), seed=3)
    draw = objective.draw((1, 1, 1), GlobalBatch(0, 4000), torch.arange(4000))
    assert draw.path_index.dtype == torch.int64 and draw.path_index.min() >= 0 and draw.path_index.max() <= 999
    assert torch.equal(draw.t, objective.path.index_to_t(draw.path_index).float())


# --- whole objectives


def test_equal_effective_weights_are_seen_to_be_equal():
    log_sigma = torch.linspace(-5, 5, 201, dtype=torch.float64)

    def weight(**keys) -> torch.Tensor:
        return build_objective(DenoisingConfig(**keys), 0).effective_weight(log_sigma)

    for path in DISCRETE:
        v = weight(path=path, prediction="v", timesteps=timesteps("uniform"))
        x0 = weight(path=path, prediction="x0", weighting=weighting("snr_plus_one"), timesteps=timesteps("uniform"))
        assert (v > 0).any()
        torch.testing.assert_close(v, x0, rtol=1e-9, atol=0)
    edm = dict(path="edm", timesteps=timesteps("lognormal_sigma"), sigma_data=0.5)
    whole = weight(**edm, prediction="x0", preconditioning="edm", weighting=weighting("edm"))
    torch.testing.assert_close(whole, weight(**edm, prediction="edm", preconditioning="edm"), rtol=1e-9, atol=0)
    normal = torch.from_numpy(stats.norm(-1.2, 1.2).pdf(log_sigma.numpy()))
    torch.testing.assert_close(whole, normal * (1 + torch.exp(log_sigma) ** 2 / 0.25), rtol=1e-9, atol=0)


class InAnyCurrency(torch.nn.Module):
    """A network of x0, its output turned by hand into a given prediction."""

    def __init__(self, network: torch.nn.Module, path: str, prediction: str) -> None:
        super().__init__()
        self.network, self.path, self.prediction = network, PATHS[path](), prediction

    def forward(self, x, time, condition):
        a, b = (c.reshape(-1, 1, 1, 1) for c in self.path.coefficients(time.double() / 1000))
        x0 = self.network(x, time, condition).double()
        noise = (x - a * x0) / b
        return {
            "x0": x0, "noise": noise, "v": a * noise - b * x0, "velocity": noise - x0,
            "edm": (b * x0 / 0.5 - 0.5 * a * noise) / torch.sqrt(b**2 + 0.25 * a**2),
        }[self.prediction]


@pytest.fixture(scope="module")
def small_dit():
    config = dataclasses.replace(FLAVORS["debug"], num_layers=1)
    torch.manual_seed(0)
    model = DiT(config, (1, 8, 8), Classes(10))
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():  # the output layer starts at zero, and nothing before it would count
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", [name for name in WEIGHTINGS if name != "none"])
@pytest.mark.parametrize("path", ["rectified_flow", "edm", "ddpm_linear"])
def test_gradient_does_not_depend_on_the_prediction_type(path, name, small_dit):
    images = philox.normal(1, "synthetic_data", torch.arange(8), (1, 8, 8))
    gradients = {}
    for prediction in PREDICTIONS:
        objective = build_objective(DenoisingConfig(path=path, prediction=prediction, weighting=weighting(name)), seed=5)
        draw = objective.draw((1, 8, 8), GlobalBatch(0, 8), torch.arange(8))
        small_dit.zero_grad()
        model = InAnyCurrency(small_dit, path, prediction)
        objective.loss(model, Microbatch(images, torch.arange(8)), draw).loss.mean().backward()
        gradients[prediction] = torch.cat([p.grad.flatten() for p in small_dit.parameters() if p.grad is not None])
    scale = gradients["x0"].norm()
    assert scale > 1e-4
    for prediction, gradient in gradients.items():
        assert (gradient - gradients["x0"]).norm() <= 1e-5 * scale, prediction


def test_edm_loss_is_the_paper_s_written_out(small_dit):
    config = DenoisingConfig(
        path="edm", prediction="x0", preconditioning="edm", weighting=weighting("edm"), timesteps=timesteps("lognormal_sigma")
    )
    objective = build_objective(config, seed=2)
    images, classes = philox.normal(1, "synthetic_data", torch.arange(8), (1, 8, 8)), torch.arange(8)
    draw = objective.draw((1, 8, 8), GlobalBatch(0, 8), torch.arange(8))
    found = objective.loss(small_dit, Microbatch(images, classes), draw).loss
    sigma = (draw.t.double() / (1 - draw.t.double())).reshape(-1, 1, 1, 1)
    noisy, total = images + sigma * draw.noise, sigma**2 + 0.25
    network = small_dit((noisy / total.sqrt()).float(), (sigma.log() / 4).float().flatten(), classes).double()
    denoised = 0.25 / total * noisy + 0.5 * sigma / total.sqrt() * network
    wanted = (total / (0.5 * sigma) ** 2 * (denoised - images) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=0)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("path", PATHS)
def test_predict_inverts_a_perfect_network(path, prediction):
    x0, noise = torch.randn(2, 6, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    objective = build_objective(DenoisingConfig(path=path, prediction=prediction), 0)
    t = torch.linspace(0.05, 0.95, 6)
    a, b = (c.reshape(-1, 1, 1, 1) for c in objective.path.coefficients(t))
    y = target(prediction, x0, noise, a, b)
    found = objective.predict(lambda *_: y, a * x0 + b * noise, t, None)
    for estimate, wanted in zip(found, (x0, noise), strict=True):
        torch.testing.assert_close(estimate, wanted, rtol=1e-4, atol=1e-4)


def test_every_accepted_combination_has_a_finite_loss_and_effective_weight():
    images, noise = torch.randn(2, 16, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    model, log_sigma = lambda x, time, _: torch.tanh(x) + 1e-4 * time.reshape(-1, 1, 1, 1), torch.linspace(-9, 9, 37)
    keys = ("path", "prediction", "preconditioning")
    accepted, of_samplers = 0, collections.Counter()
    few = [choices("path"), ["v", "x0", "edm"], ["identity"], ["none", "snr_plus_one"], choices("timesteps")]
    every = [*map(choices, (*keys, "weighting")), ["uniform", "logit_normal"]]
    for values in dict.fromkeys((*itertools.product(*few), *itertools.product(*every))):
        *others, factor, sampler = values
        chosen = {"weighting": weighting(factor), "timesteps": timesteps(sampler)}
        config = with_slots(DenoisingConfig(**dict(zip(keys, others, strict=True)), **chosen))
        if list(objective_problems(config)):
            continue
        accepted += 1
        of_samplers[sampler] += 1
        objective = build_objective(config, 0)
        t, importance = objective.timestep_sampler.sample(GlobalBatch(0, 16), torch.arange(16))
        assert torch.isfinite(objective.loss(model, Microbatch(images), Draw(t, noise, importance)).loss).all(), config
        weight = objective.effective_weight(log_sigma.double())
        assert torch.isfinite(weight).all() and (weight >= 0).all() and (weight > 0).any(), config
    assert accepted > 500 and set(of_samplers) == set(choices("timesteps")) and min(of_samplers.values()) >= 10
