"""What measuring gradient noise asks of a GPU, counted on an imitated one: operations, bytes, copies and waits."""

import pytest

from tests.counted_noise import IMAGES, LAYERS, STEPS, write_noise_counts
from tests.counted_steps import counts_in_fork

XL2_LAYERS = 28


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    return counts_in_fork(write_noise_counts, (), tmp_path_factory.mktemp("noise") / "counts.json")


def of_xl2(counts: dict, kind: str, phase: str, quantity: str = "operations") -> int:
    """Count of XL/2, which grows by the same number with every layer."""
    few, more = (counts[f"{layers} {kind}"][phase][quantity] for layers in LAYERS)
    return few + (XL2_LAYERS - LAYERS[0]) * (more - few) // (LAYERS[1] - LAYERS[0])


def test_a_measured_step_of_xl2_begins_with_at_most_400_operations(counts):
    assert 200 < of_xl2(counts, "measured", "begin_step") <= 400
    assert "begin_step" not in counts["1 free"] or counts["1 free"]["begin_step"]["operations"] == 0


def test_collecting_takes_as_many_operations_for_any_number_of_layers(counts):
    for kind, most in (("measured", 100), ("free", 50)):
        small, large = (
            sum(counts[f"{layers} {kind}"][phase]["operations"] for phase in ("end_microbatch", "end_step"))
            for layers in LAYERS
        )
        assert small == large <= most


def test_sketches_of_xl2_move_at_most_80_gigabytes_for_256_images(counts):
    measured, free = (of_xl2(counts, kind, "backward", "moved") for kind in ("measured", "free"))
    assert IMAGES == 256 and 0 < measured - free <= 80e9


def test_a_measurement_comes_to_the_host_in_one_copy_that_nothing_waits_for(counts):
    for step, copies in zip(STEPS, (1, 0), strict=True):
        found = counts[f"step {step}"]
        assert found["gns"]["copies_to_host"] == copies
        assert (found["step"]["synchronising_copies"], found["step"]["waits"]) == (0, {})
