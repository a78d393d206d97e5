"""Learned variance of a DDPM's reverse step: the hybrid loss and the bound, against their definitions in float64."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from torchtitan import philox
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.learned_variance import log_variance, variational_bound
from torchtitan.diffusion.objective import Draw, Microbatch
from torchtitan.diffusion.objectives import build_objective

DISCRETE = ["ddpm_linear", "ddpm_cosine"]


class TwoOutputs(torch.nn.Module):
    """Prediction = first x, and variance interpolation = tanh(second x), of twice x's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Parameter(torch.tensor(0.4)), torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x, time, condition):
        return torch.cat((self.first * x, torch.tanh(self.second * x)), dim=1)


def variance_batch(path: str, prediction: str = "noise"):
    objective = build_objective(DenoisingConfig(path=path, prediction=prediction, preconditioning="index"), 0)
    index = torch.tensor([0, 0, 1, 2, 30, 500, 998])
    x0 = (philox.normal(0, "synthetic_data", torch.arange(7), (2, 3, 3)) * 0.6).clamp(-1, 1)
    noise = philox.normal(0, "noise", torch.arange(7), (2, 3, 3))
    return objective, index, x0, Draw(objective.path.index_to_t(index).float(), noise, torch.ones(7), index)


def bound_in_bits(path, index: int, x0, x_t, estimate, interpolation) -> float:
    """One sample's term in float64 from the definitions alone."""
    bar, beta = path.alphas_cumprod.numpy(), path.betas.numpy()
    before = bar[index - 1] if index else 1.0
    smallest = beta[index] * (1 - before) / (1 - bar[index]) if index else beta[1] * (1 - bar[0]) / (1 - bar[1])

    def mean(image):
        scale = 1 / (1 - bar[index])
        return scale * (np.sqrt(before) * beta[index] * image + np.sqrt(1 - beta[index]) * (1 - before) * x_t)

    v = (interpolation + 1) / 2
    deviation = np.sqrt(np.exp(v * np.log(beta[index]) + (1 - v) * np.log(smallest)))
    if index:
        true = np.sqrt(smallest)
        nats = np.log(deviation / true) + (smallest + (mean(x0) - mean(estimate)) ** 2) / (2 * deviation**2) - 0.5
    else:
        normal = stats.norm(mean(estimate), deviation)
        nats = -level_log_probability(normal, mean(estimate), x0)
    return float(nats.mean() / np.log(2))


def level_log_probability(normal, centre, x0):
    """Log of the mass of a level of 1 / 127.5, in the tail on its own side of the centre; nothing is cut off."""
    above, below = x0 + 1 / 255, x0 - 1 / 255
    right = x0 > centre
    near = np.where(right, normal.logsf(below), normal.logcdf(above))
    far = np.where(right, normal.logsf(above), normal.logcdf(below))
    inner = near + np.log(-np.expm1(far - near))
    return np.where(x0 > 0.999, normal.logsf(below), np.where(x0 < -0.999, normal.logcdf(above), inner))


@pytest.mark.parametrize("prediction", ["noise", "v", "x0"])
@pytest.mark.parametrize("path", DISCRETE)
def test_hybrid_loss_equals_its_definition_in_float64(path, prediction):
    objective, index, x0, draw = variance_batch(path, prediction)
    model = TwoOutputs()
    terms = objective.loss(model, Microbatch(x0), draw)
    for n, k in enumerate(index.tolist()):
        bar = objective.path.alphas_cumprod[k].item()
        a, b = math.sqrt(bar), math.sqrt(1 - bar)
        clean, noise = x0[n].double().numpy(), draw.noise[n].double().numpy()
        x_t = a * clean + b * noise
        y = 0.4 * x_t
        wanted, estimate = {
            "noise": (noise, (x_t - b * y) / a), "x0": (clean, y), "v": (a * noise - b * clean, a * x_t - b * y),
        }[prediction]
        error = ((y - wanted) ** 2).mean()
        bound = bound_in_bits(objective.path, k, clean, x_t, estimate, np.tanh(0.7 * x_t))
        assert terms.error[n].item() == pytest.approx(error, rel=1e-4), k
        # 0.001 of the sum over 1000 indices
        assert terms.loss[n].item() == pytest.approx(error + 0.001 * 1000 * bound, rel=5e-4), k


@pytest.mark.parametrize("path", DISCRETE)
def test_bound_trains_the_variance_alone(path):
    objective, _, x0, draw = variance_batch(path)
    both = TwoOutputs()
    objective.loss(both, Microbatch(x0), draw).loss.mean().backward()
    mean_only = TwoOutputs()
    objective.loss(lambda x, *_: mean_only.first * x, Microbatch(x0), draw).loss.mean().backward()
    assert both.first.grad.item() == pytest.approx(mean_only.first.grad.item(), rel=1e-6)
    assert both.second.grad.abs() > 1e-3 and torch.isfinite(both.second.grad)


def test_bound_is_least_at_the_posterior_s_own_variance():
    objective, _, x0, draw = variance_batch("ddpm_linear")
    path, index = objective.path, torch.tensor([1, 2, 30, 500, 998])
    x_t = x0[2:] + 0.3 * draw.noise[2:]
    exact = variational_bound(path, x0[2:], x_t, x0[2:], torch.full_like(x_t, -1.0), index)
    torch.testing.assert_close(exact, torch.zeros(5), rtol=0, atol=1e-5)
    assert (variational_bound(path, x0[2:], x_t, x0[2:], torch.full_like(x_t, 1.0), index)[:3] > 1e-4).all()


def test_variance_lies_between_its_two_limits():
    objective, index, x0, draw = variance_batch("ddpm_linear")
    path = objective.path
    x0_hat, _, found = objective.predict_with_variance(TwoOutputs(), x0, draw.t, None)
    assert found.shape == x0_hat.shape == x0.shape
    smallest = path.posterior_variance.clone()
    smallest[0] = smallest[1]
    for interpolation, variance in ((-1.0, smallest), (1.0, path.betas)):
        ends = log_variance(path, torch.full_like(x0, interpolation), index)[:, 0, 0, 0]
        torch.testing.assert_close(ends.double(), variance[index].log(), rtol=1e-6, atol=0)


def test_twice_the_channels_without_integer_steps_are_refused():
    _, _, x0, draw = variance_batch("ddpm_linear")
    for path in ("rectified_flow", "ddpm_linear_continuous"):
        with pytest.raises(ValueError, match="the model's output"):
            build_objective(DenoisingConfig(path=path), 0).loss(TwoOutputs(), Microbatch(x0), draw)
