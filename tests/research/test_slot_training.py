"""Training on slots of timesteps and the products of their gradients, on a linear model whose optimum is known."""

import math

import pytest
import torch
from torch import Tensor, nn

from research.by_image import cosine, from_text, log_ratio, root_mean, to_text, with_student
from research.equal_loss import equal_loss_edges
from research.offline_gradients import GradientError, Gradients
from research.slot_training import (
    curve_nodes,
    edges_of_curve,
    finetune,
    gradient_products,
    make_slots,
    restored,
    slot_nodes,
)
from research.timestep_errors import fixed_samples, timestep_errors
from tests.objectives import timesteps
from torchtitan.conditions import Unconditional
from torchtitan.data.synthetic import Synthetic, SyntheticConfig
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.models.base import DiffusionModel
from torchtitan.training.config import OptimizerConfig
from torchtitan.training.optimizer import build_optimizer

VARIANCE = 0.25
DEVICE = torch.device("cpu")
DATA = SyntheticConfig(shape=[1, 4, 4], num_classes=0, num_images=10_000, spectrum_alpha=0.0, pixel_variance=VARIANCE)
OBJECTIVE = build_objective(
    DenoisingConfig(path="ddpm_linear", prediction="noise", timesteps=timesteps("uniform"), preconditioning="identity"), 0
)


class Gain(DiffusionModel):
    """Noise is estimated as (w_0 + w_1 t) x_t."""

    condition_kind = Unconditional()

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights))

    def forward(self, x: Tensor, time: Tensor, condition: Tensor | None) -> Tensor:
        return (self.weights[0] + self.weights[1] * time / 1000.0)[:, None, None, None] * x

    def expected_gradient(self, index: int) -> Tensor:
        """2 ((w . phi) E[x^2] - E[x noise]) phi with phi = (1, t), float64 [2]."""
        a2 = OBJECTIVE.path.alphas_cumprod[index].item()
        t = OBJECTIVE.path.index_to_t(torch.tensor(index)).item()
        phi = torch.tensor([1.0, t], dtype=torch.float64)
        weights = self.weights.detach().double()
        return 2.0 * ((weights @ phi) * (a2 * VARIANCE + 1.0 - a2) - math.sqrt(1.0 - a2)) * phi


def gradients_of(model: nn.Module) -> Gradients:
    data = Synthetic(DATA, "train")
    return Gradients(
        model, OBJECTIVE, data, label_dropout=0.0, horizontal_flip=False, seed=0, device=DEVICE, batch_size=4096
    )  # fmt: skip


def single_indices(*indices: int):
    edges = sorted({0, 1000, *indices, *(index + 1 for index in indices)})
    return [slot for slot in make_slots(OBJECTIVE, edges, "index") if slot.low in indices and slot.high == slot.low + 1]


def test_products_are_those_of_the_expected_gradients():
    model = Gain(0.5, 0.2)
    slots = single_indices(20, 200, 800)
    wanted = [model.expected_gradient(index) for index in (20, 200, 800)]
    places = [(slot.where, stream) for stream, slot in enumerate(slots, 1)]
    gradients = gradients_of(model)
    found = torch.stack([gradient_products(gradients, places, torch.arange(k * 128, (k + 1) * 128)) for k in range(16)])
    error = found.std(0) / math.sqrt(len(found))
    for i in range(3):
        for j in range(3):
            assert abs(found[:, i, j].mean() - wanted[i] @ wanted[j]) < 4 * error[i, j]
            assert found[0, i, j] == found[0, j, i]
            interval, truth = cosine(found, i, j), torch.cosine_similarity(wanted[i], wanted[j], 0)
            assert interval.lower - 0.01 <= truth <= interval.upper + 0.01
            assert i != j or (interval.value, interval.lower, interval.upper) == (1.0, 1.0, 1.0)
    assert cosine(found, 0, 2).upper < 0  # gains too large for the one are too small for the other


def test_noise_adds_nothing_to_a_squared_norm():
    """At a slot's optimum the gradient is noise alone: no cosine is given, and its squared norm is 0 on average."""
    a2 = OBJECTIVE.path.alphas_cumprod[200].item()
    model = Gain(math.sqrt(1 - a2) / (a2 * VARIANCE + 1 - a2), 0.0)
    assert model.expected_gradient(200).abs().max() < 1e-6
    places = [(slot.where, stream) for stream, slot in enumerate(single_indices(200, 800), 1)]
    gradients = gradients_of(model)
    found = torch.stack([gradient_products(gradients, places, torch.arange(k * 32, (k + 1) * 32)) for k in range(32)])
    norms = found[:, 0, 0]
    assert abs(norms.mean()) < 4 * norms.std() / math.sqrt(32) and (norms < 0).any()
    assert cosine(found, 0, 1) is None and cosine(found, 1, 1) is not None


def test_training_on_a_slot_lowers_it_and_leads_to_its_optimum():
    model = Gain(0.9, 0.0)
    near, far = single_indices(20, 900)
    samples = fixed_samples(Synthetic(DATA, "validation"), 32, 0)

    def error(slot) -> float:
        return timestep_errors(model, OBJECTIVE, samples, slot_nodes(OBJECTIVE, slot.where, 4)).mean().item()

    before = error(near), error(far)
    with restored(model):
        optimizer = build_optimizer(dict(model.named_parameters()), OptimizerConfig(lr=0.02))
        finetune(gradients_of(model), optimizer, [near.where], steps=80, batch_size=64, stream=1, max_norm=1.0)
        assert error(near) < before[0] and error(far) > before[1]
        a2 = OBJECTIVE.path.alphas_cumprod[20].item()
        t = OBJECTIVE.path.index_to_t(torch.tensor(20)).item()
        gain = (model.weights[0] + model.weights[1] * t).item()
        assert gain == pytest.approx(math.sqrt(1 - a2) / (a2 * VARIANCE + 1 - a2), rel=0.05)
    assert model.weights.tolist() == pytest.approx([0.9, 0.0]) and (error(near), error(far)) == before
    assert not model.training and not model.weights.requires_grad


class Recorder(Gradients):
    """Writes down what was asked for."""

    def accumulate(self, where, stream, numbers, weight, advance=None) -> None:
        self.asked = [*getattr(self, "asked", []), (where, numbers.tolist(), weight)]
        super().accumulate(where, stream, numbers, weight, advance)


def test_slots_of_a_group_take_turns():
    model, slots = Gain(0.5, 0.0), single_indices(100, 500, 900)
    recorder = Recorder(
        model, OBJECTIVE, Synthetic(DATA, "train"), label_dropout=0.0, horizontal_flip=False, seed=0, device=DEVICE
    )  # fmt: skip
    optimizer = build_optimizer(dict(model.named_parameters()), OptimizerConfig())
    finetune(recorder, optimizer, [slot.where for slot in slots], steps=2, batch_size=4, stream=1)
    assert [numbers for _, numbers, _ in recorder.asked] == [[0, 3], [1], [2], [6], [4, 7], [5]]
    assert [where for where, _, _ in recorder.asked] == [slot.where for slot in slots] * 2
    assert {weight for _, _, weight in recorder.asked} == {0.25}


def test_a_training_that_diverges_says_so():
    model = Gain(math.inf, 0.0)
    optimizer = build_optimizer(dict(model.named_parameters()), OptimizerConfig())
    with pytest.raises(GradientError, match="step 1 is not finite"):
        slot = single_indices(5)[0]
        finetune(gradients_of(model), optimizer, [slot.where], steps=1, batch_size=4, stream=1)


def test_nodes_of_slots_and_of_the_curve():
    wide, narrow = make_slots(OBJECTIVE, [0, 3, 1000], "index")[::-1]
    assert slot_nodes(OBJECTIVE, narrow.where, 8).index.tolist() == [0, 1, 2]
    nodes = slot_nodes(OBJECTIVE, wide.where, 4).index
    assert nodes.tolist() == [int(3 + 997 * share) for share in (0.125, 0.375, 0.625, 0.875)]
    assert (narrow.range, wide.range) == ("0-2", "3-999")
    index = curve_nodes(OBJECTIVE.path, 40).index
    assert index[0] == 0 and index[-1] == 999 and len(index) <= 40 and (index[:5].diff() == 1).all()


def test_edges_of_a_curve_between_its_nodes():
    index = torch.arange(1000, dtype=torch.float64)
    curve = 0.9 * (1.0 + index) ** -0.8  # a straight line in the logarithms of both
    nodes = curve_nodes(OBJECTIVE.path, 12)
    assert edges_of_curve(OBJECTIVE, nodes, curve[nodes.index], 7) == equal_loss_edges(curve, 7)
    for wrong in (0.0, math.nan, math.inf, -1.0):
        errors = curve[nodes.index].clone()
        errors[3] = wrong
        with pytest.raises(ValueError, match="not positive and finite"):
            edges_of_curve(OBJECTIVE, nodes, errors, 7)


def test_intervals_of_ratios():
    before = torch.tensor([[1.0, 2.0, 4.0, 5.0]], dtype=torch.float64)
    for repetitions in (1, 3):
        same = log_ratio(before.expand(repetitions, -1), before)
        assert (same.value, same.lower, same.upper) == (0.0, 0.0, 0.0)
    twice = log_ratio(2.0 * before, before)  # every image by the same factor: no doubt
    assert twice.value == pytest.approx(math.log(2)) and twice.upper - twice.lower < 1e-12
    # Repetitions e^0.1, e^0.2, e^0.3 with t of 2 degrees of freedom.
    after = before * torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64).exp()
    found = log_ratio(after, before)
    assert found.value == pytest.approx(0.2)
    assert found.upper - 0.2 == pytest.approx(4.30265 * 0.1 / math.sqrt(3), rel=1e-5)
    assert found.excludes(0.5) and not found.excludes(0.0)
    # Images alone: t of 3 degrees of freedom.
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    deviation = values.std().item() / 2
    assert root_mean(values).upper == pytest.approx(math.sqrt(3.0 + 3.18245 * deviation), rel=1e-5)
    assert with_student(1.0, [(0.0, 5.0)]).lower == 1.0
    assert torch.equal(from_text(to_text(values)), values)


def test_intervals_of_ratios_hold_the_truth():
    generator = torch.Generator().manual_seed(0)
    inside, trials = 0, 200
    for _ in range(trials):
        images = torch.exp(0.5 * torch.randn(1, 40, generator=generator, dtype=torch.float64))
        training = torch.exp(0.1 + 0.05 * torch.randn(3, 1, generator=generator, dtype=torch.float64))
        own = torch.exp(0.1 * torch.randn(3, 40, generator=generator, dtype=torch.float64) - 0.005)
        inside += not log_ratio(images * training * own, images).excludes(0.1)
    assert 0.91 <= inside / trials <= 0.99
