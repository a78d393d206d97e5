"""Chains with the truth or an error at some indices: the closed-form toy, and what the last step makes of it all."""

import itertools
import math

import numpy as np
import pytest
import torch

from research.oracle_replacement import ancestral_chain, posterior, visited_indices
from torchtitan.diffusion.paths import PATHS

PATH = PATHS["ddpm_linear"]()
VARIANCE, BIAS, SIZE = 0.25, 0.3, 4096


class Toy:
    """White Gaussian data with the exact estimate of x0 plus a constant bias, every index visited."""

    def __init__(self) -> None:
        self.x0 = math.sqrt(VARIANCE) * torch.from_numpy(np.random.default_rng(0).standard_normal(SIZE))
        chain = np.random.default_rng(1)
        self.start = torch.from_numpy(chain.standard_normal(SIZE))
        self.noise = {index: torch.from_numpy(chain.standard_normal(SIZE)) for index in range(999, 0, -1)}

    def predict(self, x: torch.Tensor, index: int) -> torch.Tensor:
        a2 = PATH.alphas_cumprod[index].item()
        return math.sqrt(a2) * VARIANCE / (a2 * VARIANCE + 1.0 - a2) * x + BIAS

    def rmse(self, truth_at=(), start=None) -> float:
        final = ancestral_chain(
            PATH, self.predict, self.x0, self.start if start is None else start, self.noise.__getitem__, range(1000),
            truth_at=truth_at,
        )  # fmt: skip
        return (final - self.x0).square().mean().sqrt().item()


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def plain_rmse(first: int, last: int) -> float:
    """The toy in numpy alone, by the textbook's formulas with t = 1..1000; the truth in [first, last]."""
    betas = np.linspace(1e-4, 0.02, 1000)
    alpha_bar = np.cumprod(1 - betas)
    x0 = math.sqrt(VARIANCE) * np.random.default_rng(0).standard_normal(SIZE)
    chain = np.random.default_rng(1)
    x = chain.standard_normal(SIZE)
    for t in range(1000, 0, -1):
        now, before, beta = alpha_bar[t - 1], alpha_bar[t - 2] if t > 1 else 1.0, betas[t - 1]
        estimate = x0 if first <= t <= last else np.sqrt(now) * VARIANCE / (now * VARIANCE + 1 - now) * x + BIAS
        x = (np.sqrt(before) * beta * estimate + np.sqrt(1 - beta) * (1 - before) * x) / (1 - now)
        if t > 1:
            x = x + np.sqrt(beta * (1 - before) / (1 - now)) * chain.standard_normal(SIZE)
    return float(np.sqrt(np.mean((x - x0) ** 2)))


# Ranges count from t = 1, as published; t = 1 is index 0.
@pytest.mark.parametrize(
    ("first", "last", "printed"),
    [(0, 0, 2.574), (500, 1000, 2.566), (100, 500, 2.150), (10, 100, 0.983), (2, 10, 0.379)],
)
def test_the_toy_gives_its_printed_errors(toy, first, last, printed):
    found = toy.rmse(truth_at=range(first - 1, last))
    assert found == pytest.approx(printed, abs=5e-4)
    assert found == pytest.approx(plain_rmse(first, last), abs=1e-12)


@pytest.mark.parametrize(("first", "last"), [(1, 500), (1, 10), (1, 1)])
def test_truth_at_the_last_step_is_the_truth_whatever_the_model(toy, first, last):
    assert toy.rmse(truth_at=range(first - 1, last)) < 1e-12


def test_the_toy_forgets_where_it_began(toy):
    last = PATH.alphas_cumprod[-1].item()
    noised = math.sqrt(last) * toy.x0 + math.sqrt(1.0 - last) * toy.start
    assert toy.rmse(start=noised) == pytest.approx(2.574, abs=5e-4)


def test_errors_are_carried_by_the_product_of_the_coefficients(toy):
    """With a linear model, an error at index k comes out as c_x0(k) times the gains of the steps below."""

    def change(at: range, truth) -> torch.Tensor:
        ends = [
            ancestral_chain(
                PATH, toy.predict, toy.x0, toy.start, toy.noise.__getitem__, range(1000), truth_at=truth,
                error=torch.tensor(size, dtype=torch.float64), error_at=at,
            )
            for size in (1.0, 0.0)
        ]  # fmt: skip
        return ends[0] - ends[1]

    alpha_bar, wanted, gain = PATH.alphas_cumprod, 0.0, 1.0
    for index in range(100):  # from data upwards
        if index >= 10:
            wanted += gain * PATH.posterior_x0[index].item()
        a2 = alpha_bar[index].item()
        optimal = math.sqrt(a2) * VARIANCE / (a2 * VARIANCE + 1 - a2)
        gain *= PATH.posterior_x0[index].item() * optimal + PATH.posterior_x_t[index].item()
    found = change(range(10, 100), ())
    assert found.min().item() == pytest.approx(wanted, abs=1e-10) == found.max().item()
    # With the truth elsewhere the last step hides everything, or is the error itself.
    assert change(range(10, 100), range(1000)).abs().max() < 1e-12
    assert (change(range(100), range(1000)) - 1.0).abs().max() < 1e-12


def test_the_model_is_not_asked_where_the_truth_stands(toy):
    asked = []
    ancestral_chain(
        PATH, lambda x, index: asked.append(index) or x, toy.x0, toy.start, lambda index: toy.start, [0, 3, 7, 20],
        truth_at={3, 20},
    )  # fmt: skip
    assert asked == [7, 0]


def test_posterior_is_that_of_the_path_and_composes():
    for index in (1, 2, 15, 500, 999):
        wanted = (PATH.posterior_x0[index], PATH.posterior_x_t[index], PATH.posterior_variance[index])
        assert posterior(PATH, index, index - 1) == pytest.approx([value.item() for value in wanted], rel=1e-12)
    assert posterior(PATH, 0, None) == posterior(PATH, 700, None) == (1.0, 0.0, 0.0)
    # Of x_700 = a x0 + b noise comes x_300 with the marginal's mean and variance.
    of_x0, of_x, variance = posterior(PATH, 700, 300)
    now, then = PATH.alphas_cumprod[700].item(), PATH.alphas_cumprod[300].item()
    assert of_x0 + of_x * math.sqrt(now) == pytest.approx(math.sqrt(then), rel=1e-12)
    assert of_x**2 * (1 - now) + variance == pytest.approx(1 - then, rel=1e-12)


@pytest.mark.parametrize("steps", [2, 3, 37, 100, 999, 1000])
def test_visited_indices_rise_from_data_to_noise(steps):
    indices = visited_indices(1000, steps)
    assert len(indices) == steps and indices[0] == 0 and indices[-1] == 999
    assert all(low < high for low, high in itertools.pairwise(indices))


def test_bad_chains_are_refused(toy):
    for indices in ([], [3, 3], [5, 2], [0, 1000], [-1, 4]):
        with pytest.raises(ValueError, match="rise within 0 to 999"):
            ancestral_chain(PATH, toy.predict, toy.x0, toy.start, toy.noise.__getitem__, indices)
    with pytest.raises(ValueError, match="no error to add"):
        ancestral_chain(PATH, toy.predict, toy.x0, toy.start, toy.noise.__getitem__, [0], error_at=[0])
    for steps in (1, 1001):
        with pytest.raises(ValueError, match="give 2 to 1000"):
            visited_indices(1000, steps)
