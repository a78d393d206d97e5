"""Norms of the ranks' own gradients against plain backwards of the whole model on each rank's samples alone."""

import pytest

from tests.distributed.cases import AS_TRACED, by_inductor
from tests.distributed.rank_gradient_cases import set_aside_alone
from tests.launcher import run_on_ranks

LAYOUTS = {
    2: {"DDP": (2, 1), "FSDP": (1, 2)},
    3: {"DDP": (3, 1), "FSDP": (1, 3)},
    4: {"HSDP": (2, 2)},
}
WAYS = {
    "eager": {},
    "accumulation": {"accumulation": 2},
    "full checkpointing": {"checkpoint": "full"},
    "selective checkpointing": {"checkpoint": "selective"},
    "bfloat16": {"param_dtype": "bfloat16", "accumulation": 2},
}
ONLY_ON_TWO = {
    "DDP, compiled": {"replicas": 2, "shards": 1, "compiled": True, "backend": AS_TRACED},
    "FSDP, compiled, full checkpointing": {
        "replicas": 1, "shards": 2, "compiled": True, "checkpoint": "full", "backend": AS_TRACED,
    },
    "FSDP, bfloat16 reduction": {"replicas": 1, "shards": 2, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
}
FURTHER_ON_TWO = {
    "FSDP, compiled": {"replicas": 1, "shards": 2, "compiled": True},
    "DDP, compiled whole": {"replicas": 2, "shards": 1, "compiled": True, "scope": "model"},
}
# On three, since dividing by three and multiplying by a third are not the same; on four, for the layout of two axes.
ON_MORE = {"eager": {}, "accumulation": {"accumulation": 2}}


def cases(ranks: int) -> dict[str, dict]:
    crossed = {
        f"{layout}, {way}": {"replicas": replicas, "shards": shards, **settings}
        for layout, (replicas, shards) in LAYOUTS[ranks].items()
        for way, settings in (WAYS if ranks == 2 else ON_MORE).items()
    }
    return crossed | (ONLY_ON_TWO if ranks == 2 else {})


@pytest.fixture(scope="module", params=[2, 3, 4])
def found(request) -> list[tuple[str, dict]]:
    """(case, what one rank found), of all ranks and cases of one world size."""
    return measured(request.param, cases(request.param))


def measured(ranks: int, cases: dict[str, dict]) -> list[tuple[str, dict]]:
    answers = run_on_ranks("tests.distributed.rank_gradient_cases:measure_all", ranks, {"cases": cases})
    assert len(answers) == ranks and all(answer.keys() == cases.keys() for answer in answers)
    return [(f"{name} x {ranks}, rank {rank}", answer[name]) for rank, answer in enumerate(answers) for name in answer]


def largest_errors(found: list[tuple[str, dict]], measured: str, wanted: str) -> dict[str, float]:
    return {
        name: max(abs(a / b - 1.0) for a, b in zip(answer[measured], answer[wanted], strict=True))
        for name, answer in found
    }


def test_every_rank_measures_the_gradient_of_its_own_samples(found):
    errors = largest_errors(found, "measured", "by_hand")
    assert max(errors.values()) <= 1e-5, errors
    norms = {name: tuple(answer["by_hand"]) for name, answer in found}
    assert len(set(norms.values())) >= max(len(norms) / 4, 2), "all ranks have the same samples"  # ways may agree to the bit


def test_bfloat16_compute_moves_norms_by_its_rounding_only(found):
    # An element of bfloat16 is off by up to 2^-8; some ten independent roundings on the way to an element of the gradient
    # would move a squared norm by 2 * sqrt(10) * 2^-8 = 2.5 %.
    errors = largest_errors(found, "measured", "by_hand_float32")
    assert all(error <= (0.025 if "bfloat16" in name else 1e-5) for name, error in errors.items()), errors


def test_the_reduced_gradient_is_the_mean_over_the_ranks(found):
    errors = largest_errors(found, "reduced", "reduced_by_hand")
    # What is reduced in bfloat16 is rounded in it; everything else is float32.
    assert all(error <= (0.01 if "reduction" in name else 1e-5) for name, error in errors.items()), errors


def test_measuring_changes_no_bit_of_the_reduced_gradient(found):
    assert {name: answer["same_bits"] for name, answer in found if not all(answer["same_bits"])} == {}


@pytest.mark.long
def test_code_of_inductor_is_measured_alike():
    found = measured(2, by_inductor(ONLY_ON_TWO) | FURTHER_ON_TWO)
    test_every_rank_measures_the_gradient_of_its_own_samples(found)
    test_the_reduced_gradient_is_the_mean_over_the_ranks(found)
    test_measuring_changes_no_bit_of_the_reduced_gradient(found)


def test_microbatches_reduced_one_by_one_are_measured_one_by_one_and_sum_to_the_accumulated_gradient(found):
    aside = [(name, answer["set_aside"]) for name, answer in found if "set_aside" in answer]
    assert aside
    errors = largest_errors(aside, "measured", "by_hand")
    assert max(errors.values()) <= 1e-5, errors
    differences = {name: max(answer["differences"]) for name, answer in aside}
    assert max(differences.values()) <= 1e-6, differences


def test_one_process_measures_its_microbatches_one_by_one():
    aside = [("one process", set_aside_alone())]
    assert max(largest_errors(aside, "measured", "by_hand").values()) <= 1e-5
    assert max(aside[0][1]["differences"]) <= 1e-6
