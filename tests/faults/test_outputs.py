"""Outputs that cannot be written under real runs: training continues, and nothing is lost without a word."""

import json
import re
import signal

import pytest

from tests.end_to_end.runs import write_config
from tests.faults.forked import ForkedRun
from tests.forked import ForkedProcess
from torchtitan.checkpoint.checkpointer import newest_good
from torchtitan.runs.check import check_run
from torchtitan.training.metrics import MetricsLog

PICTURES = (
    "--training.steps", "100000", "--sampling.interval", "5", "--sampling.num_steps", "1",
    "--sampling.images_per_class", "1", "--checkpoint.interval", "10", "--checkpoint.async_mode", "async",
    "--metrics.enable_tensorboard", "true", "--gns.enable", "true", "--gns.num_bins", "4", "--gns.log_interval", "2",
)  # fmt: skip
SHORT = (
    "--training.steps", "20", "--sampling.enable", "false", "--checkpoint.interval", "10", "--validation.enable", "true",
    "--validation.interval", "10", "--validation.num_images", "16",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("outputs"))


def occupy(path) -> None:
    """Put a file where a folder was, or a folder where a file was."""
    is_folder = path.is_dir()
    path.rename(path.with_name(f"{path.name} aside"))
    path.write_text("in the way") if is_folder else path.mkdir()


def release(path) -> None:
    path.unlink() if path.is_file() else path.rmdir()
    path.with_name(f"{path.name} aside").rename(path)


class OccupiedRun(ForkedRun):
    """A run that cannot write at its end: from step 7 on the disk of its metrics is full, or the place of its summary taken, as
    its name says."""

    def start(self, arguments: list[str], environment: dict[str, str]) -> ForkedProcess:
        return ForkedProcess(_train_occupied, (arguments,), environment)


def fill_disk(log: MetricsLog) -> None:
    log._lines._file = open("/dev/full", "ab", buffering=0)


def _train_occupied(arguments: list[str]) -> int:
    from torchtitan import reports
    from torchtitan_dit.commands.train import main

    advance = reports.Reports.advance

    def occupying(self) -> None:
        advance(self)
        if self._state.step == 7 and self._first:
            folder = self._state.folder.path
            (folder / "summary.json").mkdir() if folder.name == "summary" else fill_disk(self._log)

    reports.Reports.advance = occupying
    return main(arguments)


def test_pictures_that_cannot_be_written_cost_themselves_alone_and_appear_again(config):
    run = ForkedRun(config, "pictures", *PICTURES)
    outputs = ("samples", "gns")
    run.wait_until(lambda: all((run.folder / name).exists() for name in outputs) and len(run.points()) > 4)
    run.wait_until(lambda: (run.folder / "gns" / "noise_scale.png").exists())
    for name in outputs:
        occupy(run.folder / name)
    step = run.points()[-1]["step"]
    failures = ("the grid of samples", "the picture of the noise scale", "the sums of the gradient noise scale")
    run.wait_until(lambda: all(run.said().count(f"{name} cannot be written") == 1 for name in failures))
    run.wait_until(lambda: run.points()[-1]["step"] >= step + 20)
    before = newest_good(run.folder / "checkpoint")[0]
    run.wait_until(lambda: newest_good(run.folder / "checkpoint")[0] > before)
    for name in outputs:
        release(run.folder / name)
    run.wait_until(lambda: all(run.said().count(f"{name} can be written again") == 1 for name in failures))
    run.processes[0].send_signal(signal.SIGTERM)
    codes, outputs = run.wait()
    assert codes == [128 + signal.SIGTERM] and "Traceback" not in outputs[0]
    assert all(outputs[0].count(f"{name} cannot be written") == 1 for name in failures), outputs[0]
    last = run.points()[-1]["step"]
    assert run.summary()["status"] == "interrupted" and 0 <= run.summary()["step"] - last < 5
    steps = [int(path.stem[5:]) for path in sorted((run.folder / "samples").glob("step-*.png"))]
    assert steps[0] == 5 and step + 20 <= steps[-1] and 3 <= (steps[-1] - steps[0]) // 5 + 1 - len(steps)
    assert (run.folder / "samples" / "training.gif").exists()
    assert [finding for finding in check_run(run.folder) if finding.problem] == []
    logged = [point["step"] for point in run.points() if "grad_norm" in point]
    assert logged == [1, *range(5, last + 1, 5)]


def test_a_run_whose_metrics_cannot_be_written_to_the_end_fails_and_says_how_many_are_lost(config):
    run = OccupiedRun(config, "metrics", *SHORT, ranks=2, replicas=2)
    codes, outputs = run.wait()
    assert codes == [1, 1] and "Traceback" not in "".join(outputs)
    status = json.loads((run.folder / "status.json").read_text())
    assert status["status"] == run.summary()["status"] == "failed" and status["reason"] == run.summary()["reason"]
    lost = int(re.search(r"step 20: (\d+) of 7 metric points could not be written", status["reason"])[1])
    assert "to metrics.jsonl; they are lost" in status["reason"]
    assert len(run.points()) == 7 - lost > 0
    assert newest_good(run.folder / "checkpoint") == (20, [])
    again = ForkedRun(config, "metrics", *SHORT)
    again.finish()
    assert again.summary()["status"] == "completed" and len(again.points()) >= 7 - lost


def test_a_completed_run_whose_summary_cannot_be_written_says_so_and_the_next_start_writes_it(config):
    [output] = OccupiedRun(config, "summary", *SHORT).finish()
    taken = config.parent / "outputs" / "summary" / "summary.json"
    assert (
        f"{taken}: the summary cannot be written: is a folder, not a regular file; the run has completed, and the same"
        in output
    )
    assert "Traceback" not in output and output.count("the summary cannot be written") == 1
    taken.rmdir()
    again = ForkedRun(config, "summary", *SHORT)
    assert "resumed after step 20 of 20" in again.finish()[0]
    assert again.summary()["status"] == "completed" and "validation_metrics/loss" in again.summary()
    assert len([point for point in again.points() if "grad_norm" in point]) == 5
    assert "is finished" in ForkedRun(config, "summary", *SHORT).finish()[0]
