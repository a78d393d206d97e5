import csv
import io
import json
import math
import statistics
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests import analysis_outputs as planted
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.forked import run_script
from torchtitan_dit.commands.optimization_analysis import main

TAGS = {
    "images_per_second": "throughput(img/s)", "tokens_per_second": "throughput(tps)", "tflops_per_device": "tflops",
    "mfu_percent": "mfu(%)", "step_seconds": "time_metrics/end_to_end(s)", "memory_gib": "memory/max_reserved(GiB)",
}


@pytest.fixture(scope="module")
def analysed(tmp_path_factory) -> tuple[Path, str, str]:
    """The analysed sweep, and what was printed to stdout and stderr."""
    sweep = planted.write_sweep(tmp_path_factory.mktemp("outputs"))
    (sweep / "analysis").mkdir()
    (sweep / "analysis" / "mine.txt").write_text("keep")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main([str(sweep)]) == 0
    return sweep, out.getvalue(), err.getvalue()


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_everything_is_written_and_nothing_else_touched(analysed):
    sweep, out, err = analysed
    pictures = {"mfu_percent_over_batch.png", "images_per_second_over_batch.png", "memory_gib_over_batch.png"}
    tables = {"results.csv", "analysis.md", "mine.txt"}
    assert {path.name for path in (sweep / "analysis").iterdir()} == pictures | tables
    assert (sweep / "analysis" / "mine.txt").read_text() == "keep"
    assert "eager → compiled, at equal batch: images/s +26" in out
    assert err.splitlines()[-1].endswith("3 lines of metrics.jsonl cannot be read")


def test_runs_agree_with_their_metrics_derived_anew(analysed):
    """Medians, order statistics and peaks again from metrics.jsonl, by other means than the analysis has."""
    sweep, *_ = analysed
    rows = [row for row in rows_of(sweep / "analysis" / "results.csv") if row["status"] == "ok"]
    assert len(rows) > 200
    for row in rows:
        points = [json.loads(line) for line in (sweep / row["name"] / "metrics.jsonl").read_text().splitlines()]
        peaks = {column: max(point[tag] for point in points) for column, tag in TAGS.items() if column.startswith("memory")}
        assert {column: float(row[column]) for column in peaks} == peaks and not any(row[f"{column}_upper"] for column in peaks)
        # Warm-up is 10 steps and a point is logged every 5: that of step 15 is the first without any of it.
        points = [point for point in points if point["step"] >= 15]
        assert int(row["points"]) == len(points) == 10
        for column, tag in ((column, tag) for column, tag in TAGS.items() if column not in peaks):
            ordered = sorted(point[tag] for point in points)
            # Of ten values the 2nd and 9th cover with 1 - 2 (1 + 10) / 1024; the 3rd and 8th with 0.89 only.
            expected = ((ordered[4] + ordered[5]) / 2, ordered[1], ordered[8])
            found = (float(row[column]), float(row[f"{column}_lower"]), float(row[f"{column}_upper"]))
            assert found == pytest.approx(expected, rel=1e-9)
        assert float(row["interval_coverage"]) == pytest.approx(1 - 22 / 1024, rel=1e-9)


def test_effects_agree_with_the_runs_derived_anew(analysed):
    sweep, *_ = analysed
    axes = ("patch", "local_batch", "layout", "ac")
    logs: dict[str, dict[tuple, list[float]]] = {"false": {}, "true": {}}
    for row in rows_of(sweep / "analysis" / "results.csv"):
        if row["status"] == "ok":
            key = tuple(row[name] for name in axes)
            logs[row["compile"]].setdefault(key, []).append(math.log(float(row["images_per_second"])))
    eager, compiled = ({key: statistics.fmean(values) for key, values in logs[name].items()} for name in ("false", "true"))
    ratios = [compiled[key] - eager[key] for key in eager if key in compiled]
    change = 100 * (math.exp(statistics.fmean(ratios)) - 1)
    text = (sweep / "analysis" / "analysis.md").read_text(encoding="utf-8")
    assert f"| eager → compiled | equal batch | {len(ratios)} | +{change:.1f} % [" in text


def test_the_report_names_what_left_no_result_and_escapes_it(analysed):
    text = (analysed[0] / "analysis" / "analysis.md").read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script>alert" in text
    for shown in ("step 0: out of memory", "a smaller batch ran out of memory", "not done after 600 s", "cannot be read"):
        assert shown in text


def test_runs_of_this_program_are_read_without_a_sweep(tmp_path):
    run = ForkedRun(
        write_config(tmp_path), "run", "--data.name", "synthetic", "--data.shape", "[4, 8, 8]",
        "--training.steps", "20", "--lr_scheduler.warmup_steps", "0", "--metrics.log_freq", "1",
        "--metrics.peak_tflops", "0.1",
        "--sampling.enable", "false", "--checkpoint.enable", "false", "--ema.tracks", "[]",
    )
    run.finish()
    words = [tmp_path / "outputs", "--out", tmp_path / "results", "--warmup-steps", "5"]
    done = run_script("optimization_analysis.py", *map(str, words))
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path / "results" / "results.csv")
    points = [point for point in run.points() if point["step"] > 5]
    assert (row["status"], row["model"], row["layout"], int(row["points"])) == ("ok", "debug", "single", 15)
    for column, tag in TAGS.items():
        tag = tag.replace("max_reserved", "max_resident")
        assert float(row[column]) == pytest.approx(statistics.median(point[tag] for point in points), rel=1e-9)
    assert row["device"].startswith("CPU")


@pytest.mark.parametrize(
    "words, message",
    [
        (("missing",), "no such folder"), (("empty",), "no run there or below"), (("file.txt",), "not a folder"),
        (("empty", "--warmup-steps", "-1"), "must be at least 0, is -1"), ((), "FOLDER"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    try:
        code = main([str(tmp_path / word) if word in ("missing", "empty", "file.txt") else word for word in words])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert message in err and len(err.splitlines()) == 1
    assert not (tmp_path / "empty" / "analysis").exists()
