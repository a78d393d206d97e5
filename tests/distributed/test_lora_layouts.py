"""Low-rank adapters of a frozen Flux train alike on every layout, with dropout, and resume bit for bit."""

from typing import Any

import pytest

from tests.distributed.cases import WITHOUT_CODE
from tests.distributed.test_flux_layouts import check_like_one_process, train

LORA = ("--lora.enable=true", "--lora.rank=4", "--lora.alpha=8", "--lora.dropout=0.2")
FULL = "--activation_checkpoint.mode=full"
COMPILE = "--compile.enable=true"
BFLOAT16 = (*LORA, "--lora.base_dtype=bfloat16")
OF_RANKS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": {"overrides": LORA},
        "compiled": {"overrides": (*LORA, COMPILE), "backend": WITHOUT_CODE},
        "bfloat16": {"accumulation": 2, "overrides": BFLOAT16},  # as many images a forward as a rank: rounds alike
    },
    2: {
        "DDP": {"replicas": 2, "resumed": True, "overrides": LORA},
        "FSDP, full": {"shards": 2, "resumed": True, "overrides": (*LORA, FULL)},
        "FSDP, bfloat16": {"shards": 2, "overrides": BFLOAT16},
    },
}
LIKE = {"compiled": "one", "DDP": "one", "FSDP, full": "one", "FSDP, bfloat16": "bfloat16"}


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
    assert [name for name, run in found.items() if run["resumed alike"]] == ["DDP", "FSDP, full"]
