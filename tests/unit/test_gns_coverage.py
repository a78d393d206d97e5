"""Gradients that taps would miss are refused by name, and learned elements are measured as one gradient per sample gives them."""

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_gns_taps import BETA2, BINS, EDGES, GAINS, OWN_EMBEDDINGS, PAPER, Problem, one_process
from torchtitan.gns.capture import GradientTaps, check_measurable
from torchtitan.gns.config import CannotMeasure
from torchtitan.gns.step_sums import PARTS
from torchtitan.models.base import DiffusionModel
from torchtitan.models.layers import LayerNorm, TokenBias, TokenGain

IMAGES, SHAPE = 6, (2, 3, 4)


class Elements(DiffusionModel):
    """A linear over images [B, H, W, D], with elements of every kind before and after it."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.image_shape, self.out_channels, self.times = SHAPE, 2, times
        self.patch_embed, self.hidden = nn.Linear(2, 8), nn.Linear(8, 8)
        self.position, self.table, self.scale = TokenBias(1, 3, 4, 8), TokenBias(4, 8), TokenGain(8)
        self.share, self.heads, self.mask = TokenGain(1), TokenGain(2, 1), TokenBias(8)
        self.norm, self.output = LayerNorm(8, 1e-6), nn.Linear(8, 2)

    def forward(self, x: Tensor, t: Tensor, condition: object = None) -> Tensor:
        x = self.table(self.position(self.patch_embed(x.movedim(1, -1)))) * (1 + t)[:, None, None, None]
        masked = torch.arange(4)[:, None] > 2
        x = torch.where(masked, self.mask(torch.zeros_like(x)), x)
        for _ in range(self.times):
            x = x + self.scale(torch.tanh(self.hidden(x)))
        x = self.heads(self.share(self.norm(x)).unflatten(3, (2, 4))).flatten(3)
        return self.output(x).movedim(-1, 1)

    def blocks(self) -> list[nn.Module]:
        return []

    def linear_roles(self) -> dict[str, str]:
        return {"patch_embed": "small", "hidden": "small", "output": "small", "more": "small"}


def loss(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return (model(x, t) - x.sin()).square().flatten(1).mean(1)


@pytest.mark.parametrize("compiled", [False, True])
def test_learned_elements_measure_what_one_gradient_per_sample_gives(compiled):
    torch.manual_seed(0)
    model = Elements().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, t = torch.randn(IMAGES, *SHAPE, dtype=torch.float64), torch.rand(IMAGES)
    weights = {name: module.weight for name, module in model.named_children() if not isinstance(module, nn.Linear)}
    of_samples = [torch.autograd.grad(loss(model, x[i, None], t[i, None]).sum(), list(weights.values())) for i in range(IMAGES)]
    moments = {p: {"exp_avg_sq": torch.rand_like(p) + 0.1, "step": torch.ones(())} for p in model.parameters()}
    taps = GradientTaps(
        model, bin_edges=EDGES, local_batch_size=IMAGES, sketch_size=2, seed=1, adam=True, device=torch.device("cpu")
    )
    taps.begin_step(1, True, moments, BETA2, one_process())
    taps.begin_microbatch(t)
    torch.compiler.reset()
    losses = loss(torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model, x, t)
    losses.mean().backward()
    taps.end_microbatch(IMAGES, losses)
    sums = taps.end_step(one_process())

    one_hot = nn.functional.one_hot(torch.bucketize(t, EDGES), BINS).double()
    squares, products = torch.zeros(2, BINS).double(), torch.zeros(2, BINS, BINS).double()
    for weight, single in zip(weights.values(), zip(*of_samples, strict=True), strict=True):
        v = moments[weight]["exp_avg_sq"] / (1 - BETA2)
        v = v.flatten(1) if v.ndim > 1 else v[:, None]
        for index, factor in enumerate((torch.ones_like(v), (v.sum(1, keepdim=True) * v.sum(0) / v.sum()).rsqrt())):
            scaled = torch.stack(single).flatten(1) * factor.flatten()
            squares[index] += one_hot.T @ scaled.square().sum(1)
            products[index] += one_hot.T @ (scaled @ scaled.T) @ one_hot
    token = PARTS.index("token")
    torch.testing.assert_close(sums.squares[token], squares, rtol=1e-10, atol=0)
    torch.testing.assert_close(sums.all_products[token], products, rtol=1e-10, atol=1e-10)


OUTSIDE = {
    "layers.0.modulation": PAPER, "label_embed": PAPER, "patch_embed": PAPER, "layers.1.mlp.out": PAPER,
    "layers.0.attention.k_norm": GAINS, "layers.0.time_embed.hidden": OWN_EMBEDDINGS,
}  # fmt: skip


def measured_step(taps: GradientTaps, problem: Problem, microbatches: int, dtype: torch.dtype, beside: Tensor | float = 0):
    """Measure a step of equal microbatches, and compare it with its gradients."""
    problem.model.zero_grad()
    taps.begin_step(1, True, {}, BETA2, one_process())
    for _ in range(microbatches):
        taps.begin_microbatch(problem.t)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            losses = problem.loss()
        ((losses.mean() + beside) / microbatches).backward(retain_graph=True)
        taps.end_microbatch(len(losses) * microbatches, losses)
    taps.end_step(one_process())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_weight_used_outside_of_its_layer_is_refused_by_name_on_the_first_measured_step_of_a_batch_size(name, dtype):
    problem = Problem(OUTSIDE[name], torch.float32)
    taps = problem.taps(adam=False, compute_dtype=dtype)
    measured_step(taps, problem, 1, dtype)
    with pytest.raises(CannotMeasure, match=rf"^gns.single_pass: {name}.weight .* outside .* .call the layer, or set gns.enable"):
        measured_step(taps, problem, 2, dtype, problem.model.get_submodule(name).weight.square().sum())


def test_a_step_whose_gradients_are_not_finite_is_left_to_the_guard():
    problem = Problem(next(iter(OUTSIDE.values())), torch.float32)
    weight = problem.model.get_submodule(next(iter(OUTSIDE))).weight
    measured_step(problem.taps(adam=False), problem, 1, torch.float32, weight.sum() * float("nan"))


class Scaled(nn.Linear):
    """A linear that computes something else."""


CHANGES = {
    "extra belongs to a Elements": lambda model: setattr(model, "extra", nn.Parameter(torch.zeros(3))),
    "hidden.weight belongs to a Scaled": lambda model: setattr(model, "hidden", Scaled(8, 8)),
    "norm.weight belongs to a LayerNorm; .* TokenBias and TokenGain": lambda model: setattr(model, "norm", nn.LayerNorm(8)),
    "hidden is applied 2 times": lambda model: setattr(model, "times", 2),
    "hidden.weight and more.weight are one parameter": lambda model: setattr(model, "more", tied(model.hidden)),
    r"hidden is applied to .*4, 8. for 7 images .give it .B, D. by its role vector": lambda model: setattr(
        model, "linear_roles", lambda: Elements.linear_roles(model) | {"hidden": "vector"}
    ),
    r"mask is applied to .3, 4, 8. for 7 images": lambda model: model.mask.register_forward_pre_hook(lambda _, x: x[0][0]),
}  # fmt: skip


def tied(linear: nn.Linear) -> nn.Linear:
    other = nn.Linear(8, 8, bias=False)
    other.weight = linear.weight
    return other


@pytest.mark.parametrize("message", CHANGES)
def test_a_network_that_taps_cannot_measure_is_refused_before_it_trains(message):
    with torch.device("meta"):
        model = Elements()
        check_measurable(model)
        CHANGES[message](model)
        with pytest.raises(CannotMeasure, match=f"^gns.single_pass: {message}"):
            check_measurable(model)
