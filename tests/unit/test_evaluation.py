"""Validation and sampling: fixed triples, no dependence on the batch, and nothing of training disturbed."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.objectives import schedule, solver, timesteps
from torchtitan import philox
from torchtitan.conditions import Classes, ConditionKind, Unconditional
from torchtitan.data.image_folder import ImageFolderConfig
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance
from torchtitan.diffusion.objective import Draw, Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.solvers import uniform_times
from torchtitan.evaluation.config import EvaluationConfig, SamplingConfig
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices, grid_choices
from torchtitan.evaluation.validation import held_out_draw, validation_loss

SHAPE = (2, 3, 4)
CPU = torch.device("cpu")
OBJECTIVES = {
    "uniform": DenoisingConfig(timesteps=timesteps("uniform")),
    "logit-normal": DenoisingConfig(timesteps=timesteps("logit_normal", mean=-0.5, std=1.2)),
}

THREE_CLASSES = Classes(3)


class Toy(nn.Module):
    """Works on each image by itself; dropout and random numbers would be used in training only."""

    image_shape = SHAPE

    def __init__(self, kind: ConditionKind = THREE_CLASSES) -> None:
        super().__init__()
        self.condition_kind = kind
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(0.5)
        self.batch_sizes = []

    def forward(self, x, time, condition):
        assert not self.training
        self.batch_sizes.append(len(x))
        shift = time / 1000 + (0 if condition is None else 0.1 * condition)
        return self.dropout(torch.tanh(self.scale * x) + shift.reshape(-1, 1, 1, 1))


@pytest.fixture(params=[True, False], ids=["training", "evaluating"])
def undisturbed(request):
    """A model in either mode, of which mode and torch's random state must be the same afterwards."""
    model = Toy().train(request.param)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    yield model
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training is request.param and model.dropout.training is request.param
    assert model.scale.grad is None


# --- validation


@pytest.mark.parametrize("name", OBJECTIVES)
def test_held_out_timesteps_are_the_quantiles_one_per_image(name):
    objective, count = build_objective(OBJECTIVES[name], seed=1), 101
    draw = held_out_draw(objective, 1, torch.arange(count), count, SHAPE)
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    wanted = objective.timestep_sampler.density.quantile(middles).float()
    assert torch.equal(draw.t.sort().values, wanted)
    assert not torch.equal(draw.t, wanted) and abs(np.corrcoef(draw.t, np.arange(count))[0, 1]) < 0.4
    assert draw.noise.shape == (count, *SHAPE) and torch.equal(draw.importance, torch.ones(count))
    assert len(torch.unique(draw.noise)) > 0.999 * draw.noise.numel()


def test_held_out_draws_are_fixed_and_independent_of_the_batch():
    objective, indices = build_objective(DenoisingConfig(), seed=1), torch.arange(30)
    whole = held_out_draw(objective, 1, indices, 30, SHAPE)
    for part in (indices, *indices.split(7), indices.flip(0), indices[3:4]):
        found = held_out_draw(objective, 1, part, 30, SHAPE)
        assert torch.equal(found.t, whole.t[part]) and torch.equal(found.noise, whole.noise[part])
    other = held_out_draw(objective, 2, indices, 30, SHAPE)
    assert not torch.equal(other.t, whole.t) and not torch.equal(other.noise, whole.noise)


EIGHTHS = [k / 8 for k in range(8)]


@pytest.mark.parametrize("path", ["rectified_flow", "ddpm_linear", "ddpm_cosine_continuous"])
def test_given_timesteps_are_taken_in_turn_by_the_number_of_the_image(path):
    timesteps = EIGHTHS if path == "rectified_flow" else [0.02, 0.3, 0.9]
    prediction = "velocity" if path == "rectified_flow" else "noise"
    objective = build_objective(DenoisingConfig(path=path, prediction=prediction), seed=1)
    whole = held_out_draw(objective, 1, torch.arange(30), 30, SHAPE, timesteps)
    wanted = torch.tensor([timesteps[number % len(timesteps)] for number in range(30)])
    if path == "ddpm_linear":  # trained at 1000 times only: none is farther from its neighbour than this
        assert 0 < (whole.t - wanted).abs().max() < 0.005
        index = objective.path.t_to_index(whole.t)
        assert torch.equal(objective.path.index_to_t(index).float(), whole.t)
    else:
        assert torch.equal(whole.t, wanted)
    assert torch.equal(whole.noise, held_out_draw(objective, 1, torch.arange(30), 30, SHAPE).noise)
    for part in (*torch.arange(30).split(7), torch.tensor([29, 3])):
        found = held_out_draw(objective, 1, part, 30, SHAPE, timesteps)
        assert torch.equal(found.t, whole.t[part]) and torch.equal(found.noise, whole.noise[part])


@pytest.mark.parametrize("batch_size", [5, 40])
def test_validation_loss_by_given_timesteps_equals_direct_means(batch_size):
    """The images of t = 0 are clean, those of t near 1 nearly noise; MLPerf's eight times, 23 images."""
    model, objective, count = Toy(), build_objective(DenoisingConfig(), seed=0), 23
    model.eval()
    found = validate(model, objective, count, batch_size, torch.tensor([0.5]), timesteps=EIGHTHS)
    whole = next(held_out(count, count))
    noise = philox.normal(4, "validation", torch.arange(count) + 2**40, SHAPE).double().numpy()
    data, t = whole["images"].double().numpy(), np.arange(count) % 8 / 8
    time = t.reshape(-1, 1, 1, 1)
    output = np.tanh(0.7 * ((1 - time) * data + time * noise)) + time + 0.1 * whole["class"].numpy().reshape(-1, 1, 1, 1)
    error = ((output - (noise - data)) ** 2).mean((1, 2, 3))
    assert found == means_of({"": error} | {f"_by_time/{k}": error[t == k / 8] for k in range(8)})


def held_out(count: int, batch_size: int):
    """Batches as validation reads them: the last is filled up with weight 0."""
    images = philox.normal(9, "synthetic_data", torch.arange(count), SHAPE)
    labels = torch.arange(count) % 3
    for start in range(0, count, batch_size):
        numbers = torch.arange(start, start + batch_size)
        indices = numbers.clamp(max=count - 1)
        weights = (numbers < count).to(torch.float32)
        yield {"images": images[indices], "class": labels[indices], "indices": indices, "weights": weights}


def validate(model: Toy, objective: Objective, count: int, batch_size: int, edges: torch.Tensor, **more) -> dict[str, float]:
    return validation_loss(
        model, objective, held_out(count, batch_size),
        count=count, seed=4, bin_edges=edges, param_dtype="float32", device=CPU, sharded=False, **more,
    )


def means_of(groups: dict[str, np.ndarray]):
    wanted = {f"loss{name}": values.mean() for name, values in groups.items()}
    wanted |= {f"loss_stderr{name}": values.std(ddof=1) / np.sqrt(len(values)) for name, values in groups.items()}
    return pytest.approx(wanted, rel=1e-5)


def test_an_objective_finds_the_entries_of_held_out_images():
    found, objective = [], build_objective(DenoisingConfig(), seed=0)
    loss = objective.loss
    objective.loss = lambda model, batch, draw: found.append(batch.entries["class"]) or loss(model, batch, draw)
    validate(Toy(), objective, 23, 8, torch.tensor([0.5]))
    assert torch.equal(torch.cat(found)[:23], torch.arange(23) % 3)


@pytest.mark.parametrize("kind", [Classes(3), Unconditional()], ids=["classes", "none"])
@pytest.mark.parametrize("batch_size", [8, 40])
def test_validation_loss_equals_a_direct_mean(undisturbed, batch_size, kind):
    model, objective, count = undisturbed, build_objective(DenoisingConfig(), seed=0), 23
    model.condition_kind = kind
    objective.weighting = lambda sigma: 2 + 0 * sigma
    edges = torch.tensor([0.3, 0.5, 0.7])
    found = validate(model, objective, count, batch_size, edges)

    whole = next(held_out(count, count))
    draw: Draw = held_out_draw(objective, 4, torch.arange(count), count, SHAPE)
    data, noise, t = (v.double().numpy() for v in (whole["images"], draw.noise, draw.t))
    time = t.reshape(-1, 1, 1, 1)
    output = np.tanh(float(model.scale.detach()) * ((1 - time) * data + time * noise)) + time
    if kind.entries:
        output += 0.1 * whole["class"].numpy().reshape(-1, 1, 1, 1)
    error = ((output - (noise - data)) ** 2).mean((1, 2, 3))
    bins = np.digitize(draw.t.numpy(), edges.numpy(), right=True)
    assert found == means_of({"": 2 * error} | {f"_by_bin/{k}": error[bins == k] for k in range(4)})


def test_a_bin_of_one_image_has_no_standard_error_and_an_empty_bin_nothing():
    model, objective = Toy(), build_objective(DenoisingConfig(), seed=0)
    times = held_out_draw(objective, 4, torch.arange(6), 6, SHAPE).t.sort().values
    edges = torch.tensor([0.0, (times[0] + times[1]).item() / 2])
    found = validate(model, objective, 6, 4, edges)
    assert set(found) == {"loss", "loss_stderr", "loss_by_bin/1", "loss_by_bin/2", "loss_stderr_by_bin/2"}


# --- sampling


def draw(model: Toy, labels: torch.Tensor, **options) -> torch.Tensor:
    method = dict(solver=solver("euler"), schedule=schedule("uniform"), num_steps=4, batch_size=64)
    method["guidance"] = Guidance(options.pop("guidance_scale", 1.5))
    return ImageSampler(model, build_objective(DenoisingConfig(), seed=0), "float32", CPU).draw(labels, 11, **method | options)


@pytest.mark.parametrize("solver", [solver("euler"), solver("heun")], ids=["euler", "heun"])
def test_an_image_depends_on_its_number_and_class_only(undisturbed, solver):
    labels = torch.arange(13) % 3
    whole = draw(undisturbed, labels, solver=solver)
    assert whole.shape == (13, *SHAPE) and whole.dtype == torch.float32 and not whole.requires_grad
    for batch_size in (1, 4, 13):
        found = draw(undisturbed, labels, solver=solver, batch_size=batch_size)
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
    later = draw(undisturbed, labels[5:9], solver=solver, first_number=5)
    torch.testing.assert_close(later, whole[5:9], rtol=1e-6, atol=1e-6)
    # another class changes every image, and another number too
    assert (draw(undisturbed, (labels + 1) % 3, solver=solver) - whole).abs().amax((1, 2, 3)).min() > 1e-2
    assert (draw(undisturbed, labels, solver=solver, first_number=13) - whole).abs().amax((1, 2, 3)).min() > 1e-2


@pytest.mark.parametrize(("reference", "paths", "said"), [
    ("train", {"path": "/a/pets/"}, "against train of pets in"),
    ("validation", {"path": "/a/pets"}, "against validation of pets in"),
    ("validation", {"path": "/a/pets", "validation_path": "/a/others"}, "against validation of others in"),
    ("train", {"path": "/a/train"}, "against train in"), ("pets.npz", {"path": "/a/train"}, "against pets.npz in"),
])  # fmt: skip
def test_a_reference_of_the_runs_own_images_is_named_by_their_folder(reference, paths, said):
    sampling = SamplingConfig(guide_track="none", clip_x0=True)
    found = EvaluationConfig(reference=reference, guidance_scale=1.5).describe(sampling, ImageFolderConfig(**paths))
    how = "5,000 samples by euler in 50 steps, guidance 1.5 by the trained weights, clipped"
    assert found == f"{how} {said} features of inception"


def test_images_equal_a_written_out_euler_loop(undisturbed):
    labels = torch.tensor([2, 0, 1])
    found = draw(undisturbed, labels, num_steps=5, guidance_scale=3.0)
    x = philox.normal(11, "sampling", torch.arange(3), SHAPE).double()
    scale = undisturbed.scale.detach().double()
    for t in uniform_times(5)[:-1].double():
        # the class shifts the velocity by 0.1 c, guided: 0.1 (null + 3 (c - null))
        shift = 0.1 * (3 + 3.0 * (labels.double() - 3)).reshape(-1, 1, 1, 1)
        x = x - (torch.tanh(scale * x) + t + shift) / 5
    torch.testing.assert_close(found.double(), x, rtol=1e-5, atol=1e-5)


def test_purposes_and_guidance_reach_the_images():
    labels = torch.tensor([2, 0, 1])
    model = Toy().eval()
    one = draw(model, labels, guidance_scale=1.0)
    assert set(model.batch_sizes) == {3}
    assert not torch.allclose(draw(model, labels, guidance_scale=2.0), one)
    assert not torch.allclose(draw(model, labels, guidance_scale=1.0, purpose="evaluation"), one)
    unguided = draw(model, labels, guidance_scale=0.0)
    torch.testing.assert_close(unguided, draw(model, torch.full((3,), 3), guidance_scale=1.0), rtol=1e-5, atol=1e-6)


def test_an_unconditional_model_ignores_labels():
    model = Toy(Unconditional()).eval()
    assert torch.equal(draw(model, torch.tensor([0, 1])), draw(model, torch.tensor([2, 2])))
    assert set(model.batch_sizes) == {2}


def test_labels_of_grids_and_of_judged_images():
    assert grid_choices([4, 1], 10, 3).tolist() == [4, 4, 4, 1, 1, 1]
    assert grid_choices([], 1000, 2).tolist() == sorted([*range(10)] * 2)
    assert grid_choices([], 3, 1).tolist() == [0, 1, 2]
    assert grid_choices([], 0, 4).tolist() == [0] * 4
    for count, classes in ((10, 3), (9, 3), (2, 5)):
        counts = np.bincount(balanced_choices(count, classes), minlength=classes)
        assert counts.sum() == count and counts.max() - counts.min() <= 1
    assert balanced_choices(4, 0).tolist() == [0] * 4
