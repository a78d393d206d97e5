"""Estimates of published systems: those of the result file, which the documentation shows, are of the present code."""

import pytest

from benchmarks.published_steps import ROWS, record_of, table_of
from benchmarks.shared import ROOT, read_results

FOUND = read_results("published_steps")["rows"]


def test_the_documented_table_is_that_of_the_result_file():
    assert len(FOUND) == len(ROWS)
    assert "\n".join(table_of(FOUND)) in (ROOT / "docs" / "estimating.md").read_text()


@pytest.mark.parametrize("number", [0, 6])  # compute in both precisions, and communication, are most of them
def test_the_result_file_is_of_the_present_estimator(number):
    found = record_of(ROWS[number])
    assert found["devices"] == FOUND[number]["devices"]
    for precision, time in found["estimates"].items():
        assert time == pytest.approx(FOUND[number]["estimates"][precision], rel=1e-9)
