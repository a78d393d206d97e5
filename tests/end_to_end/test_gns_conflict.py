"""Studies of conflict and of lags on a run: rows, resumption by cell, what is refused, reports from records alone."""

from pathlib import Path

import pytest

from tests.end_to_end.test_gns_calibration import CONFIG
from tests.end_to_end.tools import rows_of
from tests.faults.forked import ForkedRun

CONFLICT = ["--edges", 0, 0.5, 1, "--samples", 32, "--batch", 8, "--several", 2, "--several-batch", 4, "--held", 8]
LAGS = ["--edges", 0, 0.5, 1, "--samples", 64, "--back", 2, "--lags", 2]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    config = tmp_path_factory.mktemp("conflict") / "small.toml"
    # A small rate: weights that four steps hardly reached have a large factor in Adam's geometry.
    text = CONFIG.replace("[checkpoint]", "[checkpoint]\nkeep_latest_k = 0").replace("lr = 1e-2", "lr = 1e-5")
    config.write_text(text + "[gns]\nenable = true\nbin_edges = [0, 0.5, 1]\nlog_interval = 1\n")
    trained = ForkedRun(config, "trained")
    trained.finish()
    return trained.folder


@pytest.mark.parametrize(("name", "options", "cells"), [("gns_conflict", CONFLICT, 2), ("gns_lags", LAGS, 2)])
def test_cells_are_measured_once_and_reported_from_their_records(run, study, tmp_path, name, options, cells):
    words = [name, run, "--steps", 4, *options, "--output", tmp_path / "cells"]
    code, output, error = study(*words)
    assert code == 0, error
    before, results = rows_of(tmp_path / "cells"), tmp_path / "cells" / "results.csv"
    assert [row["status"] for row in before] == ["ok"] * cells, before[0]["reason"]
    lines = results.read_text().splitlines()
    results.write_text("\n".join(lines[:-1]) + "\nstep-00000004,digits,")  # the last one is cut off by a kill
    assert study(*words)[0] == 0
    after, volatile = rows_of(tmp_path / "cells"), {"date", "runtime"}
    assert after[:-1] == before[:-1]
    assert {k: v for k, v in after[-1].items() if k not in volatile} == {
        k: v for k, v in before[-1].items() if k not in volatile
    }
    code, output, error = study(f"{name}_report", tmp_path / "cells", "--cells", 9, "--output", tmp_path / "report")
    assert code == 0 and f"Interim, without a verdict: digits run_seed 0 {cells} of 9" in Path(output.strip()).read_text(), error


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["gns_conflict", "--samples", 12], "--samples: must be a multiple of 8"),
        (["gns_conflict", "--weights", "slow"], "is an average, without second moments of Adam"),
        (["gns_lags", "--edges", 0, 0.5, 1, "--back", 1], "--back: "),
        (["gns_lags", "--edges", 0, 0.4, 1, "--back", 2, "--steps", 4], "logged no noise scales of these bins"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(run, study, words, reason):
    code, output, error = study(words[0], run, *words[1:])
    assert code == 2 and reason in error and error.count("\n") == 1 and not output
