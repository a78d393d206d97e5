"""What a run leaves behind, and what can be done with it."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.drawing import sample
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.forked import run_script
from tests.launcher import ROOT

OVERRIDES = [
    "--training.steps", "20", "--metrics.enable_tensorboard", "true", "--metrics.peak_tflops", "0.5",
    "--sampling.interval", "10", "--validation.enable", "true", "--validation.interval", "10",
    "--validation.num_images", "100", "--checkpoint.interval", "10", "--objective.cosine_weight", "0.5",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = ForkedRun(write_config(tmp_path_factory.mktemp("outputs")), "complete", *OVERRIDES)
    run.finish()
    return run


def test_points_hold_the_documented_metrics(run):
    training = [point for point in run.points() if "grad_norm" in point]
    assert [point["step"] for point in training] == [1, 5, 10, 15, 20]
    text = (ROOT / "docs" / "running.md").read_text().partition("\n## Metrics\n")[2].partition("\n## The clock\n")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `") and "if blocks are compiled" not in line]
    documented = {tag for row in rows for tag in re.findall("`([^`]+)`", row) if "<" not in tag and "..." not in tag}
    point = run.points()[-2] | run.points()[-1]
    assert len(documented) > 10 and documented <= point.keys(), documented - point.keys()
    assert [tag for tag in point if tag.startswith("loss_by_bin/")] == [f"loss_by_bin/{k}" for k in range(10)]
    assert point["n_images_seen"] == 320
    flops = run.summary()["flops_per_image"]
    assert point["tflops"] == pytest.approx(flops * point["throughput(img/s)"] / 1e12)
    assert point["mfu(%)"] == pytest.approx(100 * point["tflops"] / 0.5)
    assert point["throughput(tps)"] == pytest.approx(16 * point["throughput(img/s)"])


def test_tensorboard_holds_the_same_numbers_and_the_pictures(run):
    events = EventAccumulator(str(run.folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    for tag in ("loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/ema/loss"):
        logged = [(point["step"], point[tag]) for point in run.points() if tag in point]
        assert [(event.step, event.value) for event in events.Scalars(tag)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in logged
        ]
    assert [event.step for event in events.Images("samples")] == [10, 20]


def test_summary_and_pictures(run):
    summary = run.summary()
    assert (summary["status"], summary["step"], summary["n_images_seen"]) == ("completed", 20, 320)
    assert summary["layout"] == "one process" and summary["versions"]["torch"]
    last = [point for point in run.points() if "validation_metrics/loss" in point][-1]
    tags = [tag for tag in last if tag.startswith("validation_metrics/")]
    assert {tag: summary[tag] for tag in tags} == {tag: last[tag] for tag in tags}
    for weights in ("", "ema/"):
        for name in ("loss", "loss_stderr", "loss_by_bin/9", "loss_stderr_by_bin/9"):
            assert last[f"validation_metrics/{weights}{name}"] > 0
    throughputs = sorted(point["throughput(img/s)"] for point in run.points() if "grad_norm" in point)
    assert throughputs[0] <= summary["tail_medians"]["throughput(img/s)"] <= throughputs[-1]
    with Image.open(run.folder / "samples" / "training.gif") as animation:
        assert animation.n_frames == 2


def test_recorded_configuration_repeats_the_run(run, tmp_path):
    done = run_script(
        "train.py", "--job.config_file", str(run.folder / "config.toml"), "--job.dump_folder", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "complete" / "metrics.jsonl").read_text().splitlines()
    again = [(p["step"], p["loss_metrics/global_avg_loss"], p["grad_norm"]) for p in map(json.loads, lines) if "grad_norm" in p]
    assert again == [
        (p["step"], p["loss_metrics/global_avg_loss"], p["grad_norm"]) for p in run.points() if "grad_norm" in p
    ]


def test_samples_are_the_same_on_any_number_of_ranks(run, tmp_path):
    for ranks in (1, 2):
        results = sample(
            tmp_path / str(ranks), run.folder, "--classes", "3", "7", "--images-per-class", "3", "--seed", "5",
            "--num-steps", "4", "--solver", "heun", "--files", "--latents", ranks=ranks,
        )  # fmt: skip
        assert [code for code, _ in results] == [0] * ranks, results
    latents = [load_file(next((tmp_path / ranks).glob("latents-*-seed-5.safetensors"))) for ranks in ("1", "2")]
    assert latents[0]["labels"].tolist() == [3] * 3 + [7] * 3 and latents[0]["latents"].shape[0] == 6
    torch.testing.assert_close(latents[1], latents[0])
    files = sorted(path.name for path in (tmp_path / "1").glob("*.png"))
    assert len(files) == 1 + 6 and sum(name.startswith("class-0007") for name in files) == 3
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name
    contents = {(tmp_path / "1" / name).read_bytes() for name in files}
    assert len(contents) == len(files)


def test_packages_are_this_repository_s_even_where_others_are_installed(tmp_path):
    for name in ("torchtitan", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the other package')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "train.py", "--check-only"], cwd=ROOT, env=environment, check=True, capture_output=True)
