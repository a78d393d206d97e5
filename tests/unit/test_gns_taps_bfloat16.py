"""What taps measure where the network computes in bfloat16, eager and compiled."""

import pytest
import torch
from torch import nn

from torchtitan.gns.projections import Projections
from torchtitan.gns.taps import (
    FOLDED_ROWS,
    MEASURED,
    SketchedLinear,
    SmallLinear,
    TappedEmbedding,
    TappedNorm,
    TapSwitch,
    VectorLinear,
)
from torchtitan.models.layers import RMSNorm

BATCH, TOKENS, BINS, INPUTS, OUTPUTS = 12, 5, 3, 24, 40
VECTORS, SEQUENCES = (BATCH, INPUTS), (BATCH, TOKENS, INPUTS)
# name -> tapped layer, its input's shape, and its probes with their shapes in two geometries
LAYERS = {
    "vector": (lambda s: VectorLinear(nn.Linear(INPUTS, OUTPUTS), s), VECTORS, {"gram": (2, BATCH, BATCH)}),
    "embedding": (lambda s: TappedEmbedding(nn.Embedding(OUTPUTS, INPUTS), s), (BATCH,), {"gram": (2, BATCH, BATCH)}),
    "sketch": (lambda s: SketchedLinear(nn.Linear(INPUTS, OUTPUTS), s), SEQUENCES, {"squares": (2, BATCH)}),
    "small": (
        lambda s: SmallLinear(nn.Linear(INPUTS, OUTPUTS), s), SEQUENCES,
        {"squares": (2, BATCH), "sums": (BINS, OUTPUTS, INPUTS + 1)},
    ),
    "gain": (
        lambda s: TappedNorm(RMSNorm(INPUTS, 1e-6), s), SEQUENCES,
        {"squares": (2, BATCH), "sums": (BINS, INPUTS, 1)},
    ),
}  # fmt: skip


def tapped(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Layer of random weights and factors that is switched on, and an input."""
    torch.manual_seed(0)
    build, shape, probes = LAYERS[name]
    layer = build(TapSwitch(MEASURED, nn.functional.one_hot(torch.arange(BATCH) % BINS, BINS).bfloat16()))
    nn.init.normal_(layer.weight)
    rows, columns = layer.weight.shape[0], layer.weight.shape[1] + 1 if layer.weight.ndim == 2 else 1
    layer.rows, layer.columns = (torch.cat((torch.ones(1, n), torch.rand(1, n) + 0.5)) for n in (rows, columns))
    if "sums" not in probes:
        size = 2
        Projections([layer], size, 2, 0, None, torch.bfloat16).draw(0)
        probes = probes | {"sums": (2, BINS, FOLDED_ROWS * size)}
    for probe, of_probe in probes.items():
        setattr(layer, probe, torch.zeros(of_probe, requires_grad=True))
    return layer, torch.arange(BATCH) if name == "embedding" else torch.randn(shape)


def measured(layer: nn.Module, call: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the probes receive, called `call`, under autocast as the trainer calls it."""
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    probes = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor) and value.requires_grad}
    found = {name: probe.grad for name, probe in probes.items()}
    for probe in probes.values():
        probe.grad = None
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_backward_measures_what_an_eager_one_does(name):
    """The compiler traces it under the forward's autocast, which would round products to bfloat16."""
    layer, x = tapped(name)
    torch._dynamo.reset()
    eager = measured(layer, layer, x)
    compiled = measured(layer, torch.compile(layer, backend="aot_eager", fullgraph=True), x)
    assert eager.keys() == compiled.keys() and len(eager) == 2
    for probe, values in eager.items():
        assert values.any() and torch.equal(compiled[probe], values), probe


def test_inner_products_of_vectors_are_those_of_their_inputs_to_bfloat16s_rounding():
    """Each side of two inner products is rounded to bfloat16 once, as the product with its factor; all else is in float32."""
    layer, x = tapped("vector")
    torch.manual_seed(1)
    x, dy = x.bfloat16(), torch.randn(BATCH, OUTPUTS).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(dy)
    sides = (x, layer.columns[:, :-1]), (dy, layer.rows)
    a, d = ((side.float() * factors[:, None]).bfloat16().double() for side, factors in sides)
    bias = layer.columns[:, -1:, None].double().square()
    wanted = (d @ d.mT) * (a @ a.mT + bias)
    terms = (d.abs() @ d.abs().mT) * (a.abs() @ a.abs().mT + bias)
    # float32's roundings: of each product and sum, of the bias, of the product of both.
    found, rounding = layer.gram.grad, (1 + 2**-24) ** (2 * (OUTPUTS + INPUTS) + 3) - 1
    errors = (found.double() - wanted).abs() / terms
    assert found.dtype == torch.float32 and errors.max() <= rounding
