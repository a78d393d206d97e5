"""Damaged files of every kind that the program reads are refused, passed over, or mean something legal."""

import pytest

from tests.faults import mutations


def test_files_damaged_at_random_never_raise_hang_or_lead_elsewhere():
    rows, failures = mutations.suite(6 * len(mutations.KINDS), seed=1)
    assert not failures, "\n".join(failure["problem"] for failure in failures)
    assert all(any(row[outcome] for row in rows) for outcome in mutations.OUTCOMES)  # each is exercised


@pytest.mark.long
def test_two_thousand_files_damaged_at_random_never_raise_hang_or_lead_elsewhere():
    rows, failures = mutations.suite(2000, seed=0)
    assert not failures, "\n".join(failure["problem"] for failure in failures)
    print(mutations.table(rows))
