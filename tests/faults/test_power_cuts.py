"""Its power cut at random moments, a run ends as if nothing had been, and nothing that it logged is missing."""

import pytest

from tests.faults import power_cuts
from tests.faults.cut_disk import CannotMount


def suite(*arguments) -> list[dict]:
    try:
        return list(power_cuts.runs(*arguments))
    except CannotMount as error:
        pytest.skip(str(error))


def differences(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["different"]]


def test_a_run_whose_power_is_cut_ends_bit_for_bit_as_one_whose_was_not():
    rows = suite(3, 25, power_cuts.TRIALS[:1])
    assert differences(rows) == []
    assert any(cut["kept"] for row in rows for cut in row["cuts"]), "this seed cuts after a save"


@pytest.mark.long
def test_thirty_cuts_of_runs_on_three_layouts_and_four_file_systems_lose_nothing():
    rows = suite(30, 0)
    assert differences(rows) == []
    print(power_cuts.table(rows))
