"""Folders of runs with torn or very long files are compared and analysed; intervals of medians."""

import contextlib
import io
import json
import math
import tracemalloc
from pathlib import Path

import pytest

from torchtitan.statistics.interval import median_interval
from torchtitan.training import metric_points
from torchtitan.training.metric_points import read_points
from torchtitan_dit.commands.compare import main as compare
from torchtitan_dit.commands.optimization_analysis import main as analyse

TORN = {"config": "[model]\nflavor = ", "summary": "{", "points": '{"step": 6, "throughput(img/s)": NaN}\n{'}


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


def test_a_run_of_torn_files_is_compared_with_a_good_one(tmp_path):
    outputs = tmp_path / "outputs"
    write_run(outputs / "good")
    for part, text in TORN.items():
        write_run(outputs / f"bad {part}", **{part: text})
    page = both(outputs)
    assert "good" in page and all(f"bad {part}" in page for part in TORN)


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


def test_a_long_run_has_an_interval_too():
    found = median_interval([float(value) for value in range(40_000)])
    assert found.coverage == pytest.approx(0.95, abs=2e-3)
    assert found.upper - found.lower == pytest.approx(2 * 1.96 * 0.5 * math.sqrt(40_000), rel=0.02)
