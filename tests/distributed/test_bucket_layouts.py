"""Images of several shapes: loss, gradient and its noise do not depend on how a global batch is divided."""

import itertools

import pytest

from tests.bucketed_images import SHAPES
from tests.launcher import run_on_ranks

# Twice the batch, as it grows: two batches, often of two shapes, in one step.
TWICE = {"factor": 2}
ON_ONE = {
    "one": {"replicas": 1, "shards": 1}, "one, twice": {"replicas": 1, "shards": 1, **TWICE},
}
ON_TWO = {
    "DDP, accumulation 2": {"replicas": 2, "shards": 1, "accumulation": 2}, "FSDP": {"replicas": 1, "shards": 2},
    "DDP, twice": {"replicas": 2, "shards": 1, **TWICE},
    "FSDP, accumulation 2, twice": {"replicas": 1, "shards": 2, "accumulation": 2, **TWICE},
}  # fmt: skip
ON_FOUR = {"HSDP": {"replicas": 2, "shards": 2}}


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    results = {}
    for ranks, cases in ((1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)):
        results |= run_on_ranks("tests.distributed.bucket_cases:train_all", ranks, {"cases": cases})[0]
    return results


def largest_difference(rows: list[list[float]], reference: list[list[float]]) -> float:
    """Relative to the largest value of each step."""
    scales = [max(1e-30, *map(abs, row)) for row in reference]
    return max(
        abs(value - wanted) / scale
        for row, other, scale in zip(rows, reference, scales, strict=True) for value, wanted in zip(row, other, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_loss_gradient_and_noise_equal_those_of_one_process(found, name):
    case, one = found[name], found["one, twice" if "twice" in name else "one"]
    assert case["shapes"] == one["shapes"]
    pairs = zip(itertools.chain(*case["curve"]), itertools.chain(*one["curve"]), strict=True)
    assert max(abs(value - wanted) / abs(wanted) for value, wanted in pairs) <= 1e-5
    # Adam's geometry divides by averages of squares that are nearly zero in these first steps.
    for geometry, tolerance in ((0, 1e-5), (1, 1e-4)):
        squares, wanted = ([row[geometry] for row in each["squares"]] for each in (case, one))
        assert largest_difference(squares, wanted) <= tolerance


def test_a_step_is_of_one_shape_and_a_grown_one_of_several(found):
    steps = found["one"]["shapes"]
    assert len(steps) == 8 and all(count == 16 for step in steps for _, count in step) and {len(step) for step in steps} == {1}
    assert {tuple(step[0][0]) for step in steps} == {SHAPES[0], SHAPES[1], SHAPES[3]}
    grown = found["one, twice"]["shapes"]
    assert len(grown) == 4 and all(sum(count for _, count in step) == 32 for step in grown)
    assert {len(step) for step in grown} == {1, 2}
