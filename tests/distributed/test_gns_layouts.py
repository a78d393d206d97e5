"""Raw sums of the gradients of single samples are the same however a global batch is divided."""

import pytest
import torch

from tests.distributed.cases import AS_TRACED, WITHOUT_CODE, by_inductor
from tests.launcher import run_on_ranks

STEPS = 6
COMPILED = ("--compile.enable", "true")
BF16 = ("--training.mixed_precision_param", "bfloat16")
# ranks -> name -> layout
CASES = {
    1: {
        "one": {"replicas": 1, "shards": 1},
        "accumulate": {"replicas": 1, "shards": 1, "accumulation": 2},
        "compile whole": {
            "replicas": 1, "shards": 1, "layers": 1, "overrides": (*COMPILED, "--compile.scope", "model"),
            "backend": WITHOUT_CODE,
        },
        "one, as compiled": {"replicas": 1, "shards": 1, "layers": 1},
        "selective": {"replicas": 1, "shards": 1, "overrides": ("--activation_checkpoint.mode", "selective")},
        "one bf16": {"replicas": 1, "shards": 1, "overrides": BF16, "layers": 3},
    },
    2: {
        "ddp": {"replicas": 2, "shards": 1},
        "fsdp": {"replicas": 1, "shards": 2},
        "fsdp accumulate": {"replicas": 1, "shards": 2, "accumulation": 2},
        "fsdp compile, full": {
            "replicas": 1, "shards": 2, "overrides": (*COMPILED, "--activation_checkpoint.mode", "full"),
            "backend": AS_TRACED, "layers": 1,
        },
        "fsdp bf16": {"replicas": 1, "shards": 2, "overrides": BF16, "layers": 3},
    },
    4: {
        "hsdp": {"replicas": 2, "shards": 2},
        "hsdp accumulate": {"replicas": 2, "shards": 2, "accumulation": 2},
    },
}
# Only in the long tests: above, compiled blocks are in "fsdp compile, full".
FURTHER = {
    1: {
        "compile, accumulate": {"replicas": 1, "shards": 1, "accumulation": 2, "overrides": COMPILED, "layers": 1},
        "compile bf16": {"replicas": 1, "shards": 1, "overrides": (*COMPILED, *BF16), "layers": 3},
    },
    2: {"fsdp compile": {"replicas": 1, "shards": 2, "overrides": COMPILED, "layers": 1}},
}


@pytest.fixture(scope="module")
def sums() -> dict[tuple[int, str], list[dict[str, torch.Tensor]]]:
    found = {}
    for ranks, cases in CASES.items():
        found |= sums_of(ranks, cases)
    return found


def sums_of(ranks: int, cases: dict[str, dict]) -> dict[tuple[int, str], list[dict[str, torch.Tensor]]]:
    of_ranks = run_on_ranks("tests.distributed.gns_cases:raw_sums", ranks, {"cases": cases}, timeout=600)[0]
    return {
        (ranks, name): [{key: torch.tensor(value, dtype=torch.float64) for key, value in row.items()} for row in rows]
        for name, rows in of_ranks.items()
    }


def largest_error(rows: list[dict], reference: list[dict], name: str) -> float:
    """Over the steps, relative to the largest entry of the same part, geometry and step."""
    errors = []
    for row, wanted in zip(rows, reference, strict=True):
        assert (name in row) == (name in wanted)
        if name in row:
            found, expected = row[name].flatten(2), wanted[name].flatten(2)  # [P, G, ...]
            scale = expected.abs().amax(2, keepdim=True).clamp_min(1e-300)
            errors.append(((found - expected).abs() / scale).max().item())
    return max(errors)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_layout_free_sums_equal_those_of_one_process(sums, ranks, name):
    bf16 = "bf16" in name
    tolerance = 1e-2 if bf16 else 1e-5
    rows, reference = sums[ranks, name], sums[1, "one bf16" if bf16 else "one, as compiled" if "compile" in name else "one"]
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    for row, wanted in zip(rows, reference, strict=True):
        assert torch.equal(row["count"], wanted["count"])
        assert ("sketched" in row) == (row["step"] % 2 == 0)
    # In bfloat16 Adam turns rounding into weights of their own: after two measured steps the models differ, after one by code of
    # Inductor, which rounds elsewhere (at step 4 the sums in bfloat16 are themselves 15 % from those in float32).
    steps = (3 if "compile" in name else 4) if bf16 else STEPS
    assert largest_error(rows[:steps], reference[:steps], "squares") < tolerance
    assert largest_error(rows[:steps], reference[:steps], "sketched") < tolerance


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_code_of_inductor_gives_the_same_sums(sums, ranks):
    cases = by_inductor(CASES[ranks]) | FURTHER[ranks]
    compiled = sums | sums_of(ranks, cases)
    for name in cases:
        test_layout_free_sums_equal_those_of_one_process(compiled, ranks, name)


OUTSIDE = {1: ("accumulate", "one bf16"), 2: ("ddp", "fsdp accumulate")}


@pytest.mark.parametrize("ranks", OUTSIDE)
def test_a_weight_used_outside_of_its_layer_is_refused_on_every_rank(ranks):
    cases = {name: {key: value for key, value in CASES[ranks][name].items() if key != "layers"} for name in OUTSIDE[ranks]}
    for found in run_on_ranks("tests.distributed.gns_cases:refusals", ranks, {"cases": cases}, timeout=300):
        for name in cases:
            step, words = found[name]
            assert step == 2 and "output.linear.weight or its bias is used outside of its layer" in words, name


@pytest.mark.parametrize(("ranks", "name"), [(2, "ddp"), (4, "hsdp"), (4, "hsdp accumulate"), (1, "accumulate")])
def test_pairs_within_microbatches_are_fewer_and_told(sums, ranks, name):
    microbatches = ranks * (2 if "accumulate" in name else 1)
    for row, one in zip(sums[ranks, name], sums[1, "one"], strict=True):
        assert row["pairs"].sum() == 16 * (16 // microbatches - 1) < one["pairs"].sum() == 16 * 15
        # Of every bin the squares are known, so the pairs' part of the products is what the cut takes away.
        if "all_pairs" in row:
            assert torch.equal(row["all_pairs"], one["all_pairs"])


def test_corrections_make_pairs_of_one_microbatch_exact(sums):
    for row in sums[1, "one"]:
        if "sketched" in row:
            modulation = row["sketched"][0] + row["corrections"][0]
            assert torch.allclose(modulation, row["products"][0], rtol=1e-5, atol=1e-5 * row["products"][0].abs().max().item())
