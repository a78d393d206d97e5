"""Low-rank adapters: gradients and outputs against W + s B A formed explicitly, merging, modes, and what is refused."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from tests.adapted_models import CLASSES, DEBUG, PIXELS, drawn, flux, flux_inputs, randomised, with_adapter
from torchtitan.files.weight_files import named_weights
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapters import (
    TRAINED,
    adapted_layers,
    adapter_weights,
    add_frozen_adapter,
    add_trained_adapter,
    draw_adapter,
    fill_adapter,
    merged_weights,
    trained_parameters,
)
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.target import AdapterError, Target
from torchtitan.models.adapters.targets import find_targets
from torchtitan.models.dit.config import FLAVORS as DIT_FLAVORS
from torchtitan.models.edm2.config import EDM2Config

DIT = replace(DIT_FLAVORS["debug"], num_layers=2)
EDM2 = EDM2Config(channels=32, channel_mults=[1, 2], num_blocks=1, attention_resolutions=[8], dropout=0.0)
CONFIGS = {
    "flux": DEBUG,
    "dit": DIT,
    "dit, magnitudes preserved": replace(DIT, magnitude_preserving=True),
    **{f"edm2 {letter}": replace(EDM2, config=letter) for letter in "CEG"},
}
each_network = pytest.mark.parametrize("name", CONFIGS)


def build(name):
    config = CONFIGS[name]
    return flux(config) if name == "flux" else randomised(MODELS[config.name].build(config, PIXELS, CLASSES))


def inputs(name):
    if name == "flux":
        return flux_inputs()
    generator = torch.Generator().manual_seed(5)
    times = torch.tensor([0.3, -0.7]) if name.startswith("edm2") else torch.tensor([250.0, 900.0])
    return torch.randn(2, *PIXELS, generator=generator), times, torch.tensor([1, 4])


def targets_of(model, rank=2):
    """Whole layers of the blocks and, of one, two neighbouring ranges of rows."""
    whole = find_targets(model, LoRAConfig(enable=True, rank=rank), {})
    first = whole[0]
    return [replace(first, stop=first.stop // 2), replace(first, start=first.stop // 2, stop=first.stop - 1), *whole[1:]]


def in_double(model, values):
    doubled = [value.double() if isinstance(value, torch.Tensor) else value for value in values[:2]]
    condition = values[2]
    if isinstance(condition, dict):
        condition = {key: value.double() for key, value in condition.items()}
    return model.double(), (*doubled, condition)


def explicit_weights(plain, adapter):
    """Weights W + alpha / rank B A of each layer, and the leaves A and B that they are differentiable in."""
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    leaves, dtype = {}, next(plain.parameters()).dtype
    for target, values in adapter.items():
        down, up = (value.to(dtype).requires_grad_() for value in (values.down.clone(), values.up.clone()))
        leaves[target] = down, up
        name = f"{target.module}.weight"
        update = torch.zeros_like(weights[name])
        update[target.start : target.stop] = values.alpha / values.rank * (up @ down.flatten(1)).unflatten(1, down.shape[1:])
        weights[name] = weights[name] + update
    return weights, leaves


@each_network
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_those_of_the_explicit_weight(name, training):
    plain, values = in_double(build(name), inputs(name))
    adapter = drawn(plain, targets_of(plain), rank=2, alpha=3.0)
    weights, leaves = explicit_weights(plain, adapter)
    # Functional calls leave the layers as they are: in eval mode, where nothing is random.
    wanted = functional_call(plain, weights, values)
    wanted.square().sum().backward()
    model = build(name).double()
    add_trained_adapter(model, list(adapter), LoRAConfig(enable=True, rank=2, alpha=3.0))
    model.double()
    fill_adapter(model, adapter)
    model.eval()
    for _, layer in adapted_layers(model):
        layer.train(training)
    found = model(*values)
    found.square().sum().backward()
    assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max() and wanted.abs().max() > 0
    gradients = {name: parameter.grad for name, parameter in trained_parameters(dict(model.named_parameters())).items()}
    assert len(gradients) == 2 * len(adapter)
    reached = 0
    for layer_name, layer in adapted_layers(model):
        for update in layer.adapters[TRAINED]:
            leaf = leaves[Target(layer_name, update.start, update.stop)]
            for mine, theirs in zip((update.down.grad, update.up.grad), (value.grad for value in leaf), strict=True):
                assert (mine - theirs).abs().max() <= 1e-6 * max(theirs.abs().max(), 1e-12)
                reached += bool(theirs.abs().max() > 0)
    assert reached > len(adapter)  # gradients arrive
    assert all(parameter.grad is None for key, parameter in model.named_parameters() if ".adapters." not in key)


@each_network
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_merged_network_is_the_same_function(name, dtype, bound):
    values = inputs(name)
    plain, model = build(name).to(dtype), build(name).to(dtype)

    def output(network):  # in float64: the weights count, not how a processor's convolutions round
        doubled, double_values = in_double(deepcopy(network), values)
        return doubled(*double_values)

    with_adapter(model, drawn(model, targets_of(model), alpha=1.0)).to(dtype).eval()
    base, adapted = output(plain), output(model)
    scale = adapted.abs().max()
    assert (adapted - base).abs().max() > 1e-3 * scale  # the adapter counts
    exported = dict(merged_weights(model))
    assert exported.keys() == named_weights(plain).keys()
    plain.load_state_dict({**plain.state_dict(), **exported})
    assert (output(plain) - adapted).abs().max() <= bound * scale


def test_merged_weights_of_a_bfloat16_network_are_added_in_float32():
    model = flux().to(torch.bfloat16)
    target = Target("single_layers.0.out", 0, 64)
    adapter = drawn(model, [target])
    with_adapter(model, adapter)
    values = adapter[target]
    weight = model.single_layers[0].out.weight
    assert weight.dtype == torch.bfloat16
    merged = merged_weights(model)["single_layers.0.out.weight"]
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged, weight.float() + values.up @ values.down, rtol=1e-6, atol=1e-6)


def test_drawn_adapter_is_no_update_at_first_and_has_published_deviations():
    model = flux()
    targets = MODELS["flux"].adapter_sets["ai-toolkit"](model)
    x = flux_inputs()
    before = model(*x)
    add_trained_adapter(model, targets, LoRAConfig(enable=True, rank=8))
    draw_adapter(model, seed=0)
    assert torch.equal(model(*x), before)
    downs = torch.cat([values.down.flatten() for values in adapter_weights(model).values() if values.down.shape[1] == 64])
    assert downs.abs().max() <= 1 / 64**0.5
    assert downs.std() == pytest.approx(1 / (3 * 64) ** 0.5, rel=0.02)


@each_network
def test_an_assistant_counts_in_training_and_is_taken_away_in_sampling(name):
    """Weights +1 and -1, as schnell needs: the network trains as if the assistant were merged."""
    model, values = build(name), inputs(name)
    targets = targets_of(model)
    adapter = drawn(model, targets)
    add_frozen_adapter(model, "assistant", adapter, 1.0, -1.0)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    sampling = model(*values)
    for _, layer in adapted_layers(model):
        layer.train()
    training = model(*values)
    negative = {target: replace(of_target, up=-of_target.up) for target, of_target in adapter.items()}
    for found, wanted in ((training, adapter), (sampling, negative)):
        explicit = with_adapter(build(name), wanted)(*values)
        assert (found - explicit).abs().max() <= 1e-6 * explicit.abs().max()
    assert (training - sampling).abs().max() > 1e-3 * training.abs().max()


def test_updates_of_the_same_rows_are_refused_in_one_adapter_and_summed_in_two():
    model, x = flux(), flux_inputs()
    target = Target("double_layers.0.image.qkv", 0, 100)
    first, second = drawn(model, [target]), drawn(model, [replace(target, start=50, stop=192)])
    with pytest.raises(AdapterError, match="rows 50 to 192 of a layer overlap others of the same adapter"):
        add_trained_adapter(flux(), [*first, *second], LoRAConfig(enable=True, rank=2))
    add_frozen_adapter(model, "a", first, 1.0, 1.0)
    add_frozen_adapter(model, "b", second, 0.0, 0.5)
    plain = flux()
    weight = plain.double_layers[0].image.qkv.weight
    with torch.no_grad():
        for values, (start, stop), factor in ((first[target], (0, 100), 1.0), (*second.values(), (50, 192), 0.5)):
            weight[start:stop] += factor * values.up @ values.down
    assert (model(*x) - plain(*x)).abs().max() <= 1e-6 * plain(*x).abs().max()


@pytest.mark.parametrize(("change", "message"), [
    (lambda weights, target: weights.pop(target), "FILE: lacks single_layers.0.out[0:64]: set lora.targets"),
    (lambda weights, target: weights.update({replace(target, module="text_embed"): weights[target]}),
     "FILE: also has text_embed[0:64]: set lora.targets"),
    (lambda weights, target: weights.update({target: replace(weights[target], alpha=7.0)}),
     "FILE: has alpha 7 in single_layers.0.out[0:64], the run 2 (set lora.alpha)"),
    (lambda weights, target: weights.update({target: replace(weights[target], down=torch.zeros(3, 320))}),
     "FILE: has rank 3 in single_layers.0.out[0:64], the run 2 (set lora.rank)"),
    (lambda weights, target: weights.update({target: replace(weights[target], down=torch.zeros(2, 9))}),
     "FILE: is an adapter of another network: single_layers.0.out[0:64] needs A [2, 320] and B [64, 2], and it has [2, 9]"
     " and [64, 2]"),
])  # fmt: skip
def test_an_adapter_that_does_not_fit_the_run_is_refused_by_its_first_difference(change, message):
    model = flux()
    config = LoRAConfig(enable=True, rank=2)
    targets = find_targets(model, config, {})
    weights = drawn(model, targets)
    add_trained_adapter(model, targets, config)
    change(weights, Target("single_layers.0.out", 0, 64))
    with pytest.raises(AdapterError) as raised:
        fill_adapter(model, weights, "FILE")
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
