"""Completed runs with a clock, the same training on other hardware: read, and refused where they do not compare."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchtitan.distributed.degrees import DEGREE_KEYS
from torchtitan.runs.compare.text import settings_text
from torchtitan.runs.record import RunRecord, RunRecordError, Series, differing_settings, is_number, read_runs
from torchtitan.training.clock import PARTS

TRAIN, WALL = "train", "wall"
CLOCKS = (TRAIN, WALL)
CLOCK_NAMES = {TRAIN: "training alone", WALL: "wall, all included"}

# What hardware may change: where a run lies, its number of devices, their peak and price; and the seed, for repeats.
_FREE = (
    "job.", "comm.", "debug.seed", "checkpoint.folder", "metrics.peak_tflops", "metrics.price_per_hour", "metrics.currency",
    *DEGREE_KEYS,
)
_SHARED_BATCH = "training.local_batch_size"
_PLACES = ("path", "folder", "file", "directory", "store")  # endings of keys that name places
_PRESENT_CLOCKS = ("sm_mhz", "memory_mhz")  # of the moment they were read: no two runs have the same
_MOST_KEYS = 12  # named in a refusal


@dataclass(frozen=True)
class Window:
    """Steps between two logged points.

    Attributes:
        start, end: steps of the points; trained are start + 1 to end.
        seconds: of each of CLOCKS.
    """

    start: int
    end: int
    seconds: dict[str, float]

    def per_step(self, clock: str) -> float:
        """Seconds per step."""
        return self.seconds[clock] / (self.end - self.start)


@dataclass(eq=False)
class ClockedRun:
    """Completed run with a clock.

    Attributes:
        record: the run.
        clock: of its summary; finite numbers only.
        hardware: of its summary, as found.
    """

    record: RunRecord
    clock: dict[str, float]
    hardware: dict[str, Any]

    @cached_property
    def seconds(self) -> dict[str, Series]:
        """Seconds since the run's start by step, of each of CLOCKS, at the steps that have both."""
        both = {clock: self.record.series(f"clock/{clock}(s)") for clock in CLOCKS}
        steps = sorted(set(both[TRAIN].steps) & set(both[WALL].steps))
        return {clock: Series(tuple(steps), tuple(one.at(step) for step in steps)) for clock, one in both.items()}

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """Windows between logged points. The first steps are in none: they are up to the first point."""
        steps = self.seconds[TRAIN].steps
        found = []
        for number, (start, end) in enumerate(pairwise(steps)):
            seconds = {clock: one.values[number + 1] - one.values[number] for clock, one in self.seconds.items()}
            if all(value > 0 for value in seconds.values()):
                found.append(Window(start, end, seconds))
        return tuple(found)

    @property
    def identity(self) -> tuple:
        """Hardware by which runs are pooled: all that was found, but for clocks of the moment."""
        found = {key: value for key, value in self.hardware.items() if key not in _PRESENT_CLOCKS}
        return str((self.record.summary or {}).get("layout")), tuple(sorted((key, str(value)) for key, value in found.items()))


@dataclass(frozen=True)
class Hardware:
    """Hardware with the runs on it, one or several.

    Attributes:
        name: shown.
        runs: in the order of their seeds.
    """

    name: str
    runs: tuple[ClockedRun, ...]


def read_clocked_runs(folders: Sequence[Path], same: Collection[str] = ()) -> list[ClockedRun]:
    """Read runs that compare: each once, completed, with a clock, and of the same settings.

    Args:
        folders: of runs, at least one.
        same: keys of places with different values and the same content.

    Raises:
        RunRecordError: with one line per problem.
    """
    places = [folder.resolve() for folder in folders]
    if twice := [str(folder) for folder, place in zip(folders, places, strict=True) if places.count(place) > 1]:
        raise RunRecordError(f"{twice[0]}: the run is given twice (give each once)")
    records = read_runs(folders)
    problems = [problem for record in records if (problem := _unusable(record))]
    if problems:
        raise RunRecordError("\n".join(problems))
    if line := _difference(records, same):
        raise RunRecordError(line)
    return [
        ClockedRun(
            record, {key: float(value) for key, value in _table(record, "clock").items() if is_number(value)},
            _table(record, "hardware"),
        )
        for record in records
    ]  # fmt: skip


def by_hardware(runs: Sequence[ClockedRun]) -> list[Hardware]:
    """Gather runs on the same hardware, in the order of their first runs, under different names."""
    groups: dict[tuple, list[ClockedRun]] = {}
    for run in runs:
        groups.setdefault(run.identity, []).append(run)
    members = [tuple(sorted(group, key=lambda run: (run.record.seed or 0, run.record.name))) for group in groups.values()]
    names = [_name(group[0].hardware, group[0].record) for group in members]
    for wording in (lambda run: str((run.record.summary or {}).get("layout")), lambda run: run.record.name):
        twice = {name for name in names if names.count(name) > 1}
        names = [
            f"{name}, {wording(group[0])}" if name in twice else name for name, group in zip(names, members, strict=True)
        ]
    return [Hardware(name, group) for name, group in zip(names, members, strict=True)]


def _name(hardware: dict[str, Any], record: RunRecord) -> str:
    device, count = hardware.get("device") or (record.summary or {}).get("device") or "unknown", hardware.get("num_devices")
    return f"{count} x {device}" if type(count) is int and count > 1 else str(device)


def _table(record: RunRecord, name: str) -> dict[str, Any]:
    table = (record.summary or {}).get(name)
    return table if isinstance(table, dict) else {}


def _unusable(record: RunRecord) -> str | None:
    """Why a run cannot be compared, in one line; None if it can."""
    folder, clock = record.folder, _table(record, "clock")
    if not record.settings:
        return f"{folder}: {next(iter(record.problems), 'config.toml is empty')} (its settings are needed)"
    if record.summary is None or record.status != "completed":
        return f"{folder}: {record.status} (complete the run: start its command again, or leave it out)"
    if not clock or not any("clock/wall(s)" in point for point in record.points):
        problem = next((one for one in record.problems if "metrics.jsonl" in one), "has no clock")
        return f"{folder}: {problem} (runs of this version have one: train it again)"
    needed = ("train_seconds", "wall_seconds", "steps")
    if wrong := [name for name in (*needed, *PARTS) if not (is_number(clock.get(name)) and clock[name] >= 0)]:
        return f"{folder}: summary.json: clock.{wrong[0]}: no number of at least 0 (train it again)"
    if not all(clock[name] > 0 for name in needed):
        return f"{folder}: has trained no step (leave it out)"
    return None


def _difference(records: Sequence[RunRecord], same: Collection[str]) -> str | None:
    """Line that names the settings in which runs differ; None where they compare."""
    known = {key for record in records for key in record.settings}
    if wrong := [key for key in same if key not in known or not _is_place(key)]:
        return f"--same {wrong[0]}: takes a key of the runs that names a place, as data.path"
    differing = [key for key in differing_settings(records)[0] if not key.startswith(_FREE) and key not in same]
    if len({tuple(str(record.settings.get(key, 1)) for key in DEGREE_KEYS) for record in records}) > 1:
        differing = [key for key in differing if key != _SHARED_BATCH]  # the devices share one global batch
    if not differing:
        return None
    lines = [f"{key} ({settings_text([record.settings.get(key) for record in records])})" for key in differing[:_MOST_KEYS]]
    more = f" and {len(differing) - _MOST_KEYS} more" if len(differing) > _MOST_KEYS else ""
    advice = "compare runs of one configuration"
    if places := [key for key in differing if _is_place(key)]:
        advice += f"; --same {places[0]} if both places hold the same"
    return f"the runs differ in settings: {', '.join(lines)}{more} ({advice})"


def differing_places(runs: Sequence[ClockedRun]) -> list[str]:
    """Keys of places that differ between runs that compare: they were given as the same."""
    return [key for key in differing_settings([run.record for run in runs])[0] if _is_place(key) and not key.startswith(_FREE)]


def _is_place(key: str) -> bool:
    return key.rpartition(".")[2].endswith(_PLACES)
