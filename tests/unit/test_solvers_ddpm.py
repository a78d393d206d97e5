"""DDPM, DDIM, learned variance and respacing against the published formulas in alpha_bar, written out in float64."""

import math

import numpy as np
import pytest
import torch

from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.solvers import SOLVERS, Prediction, ddpm_times, edm_times, respaced_indices, uniform_times

BETAS = {
    "ddpm_linear": np.linspace(1e-4, 0.02, 1000),
    "ddpm_cosine": np.minimum(
        1
        - np.cos((np.arange(1, 1001) / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2
        / np.cos((np.arange(1000) / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2,
        0.999,
    ),
}
PIXELS = 5


def fresh_noise(step: int) -> np.ndarray:
    return np.random.default_rng(100 + step).standard_normal((2, PIXELS))


def noise_of(x, index: int):
    """A network that predicts the noise: any smooth function of x and of the index."""
    tanh = torch.tanh if isinstance(x, torch.Tensor) else np.tanh
    return 0.8 * tanh(x) + 0.1 * math.cos(index / 100)


def fraction_of(x, index: int):
    """A learned variance, (v + 1) / 2 of an output v."""
    sin = torch.sin if isinstance(x, torch.Tensor) else np.sin
    return 0.5 + 0.4 * sin(3 * x + index / 77)


def published(path_name: str, indices: list[int], kind: str, eta: float = 0.0) -> np.ndarray:
    """Sample along rising `indices` with the formulas of the papers, in beta and alpha_bar of the respaced chain."""
    alpha_bar = np.cumprod(1 - BETAS[path_name])[indices]
    before = np.append(1.0, alpha_bar[:-1])
    beta = 1 - alpha_bar / before
    posterior_variance = beta * (1 - before) / (1 - alpha_bar)
    x = np.random.default_rng(7).standard_normal((2, PIXELS))
    for step, k in enumerate(reversed(range(len(indices)))):
        noise = noise_of(x, indices[k])
        x0 = (x - np.sqrt(1 - alpha_bar[k]) * noise) / np.sqrt(alpha_bar[k])
        if kind == "ddim":
            deviation = (
                eta * np.sqrt((1 - before[k]) / (1 - alpha_bar[k])) * np.sqrt(1 - alpha_bar[k] / before[k])
            )
            mean = np.sqrt(before[k]) * x0 + np.sqrt(1 - before[k] - deviation**2) * noise
        else:
            mean = np.sqrt(before[k]) * beta[k] / (1 - alpha_bar[k]) * x0
            mean = mean + np.sqrt(1 - beta[k]) * (1 - before[k]) / (1 - alpha_bar[k]) * x
            if k == 0:
                deviation = 0.0
            elif kind == "learned":
                v = fraction_of(x, indices[k])
                deviation = np.exp(0.5 * (v * np.log(beta[k]) + (1 - v) * np.log(posterior_variance[k])))
            else:
                deviation = np.sqrt({"small": posterior_variance, "large": beta}[kind][k])
        x = mean + deviation * fresh_noise(step)
    return x


def ours(path_name: str, num_steps: int, solver: str, dtype=torch.float64, **options) -> torch.Tensor:
    path = PATHS[path_name]()

    def predict(x, t):
        index = path.t_to_index(t.float())  # as a network's float32 time
        assert index.dtype == torch.int64 and len(set(index.tolist())) == 1
        noise = noise_of(x, index[0].item())
        a, b = (c.reshape(-1, 1) for c in path.coefficients(t))
        return Prediction((x - b * noise) / a, noise, fraction_of(x, index[0].item()))

    x = torch.from_numpy(np.random.default_rng(7).standard_normal((2, PIXELS))).to(dtype)
    noise = lambda step: torch.from_numpy(fresh_noise(step)).to(dtype)  # noqa: E731
    return SOLVERS[solver].solve(predict, path, x, ddpm_times(num_steps, path), noise, **options)


def even_spacing(count: int, total: int = 1000) -> list[int]:
    return [round(number * (total - 1) / (count - 1)) for number in range(count)]


@pytest.mark.parametrize("path_name", ["ddpm_linear", "ddpm_cosine"])
@pytest.mark.parametrize("num_steps", [250, 1000])
@pytest.mark.parametrize("variance", ["small", "large", "learned"])
def test_ancestral_sampling_equals_the_published_formulas(path_name, num_steps, variance):
    wanted = published(path_name, even_spacing(num_steps), variance)
    found = ours(path_name, num_steps, "ddpm", variance=variance)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("path_name", ["ddpm_linear", "ddpm_cosine"])
@pytest.mark.parametrize("num_steps", [10, 250])
@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
def test_ddim_equals_the_published_formula(path_name, num_steps, eta):
    wanted = published(path_name, even_spacing(num_steps), "ddim", eta)
    found = ours(path_name, num_steps, "ddim", eta=eta)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def test_ddim_of_eta_one_is_ddpm_of_the_small_variance():
    for num_steps in (1, 2, 50):
        found = [ours("ddpm_linear", num_steps, "ddim", eta=1.0), ours("ddpm_linear", num_steps, "ddpm")]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_state_of_float32_stays_float32():
    found = ours("ddpm_linear", 20, "ddpm", torch.float32, variance="learned")
    assert found.dtype == torch.float32
    wanted = ours("ddpm_linear", 20, "ddpm", variance="learned")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


def test_learned_variance_lies_between_small_and_large_and_must_be_there():
    path, times = PATHS["ddpm_linear"](), ddpm_times(2, PATHS["ddpm_linear"]())
    ones = lambda step: torch.ones(1, 1, dtype=torch.float64)  # noqa: E731

    def spread(variance: str, fraction: float | None) -> float:
        learned = None if fraction is None else torch.full((1, 1), fraction, dtype=torch.float64)
        last = lambda x, t: (x, torch.zeros_like(x), learned)  # noqa: E731
        return SOLVERS["ddpm"].solve(last, path, 0 * ones(0), times, ones, variance=variance).item()

    assert spread("learned", 0.0) == pytest.approx(spread("small", None), rel=1e-12)
    assert spread("learned", 1.0) == pytest.approx(spread("large", None), rel=1e-12)
    assert spread("learned", 0.5) == pytest.approx(math.sqrt(spread("small", None) * spread("large", None)), rel=1e-12)
    with pytest.raises(ValueError, match="variance = learned needs a network that has learned it"):
        spread("learned", None)


@pytest.mark.parametrize("num_steps", [2, 50, 250, 999, 1000])
def test_respaced_indices_are_even_with_both_ends(num_steps):
    found = respaced_indices(num_steps).tolist()
    assert found == even_spacing(num_steps)[::-1]
    assert len(set(found)) == num_steps


def test_ddpm_times_are_the_indices_of_the_path():
    path = PATHS["ddpm_linear"]()
    times = ddpm_times(250, path)
    assert times.dtype == torch.float64 and times[-1] == 0
    assert path.t_to_index(times[:-1].float()).tolist() == respaced_indices(250).tolist()
    a, _ = path.coefficients(times[:-1])
    wanted = np.cumprod(1 - BETAS["ddpm_linear"])[respaced_indices(250).numpy()]
    np.testing.assert_allclose(a.square().numpy(), wanted, rtol=1e-10)


def test_edm_schedule_has_the_golden_noise_levels():
    golden = [
        80, 57.586, 40.7856, 28.3746, 19.3525, 12.9101, 8.40094, 5.31519, 3.25682, 1.92334, 1.08817, 0.585348,
        0.296442, 0.139516, 0.0599473, 0.0229345, 0.00752802, 0.002,
    ]
    times = edm_times(18)
    assert len(times) == 19 and times[-1] == 0 and times.dtype == torch.float64
    sigma = (times / (1 - times))[:-1].tolist()
    assert sigma == pytest.approx(golden, rel=5e-6)
    assert (edm_times(1) / (1 - edm_times(1))).tolist() == pytest.approx([80.0, 0.0])


def test_shift_multiplies_sigma():
    plain, shifted = uniform_times(7), uniform_times(7, shift=3.0)
    assert shifted[0] == 1 and shifted[-1] == 0
    inner = slice(1, -1)
    ratio = (shifted / (1 - shifted))[inner] / (plain / (1 - plain))[inner]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 3.0), rtol=1e-12, atol=0)
    ending = uniform_times(7, t_max=0.9, shift=3.0)
    assert ending[0].item() == pytest.approx(0.9)
    torch.testing.assert_close(ending, 0.9 * shifted, rtol=1e-12, atol=0)
