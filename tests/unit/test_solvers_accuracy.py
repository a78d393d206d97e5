"""Every solver against data N(0, s^2), whose denoiser, flow and chain are known in closed form."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.diffusion.paths import PATHS, per_image
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS, edm_times, uniform_times

DATA_STD = 0.5


def gaussian_predict(path, std: float = DATA_STD):
    """E[x0 | x_t] and E[noise | x_t] of data N(0, std^2): both linear in x_t."""

    def predict(x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (per_image(c, x_t) for c in path.coefficients(t))
        variance = (a * std) ** 2 + b**2
        return a * std**2 / variance * x_t, b / variance * x_t

    return predict


def no_noise(step: int) -> Tensor:
    raise AssertionError("no noise is asked for")


def flow_error(solver: str, path_name: str, times: Tensor) -> float:
    """|end - exact end| of the flow from x = 1: it multiplies x by the ratio of the marginal deviations."""
    path = PATHS[path_name]()
    a, b = path.coefficients(times)
    deviations = ((a * DATA_STD) ** 2 + b**2).sqrt()
    x = torch.ones(1, 1, dtype=torch.float64)
    end = SOLVERS[solver].solve(gaussian_predict(path), path, x, times, no_noise)
    return abs(end - deviations[-1] / deviations[0]).item()


def geometric_times(num_steps: int) -> Tensor:
    """Equal steps of ln sigma, so that no end of the scale hides a method's order."""
    return torch.sigmoid(torch.linspace(math.log(30), math.log(0.01), num_steps + 1, dtype=torch.float64))


@pytest.mark.parametrize("path_name", ["rectified_flow", "edm", "ddpm_linear_continuous"])
@pytest.mark.parametrize(
    ("solver", "order"), [("euler", 1), ("heun", 2), ("ddim", 1), ("dpmpp_2m", 2), ("edm_heun", 2)]
)
def test_error_falls_with_the_order_of_the_method(path_name, solver, order):
    schedule = geometric_times if solver in ("ddim", "dpmpp_2m", "edm_heun") else lambda n: uniform_times(n, 0.97)
    errors = [flow_error(solver, path_name, schedule(count)) for count in (256, 512, 1024)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize(
    ("num_steps", "deviation"), [(9, 0.639060), (18, 0.527625), (32, 0.507838), (36, 0.506097), (72, 0.501426)]
)
def test_edm_heun_gives_the_golden_deviations(num_steps, deviation):
    path = PATHS["edm"]()
    x = torch.full((1, 1), 80.0, dtype=torch.float64)
    found = SOLVERS["edm_heun"].solve(gaussian_predict(path), path, x, edm_times(num_steps), no_noise).item()
    assert found == pytest.approx(deviation, rel=2e-6)


def test_edm_heun_equals_the_written_out_algorithm_on_any_path():
    num_steps, churn, low, high, inflate = 6, 1.5, 0.05, 50.0, 1.1
    sigmas = [(80 ** (1 / 7) + i / (num_steps - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(num_steps)]
    fresh = [math.sin(7.0 * step + 1.0) for step in range(num_steps)]
    denoise = lambda y, sigma: DATA_STD**2 / (DATA_STD**2 + sigma**2) * y  # noqa: E731
    y, gamma = 70.0, min(churn / num_steps, math.sqrt(2) - 1)
    for step, (sigma, then) in enumerate(zip(sigmas, sigmas[1:] + [0.0], strict=True)):
        raised = sigma * (1 + gamma) if low <= sigma <= high else sigma
        y += math.sqrt(raised**2 - sigma**2) * inflate * fresh[step]
        slope = (y - denoise(y, raised)) / raised
        ahead = y + (then - raised) * slope
        if then > 0:
            slope = 0.5 * (slope + (ahead - denoise(ahead, then)) / then)
        y += (then - raised) * slope
    times = edm_times(num_steps)
    for path_name in ("edm", "ddpm_linear_continuous", "rectified_flow"):
        path = PATHS[path_name]()
        x = path.coefficients(times[0])[0] * torch.full((1, 1), 70.0, dtype=torch.float64)
        found = SOLVERS["edm_heun"].solve(
            gaussian_predict(path), path, x, times, lambda step: torch.full((1, 1), fresh[step], dtype=torch.float64),
            churn=churn, churn_min=low, churn_max=high, churn_noise=inflate,
        )
        assert found.item() == pytest.approx(y, rel=1e-9)


def test_edm_heun_refuses_an_infinite_noise_level():
    path = PATHS["rectified_flow"]()
    with pytest.raises(ValueError, match="sigma is infinite at the first time"):
        SOLVERS["edm_heun"].solve(gaussian_predict(path), path, torch.ones(1, 1), uniform_times(4), no_noise)


def test_dpmpp_2m_equals_the_written_out_algorithm():
    path, num_steps, lambdas = PATHS["ddpm_linear_continuous"](), 5, []
    times = uniform_times(num_steps, 0.98)
    for t in times.tolist()[:-1]:
        lambdas.append(math.log((1 - t) / t))
    alpha = lambda log_ratio: 1 / math.sqrt(1 + math.exp(-2 * log_ratio))  # noqa: E731
    sigma = lambda log_ratio: math.exp(-log_ratio) * alpha(log_ratio)  # noqa: E731
    denoise = lambda x, l: alpha(l) * DATA_STD**2 / ((alpha(l) * DATA_STD) ** 2 + sigma(l) ** 2) * x  # noqa: E731, E741
    x, seen = 1.3, []
    for i in range(1, num_steps):
        seen.append(denoise(x, lambdas[i - 1]))
        h, combined = lambdas[i] - lambdas[i - 1], seen[-1]
        if i > 1:
            r = (lambdas[i - 1] - lambdas[i - 2]) / h
            combined = (1 + 1 / (2 * r)) * seen[-1] - 1 / (2 * r) * seen[-2]
        x = sigma(lambdas[i]) / sigma(lambdas[i - 1]) * x - alpha(lambdas[i]) * math.expm1(-h) * combined
    wanted = denoise(x, lambdas[-1])  # the last step, to sigma = 0
    found = SOLVERS["dpmpp_2m"].solve(
        gaussian_predict(path), path, torch.full((1, 1), 1.3, dtype=torch.float64), times, no_noise
    )
    assert found.item() == pytest.approx(wanted, rel=1e-11)


def variance_of(solver: str, path_name: str, times: Tensor, **options) -> float:
    """Variance at the end, exactly: the state is a linear function of the start and of every step's noise.

    Each of those N + 1 numbers is set to its deviation in a row of its own, and the squares of the ends are summed.
    """
    path, rows = PATHS[path_name](), len(times)
    x = torch.zeros(rows, 1, dtype=torch.float64)
    x[0] = path.coefficients(times[0])[1]
    impulse = lambda step: torch.eye(rows, dtype=torch.float64)[:, step + 1 : step + 2]  # noqa: E731
    end = SOLVERS[solver].solve(gaussian_predict(path), path, x, times, impulse, **options)
    return end.square().sum().item()


def test_variance_of_the_stochastic_flow_converges_with_first_order():
    errors = [
        variance_of("euler_maruyama", "rectified_flow", uniform_times(count)) - DATA_STD**2
        for count in (128, 256, 512, 1024)
    ]
    assert math.log2(errors[-2] / errors[-1]) == pytest.approx(1, abs=0.15)
    assert abs(errors[-1]) < 2e-3


def test_stochastic_flow_without_diffusion_is_euler():
    path, x = PATHS["rectified_flow"](), torch.tensor([[0.7], [-2.0]], dtype=torch.float64)
    noise = lambda step: torch.ones_like(x)  # noqa: E731
    ends = [
        SOLVERS["euler_maruyama"].solve(gaussian_predict(path), path, x, uniform_times(9), noise, diffusion_scale=0.0),
        SOLVERS["euler"].solve(gaussian_predict(path), path, x, uniform_times(9), no_noise),
    ]
    torch.testing.assert_close(*ends, rtol=1e-13, atol=0)


def test_stochastic_flow_steps_equal_the_written_out_recursion():
    path, times, x = PATHS["rectified_flow"](), uniform_times(3), 1.0
    for step, t in enumerate((1.0, 2 / 3, 1 / 3)):
        variance = ((1 - t) * DATA_STD) ** 2 + t**2
        score, w, h = -x / variance, 0.7 * t, 1 / 3
        x0 = (1 - t) * DATA_STD**2 / variance * x
        velocity = t / variance * x - x0
        x = x - h * (velocity - 0.5 * w * score) + math.sqrt(w * h) * (step + 0.5) if step < 2 else x0
    found = SOLVERS["euler_maruyama"].solve(
        gaussian_predict(path), path, torch.ones(1, 1, dtype=torch.float64), times,
        lambda step: torch.full((1, 1), step + 0.5, dtype=torch.float64), diffusion_scale=0.7,
    )
    assert found.item() == pytest.approx(x, rel=1e-12)


@pytest.mark.parametrize("variance", ["small", "large"])
@pytest.mark.parametrize("path_name", ["ddpm_linear", "ddpm_cosine"])
def test_variance_of_ancestral_sampling_converges_to_the_data_s(path_name, variance):
    path = PATHS[path_name]()
    errors = [
        abs(variance_of("ddpm", path_name, SCHEDULES["ddpm"]().times(path, count, int), variance=variance) - DATA_STD**2)
        for count in (60, 250, 1000)
    ]
    assert errors[0] > 1.8 * errors[1] > 1.8**2 * errors[2]
    assert errors[2] < 0.02 * DATA_STD**2


def test_churn_keeps_the_variance():
    errors = [
        abs(variance_of("edm_heun", "edm", edm_times(count), churn=40.0, churn_noise=1.0) - DATA_STD**2)
        for count in (200, 400, 800)
    ]
    assert errors[0] > 1.7 * errors[1] > 1.7**2 * errors[2]
    assert errors[2] < 5e-3


@pytest.mark.parametrize(
    ("solver", "options"), [("edm_heun", {"churn": 0.0}), ("ddim", {"eta": 0.0}), ("dpmpp_2m", {}), ("heun", {})]
)
def test_deterministic_solvers_draw_no_noise_and_keep_float32(solver, options):
    path = PATHS["rectified_flow"]()
    times = edm_times(8)
    x = path.coefficients(times[0])[1] * philox.normal(0, "sampling", torch.arange(3), (1, 2, 2))
    ends = [SOLVERS[solver].solve(gaussian_predict(path), path, x, times, no_noise, **options) for _ in range(2)]
    assert torch.equal(*ends) and ends[0].dtype == torch.float32
    deviation = SOLVERS[solver].solve(gaussian_predict(path), path, x.double(), times, no_noise, **options)
    torch.testing.assert_close(ends[0].double(), deviation, rtol=2e-5, atol=1e-6)
