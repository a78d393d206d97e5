"""Settings that trade speed for memory change when ranks communicate, and no result beyond rounding."""

import pytest
import torch

from tests.launcher import run_on_ranks

BLOCKS = 4


def case(*overrides: str, replicas: int = 1, shards: int = 2) -> dict:
    return {
        "replicas": replicas, "shards": shards, "overrides": ("--model.num_layers", str(BLOCKS), *overrides),
    }  # fmt: skip


RESHARD = "--parallelism.fsdp_reshard_after_forward"


@pytest.fixture(scope="module")
def gathered() -> dict[str, dict]:
    cases = {
        "default": case(), "always": case(RESHARD, "always"), "never": case(RESHARD, "never"),
    }  # fmt: skip
    return run_on_ranks("tests.distributed.speed_cases:gathered", 2, {"layouts": cases})[0]


def test_weights_are_gathered_again_where_they_were_released(gathered):
    counts = {name: found["gathers"] for name, found in gathered.items()}
    # The layers around the blocks are one more unit. Of the first step: nothing is gathered before it.
    assert counts == {"default": 2 * BLOCKS + 1, "always": 2 * (BLOCKS + 1), "never": BLOCKS + 1}


def test_gradients_are_the_same_to_the_bit_whenever_weights_are_gathered(gathered):
    wanted = gathered["default"]["norms"]
    assert wanted[0] != wanted[1]
    assert all(found["norms"] == wanted for found in gathered.values())


REDUCE = ("--training.mixed_precision_reduce", "bfloat16")
HALF_UNIT = 2.0**-8  # largest relative error of rounding to bfloat16's eight bits


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_reduction_in_bfloat16_is_off_by_its_rounding_only(compute):
    dtype = ("--training.mixed_precision_param", compute)
    cases = {"float32": case(*dtype), "bfloat16": case(*dtype, *REDUCE)}
    found = run_on_ranks("tests.distributed.speed_cases:reduced", 2, {"layouts": cases})[0]
    exact, rounded = (torch.tensor(found[name]["gradient"], dtype=torch.float64) for name in cases)
    error = (rounded - exact).norm()
    # Each rank's gradient is rounded, unless it was bfloat16 before, then their sum; the mean is of two: nothing more.
    of_ranks = 0 if compute == "bfloat16" else found["float32"]["own"]
    bound = HALF_UNIT * (of_ranks + exact.norm()) * (1 + HALF_UNIT)
    assert 0 < error <= bound
    assert found["bfloat16"]["dtype"] == "torch.float32"  # what the optimizer sees


def test_shards_in_host_memory_train_save_and_resume_to_the_bit():
    found = run_on_ranks("tests.distributed.speed_cases:offloaded", 2)[0]
    *kept, policy = found["kept"]
    *offloaded, offload_policy = found["offloaded"]
    assert kept == offloaded and len(set(kept)) == 5
    assert policy == ["OffloadPolicy"] and offload_policy == ["CPUOffloadPolicy"]
