"""Optimal loss over a finite set and excess over it: against brute force, quadrature and networks known in closed form."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.configurations import problems
from tests.latent_stores import SHAPE as LATENT
from tests.latent_stores import plan_of, write_store
from tests.memory_images import COUNT, CPU, SHAPE, Memory, draws_of, training_set
from tests.objectives import timesteps, weighting
from torchtitan.conditions import Classes, Embeddings
from torchtitan.data.base import DatasetError, DatasetInfo, Draws
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Draw
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.posterior_mean import EVERY, Posterior, PosteriorSums
from torchtitan.diffusion.predictions import PREDICTIONS
from torchtitan.evaluation import optimal_draws as module
from torchtitan.evaluation.config import ValidationConfig, excess_problems
from torchtitan.evaluation.excess_loss import excess_loss, optimal_prediction
from torchtitan.evaluation.optimal_draws import OptimalDraws, TrainingSet
from torchtitan.latents import Normalization


def brute_force(x_t, a, b, points):
    """Weights [N], by direct differences in float64, of points [N, D] given one noisy image [D]."""
    logs = -((x_t - a * points) ** 2).sum(1) / (2 * b * b)
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


# --- the posterior mean


@pytest.mark.parametrize("path", ["rectified_flow", "edm", "ddpm_linear"])
def test_optimal_loss_equals_brute_force_in_every_prediction(path):
    """64 images in pieces of 7, at noise levels from 0.02 to 20; every third noisy image may come from all of them."""
    images = training_set().dataset.images.flatten(1).double()
    labels = torch.arange(COUNT) % 3
    generator = torch.Generator().manual_seed(0)
    sigma = torch.logspace(-1.7, 1.3, 20, dtype=torch.float64)
    own = torch.randint(COUNT, (20,), generator=generator)
    groups = torch.where(torch.arange(20) % 3 == 0, EVERY, labels[own])
    noise = torch.randn(20, *SHAPE, generator=generator)
    prediction = "v" if path == "ddpm_linear" else "velocity"
    objective = build_objective(DenoisingConfig(path=path, prediction=prediction, timesteps=timesteps("uniform")), seed=0)
    t = objective.path.sigma_to_t(sigma).float()
    a, b = objective.path.coefficients(t.double())
    x_t = a[:, None] * images[own] + b[:, None] * noise.flatten(1).double()
    sums = PosteriorSums(x_t, a, b, groups)
    for part in torch.arange(COUNT).split(7):
        sums.add(images[part], labels[part])
    posterior = sums.posterior()
    kept = Posterior(posterior.mean.view(20, *SHAPE), posterior.variance)
    draws = OptimalDraws({"images": images[own].float().view(20, *SHAPE)}, Draw(t, noise, torch.ones(20)), kept)
    optimal = {}
    for objective.prediction in PREDICTIONS:
        optimal[objective.prediction] = optimal_prediction(objective, draws)
    for k in range(20):
        among = (images if groups[k] == EVERY else images[labels == groups[k]]).numpy()
        weights = brute_force(x_t[k].numpy(), a[k].item(), b[k].item(), among)
        for name, (found, least) in optimal.items():
            p, q = (c.item() for c in PREDICTIONS[name](a[k], b[k], objective.sigma_data))
            targets = p * among + q * (x_t[k].numpy() - a[k].item() * among) / b[k].item()
            wanted = weights @ targets
            np.testing.assert_allclose(found[k].flatten(), wanted, rtol=1e-10, atol=1e-10)
            assert least[k].item() == pytest.approx((weights @ (targets - wanted) ** 2).mean(), rel=1e-10, abs=1e-10)
    assert posterior.variance.min() < 1e-3 * posterior.variance.max()  # of levels that hide nothing, and that hide much


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 0.5), (0.7, 0.3), (0.9, 0.0)], ids=["normal", "mixture", "points"])
def test_optimal_loss_of_normal_data_and_mixtures_equals_the_integral(mean, deviation):
    """Data N(+-m, s^2), half each, a single normal distribution at m = 0, at seven noise levels.

    With v = a^2 s^2 + b^2 and r = a^2 m^2 / v the least squared error is s^2 b^2 / v + (b^2 m / v)^2 (1 - I(r)), where I(r) is
    the integral of tanh(r + sqrt(r) z) over standard normal z. The trapezoidal rule of 400 steps over +-9 is exact to 1e-15.
    """
    z = torch.linspace(-9, 9, 401, dtype=torch.float64)
    density = torch.exp(-0.5 * z**2) / (2 * np.pi) ** 0.5 * (z[1] - z[0])
    for sigma in (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 80.0):
        a, b = 1 / (1 + sigma), sigma / (1 + sigma)
        v = (a * deviation) ** 2 + b**2
        sums = PosteriorSums(
            (a * mean + v**0.5 * z)[:, None], torch.full_like(z, a), torch.full_like(z, b), torch.full((401,), EVERY)
        )
        for value in (mean, -mean):
            points = torch.full((1, 1), value, dtype=torch.float64)
            sums.add(points, None, torch.full_like(points, deviation) if deviation else None)
        ratio = (a * mean) ** 2 / v
        known = (density * torch.tanh(ratio + ratio**0.5 * z)).sum()
        wanted = (deviation * b) ** 2 / v + (b**2 * mean / v) ** 2 * (1 - known)
        found = (density * sums.posterior().variance).sum()
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6, abs=1e-9)


def test_deviations_of_each_element_equal_a_sum_over_their_points():
    """Images of independent normal elements, each replaced by 9 Gauss-Hermite points: 81 images of two elements for one."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(9)
    generator = torch.Generator().manual_seed(5)
    means = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    deviations = 0.2 + 0.3 * torch.rand(3, 2, generator=generator, dtype=torch.float64)
    x_t = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    a, b = torch.full((5,), 0.6, dtype=torch.float64), torch.linspace(0.8, 3.0, 5, dtype=torch.float64)
    sums = PosteriorSums(x_t, a, b, torch.full((5,), EVERY))
    sums.add(means[:2], None, deviations[:2])
    sums.add(means[2:], None, deviations[2:])
    grid = np.array([(u, v) for u in nodes for v in nodes])
    shares = np.array([u * v for u in weights for v in weights])
    points = np.concatenate([m + s * grid for m, s in zip(means.numpy(), deviations.numpy(), strict=True)])
    posterior = sums.posterior()
    for k in range(5):
        likely = np.tile(shares, 3) * brute_force(x_t[k].numpy(), a[k].item(), b[k].item(), points)
        likely /= likely.sum()
        wanted = likely @ points
        np.testing.assert_allclose(posterior.mean[k], wanted, rtol=1e-6)
        assert posterior.variance[k].item() == pytest.approx((likely @ (points - wanted) ** 2).mean(), rel=1e-6)


# --- draws of a training set


@pytest.mark.parametrize("flip", [False, True], ids=["plain", "mirrored"])
@pytest.mark.parametrize("classes", [True, False], ids=["classes", "no_classes"])
def test_posterior_is_over_the_images_of_the_class_and_their_mirror_images(tmp_path, flip, classes):
    which = training_set(flip, classes)
    found = draws_of(which, tmp_path)
    images, labels = which.dataset.images, which.dataset.labels
    everything = torch.cat((images, images.flip(-1))) if flip else images
    label_of = torch.cat((labels, labels)) if flip else labels
    mirrored = 0
    for k in range(len(found)):
        x0, t = found.batch["images"][k], found.draw.t[k].double().item()
        place = int((everything - x0).flatten(1).abs().sum(1).argmin())
        assert torch.equal(everything[place], x0)
        mirrored += place >= COUNT
        among = everything[label_of == label_of[place]] if classes else everything
        x_t = ((1 - t) * x0.double() + t * found.draw.noise[k].double()).flatten().numpy()
        points = among.flatten(1).double().numpy()
        weights = brute_force(x_t, 1 - t, t, points)
        np.testing.assert_allclose(found.posterior.mean[k].flatten(), weights @ points, rtol=1e-5, atol=1e-7)
        variance = (weights @ (points - weights @ points) ** 2).mean()
        assert found.posterior.variance[k].item() == pytest.approx(variance, rel=1e-9, abs=1e-12)
    assert (10 < mirrored < 30) if flip else not mirrored
    assert len(found.batch["images"].flatten(1).unique(dim=0)) == len(found)  # no image twice


def test_posterior_is_kept_for_a_set_of_the_same_content_alone(tmp_path, monkeypatch):
    first = draws_of(training_set(), tmp_path)
    monkeypatch.setattr(module, "PosteriorSums", None)  # nothing may be computed anew
    again = draws_of(training_set(), tmp_path, build_objective(DenoisingConfig(prediction="x0"), seed=7))
    assert torch.equal(again.posterior.mean, first.posterior.mean) and len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    drawn = first.batch["images"].flatten(1)
    changed = training_set()
    images = changed.dataset.images
    other = next(n for n in range(COUNT) if not (drawn == images[n].flatten()).all(1).any())
    images[other] += 0.05
    found = draws_of(changed, tmp_path)
    assert torch.equal(found.batch["images"], first.batch["images"])
    assert not torch.equal(found.posterior.mean, first.posterior.mean)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"damaged")
    assert torch.equal(draws_of(changed, tmp_path).posterior.mean, found.posterior.mean)


def test_unreadable_image_is_the_next_one_as_in_training(tmp_path):
    torn, copied = training_set(), training_set()
    torn.dataset.unreadable = (5,)
    for values in (copied.dataset.images, copied.dataset.labels):
        values[5] = values[6]
    found, wanted = draws_of(torn, tmp_path / "a"), draws_of(copied, tmp_path / "b")
    assert torch.equal(found.posterior.mean, wanted.posterior.mean)


def test_forms_of_latents_are_what_training_draws(tmp_path):
    normalization = Normalization(shift=[1.0, 0.5, 0.0, -1.0], scale=[0.5, 0.25, 2.0, 1.0], source="given")
    write_store(tmp_path, plan_of(normalization=normalization))
    dataset, indices = Latents(LatentsConfig(path=str(tmp_path)), "train"), np.array([3, 0, 7])
    forms = dataset.training_forms(indices)
    assert len(forms) == 2
    draws = Draws(0, torch.tensor([10, 11, 12]))
    drawn = dataset.fetch_drawn(indices, draws)
    views, noise = (draws.uniform("horizontal_flip") < 0.5).long(), draws.normal("posterior", LATENT)
    for k in range(3):
        form = forms[int(views[k])]
        assert drawn["class"][k] == form.batch["class"][k]
        torch.testing.assert_close(drawn["images"][k], form.batch["images"][k] + form.deviations[k] * noise[k])
    plain = Latents(LatentsConfig(path=str(tmp_path), sample_posterior=False, mirror=False), "train")
    (form,) = plain.training_forms(indices)
    assert form.deviations is None and torch.equal(form.batch["images"], plain.fetch(indices)["images"])


def test_a_set_that_is_drawn_in_another_way_is_refused(tmp_path):
    which = training_set()

    class Cropped(Memory):
        def fetch_drawn(self, indices, draws):
            return self.fetch(indices)

    with pytest.raises(DatasetError, match="data.name = memory: draws its images at random"):
        draws_of(TrainingSet(Cropped(), which.info, which.config, which.kind), tmp_path)


# --- excess over it


class Optimal(nn.Module):
    """Network of the optimal prediction plus a constant, computed from the noisy image and its class alone."""

    image_shape = SHAPE

    def __init__(self, prediction: str, offset: float) -> None:
        super().__init__()
        self.condition_kind = Classes(3)
        self.prediction, self.offset = prediction, offset
        self.set = Memory()

    def forward(self, x, time, condition):
        outputs = []
        for x_t, t, label in zip(x, time.double() / 1000, condition, strict=True):
            points = self.set.images[self.set.labels == label].flatten(1).double().numpy()
            a, b = 1 - t.item(), t.item()
            x_t = x_t.flatten().double().numpy()
            weights = brute_force(x_t, a, b, points)
            p, q = (c.item() for c in PREDICTIONS[self.prediction](1 - t, t, 0.5))
            mean = weights @ points
            outputs.append(p * mean + q * (x_t - a * mean) / b + self.offset)
        return torch.from_numpy(np.stack(outputs)).float().view(x.shape)


def excess_of(model, objective, found: OptimalDraws, batch_size=16, times=()) -> dict[str, float]:
    return excess_loss(
        model, objective, found, batch_size=batch_size, rank=0, world_size=1, bin_edges=torch.tensor([0.3, 0.5, 0.7]),
        param_dtype="float32", device=CPU, sharded=False, timesteps=times,
    )


@pytest.mark.parametrize("prediction", ["velocity", "x0", "edm"])
@pytest.mark.parametrize("batch_size", [16, 100])
def test_excess_of_the_optimal_network_is_the_square_of_what_is_added_to_it(tmp_path, prediction, batch_size):
    objective = build_objective(DenoisingConfig(prediction=prediction), seed=0)
    objective.weighting = lambda sigma: 2 + 0 * sigma
    found = draws_of(training_set(), tmp_path, objective, count=64)
    metrics = excess_of(Optimal(prediction, 0.1), objective, found, batch_size)
    assert metrics["excess_loss"] == pytest.approx(0.02, rel=1e-4)
    for k in range(4):
        assert metrics[f"excess_loss_by_bin/{k}"] == pytest.approx(0.01, rel=1e-4)
    exact = excess_of(Optimal(prediction, 0.0), objective, found)
    assert exact["excess_loss"] < 1e-9
    # The loss of the optimal network is the optimal loss in expectation; the deviation of their difference is below the sum.
    spread = exact["training_loss_stderr"] + exact["optimal_loss_stderr"]
    assert abs(exact["training_loss"] - exact["optimal_loss"]) < 3 * spread
    assert exact["optimal_loss"] > 4 * spread


def test_at_given_times_a_clean_image_tells_nothing_of_its_noise(tmp_path):
    objective = build_objective(DenoisingConfig(), seed=0)
    found = draws_of(training_set(), tmp_path, objective, count=60, times=(0.0, 0.5, 1.0))
    best, least = optimal_prediction(objective, found)
    for k in range(0, 60, 3):
        torch.testing.assert_close(best[k], -found.batch["images"][k].double())
        assert least[k] == 1
    label = found.batch["class"][2]
    among = training_set().dataset.images[training_set().dataset.labels == label].double()
    torch.testing.assert_close(best[2], found.draw.noise[2].double() - among.mean(0))  # at t = 1 nothing of the image is seen
    assert least[2].item() == pytest.approx(among.var(0, unbiased=False).mean().item())

    class Zero(nn.Module):
        condition_kind = Classes(3)

        def forward(self, x, time, condition):
            return torch.zeros_like(x)

    metrics = excess_of(Zero(), objective, found, times=(0.0, 0.5, 1.0))
    for k in range(3):
        assert metrics[f"excess_loss_by_time/{k}"] == pytest.approx(best[k::3].square().mean().item())
        assert metrics[f"optimal_loss_by_time/{k}"] == pytest.approx(least[k::3].mean().item())


@pytest.mark.parametrize("name", ["min_snr", "edm"])
def test_whole_excess_is_weighted_as_the_loss_is(tmp_path, name):
    objective = build_objective(DenoisingConfig(weighting=weighting(name)), seed=0)
    found = draws_of(training_set(), tmp_path, objective)
    metrics = excess_of(Optimal("velocity", 0.1), objective, found)
    sigma = found.draw.t.double() / (1 - found.draw.t.double())
    assert metrics["excess_loss"] == pytest.approx((0.01 * objective.weighting(sigma)).mean().item(), rel=1e-3)


REFUSED = {
    "consistency": (
        "[objective]\nname = 'consistency'",
        "validation.excess_images: objective.name names no objective whose optimal loss is known (set it to 0, or use denoising)",
    ),
    "off": (
        "",
        "validation.excess_images: has no effect when validation.enable = false; remove it or set validation.enable = true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_excess_loss_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys, wanted = REFUSED[case]
    enabled = "" if case == "off" else "enable = true\n"
    assert problems(f"[validation]\n{enabled}excess_images = 8\n{keys}") == [f"run.toml: {wanted}"]


@pytest.mark.parametrize(
    ("info", "heads", "wanted"),
    [
        (DatasetInfo(SHAPE, Embeddings({})), False, "excess_images: a caption names its image"),
        (DatasetInfo(SHAPE, bucket_shapes=(SHAPE, SHAPE)), False, "excess_images: is of images of one shape, and these have 2"),
        (DatasetInfo(SHAPE), True, "timesteps: 0 has no combined prediction of objective.heads"),
        (DatasetInfo(SHAPE, Classes(3)), False, None),
    ],
)
def test_excess_loss_is_of_images_of_one_shape_without_captions(info, heads, wanted):
    config = ValidationConfig(enable=True, excess_images=8, timesteps=[0.0, 0.5])
    found = [f"{key}: {text}" for key, text in excess_problems(config, True, heads, info)]
    assert [line[: len(wanted or "")] for line in found] == ([wanted] if wanted else [])
