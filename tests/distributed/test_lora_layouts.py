"""Low-rank adapters of a frozen Flux train alike on every layout, and resume bit for bit."""

import importlib.util
from typing import Any

import pytest

from tests.distributed.cases import AS_TRACED
from tests.distributed.test_flux_layouts import check_like_one_process, train

LORA = ("--lora.enable=true", "--lora.rank=4", "--lora.alpha=8")
FULL = "--activation_checkpoint.mode=full"
COMPILE = "--compile.enable=true"
# One adapter in a block instead of all: less to trace.
OUTPUTS = (*LORA, '--lora.patterns=["out$"]')
BFLOAT16 = (*LORA, "--lora.base_dtype=bfloat16")
OF_RANKS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": {"overrides": LORA},
        "outputs": {"overrides": OUTPUTS},
        "outputs, compiled": {"overrides": (*OUTPUTS, COMPILE), "backend": AS_TRACED, "held_out": False},
        "bfloat16": {"accumulation": 2, "overrides": BFLOAT16},  # as many images a forward as a rank: rounds alike
    },
    2: {
        "DDP": {"replicas": 2, "overrides": LORA},
        "FSDP, full": {"shards": 2, "resumed": True, "overrides": (*LORA, FULL)},
        "FSDP, bfloat16": {"shards": 2, "overrides": BFLOAT16},
    },
}
LIKE = {"outputs, compiled": "outputs", "DDP": "one", "FSDP, full": "one", "FSDP, bfloat16": "bfloat16"}

if importlib.util.find_spec("torchao"):  # quantised weights: the codes are whole on every rank
    INT8 = (*LORA, "--lora.base_dtype=int8")
    OF_RANKS[1] |= {  # codes are multiplied in bfloat16
        "int8": {"accumulation": 2, "overrides": INT8},
    }
    OF_RANKS[2] |= {
        "DDP, int8": {"replicas": 2, "resumed": True, "overrides": (*INT8, FULL)},
        "FSDP, int8": {"shards": 2, "overrides": INT8},
    }
    LIKE |= dict.fromkeys(("DDP, int8", "FSDP, int8"), "int8")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return train(OF_RANKS)


@pytest.mark.parametrize("name", LIKE)
def test_losses_and_gradient_norms_are_those_of_one_process(found, name):
    check_like_one_process(found[name], found[LIKE[name]])


def test_the_reference_learns_and_its_dtype_counts(found):
    losses = [loss for loss, _ in found["one"]["curve"]]
    assert len(set(losses)) == 6
    assert all(norm > 0 for _, norm in found["one"]["curve"])
    assert losses != [loss for loss, _ in found["bfloat16"]["curve"]]


def test_a_run_resumes_bit_for_bit(found):
    resumed = [name for runs in OF_RANKS.values() for name, run in runs.items() if run.get("resumed")]
    assert [name for name, run in found.items() if run["resumed alike"]] == resumed != []


@pytest.mark.long
@pytest.mark.skipif("int8" not in OF_RANKS[1], reason="could not import 'torchao'")
def test_compiled_blocks_compute_with_codes_as_eager_ones_do():
    codes = {"held_out": False, "overrides": (*OUTPUTS, "--lora.base_dtype=int8")}
    found = train({1: {"eager": codes, "compiled": {**codes, "overrides": (*codes["overrides"], COMPILE)}}})
    for (loss, norm), (of_eager, norm_of_eager) in zip(found["compiled"]["curve"], found["eager"]["curve"], strict=True):
        # Compute is in bfloat16, and compilation rounds it at other places: by its unit roundoff, 2^-8.
        assert loss == pytest.approx(of_eager, rel=2.0**-8) and norm == pytest.approx(norm_of_eager, rel=2.0**-8)
