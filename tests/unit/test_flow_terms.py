"""Terms of the velocity beside the squared error: golden values, brute force over pairs, and samples that stay separate."""

import pytest
import torch
from torch import Tensor

from tests.configurations import problems
from tests.objectives import weighting
from torchtitan import philox
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.flow_terms import cosine_distance, partners
from torchtitan.diffusion.objective import LossTerms, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.evaluation.validation import held_out_draw

SHAPE, NUMBERS = (3, 2, 2), torch.arange(8)
IMAGES = philox.normal(0, "synthetic_data", NUMBERS, SHAPE)
DROPPED = torch.tensor([0.05, 0.3, 0.4, 0.5, 0.6, 0.7, 0.1, 0.15])  # the first and the seventh below 0.12


def a(*shape: int) -> Tensor:
    return torch.sin(0.7391 * torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)).reshape(shape)


def b(*shape: int) -> Tensor:
    return torch.cos(0.5123 * torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)).reshape(shape)


def test_cosine_distance_has_its_golden_value():
    found, wanted = a(1, 4, 2, 2), b(1, 4, 2, 2)
    assert cosine_distance(found, wanted).item() == pytest.approx(0.38241402901845983, rel=1e-12)


def test_cosine_distance_of_a_network_that_starts_at_zero_has_a_bounded_gradient():
    output = torch.zeros(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    distance = cosine_distance(output, b(2, 3, 2, 2))
    distance.sum().backward()
    assert distance.tolist() == [1.0, 1.0] and output.grad.abs().max() <= 10 / 4  # 1 / the shortest length, over 4 pixels


def test_partners_are_samples_2k_and_2k_plus_1_with_the_distances_of_brute_force():
    found, other = a(4, 6), partners(b(4, 6))
    wanted = [sum((a(4, 6)[i, k] - b(4, 6)[i ^ 1, k]) ** 2 for k in range(6)).item() / 6 for i in range(4)]
    assert (found - other).square().mean(1).tolist() == pytest.approx(wanted, rel=1e-12)


def network(x: Tensor, time: Tensor, condition: Tensor | None) -> Tensor:
    return torch.tanh(0.7 * x) + 1e-4 * time.reshape(-1, 1, 1, 1)


def loss(network=network, share: float = 0.12, **keys) -> LossTerms:
    objective = build_objective(DenoisingConfig(**keys), seed=3)
    draw = objective.draw(SHAPE, GlobalBatch(0, 8), NUMBERS)._replace(dropping=DROPPED)
    return objective.loss(network, Microbatch(IMAGES, kept=objective.kept(DROPPED, share)), draw)


@pytest.mark.parametrize("prediction", ["velocity", "x0", "v", "edm"])
@pytest.mark.parametrize("factor", [{}, {"weighting": weighting("velocity")}])
def test_losses_are_those_of_the_velocity_by_brute_force(prediction, factor):
    keys = {"prediction": prediction, "noise_std": 2.0, **factor}
    plain, whole = loss(**keys), loss(**keys, cosine_weight=0.7, contrastive_weight=0.05)
    objective = build_objective(DenoisingConfig(**keys), seed=3)
    draw = objective.draw(SHAPE, GlobalBatch(0, 8), NUMBERS)
    velocity = draw.noise - IMAGES
    for i in range(8):
        t, v, partner = draw.t[i : i + 1], velocity[i : i + 1].double(), velocity[i ^ 1 : (i ^ 1) + 1].double()
        x_t = (1 - t) * IMAGES[i : i + 1] + t * draw.noise[i : i + 1]
        x0, noise = (each.double() for each in objective.predict(network, x_t, t, None))
        found = noise - x0
        cosines = [
            1 - (found[0, :, y, x] @ v[0, :, y, x]) / (found[0, :, y, x].norm().clamp(min=0.1) * v[0, :, y, x].norm())
            for y in range(2) for x in range(2)
        ]  # fmt: skip
        ratio = plain.loss[i].double() / (found - v).square().mean()  # weight of the velocity's error
        kept = 0.0 if DROPPED[i] < 0.12 else 1 / 0.88
        wanted = plain.loss[i].double() + 0.7 * sum(cosines) / 4 - 0.05 * kept * ratio * (found - partner).square().mean()
        torch.testing.assert_close(whole.loss[i].double(), wanted, rtol=2e-5, atol=1e-6)
    assert torch.equal(whole.error, plain.error) and torch.equal(whole.weighted, plain.weighted)


def test_each_loss_is_a_function_of_its_own_output():
    outputs = philox.normal(1, "synthetic_data", NUMBERS, SHAPE)
    keys = {"cosine_weight": 0.7, "contrastive_weight": 0.05}
    jacobian = torch.autograd.functional.jacobian(lambda y: loss(lambda x, time, condition: y, **keys).loss, outputs)
    size = jacobian.flatten(2).norm(dim=2)
    assert (size.diagonal() > 0).all() and size.sum() == size.diagonal().sum()


def test_weights_of_0_and_losses_outside_of_training_are_the_plain_ones_bit_for_bit():
    plain = loss()
    assert torch.equal(loss(cosine_weight=0.0, contrastive_weight=0.0).loss, plain.loss)
    both = [build_objective(DenoisingConfig(**keys), seed=3) for keys in ({}, {"cosine_weight": 1.0, "contrastive_weight": 0.05})]
    draw = held_out_draw(both[0], 1, torch.arange(7), 7, SHAPE)  # an odd number
    found = [each.loss(network, Microbatch(IMAGES[:7]), draw) for each in both]
    assert torch.equal(found[0].loss, found[1].loss) and torch.equal(found[0].weighted, found[1].weighted)


@pytest.mark.parametrize(("given", "line"), [
    (["--training.local_batch_size=3"], "training.local_batch_size: 3 is odd: objective.contrastive_weight sets the samples of a"
     " microbatch against each other in pairs (make it even)"),
    (["--objective.timesteps.name=time_warping"], "objective.timesteps.name: time_warping learns from losses, which"
     " objective.contrastive_weight makes negative (use a density)"),
    (["--objective.learned_uncertainty=true"], "objective.contrastive_weight: is no part of the loss that"
     " objective.learned_uncertainty measures (set that to false)"),
    (["--objective.heads=x0,v"], "objective.contrastive_weight: is for a network of one prediction, without objective.heads"
     " (leave it out)"),
])  # fmt: skip
def test_impossible_contrasts_are_refused_in_one_line(given, line):
    found = problems(arguments=["--data.name=synthetic", "--objective.contrastive_weight=0.05", *given])
    assert [problem.removeprefix("command line: ").removeprefix("--") for problem in found] == [line]
