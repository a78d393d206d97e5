"""Records of studies given to a report: each cell counts once."""

import csv
from pathlib import Path

import pytest

from torchtitan_dit.commands.study import main

RESULTS = Path(__file__).parents[2] / "studies" / "results"


@pytest.mark.parametrize(
    ("study", "records", "said"),
    [
        ("gns_calibration", ["digits", "digits"], "digits, step 30, bin 0; a cell"),
        ("gns_calibration", ["digits", "digits-age-120-first"], "digits, step 120, bin 0, with different checkpoint; a cell"),
        ("gns_conflict", ["digits-0", "digits-1", "digits-0"], "digits run_seed 0, step 60, bin 0; a cell"),
        ("gns_lags", ["digits-0", "digits-0"], "digits run_seed 0, step 60, bin 0; a cell"),
    ],
)
def test_a_cell_in_two_records_is_refused_with_both_folders(tmp_path, capsys, study, records, said):
    folders = [str(RESULTS / study / name) for name in records]
    assert main([f"{study}_report", *folders, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{folders[0]} and {folders[-1]}: both hold {said} counts once" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_cell_measured_twice_with_other_numbers_in_one_record_is_refused(tmp_path, capsys):
    with open(RESULTS / "gns_lags" / "digits-0" / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for more, code in ((rows[0], 0), (rows[0] | {"samples": "2048"}, 2)):  # the same cell repeated: the later row counts
        with open(tmp_path / "results.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows([*rows, more])
        assert main(["gns_lags_report", str(tmp_path), "--output", str(tmp_path / "out")]) == code
    assert "step 60, bin 0, with different samples" in capsys.readouterr().err
    assert "digits run_seed 0 40 of 40" in (tmp_path / "out" / "summary.md").read_text()
