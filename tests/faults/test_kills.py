"""Killed at random moments, a run ends as if nothing had been."""

import pytest

from tests.faults import kills


def differences(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["different"]]


def test_a_run_killed_at_random_ends_bit_for_bit_as_one_that_was_not():
    rows = kills.suite(1, seed=3)
    assert differences(rows) == []
    assert rows[0]["moments"], "this seed kills the run"


@pytest.mark.long
def test_forty_runs_on_five_layouts_killed_at_random_end_bit_for_bit_as_those_that_were_not():
    rows = kills.suite(40, seed=0)
    assert differences(rows) == []
    print(kills.table(rows))
