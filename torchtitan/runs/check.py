"""Check of a run's folder to its last byte, with advice on damaged files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps, verify
from torchtitan.checkpoint.finding import NONE_GOOD
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.checkpoint.manifest import read_json
from torchtitan.errors import DamagedFile, unwrapped
from torchtitan.files.regular import UnsuitableFile, check_regular, open_regular, read_toml
from torchtitan.files.remote_path import AnyPath, RemotePath
from torchtitan.gns.config import GNS_FOLDER
from torchtitan.programs import program
from torchtitan.training.metric_points import parse_point
from torchtitan.training.metrics import METRICS_FILE
from torchtitan.training.snapshot_series import check_snapshots

STATUSES = ("completed", "oom", "failed", "interrupted")


@dataclass(frozen=True)
class Finding:
    """Finding on one file or checkpoint: the problem and the advice, both empty if it is good."""

    path: AnyPath
    problem: str = ""
    advice: str = ""


def check_run(run: AnyPath) -> Iterator[Finding]:
    """Check everything of a run, or of a folder of checkpoints, that a resume or an analysis needs; checkpoints come last.

    Raises:
        CheckpointError: their store does not answer, or their place is not known.
    """
    if isinstance(run, RemotePath) or checkpoint_steps(run) and not (run / "config.toml").exists():
        yield from _checkpoints(run)
        return
    yield _finding(run / "config.toml", _config, "remove it and start the run's command again: it is written anew")
    if (run / METRICS_FILE).exists():  # something was logged
        ended = (run / "summary.json").exists()
        advice = "remove that line" + ("" if ended else ", or resume the run, which drops what follows its checkpoint")
        yield _finding(run / METRICS_FILE, _damaged_line, advice)
    if (run / "summary.json").exists():  # the run is not in progress, and was not killed
        advice = "remove it and start the run's command again: it resumes and closes the run anew"
        yield _finding(run / "summary.json", _summary, advice)
    for path in sorted((run / GNS_FOLDER).glob("*.parquet")):
        yield _finding(path, _parquet, "remove it: pooling anew then does without its steps; training does not need it")
    yield from _snapshots(run)
    checkpoints = run_checkpoints(run)
    if not checkpoint_steps(checkpoints) and _has_saved(run):
        yield Finding(checkpoints, "holds no checkpoint, and the run saved some", "put them back")
    yield from _checkpoints(checkpoints)


def _has_saved(run: Path) -> bool:
    """Check whether a run that saves has ended with a checkpoint; False where that cannot be read, a finding already."""
    try:
        ended = read_json(run / "summary.json", dict)["status"] in ("completed", "interrupted")
        return ended and bool(read_toml(run / "config.toml")["checkpoint"]["enable"])
    except (DamagedFile, OSError, ValueError, KeyError, TypeError):
        return False


def _finding(path: Path, problem_of: Callable[[Path], str], advice: str) -> Finding:
    try:
        problem = problem_of(path)
    except UnsuitableFile as error:
        problem = str(error.strerror)
    except OSError:
        problem = "is missing or unreadable"
    return Finding(path, problem, advice if problem else "")


def _config(path: Path) -> str:
    try:
        read_toml(path)
    except ValueError as error:
        return f"is no TOML: {unwrapped(error)}"
    return ""


def _damaged_line(path: Path) -> str:
    last = -1
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            point = parse_point(line)
            if point is None or not line.endswith(b"\n"):
                return f"line {number} is damaged"
            if point["step"] < last:
                return f"line {number} is of step {point['step']}, after step {last}"
            last = point["step"]
    return ""


def _summary(path: Path) -> str:
    try:
        summary = read_json(path, dict)
    except DamagedFile as error:
        return str(error).removeprefix(f"{path.name} ")
    sound = summary.get("status") in STATUSES and type(summary.get("step")) is int
    return "" if sound else "does not contain the end of the run"


def _parquet(path: Path) -> str:
    check_regular(path)
    try:
        with pq.ParquetFile(path) as file:
            for _ in file.iter_batches():
                pass
    except (pa.ArrowException, OSError) as error:
        return f"is damaged: {unwrapped(error)[:120]}"
    return ""


def _snapshots(run: Path) -> Iterator[Finding]:
    for path, problem in check_snapshots(run):
        advice = f"put a copy back: without it {program('ema')} needs --ignore-gaps; training does not need it"
        yield Finding(path, problem, advice if problem else "")


def _checkpoints(folder: AnyPath) -> Iterator[Finding]:
    problems = {step: verify(checkpoint_path(folder, step)) for step in checkpoint_steps(folder)[::-1]}
    there = set(checkpoint_steps(folder))  # a run that trains deletes some meanwhile
    steps = [step for step in problems if step in there]
    good = [step for step in steps if problems[step] is None]
    for step in steps:
        yield Finding(checkpoint_path(folder, step), problems[step] or "", _repair(step, good) if problems[step] else "")


def _repair(step: int, good: list[int]) -> str:
    if not good:
        return NONE_GOOD
    if step < good[-1]:
        return f"remove it: a resume uses step {good[-1]}"
    anew = f"a finished run, with --checkpoint.load_step {good[-1]}"
    return f"nothing needs to be done: a resume skips it and uses step {good[-1]} ({anew}); or put a good copy back"
