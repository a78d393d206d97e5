"""Folders of runs that somebody has filled with anything are compared and analysed, or refused, within bounds of memory."""

import contextlib
import io
import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest

from torchtitan.experiments.autotune.record import RecordError, SearchRecord
from torchtitan.experiments.folder import StudyError
from torchtitan.experiments.grid import SweepError
from torchtitan.experiments.record import ResultTable, SweepFolder
from torchtitan.experiments.training import samples_logged
from torchtitan.pictures.grids import save_animation
from torchtitan.runs.check import check_run
from torchtitan.statistics.interval import median_interval
from torchtitan.training import metric_points
from torchtitan.training.metric_points import read_points
from torchtitan_dit.commands.compare import main as compare
from torchtitan_dit.commands.optimization_analysis import main as analyse
from torchtitan_dit.studies.critical_batch_report import noise_scales
from torchtitan_dit.studies.curve_table import read_curves

DIGITS = "9" * 400  # beyond float64
DEEP = "[" * 500 + "]" * 500

CONFIGS = [
    f"[model]\nflavor = [1, {{a = 2}}]\npatch_size = {DIGITS}\n[debug]\nseed = 'one'\n[metrics]\nloss_bins = 10000000000\n",
    f"[debug]\nseed = {DIGITS}\n[training]\nsteps = {DIGITS}\nglobal_batch_size = {DIGITS}\nlocal_batch_size = -1\n",
    "[model]\nflavor = 'x/" + DIGITS + "'\n[parallelism]\ndata_parallel_replicate_degree = 1e308\n[compile]\nenable = [1]\n",
    "model." + ".".join("a" * 3000) + " = 1\n", f"model = {DEEP}\n", "model = 1\ndata = 'x'\n", "\x00", "[model]\n" * 2,
    "[activation_checkpoint]\nmode = {a = 1}\n[training]\nmixed_precision_param = []\n[job]\nname = 3\n",
]  # fmt: skip
SUMMARIES = [
    json.dumps({"status": ["completed"], "step": "8", "reason": {"a": 1}, "device": ["cpu"], "versions": [1], "layout": {}}),
    '{"status": "completed", "step": ' + DIGITS + ', "progress": ' + DIGITS + ', "num_parameters": ' + DIGITS + "}",
    '{"status": "completed", "step": -5, "sample_fid": ' + DIGITS + ', "device": 3, "versions": {"torch": [], "git_commit": {}}}',
    "[]", "null", DEEP, "{", '{"status": "completed", "step": 1e999}',
]  # fmt: skip
POINTS = [
    '{"step": ' + DIGITS + "}", '{"step": 1, "throughput(img/s)": ' + DIGITS + "}", DEEP, '{"step": true}', '{"step": -1}',
    '{"step": 3, "throughput(img/s)": 1e308, "loss_metrics/global_avg_loss": -1e308, "n_images_seen": 1e-300}',
    '{"step": 4, "throughput(img/s)": -1e308, "loss_metrics/global_avg_loss": 1e308, "n_images_seen": "many"}',
    '{"step": 9223372036854775807, "throughput(img/s)": 5e-324, "loss_by_bin/999999999999": 1, "loss_by_bin/x": 2}',
    '{"step": 6, "throughput(img/s)": [1], "validation_metrics/a/loss": NaN, "gns": Infinity, "lr": "1"}',
]  # fmt: skip


def write_run(folder: Path, config: str = "", summary: str = "", points: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config or '[model]\nflavor = "debug"\n[training]\nsteps = 8\n')
    (folder / "summary.json").write_text(summary or '{"status": "completed", "step": 8}')
    good = [{"step": step, "throughput(img/s)": 9.0, "loss_metrics/global_avg_loss": 1.0} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text(points or "".join(json.dumps(point) + "\n" for point in good))
    return folder


def both(outputs: Path) -> str:
    """What compare and the analysis say; each ends well."""
    runs = sorted(str(path) for path in outputs.iterdir())
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        assert compare([*runs, "--output", str(outputs.parent / "compare.html")]) == 0
        assert analyse([str(outputs), "--out", str(outputs.parent / "analysis")]) == 0
    assert "Traceback" not in said.getvalue()
    return (outputs.parent / "compare.html").read_text() + (outputs.parent / "analysis" / "analysis.md").read_text()


@pytest.mark.parametrize(
    ("part", "text"),
    [("config", text) for text in CONFIGS] + [("summary", text) for text in SUMMARIES] + [("points", text) for text in POINTS],
    ids=lambda value: value[:24] if value in ("config", "summary", "points") else "",
)  # fmt: skip
def test_a_run_of_anything_is_compared_with_a_good_one(tmp_path, part, text):
    outputs = tmp_path / "outputs"
    write_run(outputs / "good")
    write_run(outputs / "bad", **{part: text})
    write_run(outputs / "worse", **{part: text + "\n" + text})
    page = both(outputs)
    assert "good" in page and "bad" in page


def test_no_pipe_device_or_link_in_a_circle_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_points, "_GIVEN_UP", 1 << 22)  # the hole behind the points
    outputs = tmp_path / "outputs"
    write_run(outputs / "good")
    for kind in ("pipe", "device", "circle", "folder", "huge"):
        run = write_run(outputs / kind)
        for name in ("config.toml", "summary.json", "metrics.jsonl"):
            path = run / name
            if kind == "huge":
                os.truncate(path, 1 << 40)  # takes no room on the disk
                continue
            path.unlink()
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to("/dev/zero" if kind == "device" else path)
        (run / "metrics.jsonl.bak").touch()
    (outputs / "loop").symlink_to(outputs)
    for name in ("pipe", "device", "circle", "folder", "loop"):  # not known as runs: nothing there is a file
        assert compare([str(outputs / name), "--output", str(tmp_path / "page.html")]) == 2
        if name != "loop":
            assert analyse([str(outputs / name), "--out", str(tmp_path / "analysis")]) == 2
    assert compare([str(outputs / "huge"), "--output", str(tmp_path / "page.html")]) == 0
    assert "config.toml cannot be read" in (tmp_path / "page.html").read_text()
    assert analyse([str(outputs), "--out", str(tmp_path / "analysis")]) == 0


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def test_whatever_reads_what_a_run_or_a_study_left_refuses_a_pipe(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "checkpoint").mkdir()
    for name in ("config.toml", "metrics.jsonl", "gns/raw-00000001-00000002.parquet"):
        pipe(run / name)
    found = {finding.path.name: finding.problem for finding in check_run(run) if finding.problem}
    assert all("is a pipe, not a regular file" in found[name] for name in found) and len(found) == 3
    with pytest.raises(OSError, match="is a pipe"):
        list(metric_points.iter_points(run / "metrics.jsonl"))
    assert noise_scales(run / "metrics.jsonl", 4) == [] and samples_logged(run) == 0
    with pytest.raises(StudyError, match=r"results\.csv: cannot be read: is a pipe"):
        ResultTable(pipe(tmp_path / "results.csv"), ["a"], ["a"])
    with pytest.raises(StudyError, match=r"curve\.csv: cannot be read: is a pipe"):
        read_curves(pipe(tmp_path / "curve.csv"))
    search = SearchRecord(tmp_path, {})
    pipe(search.path)
    with pytest.raises(RecordError, match="damaged"):
        search.read()
    pipe(tmp_path / "sweep" / "sweep.jsonl")
    with pytest.raises(SweepError, match=r"sweep\.jsonl: cannot be read: is a pipe"):
        SweepFolder(tmp_path / "sweep").rows()
    assert save_animation([(1, pipe(tmp_path / "step-1.png"))], tmp_path / "x.gif") == 0


def test_points_of_an_endless_file_are_thinned_within_a_bound_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_points, "MOST_KEPT", 4000)
    monkeypatch.setattr(metric_points, "LONGEST_LINE", 1000)
    path, count = tmp_path / "metrics.jsonl", 20_001
    with open(path, "w") as file:
        for step in range(count):
            file.write(json.dumps({"step": step, "a": 1.0}) + "\n")
            if step == 10:
                file.write("x" * 3_000_000 + "\n" + '{"step": 11, "a": "' + "y" * 5000 + '"}\n')
    tracemalloc.start()
    found = read_points(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    steps = [point["step"] for point in found.points]
    assert found.damaged == 2 and found.stride == 128 and steps == [*range(0, count, 128), count - 1]
    assert peak < 400_000, peak

    (tmp_path / "few").write_text('{"step": 2}\n{"step": 1}')  # a line without an end counts
    assert read_points(tmp_path / "few") == metric_points.MetricPoints([{"step": 1}, {"step": 2}])
    (tmp_path / "none").write_text("")
    assert read_points(tmp_path / "none") == metric_points.MetricPoints()


def test_a_file_that_is_written_and_cut_back_while_it_is_read_is_read_to_an_end(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    parse = metric_points.parse_point

    def somebody_writes(line):
        with open(path, "a") as file:  # a run that logs faster than this reads
            file.write('{"step": 3}\n' * 100)
        return parse(line)

    monkeypatch.setattr(metric_points, "parse_point", somebody_writes)
    assert [point["step"] for point in read_points(path).points] == [1, 2]
    monkeypatch.setattr(metric_points, "parse_point", lambda line: (os.truncate(path, 0), parse(line))[1])
    assert len(read_points(path).points) >= 1


@pytest.mark.parametrize("count", [6, 10, 50, 1000])
def test_the_interval_of_a_median_is_that_of_the_binomial_distribution(count):
    found = median_interval([float(value) for value in range(count)])
    below = round(found.lower)  # values below the lower end
    tail = sum(math.comb(count, k) for k in range(below + 1)) / 2**count
    assert found.coverage == pytest.approx(1 - 2 * tail, rel=1e-9) and 2 * tail <= 0.05
    assert 2 * sum(math.comb(count, k) for k in range(below + 2)) / 2**count > 0.05


def test_a_long_run_has_an_interval_too():
    found = median_interval([float(value) for value in range(40_000)])
    assert found.coverage == pytest.approx(0.95, abs=2e-3)
    assert found.upper - found.lower == pytest.approx(2 * 1.96 * 0.5 * math.sqrt(40_000), rel=0.02)
