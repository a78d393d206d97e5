"""Solvers and guidance against the closed-form flow of Gaussian data."""

import math

import pytest
import torch
from torch import Tensor

from tests.unit.test_solvers_accuracy import DATA_STD, gaussian_predict, no_noise
from torchtitan.conditions import Classes, Unconditional
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, guided_network, predictor
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import RectifiedFlow
from torchtitan.diffusion.solvers import SOLVERS
from torchtitan.diffusion.timesteps.sampler import GlobalBatch


def solve(solver: str, predict, x: Tensor, num_steps: int) -> Tensor:
    times = torch.linspace(1, 0, num_steps + 1, dtype=x.dtype)
    return SOLVERS[solver].solve(predict, RectifiedFlow(), x, times, no_noise)


def test_euler_steps_equal_the_written_out_recursion():
    # velocity = noise - x0 = (t - (1 - t) s^2) / ((1 - t)^2 s^2 + t^2) x
    x, s, steps = 1.0, DATA_STD, 7
    for number in range(steps):
        t = 1 - number / steps
        x -= (t - (1 - t) * s**2) / (((1 - t) * s) ** 2 + t**2) * x / steps
    found = solve("euler", gaussian_predict(RectifiedFlow()), torch.ones(1, 1, 1, 1, dtype=torch.float64), steps)
    assert found.item() == pytest.approx(x, rel=1e-13)


def test_heun_is_exact_where_the_velocity_is_linear_in_time():
    # dx/dt = t with x0 = -t and noise = 0: the trapezium rule is exact but for the last, Euler's, step.
    predict = lambda x, t: (-t.reshape(-1, 1).expand_as(x), torch.zeros_like(x))  # noqa: E731
    for steps in (1, 2, 5):
        end = solve("heun", predict, torch.zeros(1, 1, dtype=torch.float64), steps)
        # exact -1/2; Euler's last step takes the slope h at its start: h^2 instead of h^2 / 2
        assert end.item() == pytest.approx(-0.5 - 0.5 / steps**2, abs=1e-14)


@pytest.mark.parametrize(("solver", "per_step"), [("euler", 1), ("heun", 2)])
def test_evaluations_happen_at_the_times_of_the_grid(solver, per_step):
    seen = []

    def predict(x, t):
        assert t.shape == (3,) and len(set(t.tolist())) == 1
        seen.append(t[0].item())
        return gaussian_predict(RectifiedFlow())(x, t)

    solve(solver, predict, torch.ones(3, 1, 2, 2), 4)
    assert seen == ([1.0, 0.75, 0.5, 0.25] if per_step == 1 else [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25])


# --- guidance


class RecordingNetwork:
    """output = x cos(time) + 3^class, and what it was called with."""

    def __init__(self) -> None:
        self.batches = []

    def __call__(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        self.batches.append((len(x), condition.tolist()))
        return x * time.cos().reshape(-1, 1, 1, 1) + 3.0 ** condition.reshape(-1, 1, 1, 1)


KIND = Classes(4)


def guidance_inputs():
    x = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    return x, torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.5, 4.0])
def test_guided_network_equals_two_separate_calls(scale):
    x, time, classes = guidance_inputs()
    network = RecordingNetwork()
    found = guided_network(network, KIND, scale)(x, time, classes)
    assert network.batches == [(6, [0, 2, 1, 4, 4, 4])]
    conditional = network(x, time, classes).double()
    unconditional = network(x, time, torch.full_like(classes, KIND.count)).double()
    wanted = scale * conditional + (1 - scale) * unconditional
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)
    if scale == 0:
        assert torch.equal(found.double(), unconditional)


def test_predictor_reads_the_guided_network_by_the_objective():
    x, _, classes = guidance_inputs()
    t = torch.tensor([0.2, 0.5, 0.8])
    objective = build_objective(DenoisingConfig(), seed=0)
    x0, noise, _ = predictor(objective, RecordingNetwork(), KIND, classes, Guidance(2.0))(x, t)
    velocity = guided_network(RecordingNetwork(), KIND, 2.0)(x, 1000 * t, classes)
    b = t.reshape(-1, 1, 1, 1)
    torch.testing.assert_close(noise - x0, velocity, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close((1 - b) * x0 + b * noise, x, rtol=1e-5, atol=1e-4)


def test_predictor_of_an_unconditional_network_never_guides():
    calls = []

    def network(x, time, condition):
        calls.append((len(x), condition))
        return x

    x, t, _ = guidance_inputs()
    predictor(build_objective(DenoisingConfig(), seed=0), network, Unconditional(), None, Guidance(3.0))(x, t)
    assert calls == [(3, None)]


def test_labels_are_dropped_at_the_rate_asked_for():
    labels, count = torch.arange(50_000) % KIND.count, 50_000
    draw = build_objective(DenoisingConfig(), seed=0).draw((1, 1, 1), GlobalBatch(0, count), torch.arange(count))
    for probability in (0.0, 0.1, 0.5, 1.0):
        dropped = KIND.drop(labels, draw.dropping < probability)
        assert dropped.dtype == torch.int64
        gone = dropped == KIND.count
        assert torch.equal(dropped[~gone], labels[~gone])
        error = 4 * math.sqrt(probability * (1 - probability) / count)
        assert abs(gone.double().mean().item() - probability) <= error
