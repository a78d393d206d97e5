"""Sets of layers with adapters: published counts and parameters of FLUX.1, and which rows of this network's layers they are."""

import math

import pytest
import torch

from tests.adapted_models import flux
from torchtitan.conditions import POOLED, TEXT, Embeddings
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapters import add_trained_adapter, trained_parameters
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.target import AdapterError, Target
from torchtitan.models.adapters.targets import find_targets
from torchtitan.models.flux.config import FLAVORS
from torchtitan.models.flux.model import Flux

SETS = MODELS["flux"].adapter_sets


def published(flavor):
    config = FLAVORS[flavor]
    kind = Embeddings({TEXT: torch.zeros(8, config.text_dim), POOLED: torch.zeros(config.pooled_dim)})
    with torch.device("meta"):
        return Flux(config, (16, 64, 64), kind)


@pytest.mark.parametrize("flavor", ["schnell", "dev"])
@pytest.mark.parametrize(
    ("name", "rank", "modules", "parameters"),
    [("ai-toolkit", 16, 494, 85_917_696), ("diffusers", 16, 342, 44_826_624), ("diffusers", 4, 342, 11_206_656),
     ("kohya", 16, 304, 76_578_816)],
)  # fmt: skip
def test_published_counts_of_flux(flavor, name, rank, modules, parameters):
    model = published(flavor)
    config = LoRAConfig(enable=True, rank=rank, targets=name)
    targets = find_targets(model, config, SETS)
    assert len(targets) == len(set(targets)) == modules
    add_trained_adapter(model, targets, config)
    trained = trained_parameters(dict(model.named_parameters()))
    assert len(trained) == 2 * modules
    assert sum(math.prod(parameter.shape) for parameter in trained.values()) == parameters


def test_queries_keys_values_and_hidden_layer_are_rows_of_one_layer():
    model, dim = flux(), 64
    targets = SETS["ai-toolkit"](model)
    single = [target for target in targets if target.module == "single_layers.1.qkv_hidden"]
    assert [(target.start, target.stop) for target in single] == [(0, 64), (64, 128), (128, 192), (192, 192 + 4 * dim)]
    double = [target for target in targets if target.module == "double_layers.0.text.qkv"]
    assert [(target.start, target.stop) for target in double] == [(0, 64), (64, 128), (128, 192)]
    assert Target("double_layers.1.image.modulation", 0, 6 * dim) in targets
    attention = SETS["diffusers"](model)
    assert {target.module for target in attention if target.module.startswith("single")} == {
        "single_layers.0.qkv_hidden", "single_layers.1.qkv_hidden",
    }  # fmt: skip
    assert all(target.stop <= 3 * dim for target in attention if target.module.startswith("single"))


def test_ai_toolkit_and_kohya_cover_every_linear_of_the_blocks_and_nothing_else():
    model = flux()
    config = LoRAConfig(enable=True, rank=1)
    whole = {target: target.stop for target in find_targets(model, config, SETS)}
    assert {target: target.stop for target in SETS["kohya"](model)} == whole
    rows = {}
    for target in SETS["ai-toolkit"](model):
        assert rows.setdefault(target.module, 0) == target.start  # no gap and no overlap
        rows[target.module] = target.stop
    assert rows == {target.module: stop for target, stop in whole.items()}


def test_a_set_of_another_family_is_refused():
    with pytest.raises(AdapterError, match="lora.targets: 'kohya' is no set of layers of Flux \\(one of blocks, or give"):
        find_targets(flux(), LoRAConfig(enable=True, targets="kohya"), MODELS["dit"].adapter_sets)
