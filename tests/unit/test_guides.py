"""Guidance by other networks, its interval in sigma, clipped estimates and a float64 state, against closed forms."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.objectives import combine, schedule, solver, timesteps
from torchtitan import philox
from torchtitan.conditions import Classes, Condition, Unconditional
from torchtitan.config.job import JobConfig
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, Guide, predictor
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.predictions import target
from torchtitan.evaluation.config import SamplingConfig
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.sampling.guides import guide_problem, open_guide, read_reference
from torchtitan.weights.trained_model import WeightsError

KIND, SHAPE = Classes(3), (4, 2, 2)
EDM = {"path": "edm", "preconditioning": "edm", "timesteps": timesteps("lognormal_sigma")}


class GaussianNetwork:
    """Best network for data N(mean of the class, deviation^2), as it is called by an objective."""

    def __init__(self, objective: Objective, deviation: float, means: tuple[float, ...] = (0.0,) * 4) -> None:
        self.objective, self.deviation, self.means = objective, deviation, torch.tensor(means, dtype=torch.float64)
        self.t = torch.tensor(0.0)
        self.calls: list[tuple[int, Condition]] = []

    def x0(self, x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        a, b = (per_image(c, x_t) for c in self.objective.path.coefficients(t))
        classes = torch.full((len(x_t),), 3) if condition is None else condition
        mean = per_image(self.means[classes], x_t)
        return mean + a * self.deviation**2 / ((a * self.deviation) ** 2 + b**2) * (x_t - a * mean)

    def __call__(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        assert x.dtype == time.dtype == torch.float32
        self.calls.append((len(x), condition))
        t = self.t.expand(len(x))
        scaling = self.objective.preconditioning.scaling(t.double())
        a, b = (per_image(c, x) for c in self.objective.path.coefficients(t.double()))
        x_t = x.double() / per_image(scaling.c_in, x)
        x0 = self.x0(x_t, t.double(), condition)
        wanted = target(self.objective.prediction, x0, (x_t - a * x0) / b, a, b, self.objective.sigma_data)
        return ((wanted - per_image(scaling.c_skip, x) * x_t) / per_image(scaling.c_out, x)).float()


def objective_of(**keys) -> Objective:
    return build_objective(DenoisingConfig(**keys), seed=0)


def noisy(t: float, path_name: str = "rectified_flow") -> tuple[Tensor, Tensor]:
    return philox.normal(0, "sampling", torch.arange(3), SHAPE), torch.full((3,), t)


@pytest.mark.parametrize("scale", [0.0, 0.5, 2.5])
@pytest.mark.parametrize("t", [0.1, 0.6])
@pytest.mark.parametrize(
    "keys",
    [{}, {"prediction": "x0"}, {"prediction": "edm", "preconditioning": "edm"}, {"prediction": "v", "preconditioning": "sit"}],
    ids=lambda keys: keys.get("prediction", "velocity"),
)
def test_estimates_of_networks_of_any_prediction_are_combined(scale, t, keys):
    objectives = [objective_of(), objective_of(**keys)]
    networks = [GaussianNetwork(each, deviation) for each, deviation in zip(objectives, (0.5, 1.3), strict=True)]
    x_t, time = noisy(t)
    for network in networks:
        network.t = time[0]
    classes = torch.tensor([0, 2, 1])
    guide = Guide(networks[1], objectives[1], conditional=True)
    found = predictor(objectives[0], networks[0], KIND, classes, Guidance(scale), guide)(x_t, time)
    own, reference = (network.x0(x_t.double(), time.double(), classes) for network in networks)
    wanted = scale * own + (1 - scale) * reference
    torch.testing.assert_close(found.x0.double(), wanted, rtol=0, atol=5e-6)
    torch.testing.assert_close(found.noise.double(), (x_t - (1 - t) * wanted) / t, rtol=0, atol=5e-6 / t)
    assert [len(network.calls) for network in networks] == [1, 1]
    assert all(torch.equal(network.calls[0][1], classes) and network.calls[0][0] == 3 for network in networks)


def test_a_network_without_conditions_guides_one_with_them_and_one_without_any_null_class():
    objective = objective_of()
    conditional = GaussianNetwork(objective, 0.4, (-1.0, 0.0, 1.0, 99.0))
    unconditional = GaussianNetwork(objective, 0.9)
    x_t, time = noisy(0.5)
    conditional.t = unconditional.t = time[0]
    classes = torch.tensor([0, 2, 1])
    guide = Guide(unconditional, objective, conditional=False)
    found = predictor(objective, conditional, KIND, classes, Guidance(2.0), guide)(x_t, time)
    assert unconditional.calls == [(3, None)]
    own = conditional.x0(x_t.double(), time.double(), classes)
    reference = unconditional.x0(x_t.double(), time.double(), None)
    torch.testing.assert_close(found.x0.double(), 2 * own - reference, rtol=0, atol=5e-6)
    # Autoguidance of a network without conditions.
    other = GaussianNetwork(objective, 0.6)
    other.t = time[0]
    guide = Guide(other, objective, conditional=False)
    found = predictor(objective, unconditional, Unconditional(), None, Guidance(3.0), guide)(x_t, time)
    wanted = 3 * reference - 2 * other.x0(x_t.double(), time.double(), None)
    torch.testing.assert_close(found.x0.double(), wanted, rtol=0, atol=5e-6)


def test_the_guide_is_called_within_the_interval_and_at_other_scales_than_one_only():
    objective = objective_of()
    own, weak = GaussianNetwork(objective, 0.5), GaussianNetwork(objective, 1.0)
    guide = Guide(weak, objective, conditional=True)
    classes = torch.tensor([0, 2, 1])
    for guidance, calls in ((Guidance(2.0, (0.3, 0.6)), 0), (Guidance(1.0), 0), (Guidance(2.0, (0.3, 0.8)), 1)):
        x_t, time = noisy(0.7)
        own.t = weak.t = time[0]
        weak.calls.clear()
        found = predictor(objective, own, KIND, classes, guidance, guide)(x_t, time)
        assert len(weak.calls) == calls
        plain = predictor(objective, own, KIND, classes, Guidance())(x_t, time)
        assert torch.equal(found.x0, plain.x0) == (calls == 0)


def test_channels_and_a_learned_variance_without_guidance_are_the_guided_network_s_own():
    objective = objective_of(path="ddpm_linear", prediction="noise", preconditioning="index", timesteps=timesteps("uniform"))

    def two_halves(shift):
        return lambda x, time, condition: torch.cat((x + shift, x.sin()), dim=1)

    x_t = noisy(0.0)[0]
    t = objective.path.index_to_t(torch.full((3,), 400)).float()
    guide = Guide(two_halves(0.5), objective, conditional=True)
    classes = torch.tensor([0, 2, 1])
    guidance = Guidance(2.0, channels="first_three")
    found = predictor(objective, two_halves(0.0), KIND, classes, guidance, guide)(x_t, t)
    plain = predictor(objective, two_halves(0.0), KIND, classes, Guidance())(x_t, t)
    assert torch.equal(found.noise[:, 3:], plain.noise[:, 3:]) and torch.equal(found.x0[:, 3:], plain.x0[:, 3:])
    torch.testing.assert_close(found.noise[:, :3], x_t[:, :3] - 0.5, rtol=0, atol=1e-6)
    assert torch.equal(found.variance_fraction, plain.variance_fraction)


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_every_head_of_a_network_is_guided(scale):
    config = DenoisingConfig(heads=["x0", "v"], combine=combine("snr_handover", snr=[1.0]))
    objective = build_objective(config, seed=0)

    def network(x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        return torch.cat((x.sin(), x.cos()), dim=1) * (1 + condition.reshape(-1, 1, 1, 1))

    classes = torch.tensor([0, 2, 1])
    for t in (0.2, 0.8):  # one head counts at either
        x_t, time = noisy(t)
        found = predictor(objective, network, KIND, classes, Guidance(scale))(x_t, time)
        own, null = (objective.predict(network, x_t, time, each) for each in (classes, torch.full_like(classes, 3)))
        for values, one, other in zip(found, own, null, strict=False):
            torch.testing.assert_close(values, other + scale * (one - other), rtol=0, atol=5e-6)


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_guidance_by_the_null_condition_is_bit_equal_to_the_combined_output_of_one_forward(scale):
    objective = objective_of(prediction="edm", **EDM)

    def network(x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        return torch.tanh(x * (0.3 + condition.reshape(-1, 1, 1, 1))) + time.reshape(-1, 1, 1, 1)

    def combined(x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        both = torch.cat((condition, torch.full_like(condition, 3)))
        c, u = network(torch.cat((x, x)), torch.cat((time, time)), both).chunk(2)
        return u + scale * (c - u)

    x_t, time = noisy(0.7)
    classes = torch.tensor([0, 2, 1])
    found = predictor(objective, network, KIND, classes, Guidance(scale))(x_t, time)
    wanted = objective.predict(combined, x_t, time, classes)
    assert torch.equal(found.x0, wanted[0]) and torch.equal(found.noise, wanted[1])


class EDMZero(torch.nn.Module):
    """Network whose output is 0 of float32 inputs: with EDM's preconditioning D = sigma_data^2 / (sigma^2 + sigma_data^2) x.
    """

    image_shape, condition_kind = (1, 2, 2), Unconditional()

    def forward(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        assert x.dtype == time.dtype == torch.float32
        return torch.zeros_like(x)


def sampled(steps: int, sigma_data: float = 0.5, **options) -> tuple[Tensor, Tensor]:
    """Starting noise, and images of EDM's sampler for data N(0, sigma_data^2)."""
    objective = objective_of(prediction="x0", sigma_data=sigma_data, **EDM)
    method = SamplingConfig(solver=solver("edm_heun"), schedule=schedule("edm"), num_steps=steps, **options).method()
    sampler = ImageSampler(EDMZero(), objective, "float32", torch.device("cpu"))
    images = sampler.draw(torch.zeros(5, dtype=torch.long), 3, batch_size=5, **method)
    return philox.normal(3, "sampling", torch.arange(5), (1, 2, 2)), images


@pytest.mark.parametrize(("steps", "deviation"), [(18, 0.527625), (32, 0.507838)])
def test_a_float64_state_gives_the_golden_deviations_with_a_float32_network(steps, deviation):
    noise, images = sampled(steps, state_dtype="float64")
    torch.testing.assert_close(images / noise, torch.full_like(noise, deviation), rtol=2e-6, atol=0)
    rounded = sampled(steps)[1]
    assert not torch.equal(rounded, images)
    torch.testing.assert_close(rounded, images, rtol=1e-5, atol=0)


def test_clipped_estimates_are_the_estimates_within_the_limits_and_the_noise_follows():
    objective = objective_of(prediction="x0", **EDM)

    def network(x, time, condition):
        return 3 * x

    x_t, time = noisy(0.5)
    found = predictor(objective, network, KIND, None, Guidance(), clip_x0=True)(x_t, time)
    plain = predictor(objective, network, KIND, None, Guidance())(x_t, time)
    assert plain.x0.abs().max() > 1
    assert torch.equal(found.x0, plain.x0.clamp(-1, 1))
    torch.testing.assert_close(found.x0 + found.noise, x_t, rtol=1e-6, atol=1e-6)  # sigma is 1
    assert sampled(18, sigma_data=3.0)[1].abs().max() > 2
    assert sampled(18, sigma_data=3.0, clip_x0=True)[1].abs().max() <= 1.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("runs/a@500:long", (Path("runs/a"), 500, "long")), ("runs/a:long", (Path("runs/a"), None, "long")),
        ("runs/a@500", (Path("runs/a"), 500, None)), ("@7", (None, 7, None)), (":none", (None, None, "none")),
        ("runs/a", (Path("runs/a"), None, None)), ("a@b:c@5", (Path("a@b:c"), 5, None)),
    ],
)  # fmt: skip
def test_references_to_guides(text, wanted):
    reference = read_reference(text)
    assert (reference.source, reference.step, reference.track) == wanted


def test_an_existing_path_is_taken_as_it_is_and_nothing_is_no_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run@5:long").mkdir()
    assert read_reference("run@5:long").source == Path("run@5:long")
    with pytest.raises(WeightsError, match="names no weights"):
        read_reference("")


@pytest.mark.parametrize(("text", "advice"), [
    ("path-drop", " (did you mean path_drop?)"), ("heads", " (did you mean head?)"), ("outputs/no-run", ""),
])  # fmt: skip
def test_a_guide_that_is_not_there_may_be_a_misspelt_name(text, advice):
    with pytest.raises(WeightsError) as refusal:
        open_guide(text, Path("run"), None, trained(), 2.0, torch.device("cpu"))
    assert str(refusal.value) == f"--guide: {text}: no such run folder or weights file{advice}"


def trained(shape=SHAPE, kind=KIND, path="rectified_flow", noise_std=1.0) -> SimpleNamespace:
    config = JobConfig()
    config.objective.path, config.objective.noise_std = path, noise_std
    model = SimpleNamespace(image_shape=shape, condition_kind=kind)
    return SimpleNamespace(config=config, model=model, record=SimpleNamespace(latents=None))


def test_guides_that_cannot_guide_are_refused_with_the_reason():
    named = Classes(3, ("cat", "dog", "cow"))
    problems = {
        "is trained on images [3, 2, 2], the sampled model on [4, 2, 2]": (trained(), trained(shape=(3, 2, 2))),
        "is trained on objective.path = edm, the sampled model on rectified_flow": (trained(), trained(path="edm")),
        "is trained on objective.noise_std = 1, the sampled model on 2": (trained(noise_std=2.0), trained()),
        "has 4 classes, the sampled model 3": (trained(), trained(kind=Classes(4))),
        "names 'ox' what the sampled model names 'cow'": (
            trained(kind=named), trained(kind=Classes(3, ("cat", "dog", "ox")))
        ),
        "takes a class, the sampled model no condition": (trained(kind=Unconditional()), trained()),
    }  # fmt: skip
    for line, (one, guide) in problems.items():
        found = guide_problem(one, guide)
        assert found.startswith(line) and "\n" not in found and found.endswith(")")
    for one, guide in ((trained(), trained()), (trained(), trained(kind=Unconditional())), (trained(kind=named), trained())):
        assert guide_problem(one, guide) == ""


@pytest.mark.parametrize(("kind", "lacks"), [(Unconditional(), "without classes"), (KIND, "without a null class")])
def test_guidance_of_a_model_that_has_nothing_to_guide_by_is_refused_with_what_it_lacks(kind, lacks):
    config = JobConfig()
    config.model.label_dropout = 0.0
    sampled = SimpleNamespace(config=config, model=SimpleNamespace(condition_kind=kind))
    with pytest.raises(WeightsError, match=rf"^--guidance-scale: the model was trained {lacks} \(leave it at 1"):
        open_guide(None, Path("run"), None, sampled, 2.0, torch.device("cpu"))
    assert open_guide(None, Path("run"), None, sampled, 1.0, torch.device("cpu")) is None
