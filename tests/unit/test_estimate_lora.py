"""Estimates of runs that train adapters: FLOPs against torch's count, memory against a measured step."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.estimate_memory import measured_peak
from torchtitan.conditions import POOLED, TEXT, Classes, Embeddings
from torchtitan.config.job import load_config
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapters import LowRankWeights, add_frozen_adapter, add_trained_adapter, draw_adapter
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.flops import training_flops
from torchtitan.models.adapters.frozen_network import freeze_and_adapt
from torchtitan.models.adapters.target import Target
from torchtitan.models.adapters.targets import find_targets, weight_of
from torchtitan.models.quantized import quantized_tensors


def network(family, flavor, kind, shape):
    model = MODELS[family].build(MODELS[family].flavors[flavor], shape, kind)
    torch.manual_seed(0)
    model.init_weights()
    return model.train()


def counted_flops(model, batch=1):
    """FLOPs of a forward and a backward by torch, with attention's four products of the backward."""
    kind = model.condition_kind
    x = torch.randn(batch, *model.image_shape)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(x, torch.rand(batch), kind.of(kind.placeholder(batch))).square().mean().backward()
    return counter.get_total_flops()


TEXTS = Embeddings({TEXT: torch.zeros(5, 32), POOLED: torch.zeros(24)})
NETWORKS = {"flux": ("flux", TEXTS, (3, 8, 12)), "dit": ("dit", Classes(10), (3, 8, 8))}
BEFORE = ("patch_embed", "text_embed", "time_embed", "pooled_embed", "label_embed")  # what gradients do not reach


@pytest.mark.parametrize("name", NETWORKS)
def test_flops_are_those_that_torch_counts(name):
    family, kind, shape = NETWORKS[name]
    model = network(family, "debug", kind, shape)
    assert training_flops(model, shape) == model.flops_per_image(shape)
    config = LoRAConfig(enable=True, rank=4)
    add_trained_adapter(model, find_targets(model, config, {}), config)
    draw_adapter(model, 0)
    assisted = max(layer for layer in model.applications(shape) if "layers" in layer and layer.endswith("out"))
    outputs, inputs = weight_of(model, assisted)
    extra = LowRankWeights(torch.zeros(2, inputs), torch.zeros(outputs, 2), alpha=2.0)
    add_frozen_adapter(model, "extra", {Target(assisted, 0, outputs): extra}, training_weight=1.0, sampling_weight=0.0)
    uncounted = 0  # gradients of inputs that autograd does not compute: nothing trains before them
    for layer, times in model.applications(shape).items():
        if layer.startswith(BEFORE) or layer.endswith("modulation"):
            rows, columns = weight_of(model, layer)
            uncounted += 2 * times * (rows * columns + ("layers" in layer) * 4 * columns)
    assert training_flops(model, shape) - uncounted == counted_flops(model)
    assert training_flops(model, shape, 1) - training_flops(model, shape) > 2 * model.forward_macs_per_image(shape)


def test_flops_of_adapted_convolutions_are_those_of_whole_weights():
    model = network("edm2", "cifar", Classes(10), (3, 16, 16))
    before = model.forward_macs_per_image((3, 16, 16))
    config = LoRAConfig(enable=True, rank=2)
    add_trained_adapter(model, find_targets(model, config, {}), config)
    assert model.forward_macs_per_image((3, 16, 16)) == before
    found = training_flops(model, (3, 16, 16))
    assert 0.9 < found / model.flops_per_image((3, 16, 16)) < 1.0


@pytest.mark.parametrize("more", [[], ["--activation_checkpoint.mode", "full"]])
def test_memory_is_that_of_a_measured_step(more, tmp_path):
    words = [
        "--model.flavor", "debug", "--training.local_batch_size", "2", "--data.name", "synthetic", "--data.kind", "noise",
        "--data.shape", "[4, 8, 8]", "--lora.enable", "true", "--lora.rank", "8", *more,
    ]  # fmt: skip
    estimated = estimate_memory(load_config(words, 1), 1)
    peak, unseen = measured_peak([*words, "--job.dump_folder", str(tmp_path)], 1)
    assert 0.97 * (peak - max(unseen, 0)) <= estimated.total <= 1.03 * peak
    trained = model_on_meta(load_config(words, 1)).num_parameters()
    assert estimated.all_gradients == 4 * trained and estimated.ema == 4 * trained  # one track of averages


def test_a_quantised_base_is_estimated_as_its_codes():
    def parameters(kind):
        config = load_config(["--model.flavor", "DiT-S/2", "--data.name", "synthetic", "--data.shape", "[4, 16, 16]",
                              "--lora.enable", "true"], 1)  # fmt: skip
        lora = replace(config.lora, base_dtype=kind)
        with_adapters = freeze_and_adapt(plain(config), lora, {})
        frozen = [p for p in with_adapters.parameters() if not p.requires_grad]
        codes = quantized_tensors(with_adapters).values()
        return sum(tensor.nbytes for tensor in [*frozen, *codes])

    def plain(config):
        with torch.device("meta"):
            return MODELS["dit"].build(config.model, (4, 16, 16), Classes(10))

    found = {kind: parameters(kind) for kind in ("float32", "bfloat16", "float8", "int8", "int4")}
    assert found["float32"] == 2 * found["bfloat16"]
    assert 0.5 < found["int8"] / found["bfloat16"] < 0.53 and found["float8"] >= found["int8"]
    assert 4.375 / 16 < found["int4"] / found["bfloat16"] < 0.30
