"""Series of snapshots of a run's averages, read back: complete, undamaged and of one run, or refused."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from torchtitan.checkpoint.finding import verify
from torchtitan.checkpoint.manifest import (
    MANIFEST,
    STATE,
    checkpoint_path,
    checkpoint_steps,
    hash_file,
    read_json,
    read_manifest,
)
from torchtitan.errors import CheckpointError, DamagedFile
from torchtitan.training.ema_snapshots import snapshot_folder

_IGNORE = "put a copy back, or --ignore-gaps to do without it, at a larger profile error"


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of a run's power-function averages.

    Attributes:
        step: optimizer steps done.
        progress: the same in steps of training.global_batch_size: the averages' time.
        tracks: their standard deviations by name.
        earlier: step, and hash of the manifest, of each snapshot before it; "" where one could not be written.
    """

    path: Path
    step: int
    progress: int
    images: int
    dtype: str
    tracks: dict[str, float]
    earlier: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Gap:
    """Gap in a series: a snapshot that is missing or damaged; `problem` is a line that names it."""

    step: int
    problem: str


class SnapshotError(CheckpointError):
    """Snapshots that cannot be used; the message is one line."""


def read_series(run: Path, step: int | None = None, ignore_gaps: bool = False) -> tuple[list[Snapshot], list[Gap]]:
    """Read the snapshots up to a step, every byte of them.

    Args:
        step: of the last one; None for the newest.
        ignore_gaps: do without the earlier snapshots that are missing or damaged, instead of refusing.

    Returns:
        the snapshots, oldest first, and those that were left out.

    Raises:
        SnapshotError: there is none, one is missing or damaged, or one is of another run.
    """
    folder = snapshot_folder(run)
    steps = checkpoint_steps(folder)[::-1]
    if not run.is_dir():
        raise SnapshotError(f"{run}: no such run folder")
    if not steps:
        raise SnapshotError(f"{folder}: holds no snapshots (train with ema.snapshot_interval)")
    if step is not None and step not in steps:
        raise SnapshotError(f"{folder}: has no snapshot of step {step} (there are: {', '.join(map(str, steps))})")
    last_step = steps[-1] if step is None else step
    path = checkpoint_path(folder, last_step)
    if problem := verify(path):
        earlier = [str(each) for each in steps if each < last_step][-1:]
        advice = f"put a copy back, or --step {earlier[0]} for the one before" if earlier else "put a copy back"
        raise SnapshotError(f"{path}: {problem} ({advice})")
    last = _read_snapshot(path)
    expected = dict(last.earlier)
    stray = [each for each in steps if each < last_step and each not in expected]
    if stray:
        found = checkpoint_path(folder, stray[0])
        raise SnapshotError(f"{found}: is not one of those that {path.name} followed: of another run (move one of them away)")
    gaps = [Gap(*entry) for entry in _gaps(folder, expected, path.name)]
    if gaps and not ignore_gaps:
        more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        raise SnapshotError(f"{gaps[0].problem}{more} ({_IGNORE})")
    left_out = {gap.step for gap in gaps}
    kept = [_read_snapshot(checkpoint_path(folder, each)) for each in expected if each not in left_out]
    return [*kept, last], gaps


def check_snapshots(run: Path) -> Iterator[tuple[Path, str]]:
    """Check every snapshot of a run, oldest first: path, and its problem or ""."""
    folder = snapshot_folder(run)
    steps = checkpoint_steps(folder)[::-1]
    problems = {step: _problem(checkpoint_path(folder, step)) for step in steps}
    good = [step for step in steps if not problems[step]]
    if good:
        newest = checkpoint_path(folder, good[-1])
        expected = dict(_read_snapshot(newest).earlier)
        problems |= {step: _missing(expected[step]) for step in expected if step not in problems}
        for step in good[:-1]:
            if step not in expected or hash_file(checkpoint_path(folder, step) / MANIFEST) != expected[step]:
                problems[step] = f"is of another run than {newest.name}"
    for step in sorted(problems):
        yield checkpoint_path(folder, step), problems[step]


def _problem(path: Path) -> str:
    if problem := verify(path):
        return problem
    try:
        _read_snapshot(path)
    except SnapshotError as error:
        return str(error).removeprefix(f"{path}: ").partition(" (")[0]
    return ""


def _gaps(folder: Path, expected: dict[int, str], follower: str) -> Iterator[tuple[int, str]]:
    """Steps and problems of the missing and damaged among the expected snapshots. Raises SnapshotError: one is foreign."""
    bar = tqdm(expected.items(), desc="verifying snapshots", unit="snapshot", file=sys.stderr, disable=None, leave=False)
    for step, digest in bar:
        path = checkpoint_path(folder, step)
        if not path.exists():
            yield step, f"{path}: {_missing(digest)}"
            continue
        try:
            read_manifest(path)
        except DamagedFile as error:
            yield step, f"{path}: {error}"
            continue
        if hash_file(path / MANIFEST) != digest:
            raise SnapshotError(f"{path}: is not the snapshot that {follower} followed: of another run (put the right one back)")
        if problem := verify(path):
            yield step, f"{path}: {problem}"


def _missing(digest: str) -> str:
    return "is missing" if digest else "is missing: it could not be written in training"


def _read_snapshot(path: Path) -> Snapshot:
    try:
        state = read_json(path / STATE, dict)
        tracks = {str(name): float(std) for name, std in state["tracks"].items()}
        earlier = tuple((int(step), str(digest)) for step, digest in state["earlier"])
        step, progress, images = (int(state[key]) for key in ("step", "progress", "images"))
        return Snapshot(path, step, progress, images, str(state["dtype"]), tracks, earlier)
    except (DamagedFile, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{path}: is no snapshot of averages ({STATE} does not describe one; move it away)") from error
