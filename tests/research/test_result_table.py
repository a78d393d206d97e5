"""Table of a study: what is not its own stays as it is, and a torn row is measured again."""

import os

import pytest

from research.result_table import ResultTable
from torchtitan.experiments.folder import StudyError

COLUMNS, KEY = ("model", "value"), ("model",)


@pytest.mark.parametrize("text", ["", "name,age\nme,30\nyou,29", "a note without an end", "model,value"])
def test_a_table_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path, text):
    path = tmp_path / "results.csv"
    path.write_text(text)
    own = text in ("", "model,value")  # a header that a kill has cut off
    if own:
        ResultTable(path, COLUMNS, KEY).add({"model": "a", "value": 1})
        assert path.read_text() == "model,value\na,1\n"
        return
    with pytest.raises(StudyError, match="has other columns"):
        ResultTable(path, COLUMNS, KEY)
    assert path.read_text() == text


def test_a_torn_row_is_cut_off_and_measured_again(tmp_path):
    path = tmp_path / "results.csv"
    table = ResultTable(path, COLUMNS, KEY)
    table.begin()
    table.add({"model": "a", "value": 1})
    path.write_text(path.read_text() + "b,")
    assert ResultTable(path, COLUMNS, KEY).find({"model": "b"}) is None
    assert path.read_text() == "model,value\na,1\n"


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "results.csv")
    with pytest.raises(StudyError, match=r"results\.csv: cannot be read: is a pipe"):
        ResultTable(tmp_path / "results.csv", COLUMNS, KEY)
