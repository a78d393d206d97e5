"""Check of a run's folder to its last byte, with advice on damaged files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps, verify
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
_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class Finding:
    """Finding on one file or checkpoint: the problem and the advice, both empty if it is good."""

    path: AnyPath
    problem: str = ""
    advice: str = ""


def check_run(run: AnyPath) -> Iterator[Finding]:
    """Check everything of a run that a resume or an analysis needs; checkpoints, the only content of a URL, come last.

    Raises:
        CheckpointError: their store does not answer, or their place is not known.
    """
    if isinstance(run, RemotePath):
        yield from _checkpoints(run)
        return
    yield from _config(run / "config.toml")
    yield from _metrics(run / METRICS_FILE)
    yield from _summary(run / "summary.json")
    for path in sorted((run / GNS_FOLDER).glob("*.parquet")):
        yield from _parquet(path)
    yield from _snapshots(run)
    yield from _checkpoints(run_checkpoints(run))


def _config(path: Path) -> Iterator[Finding]:
    problem = ""
    try:
        read_toml(path)
    except ValueError as error:
        problem = f"is no TOML: {unwrapped(error)}"
    except UnsuitableFile as error:
        problem = str(error.strerror)
    except OSError:
        problem = "is missing or unreadable"
    yield Finding(path, problem, "remove it and start the run's command again: it is written anew" if problem else "")


def _metrics(path: Path) -> Iterator[Finding]:
    if not path.exists():  # nothing was logged yet
        return
    try:
        problem = _damaged_line(path)
    except UnsuitableFile as error:
        problem = str(error.strerror)
    except OSError:
        problem = "is unreadable"
    yield Finding(
        path, problem, "remove that line, or resume the run, which drops what follows its checkpoint" if problem else ""
    )


def _damaged_line(path: Path) -> str:
    last = -1
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            point = parse_point(line)
            if point is None or not line.endswith(b"\n"):
                return f"line {number} is damaged"
            if point["step"] < last:
                return f"line {number} is of step {point['step']}, after step {last}"
            last = point["step"]
    return ""


def _summary(path: Path) -> Iterator[Finding]:
    if not path.exists():  # the run is in progress, or was killed
        return
    try:
        summary = read_json(path, dict)
        sound = summary.get("status") in STATUSES and type(summary.get("step")) is int
        problem = "" if sound else "does not contain the end of the run"
    except DamagedFile as error:
        problem = str(error).removeprefix(f"{path.name} ")
    advice = "remove it and start the run's command again: it resumes and closes the run anew" if problem else ""
    yield Finding(path, problem, advice)


def _parquet(path: Path) -> Iterator[Finding]:
    try:
        check_regular(path)
        with pq.ParquetFile(path) as file:
            for _ in file.iter_batches():
                pass
        yield Finding(path)
    except (pa.ArrowException, OSError) as error:
        said = unwrapped(error)[:120]
        advice = "remove it: pooling anew then does without its steps; training does not need it"
        yield Finding(path, f"is damaged: {said}", advice)


def _snapshots(run: Path) -> Iterator[Finding]:
    for path, problem in check_snapshots(run):
        advice = f"put a copy back: without it {program('ema')} needs --ignore-gaps; training does not need it"
        yield Finding(path, problem, advice if problem else "")


def _checkpoints(folder: AnyPath) -> Iterator[Finding]:
    steps = checkpoint_steps(folder)[::-1]
    problems = {step: verify(checkpoint_path(folder, step)) for step in steps}
    good = [step for step in steps if problems[step] is None]
    for step in steps:
        advice = ""
        if problems[step]:
            advice = _repair(step, good)
        yield Finding(checkpoint_path(folder, step), problems[step] or "", advice)


def _repair(step: int, good: list[int]) -> str:
    if not good:
        return "put a copy of a good one back, or remove all of them to start the run from the beginning"
    if step < good[-1]:
        return f"remove it: a resume uses step {good[-1]}"
    return f"nothing needs to be done: a resume skips it and uses step {good[-1]}; or put a good copy back"
