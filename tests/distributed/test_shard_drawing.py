"""Parameters drawn shard by shard: the same bits as of the model drawn whole, and a rank's memory that of its shard."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.distributed.flux_cases import TEXTS
from tests.launcher import run_on_ranks
from torchtitan.conditions import Classes
from torchtitan.distributed.shard_drawing import NotByShards, draw_shards
from torchtitan.estimate.live_storages import LiveStorages
from torchtitan.models import MODELS

CASES = {
    "dit": ("--model.qk_norm=true", "--model.norm_affine=true"),
    "magnitude-preserving dit": ("--model.magnitude_preserving=true",),
    "edm2": ("--model.name=edm2", "--model.flavor=cifar", "--model.channels=32", "--model.channel_mults=[1,1]",
             "--model.attention_resolutions=[8]"),
    "flux": TEXTS,
    "frozen": ("--lora.enable=true", "--lora.base_dtype=bfloat16"),
    "frozen, with gains": ("--lora.enable=true", "--lora.base_dtype=float32", "--model.norm_affine=true"),
}  # fmt: skip
WRAPPED = ("--activation_checkpoint.mode=full",)
NOISE = ("--gns.enable=true", "--gns.num_bins=2")


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    arguments = {"cases": CASES, "replicas": 1, "shards": 1}
    return run_on_ranks("tests.distributed.shard_drawing_cases:sha256_of_weights", 1, arguments)[0]


def test_a_sharded_model_has_the_weights_of_the_whole_one(wanted):
    arguments = {"cases": CASES, "replicas": 1, "shards": 4}  # of 1 x 2 there is a trainer below
    found = run_on_ranks("tests.distributed.shard_drawing_cases:sha256_of_weights", 4, arguments)
    assert len(wanted) == len({*wanted.values()}) == 2 * len(CASES) + 2
    assert all(of_rank == wanted for of_rank in found)


def test_a_trainer_whose_layers_are_wrapped_starts_from_the_same_weights():
    function = "tests.distributed.shard_drawing_cases:first_steps"
    cases = {"wrapped": WRAPPED, "noise": NOISE}

    def on(replicas: int, shards: int) -> dict:
        layout = {"replicas": replicas, "shards": shards}
        of_layout = {name: layout | {"overrides": overrides} for name, overrides in cases.items()}
        return run_on_ranks(function, replicas * shards, {"cases": of_layout})[0]

    one, sharded = on(1, 1), on(1, 2)
    for name in cases:
        assert sharded[name][0] == one[name][0]
        assert sharded[name][1:] == pytest.approx(one[name][1:], rel=1e-5)


@pytest.mark.parametrize("shards", [8, 1024])
def test_a_ranks_memory_is_its_shard_and_one_parameter(shards):
    family = MODELS["dit"]
    with torch.device("meta"):
        model = family.build(family.flavors["DiT-XL/2"], (4, 32, 32), Classes(1000, "class"))
    parameters = list(model.parameters())
    largest = max(parameter.nbytes for parameter in parameters)
    buffers = sum(buffer.nbytes for buffer in model.buffers())

    def rows_of(shape: tuple[int, ...]) -> slice:
        return slice(0, math.ceil(shape[0] / shards))

    with FakeTensorMode(allow_non_fake_inputs=True), LiveStorages() as live:
        live.open_window("drawing")
        kept = draw_shards(model, model.init_weights, rows_of, torch.device("cpu"))
    shard = sum(tensor.nbytes for tensor in kept.values())
    assert shard == sum(math.ceil(parameter.shape[0] / shards) * parameter[0].nbytes for parameter in parameters)
    peak = live.windows["drawing"].total()
    assert shard + largest <= peak <= shard + largest + 8 * buffers  # the tables are computed in float64


class DrawsAView(nn.Module):
    """Layer that draws a part of its weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.normal_(self.weight[:2])


def test_a_model_that_draws_parts_of_a_parameter_is_left_to_be_drawn_whole():
    with torch.device("meta"):
        layer = DrawsAView()
    with pytest.raises(NotByShards):
        draw_shards(layer, layer.init_weights, lambda shape: slice(0, 2), torch.device("cpu"))
