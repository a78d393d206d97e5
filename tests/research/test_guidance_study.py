"""The study of guides: equal evaluations, one noise for all methods, resumed after a stop, refusals in one line."""

import pytest

from research.guidance import NONE, Method, read_methods
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.research.tables import rows_of
from torchtitan.experiments.folder import StudyError

SHORT = (
    "--training.steps", "4", "--lr_scheduler.warmup_steps", "0", "--checkpoint.interval", "2",
    "--checkpoint.keep_latest_k", "0", "--sampling.enable", "false",
)  # fmt: skip
QUICK = ["--num-steps", "2", "--images", "20", "--sets", "2", "--batch-size", "15"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trained = ForkedRun(write_config(tmp_path_factory.mktemp("guidance")), "tiny", *SHORT)
    trained.finish()
    return trained.folder


def test_methods_are_compared_on_the_same_noise_at_equal_evaluations(run, study):
    words = ["guidance", run, "--weights", "ema", "--steps", 4, *QUICK, "--guides", "null=1", "@2=1", "@2=2", ":none=2"]
    code, _, error = study(*words)
    assert code == 0, error
    folder = run / "studies" / "guidance"
    rows = rows_of(folder)
    assert len(rows) == 2 * 5 and {row["status"] for row in rows} == {"ok"}
    assert {row["num_steps"] for row in rows if row["guide"] == NONE} == {"4"}
    assert {row["num_steps"] for row in rows if row["guide"] != NONE} == {"2"}
    # At scale 1 either guide leaves the network as it is.
    scores = {}
    for row in rows:
        scores.setdefault((row["guide"], float(row["scale"])), []).append(row["variety"])
    assert scores["null", 1.0] == scores["@2", 1.0] != scores["@2", 2.0]
    assert len(scores["@2", 1.0]) == len(set(scores["@2", 1.0])) == 2
    assert "![recognised share and variety](step-00000004.png)" in (folder / "summary.md").read_text()
    assert (folder / "step-00000004.png").stat().st_size > 10_000
    before = (folder / "results.csv").read_bytes()
    assert study(*words)[0] == 0
    assert (folder / "results.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--guides", "@2"], "'@2' is no GUIDE=SCALE"),
        (["--guides", "null=much"], "'null=much' is no GUIDE=SCALE"),
        (["--guides", "@3=2"], "holds no checkpoint of step 3 (checkpoints: 4, 2)"),
        (["--guides", "@4=2"], "are the sampled weights themselves"),
        (["--guides", ":fast=2"], "has no EMA track 'fast'"),
        (["--guides", "null=2", "--sets", "1"], "--sets: must be at least 2, is 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, study, tmp_path, words, message):
    code, _, error = study("guidance", run, "--weights", "ema", "--steps", 4, *words, "--output", tmp_path / "out")
    assert code == 2 and message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_methods_are_read_once_each_after_the_unguided_one():
    assert read_methods(["null=2", "runs/a:b@3=1.5", "null=2.0"]) == [
        Method(NONE, 1.0), Method("null", 2.0), Method("runs/a:b@3", 1.5)
    ]  # fmt: skip
    with pytest.raises(StudyError, match="none=2"):
        read_methods(["none=2"])
