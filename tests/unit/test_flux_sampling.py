"""Sampling of Flux: published times, Euler's steps along the velocity, and noise that does not depend on the device."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.objectives import schedule, solver
from torchtitan import philox
from torchtitan.conditions import POOLED, TEXT, Embeddings
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.solvers import flux_log_shift
from torchtitan.evaluation.config import SamplingConfig, sampling_problems
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.models.flux.config import FLAVORS
from torchtitan.models.flux.model import Flux

DEBUG, IMAGE = FLAVORS["debug"], (3, 8, 12)


def tiny() -> Flux:
    """A Flux whose prediction is not zero, as that of a new one is."""
    kind = Embeddings({TEXT: torch.zeros(5, DEBUG.text_dim), POOLED: torch.zeros(DEBUG.pooled_dim)})
    model = Flux(DEBUG, IMAGE, kind)
    torch.manual_seed(3)
    model.init_weights()
    torch.nn.init.normal_(model.output.linear.weight, std=0.1)
    return model.eval()


def sampler(model: Flux, device: str = "cpu") -> ImageSampler:
    return ImageSampler(model, build_objective(DenoisingConfig(), seed=0), "float32", torch.device(device))


def flux_times(num_steps: int, tokens: int) -> Tensor:
    return schedule("flux_shift").times(PATHS["rectified_flow"](), num_steps, lambda: tokens)


@pytest.mark.parametrize(("pixels", "mu"), [(256, 0.5), (512, 0.63), (768, 0.846667), (1024, 1.15)])
def test_the_shift_is_the_published_one(pixels, mu):
    assert flux_log_shift((pixels // 16) ** 2) == pytest.approx(mu, abs=5e-7)


def test_times_are_the_published_ones():
    assert flux_times(4, 4096).tolist() == pytest.approx([1, 0.904531, 0.759511, 0.512844, 0], abs=5e-7)
    unshifted = schedule("uniform").times(PATHS["rectified_flow"](), 4, lambda: 4096)
    assert unshifted.tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_times_are_the_published_formula_at_any_number_of_tokens():
    for tokens in (24, 256, 3000, 16384):
        mu = torch.tensor(0.5 + (tokens - 256) * 0.65 / 3840, dtype=torch.float64)
        t = torch.linspace(1, 0, 51, dtype=torch.float64)[:-1]
        torch.testing.assert_close(flux_times(50, tokens)[:-1], mu.exp() / (mu.exp() + 1 / t - 1), rtol=1e-13, atol=0)
        assert flux_times(50, tokens)[-1] == 0


@pytest.mark.parametrize("name", ["uniform", "flux_shift"])
def test_a_sample_is_euler_s_steps_along_the_network_s_velocity(name):
    model, numbers = tiny(), torch.arange(2)
    found = sampler(model).draw(
        torch.zeros(2, dtype=torch.int64), 7, solver=solver("euler"), schedule=schedule(name), num_steps=4,
        guidance=Guidance(), state_dtype="float64", batch_size=2,
    )  # fmt: skip
    times = [1, 0.75, 0.5, 0.25, 0] if name == "uniform" else flux_times(4, 4 * 6).tolist()
    x = philox.normal(7, "sampling", numbers, IMAGE).double()
    condition = model.condition_kind.choose(numbers)
    with torch.no_grad():
        for now, then in pairwise(times):
            x = x + (then - now) * model(x.float(), torch.full((2,), 1000.0 * now), condition).double()
    assert (x - philox.normal(7, "sampling", numbers, IMAGE)).std() > 0.1
    torch.testing.assert_close(found, x.float(), rtol=1e-5, atol=1e-6)


def test_edm_heun_is_refused_where_the_first_sigma_is_infinite():
    config = SamplingConfig(solver=solver("edm_heun"), schedule=schedule("flux_shift"))
    ((key, text),) = sampling_problems(config, "rectified_flow", False)
    assert key == "solver.name" and "needs a finite sigma" in text


@pytest.mark.parametrize("name", ["euler", "euler_maruyama"])
def test_noise_is_drawn_on_the_cpu_whatever_the_device(name, monkeypatch):
    drawn_on, normal = [], philox.normal

    def recorded(seed: int, purpose: str, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
        drawn_on.append(numbers.device.type)
        return normal(seed, purpose, numbers, shape)

    monkeypatch.setattr(philox, "normal", recorded)
    model = tiny().to("meta")
    method = {"solver": solver(name), "schedule": schedule("flux_shift"), "num_steps": 3, "guidance": Guidance()}
    with sampler(model, "meta").drawing(0, **method) as draw:
        assert draw(torch.zeros(2, dtype=torch.int64), torch.arange(2)).device.type == "meta"
    assert drawn_on == ["cpu"] * (1 if name == "euler" else 3)
