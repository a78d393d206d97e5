"""Quantised frozen base: torchao's codes, exact products and gradients, nothing else kept, the same after a resume."""

import importlib.util
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tests.end_to_end.runs import checkpoint_tensors
from tests.unit.test_estimate_lora import NETWORKS, network
from torchtitan.config.job import ConfigError, load_config
from torchtitan.files.weight_files import named_weights
from torchtitan.models import quantized
from torchtitan.models.adapters.adapters import add_trained_adapter, draw_adapter, merged_weights, trained_updates
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.target import AdapterError
from torchtitan.models.adapters.targets import find_targets
from torchtitan.models.quantized import KINDS, QuantizedLinear, quantize_base, quantized_tensors, quantized_weights
from torchtitan.run import run
from torchtitan.weights.adapted_network import adapted_network

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="could not import 'torchao'")
FIND_SPEC = importlib.util.find_spec
# Largest relative errors of a normal weight: e4m3 has 3 bits of fraction, int8 steps of max / 127, int4 of range / 15.
ERRORS = {"float8": 0.027, "int8": 0.009, "int4": 0.095}


def linear(kind, inputs=128, outputs=96, dtype=torch.bfloat16):
    torch.manual_seed(1)
    plain = nn.Linear(inputs, outputs).to(dtype)
    nn.init.normal_(plain.weight, std=0.02)
    found = QuantizedLinear(plain, kind)
    found.weight.quantize(plain.weight)
    return plain, found


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_torchao(kind):
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )
    from torchao.quantization.quant_primitives import MappingType

    of_group = partial(IntxWeightOnlyConfig, torch.int4, PerGroup(64), MappingType.ASYMMETRIC)
    configs = {"float8": Float8WeightOnlyConfig, "int8": Int8WeightOnlyConfig, "int4": of_group}
    plain, found = linear(kind)
    theirs = nn.Sequential(plain)
    original = plain.weight.detach().float()
    quantize_(theirs, configs[kind](version=2) if kind != "int4" else configs[kind]())
    wanted = theirs[0].weight.dequantize().float()
    distance = (found.weight.dequantize(torch.float32) - wanted).abs() / wanted.abs().clamp(min=1e-30)
    assert distance.max() <= 2**-8  # theirs is rounded to bfloat16
    error = float((found.weight.dequantize(torch.float32) - original).norm() / original.norm())
    assert ERRORS[kind] / 3 < error < ERRORS[kind]


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_products_and_gradients_are_those_of_the_dequantised_weight(kind, autocast):
    _, layer = linear(kind)
    x = torch.randn(3, 5, 128, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    dtype = torch.bfloat16 if autocast else torch.float32
    weight, bias = layer.weight.dequantize(dtype), layer.bias.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y, wanted = layer(x), F.linear(reference.to(dtype), weight, bias)
    assert y.dtype == wanted.dtype == dtype
    direction = torch.randn(3, 5, 96).to(dtype)
    y.backward(direction)
    wanted.backward(direction)
    assert (y - wanted).abs().max() <= 1e-6
    assert (x.grad - reference.grad).abs().max() <= 1e-6
    assert reference.grad.abs().max() > 0.1


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_keeps_the_codes_and_no_copy_of_the_weight(kind):
    _, layer = linear(kind)
    own = {buffer.untyped_storage().data_ptr() for buffer in layer.weight.buffers()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(4, 128, requires_grad=True))
    assert kept
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} <= own
    held = sum(buffer.nbytes for buffer in layer.weight.buffers())
    assert held < 96 * 128 * 2 * {"float8": 0.52, "int8": 0.52, "int4": 0.28}[kind]


def output(model):
    kind, generator = model.condition_kind, torch.Generator().manual_seed(2)
    x = torch.randn(2, *model.image_shape, generator=generator)
    condition = kind.of(kind.placeholder(2))
    return model(x, torch.tensor([0.3, 0.7]), condition)  # [2, C, H, W]


def drawn(name):
    family, kind, shape = NETWORKS[name]
    model = network(family, "debug", kind, shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


@needs_torchao
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_quantised_in_its_blocks_alone_and_is_close(name):
    wanted = output(drawn(name))
    errors = {}
    for kind in KINDS:
        model = drawn(name)
        quantize_base(model, kind)
        within = {module for block in model.blocks() for module in block.modules()}
        assert {type(m) for m in within if isinstance(m, nn.Linear)} == {QuantizedLinear}
        assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear) and m not in within)
        errors[kind] = ((output(model) - wanted).norm() / wanted.norm()).item()
    assert 0 < errors["int8"] < errors["float8"] < errors["int4"] < 0.2


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_a_quantised_base_have_the_gradients_of_the_dequantised_one(kind):
    config, gradients = LoRAConfig(enable=True, rank=4), []
    for dequantised in (False, True):
        model = drawn("flux")
        quantize_base(model, kind)
        if dequantised:
            for name, weight in quantized_weights(model).items():
                place = name.removesuffix(".weight")
                plain = nn.Linear(*reversed(weight.shape))
                plain.weight.data, plain.bias.data = weight.dequantize(torch.float32), model.get_submodule(place).bias.data
                parent, _, child = place.rpartition(".")
                model.get_submodule(parent).register_module(child, plain)
        add_trained_adapter(model, find_targets(model, config, {}), config)
        draw_adapter(model, 0)
        for _, update in trained_updates(model):
            nn.init.constant_(update.up, 0.01)
        output(model).square().mean().backward()
        gradients.append([p.grad for _, update in trained_updates(model) for p in (update.down, update.up)])
    for found, wanted in zip(*gradients, strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()
    assert len(gradients[0]) > 10


@needs_torchao
def test_merging_into_codes_is_refused():
    model, config = drawn("dit"), LoRAConfig(enable=True, rank=4)
    quantize_base(model, "int8")
    add_trained_adapter(model, find_targets(model, config, {}), config)
    draw_adapter(model, 0)
    with pytest.raises(AdapterError, match="lora.base_dtype: a weight in int8 .*export the adapter, or, .*set it to .*config"):
        merged_weights(model)


def lora_config(tmp_path, *words, steps=4):
    return load_config([
        "--job.dump_folder", str(tmp_path / "run"), "--model.flavor", "debug", "--data.name", "synthetic", "--data.shape",
        "[3, 8, 8]", "--lora.enable", "true", "--lora.rank", "4", "--training.local_batch_size", "4",
        "--training.steps", str(steps),
        "--sampling.enable", "false", "--metrics.enable_tensorboard", "false", "--checkpoint.interval", "2",
        "--job.allow_config_change", "true", *words,
    ], 1)  # fmt: skip


@needs_torchao
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_file_are_quantised_as_those_of_a_network(kind, tmp_path):
    from torchtitan.data import dataset_info

    source = drawn("dit")
    save_file(named_weights(source), tmp_path / "base.safetensors")
    config = lora_config(tmp_path, "--lora.base_dtype", kind, "--checkpoint.initial_weights", str(tmp_path / "base.safetensors"))
    models = [adapted_network(config, dataset_info(config.data), torch.device("cpu")) for _ in range(2)]
    quantize_base(source.bfloat16(), kind)
    wanted = quantized_tensors(source)
    for model, _ in models:
        found = quantized_tensors(model)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert {p.dtype for n, p in model.named_parameters() if "adapters" not in n} == {torch.bfloat16}
    assert models[0][1] == models[1][1]


@needs_torchao
def test_a_run_trains_and_resumes_on_the_same_codes(tmp_path):
    words = ("--lora.base_dtype", "int4", "--activation_checkpoint.mode", "full")
    assert run(lora_config(tmp_path / "whole", *words)) == 0
    assert run(lora_config(tmp_path / "parts", *words, steps=2)) == 0
    assert run(lora_config(tmp_path / "parts", *words)) == 0
    places = (tmp_path / name / "run" / "run" / "checkpoint" / "step-00000004" for name in ("whole", "parts"))
    whole, parts = map(checkpoint_tensors, places)
    assert len(whole) > 20
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not any("codes" in name for name in whole)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(
        quantized.importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else FIND_SPEC(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"lora.base_dtype: needs the package torchao.*-m pip install 'torchao>=0.18,<0.19'"):
        lora_config(tmp_path, "--lora.base_dtype", "int8")
    lora_config(tmp_path, "--lora.base_dtype", "bfloat16")
