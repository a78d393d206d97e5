"""The intermediate head: its formula, loss, guidance, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.configurations import problems
from tests.objectives import weighting
from tests.unit.test_dit import PAPER, build, initialised_from_garbage, named_tensors
from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, HeadGuide, predictor
from torchtitan.diffusion.objective import Draw, LossTerms, Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.models.dit.conversion import LAYOUTS
from torchtitan.models.published_layouts import ConversionError
from torchtitan.sampling.guides import open_guide
from torchtitan.weights.trained_model import WeightsError

PLAIN = replace(PAPER, learned_variance=False, num_layers=3)
CONFIG = replace(PLAIN, intermediate_head=2)
KIND = Classes(5)


def test_the_head_begins_at_zero_and_changes_no_other_weight():
    model = initialised_from_garbage(CONFIG, math.nan)
    tensors, plain = named_tensors(model), named_tensors(initialised_from_garbage(PLAIN, 7.0))
    of_head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("intermediate.")}
    assert len(of_head) == 4 and all(torch.count_nonzero(tensor) == 0 for tensor in of_head.values())
    assert tensors.keys() == plain.keys() and all(torch.equal(tensors[name], plain[name]) for name in plain)


class Toy(nn.Module):
    """Network of two outputs, by turns along the channels, of one weight each; `calls`: images of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.7, -0.4]))
        self.calls: list[int] = []

    def forward(self, x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        self.calls.append(len(x))
        of_class = (1.0 + condition)[:, None, None, None]
        return torch.cat((self.weights[0] * x * of_class, torch.sin(self.weights[1] * x + of_class)), dim=1)


def last_alone(toy: Toy):
    return lambda x, time, condition: toy(x, time, condition)[:, : x.shape[1]]


def terms_of(model, **keys) -> tuple[LossTerms, Tensor, Tensor, Tensor]:
    """Loss terms; and velocities to predict, noisy images and conditions."""
    torch.manual_seed(0)
    objective = build_objective(DenoisingConfig(weighting=weighting("snr_plus_one"), **keys), seed=0)
    if objective.uncertainty is not None:
        nn.init.normal_(objective.uncertainty.weight, std=0.1)
        torch.manual_seed(1)
    images, noise, t, condition = torch.randn(4, 2, 3, 3), torch.randn(4, 2, 3, 3), torch.rand(4), torch.arange(4)
    terms = objective.loss(model, Microbatch(images, condition), Draw(t, noise, torch.rand(4)))
    at = t[:, None, None, None]
    return terms, noise - images, (1 - at) * images + at * noise, condition


def test_the_heads_loss_is_the_same_loss_times_its_share_and_not_held_out():
    toy = Toy()
    plain, *_ = terms_of(last_alone(toy))
    found, wanted, x_t, condition = terms_of(toy, intermediate_share=0.5)
    last, early = ((part - wanted).square().mean((1, 2, 3)) for part in toy(x_t, x_t, condition).chunk(2, dim=1))
    torch.testing.assert_close(found.loss, plain.loss * (1 + 0.5 * early / last), rtol=1e-5, atol=0)
    for name in ("error", "weighted"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    # A learned uncertainty divides it too, and does not learn of it.
    plain, *_ = terms_of(last_alone(toy), learned_uncertainty=True)
    found, wanted, x_t, condition = terms_of(toy, learned_uncertainty=True, intermediate_share=0.5)
    last, early = ((part - wanted).square().mean((1, 2, 3)) for part in toy(x_t, x_t, condition).chunk(2, dim=1))
    ratio = (found.loss - plain.loss) / (0.5 * early) / (found.weighted / last)
    assert (ratio - ratio.mean()).abs().max() < 0.5 * ratio.mean() and not torch.allclose(ratio, torch.ones(4), atol=1e-3)


@pytest.mark.parametrize("uncertainty", [False, True])
def test_a_share_of_zero_is_the_plain_loss_and_gradient_bit_for_bit(uncertainty):
    found = []
    for model, share in ((Toy(), 0.0), (Toy(), None)):
        network = model if share is not None else last_alone(model)
        terms, *_ = terms_of(network, learned_uncertainty=uncertainty, intermediate_share=share)
        terms.loss.mean().backward()
        found += [terms.loss.detach(), model.weights.grad[0]]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def estimates(toy: Toy, guidance: Guidance, guide: HeadGuide | None, t: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    objective = build_objective(DenoisingConfig(intermediate_share=0.5), seed=0)
    toy.calls.clear()
    x_t = torch.randn(4, 2, 3, 3)
    with torch.no_grad():
        x0, *_ = predictor(objective, toy, KIND, torch.arange(4), guidance, guide)(x_t, t)
    return x_t, (x_t - x0) / t[:, None, None, None]  # velocity


def test_guidance_by_the_head_is_applied_to_both_branches_before_classifier_free_guidance():
    toy = Toy()
    t = torch.tensor([0.2, 0.4, 0.6, 0.8])

    def by_hand(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        branches = []
        for condition in (torch.arange(4), torch.full((4,), 5)):
            last, early = toy(x, t, condition).detach().chunk(2, dim=1)
            branches.append(early + w[:, None, None, None] * (last - early))
        return branches[1] + s[:, None, None, None] * (branches[0] - branches[1])

    ones = torch.ones(4)
    cases = {
        Guidance(1.4): (1.4 * ones, ones, [4]),
        Guidance(1.4, null_scale=1.35): (1.4 * ones, 1.35 * ones, [8]),
        Guidance(0.0): (0 * ones, ones, [4]),
        Guidance(1.4, (0.3, 0.7)): (torch.tensor([1, 1.4, 1.4, 1]), ones, [4, 4]),
        Guidance(1.4, (0.3, 1.0), "all", 2.0, (0.0, 0.7)): (
            torch.tensor([1, 1.4, 1.4, 1.4]), torch.tensor([2.0, 2.0, 2.0, 1.0]), [8, 8, 4, 4]
        ),
    }  # fmt: skip
    for guidance, (w, s, calls) in cases.items():
        x_t, velocity = estimates(toy, guidance, HeadGuide(), t)
        assert toy.calls == calls
        torch.testing.assert_close(velocity, by_hand(x_t, w, s), rtol=1e-4, atol=1e-5)
    plain = estimates(toy, Guidance(), None, t)[1]
    assert torch.equal(estimates(toy, Guidance(1.0), HeadGuide(), t)[1], plain)
    beside = estimates(toy, Guidance(1.0, null_scale=2.0), HeadGuide(), t)[1]
    assert torch.equal(beside, estimates(toy, Guidance(2.0), None, t)[1])  # classifier-free guidance of the last output


def test_exports_without_a_second_output_say_so():
    square, sizes = (3, 4, 4), {"mlp_hidden_dim": 128}
    model = build(replace(CONFIG, **sizes), square)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for name, layout in LAYOUTS.items():
        assert layout.problems(model) == []
        published, notes = layout.export_weights(weights, model)
        assert notes == [f"model.intermediate_head: left out, the {name} network has one output layer"]
        assert published.keys() == layout.export_weights(weights, build(replace(PLAIN, **sizes), square))[0].keys()
        with pytest.raises(ConversionError, match="one output layer"):
            layout.import_weights(published, model)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--model.intermediate_head 3 --objective.intermediate_share 0.5",
         "model.intermediate_head: 3 leaves no block behind it (at most model.num_layers - 1 = 2)"),
        ("--model.intermediate_head 2", "objective.intermediate_share: model.intermediate_head needs a share"),
        ("--objective.intermediate_share 0.5", "objective.intermediate_share: has no effect without model.intermediate_head"),
        ("--model.intermediate_head 2 --objective.name consistency",
         "model.intermediate_head: objective.name = consistency does not train it (leave it out)"),
        ("--model.intermediate_head 2 --objective.intermediate_share 0.5 --objective.heads ['x0','v']".replace("'", '"'),
         "model.intermediate_head: is for a network of one prediction, without objective.heads (leave it out)"),
        ("--sampling.guide_track head", "sampling.guide_track: head is model.intermediate_head, which the network lacks"),
        ("--sampling.guide_track path_drop",
         "sampling.guide_track: path_drop is for --guide of scripts/sample.py alone (leave it out)"),
        ("--sampling.null_guidance_scale 2", "sampling.null_guidance_scale: has no effect without sampling.guide_track;"),
        ("--model.intermediate_head 2 --objective.intermediate_share 0.5 --sampling.guide_track head"
         " --model.label_dropout 0 --sampling.null_guidance_scale 2",
         "sampling.null_guidance_scale: model.label_dropout = 0 trains no unconditional prediction to guide away from"),
        ("--model.intermediate_head 2 --objective.intermediate_share 0.5 --sampling.guide_track head"
         " --sampling.null_guidance_interval [0.5]", "sampling.null_guidance_interval: takes two times, has 1"),
    ],
)  # fmt: skip
def test_heads_that_nothing_trains_or_uses_are_refused_in_one_line(arguments, line):
    (problem,) = problems(arguments=["--model.flavor", "debug", *arguments.split()])
    assert line in problem


def test_the_head_is_opened_as_a_guide_where_there_is_one():
    head = ["--model.flavor", "debug", "--model.intermediate_head", "2", "--objective.intermediate_share", "0.5"]
    config = load_config([*head, "--sampling.guide_track", "head"], 1)
    sampled = SimpleNamespace(config=config, model=SimpleNamespace(condition_kind=KIND))
    arguments = Path("/"), None, sampled
    for text in ("head", None):  # None: the run's own choice
        found = open_guide(text, *arguments, 1.4, torch.device("cpu"))
        assert isinstance(found.guide, HeadGuide) and found.model is None
    assert open_guide("none", *arguments, 1.4, torch.device("cpu")) is None
    sampled_file = Path("/weights.safetensors"), None, sampled  # which has the head, too
    assert isinstance(open_guide(None, *sampled_file, 1.4, torch.device("cpu")).guide, HeadGuide)
    config.model.label_dropout = 0.0
    with pytest.raises(WeightsError, match=r"^--null-guidance-scale: the model was trained without a null class \(leave"):
        open_guide("head", *arguments, 1.4, torch.device("cpu"), 2.0)
    config.model.intermediate_head = None
    with pytest.raises(WeightsError, match="^--guide head: the model has no second output layer"):
        open_guide("head", *arguments, 1.4, torch.device("cpu"))
