"""python -m research critical_batch on a small run: killed and resumed, and what cannot be tested refused in one line."""

import csv
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from research import command_line
from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.forked import run_script, start_script
from torchtitan.files.run_lock import Busy, RunLock

COMMAND = "-m", "research", "critical_batch"
SIZE = ["--model.dim", "16", "--model.num_layers", "1", "--model.num_heads", "2", "--model.mlp_hidden_dim", "32"]
QUIET = ["--sampling.enable", "false", "--lr_scheduler.decay_type", "constant"]
ASKED = ["--step", "4", "--factors", "1", "2", "--seeds", "2", "--samples", "64", "--held-out", "320"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    config = write_config(tmp_path_factory.mktemp("branches"))
    steps = ["--training.steps", "8", "--checkpoint.interval", "4", "--metrics.loss_bins", "2"]
    trained = ForkedRun(config, "trained", *SIZE, *QUIET, *steps)
    trained.finish()
    # As the trainer logs it where gns.enable is set.
    with open(trained.folder / "metrics.jsonl", "a") as file:
        values = {"b_simple": 9.0, "lower": 8.0, "upper": 10.0}
        tags = {f"gns/plain/sketch/all/{name}": value for name, value in values.items()}
        file.write(json.dumps({"step": 4} | tags) + "\n")
    return trained.folder


@pytest.fixture
def refused(capsys):
    """Run the tool in this process, which it must refuse with one line; returns that."""

    def run_tool(*words) -> str:
        try:
            code = command_line.main(["critical_batch", *(str(word) for word in words)])
        except SystemExit as stop:  # argparse
            code = stop.code
        error = capsys.readouterr().err
        assert code == 2 and len(error.strip().splitlines()) == 1, error
        return error

    return run_tool


def rows_of(folder: Path) -> list[dict[str, str]]:
    try:
        with open(folder / "results.csv", newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []


def test_killed_test_goes_on_and_reports(run):
    folder = run / "critical_batch" / "step-00000004"
    first = start_script(*COMMAND, str(run), *ASKED)
    deadline = time.monotonic() + 300
    # The start and the first branch are measured, and the second one is at work.
    while not (len(rows_of(folder)) == 2 and (folder / "batch-32-seed-0" / "train.log").exists()):
        assert first.poll() is None and time.monotonic() < deadline, first.said()
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait(300) == 130 and "the same command resumes" in first.said() and "Traceback" not in first.said()
    before = (folder / "results.csv").read_bytes()
    assert before.count(b"\n") == 3

    second = run_script(*COMMAND, str(run), *ASKED)
    assert second.returncode == 0, second.stderr
    assert "## By timestep bin, of what it learned" in (folder / "summary.md").read_text()
    assert (folder / "results.csv").read_bytes().startswith(before)  # what was measured is not measured again
    rows = {(row["batch_size"], row["seed"]): row for row in rows_of(folder)}
    assert set(rows) == {("16", "start"), ("16", "0"), ("16", "1"), ("32", "0"), ("32", "1")}
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {key: int(row["steps"]) for key, row in rows.items()} == {
        ("16", "start"): 0, ("16", "0"): 4, ("16", "1"): 4, ("32", "0"): 2, ("32", "1"): 2
    }  # fmt: skip
    losses = {key: float(row["loss"]) for key, row in rows.items()}
    assert len(set(losses.values())) == 5
    assert max(loss for (_, seed), loss in losses.items() if seed != "start") < losses["16", "start"]
    check_report(folder, second.stdout)
    check_branch(folder / "batch-32-seed-1", run)


def check_report(folder: Path, output: str) -> None:
    summary = (folder / "summary.md").read_text()
    assert "# Critical batch size of trained at step 4" in summary and "9 [8, 10]" in summary
    assert output.strip().endswith(str(folder / "summary.md"))
    with Image.open(folder / "critical_batch.png") as image:
        assert image.width > 800 and len(image.convert("RGB").getcolors(1 << 24)) > 100
    assert not (folder / "start").exists() and not list(folder.glob("batch-*/checkpoint"))


def check_branch(branch: Path, run: Path) -> None:
    """Rate and microbatch of the branch, and samples that count from 0."""
    points = [json.loads(line) for line in (branch / "metrics.jsonl").read_text().splitlines()]
    of_run = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The run was in its warm-up at step 4 of 5; sqrt(2) times that, without a warm-up of its own.
    assert of_run[-1 - 1]["step"] == 8
    assert [point["lr"] for point in points] == pytest.approx([3e-3 * 4 / 5 * 2**0.5] * 2)
    assert [point["n_images_seen"] for point in points] == [32, 64]
    assert "32 images per step, 8 microbatches" in (branch / "train.log").read_text()


def test_branch_that_fails_is_a_row_and_the_test_goes_on(run, tmp_path):
    """A rate at which weights leave float32 at once."""
    asked = ["--step", "8", "--factors", "0.5", "1", "--seeds", "1", "--samples", "48", "--held-out", "100"]
    asked += ["--lr", "1e37", "--output", str(tmp_path / "diverging")]
    done = run_script(*COMMAND, str(run), *asked)
    assert done.returncode == 1 and "no branch was measured, the first diverged with: " in done.stderr
    rows = {row["batch_size"]: row for row in rows_of(tmp_path / "diverging") if row["seed"] == "0"}
    assert {row["status"] for row in rows.values()} == {"diverged"} and "gradient norm is" in rows["8"]["reason"]
    summary = (tmp_path / "diverging" / "summary.md").read_text()
    assert "unknown" in summary and "## Branches without a loss" in summary


@pytest.mark.parametrize(
    "words, said",
    [
        (["--step", "5"], "--step: 5 is no checkpoint of the run (there are: 4, 8)"),
        (["--factors", "1", "0.3"], "is no whole batch"),
        (["--factors", "2"], "nothing to compare"),
        (["--samples", "31", "--factors", "1", "2"], "too few for one step of 32 images"),
        (["--seeds", "0"], "--seeds: must be at least 1"),
        (["--tolerance", "nan"], "--tolerance: must be between 0 and 1"),
        (["--lr-rule", "cube"], "invalid choice"),
        (["--lr", "nan"], "--lr"),
        (["--lr", "inf"], "trained, at batch 8: optimizer.lr: "),
    ],
)
def test_bad_input_is_one_line(run, refused, words, said):
    assert said in refused(run, *words)


def test_a_run_that_its_own_average_teaches_is_refused(run, refused, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    text = (copy / "config.toml").read_text()
    aligned = text.replace('teacher = "none"', 'teacher = "self"\nblock = 1\nteacher_block = 2')
    (copy / "config.toml").write_text(aligned)
    assert aligned != text and "aligns with its own average (alignment.teacher = self)" in refused(copy, *ASKED)


def test_no_run_other_settings_and_a_second_test_at_once_are_refused(run, refused, tmp_path):
    assert "is no run folder" in refused(tmp_path / "none")
    (tmp_path / "settings.json").write_text('{"lr_rule": "linear"}')
    assert "lr_rule: 'linear' -> 'sqrt'" in refused(run, *ASKED, "--output", tmp_path)
    other = RunLock(tmp_path)
    assert other.acquire() is None
    with pytest.raises(Busy, match="this process writes here already"):
        refused(run, *ASKED, "--output", tmp_path)
    other.release()


def test_damaged_checkpoint_is_refused(run, refused):
    manifest = run / "checkpoint" / "step-00000008" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-40])
    try:
        assert "--step: 8: manifest.json is damaged" in refused(run, "--step", "8")
    finally:
        manifest.write_bytes(whole)
