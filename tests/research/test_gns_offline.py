"""Gradients of a timestep bin at frozen weights: norms against brute force, estimates against a large sample."""

import gc
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from research.offline_gradients import (
    WHOLE,
    GradientError,
    Gradients,
    GroupNorms,
    equal_mass_edges,
    noise_scale,
    square_norm,
    sub_batch_sizes,
    timestep_bin,
)
from tests.objectives import timesteps
from torchtitan.conditions import Classes
from torchtitan.data.base import Dataset, Draws, UnreadableImage
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.models.base import DiffusionModel

DDPM = {"path": "ddpm_linear", "prediction": "noise", "preconditioning": "index", "timesteps": timesteps("uniform")}


class Images(Dataset):
    """64 images [1, 4, 4], each of two values, in four classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(64, 1, 1, 1, generator=generator) * torch.ones(1, 1, 4, 4)
        self.images[..., :2] *= -0.5  # another image when mirrored

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: np.ndarray):
        chosen = torch.from_numpy(indices)
        return {"images": self.images[chosen], "class": chosen % 4}


class Network(DiffusionModel):
    """A linear network with a class embedding; only its training mode has gradients of the usual size."""

    condition_kind = Classes(4)

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.linear = nn.Linear(16, 16)
        self.time = nn.Linear(1, 16)
        self.classes = nn.Embedding(5, 16)
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x, t, condition):
        assert self.training
        hidden = self.linear(x.flatten(1)) + self.time(t[:, None] / 1000) + self.classes(condition)
        return hidden.view_as(x)


def objective(**keys) -> Objective:
    return build_objective(DenoisingConfig(**keys), seed=11)


def gradients(model=None, data=None, label_dropout=0.2, horizontal_flip=True, batch_size=5, **keys) -> Gradients:
    return Gradients(
        (model or Network()).eval(), objective(**keys), data or Images(), label_dropout=label_dropout,
        horizontal_flip=horizontal_flip, seed=7, device=torch.device("cpu"), batch_size=batch_size,
    )  # fmt: skip


def single_gradients(source: Gradients, where, stream: int, first: int, count: int) -> torch.Tensor:
    """One flat gradient per sample, each from a backward of its own, float64 [count, P]."""
    rows = []
    for sample in range(first, first + count):
        loss = source.objective.loss(source.model, *source.samples(where, stream, torch.tensor([sample]))).loss.sum()
        parts = torch.autograd.grad(loss, source.parameters, allow_unused=True)
        rows.append(torch.cat([part.flatten() for part in parts]).double())
    return torch.stack(rows)


# --- sums against brute force


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [7, 1, 12, 3]])
def test_norms_of_groups_equal_brute_force(sizes):
    source = gradients()
    where = timestep_bin(source.objective, 0.2, 0.6)
    found = source.group_norms(where, sizes, stream=3, first=100)
    singles = single_gradients(source, where, 3, 100, sum(sizes))
    means = torch.stack([group.mean(0) for group in singles.split(sizes)])
    assert found.sizes.tolist() == sizes
    torch.testing.assert_close(found.square_norms, means.square().sum(1), rtol=1e-6, atol=0)
    assert found.mean_square_norm == pytest.approx(singles.mean(0).square().sum().item(), rel=1e-6)
    again = source.group_norms(where, sizes, stream=3, first=100)
    assert torch.equal(again.square_norms, found.square_norms)
    other = source.group_norms(where, sizes, stream=4, first=100)
    assert not torch.isclose(other.square_norms, found.square_norms).any()


def test_published_norm_weights_sub_batches_equally():
    source = gradients()
    singles = single_gradients(source, WHOLE, 0, 0, 50)
    parts = [part.mean(0) for part in singles.split(sub_batch_sizes(50))]
    assert [len(part) for part in singles.split(sub_batch_sizes(50))] == [32, 18]
    wanted = torch.stack(parts).mean(0).square().sum().item()
    assert source.published_square_norm(WHOLE, 50, stream=0) == pytest.approx(wanted, rel=1e-6)
    assert wanted != pytest.approx(singles.mean(0).square().sum().item(), rel=1e-3)


def test_two_buffers_of_the_gradients_size_are_all():
    def live() -> dict[int, torch.Tensor]:
        gc.collect()
        return {id(thing): thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)}

    of_others = live()  # what earlier tests have left in caches
    source = gradients()
    size = sum(parameter.numel() for parameter in source.parameters)

    def held() -> int:
        tensors = {key: thing for key, thing in live().items() if key not in of_others}
        grads = [parameter.grad for parameter in source.parameters if parameter.grad is not None]
        shapes = {parameter.shape for parameter in source.parameters}
        weights = {id(parameter) for parameter in source.parameters}
        found = {id(thing): thing for thing in [*tensors.values(), *grads] if thing.shape in shapes}
        return sum(thing.numel() for key, thing in found.items() if key not in weights)

    before, peak = held(), []
    source.group_norms(WHOLE, [5] * 6, stream=0, advance=lambda _: peak.append(held()))
    assert before == size and max(peak) <= 2 * size
    assert held() == size  # the gradients are gone
    assert sum(peak) > 0 and len(peak) == 6


def test_square_norm_of_many_values_is_exact():
    torch.manual_seed(0)
    values = torch.randn(5_000_000)
    assert square_norm([values, None]) == pytest.approx(values.double().square().sum().item(), rel=1e-12)


# --- the draws


@pytest.mark.parametrize(
    ("low", "high", "unit", "keys"),
    [
        (0.1, 0.3, "t", {}),
        (0.5, 2.0, "sigma", {"timesteps": timesteps("lognormal_sigma")}),
        (0.0, math.inf, "sigma", {"timesteps": timesteps("uniform"), "shift": 3.0}),
        (100, 200, "index", DDPM),
        (900, 1000, "index", DDPM),
        (0, 100, "index", DDPM | {"path": "ddpm_cosine_continuous"}),
    ],
)
def test_timesteps_follow_the_density_within_the_bin(low, high, unit, keys):
    source = gradients(**keys)
    where = timestep_bin(source.objective, low, high, unit)
    samples = torch.arange(20_000)
    _, draw = source.samples(where, 0, samples)
    uniform = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    t = source.objective.timestep_sampler.density.quantile(uniform)
    inside = t[(t >= where.t_low) & (t < where.t_high)]
    assert where.mass == pytest.approx(len(inside) / len(t), abs=0.005)
    assert draw.t.min() >= inside.min().float() - 1e-3 and draw.t.max() <= where.t_high
    for quantile in (0.1, 0.5, 0.9):
        assert draw.t.double().quantile(quantile).item() == pytest.approx(inside.quantile(quantile).item(), abs=0.01)
    if draw.path_index is not None:
        assert (draw.path_index >= low).all() and (draw.path_index < high).all()
        assert set(draw.path_index.tolist()) == set(range(int(low), int(high)))


def test_bins_have_no_gap_and_every_index_is_in_one():
    source = objective(**DDPM)
    edges, unit = equal_mass_edges(source, 10)
    assert (edges, unit) == ([100.0 * place for place in range(11)], "index")
    bins = [timestep_bin(source, *pair, unit) for pair in pairwise(edges)]
    assert sum(one.mass for one in bins) == pytest.approx(1.0, abs=1e-9)
    assert all(one.mass == pytest.approx(0.1, abs=1e-9) for one in bins)
    assert all(one.quantile_high == after.quantile_low for one, after in pairwise(bins))
    smooth, unit = equal_mass_edges(objective(), 4)
    assert unit == "t" and smooth[0] == 0.0 and smooth[2] == pytest.approx(0.5) and smooth[-1] == 1.0


@pytest.mark.parametrize(
    ("bounds", "keys", "message"),
    [
        ((0.5, 0.5, "t"), {}, "empty"),
        ((0, 100, "index"), {}, "only a DDPM path"),
        ((0.999999, 1.0, "t"), DDPM, "no training"),
    ],
)
def test_impossible_bins_are_refused(bounds, keys, message):
    with pytest.raises(ValueError, match=message):
        timestep_bin(objective(**keys), *bounds)


def test_labels_are_dropped_images_mirrored_and_draws_apart():
    source = gradients(label_dropout=0.25)
    batch, draw = source.samples(WHOLE, 5, torch.arange(8000))
    images = batch.images
    assert batch.entries["images"] is images and batch.entries.keys() == {"images", "class"}
    assert (batch.condition == 4).float().mean().item() == pytest.approx(0.25, abs=0.02)
    mirrored = (images[:, 0, 0, 0] / images[:, 0, 0, 3] + 2).abs() < 1e-4
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert draw.noise.std().item() == pytest.approx(1.0, abs=0.01)
    draws = torch.stack([draw.t.logit(), draw.noise[:, 0, 0, 0], draw.noise[:, 0, 0, 1], mirrored.float()])
    assert (torch.corrcoef(draws) - torch.eye(4)).abs().max() < 0.05


def test_an_image_that_cannot_be_read_is_replaced():
    class Damaged(Images):
        def fetch(self, indices):
            for index in (3, 4):
                if index in indices:
                    raise UnreadableImage(index, f"{index}.png", "truncated")
            return super().fetch(indices)

    batch = gradients(data=Damaged())._read(np.array([2, 3, 9, 4]), Draws(7, torch.arange(4)))
    assert torch.equal(batch["images"], Images().images[[2, 5, 9, 5]]) and batch["class"].tolist() == [2, 1, 1, 1]


def test_images_that_are_drawn_for_training_are_drawn_here_by_the_sample():
    class Drawn(Images):
        def fetch_drawn(self, indices, draws):
            batch = self.fetch(indices)
            mirrored = (draws.uniform("horizontal_flip") < 0.5)[:, None, None, None]
            return batch | {"images": torch.where(mirrored, -batch["images"], batch["images"])}

    source = gradients(data=Drawn(), horizontal_flip=False)
    plain = gradients(horizontal_flip=False)
    numbers = torch.arange(64)
    images, as_stored = (each.samples(WHOLE, 3, numbers)[0].images for each in (source, plain))
    signs = (images / as_stored).mean((1, 2, 3))
    assert set(signs.tolist()) == {1.0, -1.0} and 16 < (signs < 0).sum() < 48
    assert torch.equal(source.samples(WHOLE, 3, numbers[40:])[0].images, images[40:])
    assert not torch.equal(source.samples(WHOLE, 4, numbers)[0].images.sign(), images.sign())


def test_a_gradient_that_is_not_finite_is_refused():
    model = Network()
    model.linear.weight.data.fill_(float("nan"))
    with pytest.raises(GradientError, match="not finite"):
        gradients(model).group_norms(WHOLE, [2, 2], stream=0)


# --- the estimate


@pytest.mark.parametrize("bounds", [(0.0, 0.3), (0.6, 1.0)])
def test_interval_contains_an_independent_large_sample(bounds):
    source = gradients(batch_size=100)
    where = timestep_bin(source.objective, *bounds)
    blocks = [source.group_norms(where, sub_batch_sizes(100, 16), stream=1, first=100 * block) for block in range(16)]
    found = noise_scale(blocks)
    large = source.group_norms(where, [20] * 600, stream=2)
    # A group's square norm is |G|^2 + S / 20 in the mean, that of all 12,000 samples |G|^2 + S / 12,000.
    noise = (large.square_norms.mean().item() - large.mean_square_norm) / (1 / 20 - 1 / 12_000)
    truth = noise / (large.mean_square_norm - noise / 12_000)
    assert found.lower < truth < found.upper and not found.unbounded
    assert found.upper / found.lower < 2


def test_estimate_is_the_mean_over_equal_blocks():
    """Against the formula of unequal groups written out, and Fieller's interval from the blocks' own covariance."""
    source = gradients()
    where = timestep_bin(source.objective, 0.6, 1.0)
    sizes = torch.tensor([30, 30, 15])
    blocks = [source.group_norms(where, sizes.tolist(), stream=0, first=75 * block) for block in range(6)]
    pairs = []
    for block in blocks:
        noise = ((sizes * block.square_norms).sum().item() - 75 * block.mean_square_norm) / 2
        pairs.append((noise, block.mean_square_norm - noise / 75))
    noises, signals = (np.array(column) for column in zip(*pairs, strict=True))
    found = noise_scale(blocks)
    assert (found.noise, found.signal) == pytest.approx((noises.mean(), signals.mean()), rel=1e-9)
    covariance = np.cov(noises, signals) / 6
    t = 2.570581836  # 95 % of Student's with 5 degrees of freedom
    for end in (found.lower, found.upper):
        distance = (noises.mean() - end * signals.mean()) ** 2
        variance = covariance[0, 0] - 2 * end * covariance[0, 1] + end**2 * covariance[1, 1]
        assert distance == pytest.approx(t**2 * variance, rel=1e-6)


def test_interval_of_an_uncertain_noise_begins_at_zero():
    """Equal signals, and a noise of one block alone: Fieller's lower end is below zero."""
    sizes = torch.ones(2, dtype=torch.int64)
    blocks = [GroupNorms(sizes, torch.full((2,), 1.0 + noise, dtype=torch.float64), 1.0 + noise / 2) for noise in (0.0, 0.0, 9.0)]
    found = noise_scale(blocks)
    assert (found.noise, found.signal) == pytest.approx((3.0, 1.0)) and not found.unbounded
    # The signal has no variance: 3 +- t s / sqrt(3) with s^2 = 27 and 2 degrees of freedom.
    assert found.lower == 0.0 and found.upper == pytest.approx(3.0 + 4.30265273 * 3.0)


def test_noise_alone_has_no_upper_end():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.full((8,), 4)
    blocks = []
    for _ in range(8):
        means = 0.5 * torch.randn(8, 30, generator=generator, dtype=torch.float64)
        blocks.append(GroupNorms(sizes, means.square().sum(1), means.mean(0).square().sum().item()))
    found = noise_scale(blocks)
    assert found.unbounded and found.lower > 10
    with pytest.raises(ValueError, match="needs two"):
        noise_scale(blocks[:1])
