"""Flux trains alike on every layout, compiled or recomputed, with texts of which some are dropped; and resumes bit for bit."""

from typing import Any

import pytest
import torch

from tests.distributed.cases import WITHOUT_CODE
from tests.launcher import run_on_ranks

COMPILE, AC = "--compile.enable=true", "--activation_checkpoint.mode="
OF_RANKS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "compiled": {"backend": WITHOUT_CODE, "overrides": (COMPILE, AC + "memory_budget")}},
    2: {
        "DDP": {"replicas": 2},
        "FSDP, accumulation 2": {"shards": 2, "accumulation": 2, "resumed": True},
        "FSDP, selective": {"shards": 2, "overrides": (AC + "selective",)},
    },
    4: {"HSDP": {"replicas": 2, "shards": 2}},
}
COMPILED: dict[int, dict[str, dict[str, Any]]] = {
    1: {"whole": {"backend": WITHOUT_CODE, "overrides": (COMPILE, "--compile.scope=model")}},
    2: {"FSDP, selective, compiled": {"shards": 2, "backend": WITHOUT_CODE, "overrides": (COMPILE, AC + "selective")}},
}
OTHERS = [name for cases in OF_RANKS.values() for name in cases if name != "one"]


def train(of_ranks: dict[int, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for ranks, cases in of_ranks.items():
        runs |= run_on_ranks("tests.distributed.flux_cases:train_all", ranks, {"cases": cases})[0]
    return runs


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return train(OF_RANKS)


def check_like_one_process(run: dict[str, Any], one: dict[str, Any]) -> None:
    for part in ("curve", "held out") if run["held out"] else ("curve",):
        values, wanted = (torch.tensor(each[part], dtype=torch.float64).flatten() for each in (run, one))
        assert len(wanted) == (12 if part == "curve" else 3)
        assert ((values - wanted).abs() / wanted).max() <= 1e-5, part


@pytest.mark.parametrize("other", OTHERS)
def test_losses_gradient_norms_and_held_out_losses_are_those_of_one_process(found, other):
    check_like_one_process(found[other], found["one"])


@pytest.mark.long
def test_compiled_whole_and_under_fsdp_it_trains_alike(found):
    for run in train(COMPILED).values():
        check_like_one_process(run, found["one"])


def test_the_reference_moves(found):
    losses = [loss for loss, _ in found["one"]["curve"]]
    assert len(set(losses)) == 6 and losses[-1] < losses[0]


def test_each_block_is_a_unit_of_fsdp(found):
    """Two double and two single blocks, and the rest."""
    assert {name: run["units"] for name, run in found.items() if "FSDP" in name or "HSDP" in name} == {
        "FSDP, accumulation 2": 5, "FSDP, selective": 5, "HSDP": 5
    }  # fmt: skip


def test_a_run_resumes_bit_for_bit(found):
    assert [name for name, run in found.items() if run["resumed alike"]] == ["FSDP, accumulation 2"]
