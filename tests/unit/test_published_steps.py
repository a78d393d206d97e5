"""Estimates of published systems: the result file, of which the documentation gives the errors, is that of the present code."""

import pytest

from benchmarks.published_steps import ROWS, record_of
from benchmarks.shared import ROOT, read_results

FOUND = read_results("published_steps")["rows"]


def test_the_documented_errors_are_those_of_the_result_file():
    assert len(FOUND) == len(ROWS)
    page = " ".join((ROOT / "docs" / "comparing.md").read_text().split())
    few, many = ([row for row in FOUND if (row["devices"] <= 72) == small] for small in (True, False))
    for rows, words in ((few, "on 16 to 72 GPUs"), (many, "on 512 and 1,152")):
        errors = [100 * row["error"] for row in rows]
        assert f"{min(errors):+.0f} to {max(errors):+.0f} %" in page.partition(words)[0][-25:], words


@pytest.mark.parametrize("number", [0, 6])  # compute, and communication, are most of them
def test_the_result_file_is_of_the_present_estimator(number):
    found = record_of(ROWS[number])
    assert found["devices"] == FOUND[number]["devices"]
    assert found["estimate"] == pytest.approx(FOUND[number]["estimate"], rel=1e-9)
