"""Find runs below folders and read each into one row: axes, status, measures with intervals."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from torchtitan.config.smoke import SMOKE_SUFFIX
from torchtitan.errors import unwrapped
from torchtitan.files.regular import read_regular, read_toml
from torchtitan.pictures.number_text import counted, first_named
from torchtitan.runs.analysis.axes import Axes, add_further_axes, axes_of, word
from torchtitan.runs.analysis.measures import IMAGES, loss_points, measure_run
from torchtitan.runs.record import RUN_FILES, RunRecord, RunRecordError, read_run
from torchtitan.statistics.interval import Interval
from torchtitan.training.metric_points import timed_since

SWEEP_STATE, SWEEP_FILE = "sweep.jsonl", "sweep.toml"
DEFAULT_WARM_UP = 0.1  # of a run's steps

_STATUS = {"completed": "ok", "oom": "oom", "failed": "failed", "interrupted": "interrupted"}


@dataclass(eq=False)
class Run:
    """Run: one run, or one cell of a sweep that left none.

    Attributes:
        folder: None if it never started, or left none.
        axes: see axes.NAMED_AXES; further ones may follow.
        repeat: number or seed that distinguishes repeats.
        status: ok, oom, failed, timeout, refused, skipped, interrupted, damaged, unfinished or short.
        measures: metric's name -> as `measures.measure` has it; empty unless ok.
        losses: see measures.loss_points.
        held: GiB that every step holds of the peak memory, by part.
    """

    name: str
    folder: Path | None
    axes: Axes
    repeat: int | None = None
    status: str = "unfinished"
    reason: str = ""
    measures: dict[str, Interval] = field(default_factory=dict)
    warmup_steps: int = 0
    losses: list[dict[str, float]] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    cell: str = ""
    notes: list[str] = field(default_factory=list)
    clock: str = ""  # of the run's end; equal in copies of one folder alone
    beginning: tuple[int, float] | None = None  # step and images/s of the first point, of a copy that trained on its origin's

    @property
    def points(self) -> int:
        """Logged points behind the median of images/s."""
        return self.measures[IMAGES.name].count if IMAGES.name in self.measures else 0

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass
class Sweep:
    """Sweep and its state.

    Attributes:
        rows: the last row of every cell and repeat.
    """

    folder: Path
    rows: list[dict[str, Any]]
    table: dict[str, Any]
    problems: list[str]

    def run_folder(self, row: dict[str, Any]) -> Path | None:
        """Folder of a row's run, if there is one."""
        for name in filter(None, (row.get("run"), row.get("name"))):
            for above in (self.folder, self.folder.parent):
                if _is_run(above / name):
                    return (above / name).resolve()
        return None


def collect(
    folders: Sequence[Path], warmup_steps: int | None = None, progress: bool = False
) -> tuple[list[Run], list[str]]:
    """Read every run below some folders.

    Args:
        folders: each a run's folder or one above run folders; sweeps among them are read with their state.
        warmup_steps: left out at the start of every run; default: the sweep's setting, else a tenth of its steps.

    Returns:
        runs, with comparable axes, and lines about unreadable files and about smoke runs beside others, which are left out.

    Raises:
        RunRecordError: a folder is missing, or no run is below any.
    """
    found, sweeps = _search(folders)
    remarks = [problem for sweep in sweeps for problem in sweep.problems]
    smoke = [path for path, base in found.items() if path != base and path.name.endswith(SMOKE_SUFFIX)]
    if 0 < len(smoke) < len(found):
        remarks.append(f"{counted(len(smoke), 'smoke run')} left out: {first_named([path.name for path in smoke], 3)}")
        found = {path: base for path, base in found.items() if path not in smoke}
    by_path: dict[Path, Run] = {}
    of_sweep = {sweep.folder: sweep for sweep in sweeps}
    for path, base in tqdm(found.items(), desc="reading runs", unit="run", disable=None if progress and found else True):
        if path.parent not in of_sweep and (path.parent / SWEEP_STATE).is_file():  # given alone: for its warm-up
            of_sweep[path.parent] = read_sweep(path.parent)
        sweep = next((of_sweep[above] for above in path.parents if above in of_sweep), None)
        wanted = warmup_steps if warmup_steps is not None or sweep is None else sweep.table.get("warmup_steps")
        by_path[path] = _read(path, _name(path, base), wanted)
    runs = list(by_path.values())
    for sweep in sweeps:
        runs += _apply_rows(sweep, by_path)
    first: dict[str, Run] = {}
    copies = [run for run in runs if run.ok and run.clock != "null" and first.setdefault(run.clock, run) is not run]
    if copies:
        remarks.append(f"{counted(len(copies), 'copied folder')} left out: {first_named([run.name for run in copies], 3)}")
        runs = [run for run in runs if run not in copies]
    began: dict[object, list[str]] = {}
    for run in (run for run in runs if run.ok and run.beginning):
        began.setdefault(run.beginning, []).append(run.name)
    remarks += [
        f"{first_named(names, 3)} have their first steps in common, as copies of one folder that trained on: they are no"
        " independent repeats" for names in began.values() if len(names) > 1
    ]  # fmt: skip
    if not runs:
        where = ", ".join(map(str, folders))
        advice = "a run's folder has config.toml or metrics.jsonl; links are not followed"
        raise RunRecordError(f"{where}: no run there or below ({advice})")
    add_further_axes([(run.axes, run.settings) for run in runs if run.folder])
    remarks += [f"{run.name}: {run.reason}" for run in runs if run.status == "damaged"]
    return runs, remarks


def read_sweep(folder: Path) -> Sweep:
    """Read sweep.jsonl and sweep.toml; of several rows of a cell's repeat the last counts, one torn by a kill does not."""
    rows: dict[tuple, dict[str, Any]] = {}
    table, problems, damaged, text = {}, [], 0, ""
    try:
        text = read_regular(folder / SWEEP_STATE).decode(errors="replace")
        table = read_toml(folder / SWEEP_FILE)
    except FileNotFoundError:  # of the table
        pass
    except (OSError, ValueError) as error:
        problems.append(f"{folder}: {SWEEP_STATE} or {SWEEP_FILE} cannot be read ({unwrapped(error)})")
    for line in filter(str.strip, text.split("\n")):
        try:
            row = json.loads(line)
            rows[row["cell"], row["repeat"]] = row | {key: row[key] for key in ("axes", "status")}
        except (ValueError, KeyError, TypeError):
            damaged += 1
    if damaged:
        problems.append(f"{folder / SWEEP_STATE}: {damaged} of its lines could not be read and left out")
    return Sweep(folder.resolve(), list(rows.values()), table, problems)


def _search(folders: Iterable[Path]) -> tuple[dict[Path, Path], list[Sweep]]:
    """Search for run folders -> the folder below which each was found; and sweeps. A run's own folder is not searched."""
    found: dict[Path, Path] = {}
    sweeps: dict[Path, Sweep] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RunRecordError(f"{folder}: " + ("not a folder" if folder.exists() else "no such folder"))
        for path, below, files in os.walk(folder.resolve()):
            here = Path(path)
            below.sort()
            if SWEEP_STATE in files:
                sweeps.setdefault(here, read_sweep(here))
            elif _is_run(here):
                found.setdefault(here, folder.resolve())
                below.clear()
    return found, list(sweeps.values())


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def _name(path: Path, base: Path) -> str:
    return path.name if path == base else path.relative_to(base).as_posix()


def _read(path: Path, name: str, warmup_steps: int | None) -> Run:
    record = read_run(path)
    summary = record.summary or {}
    run = Run(name, path, axes_of(record.settings), record.seed, settings=record.settings)
    run.axes["device"] = word(record.about.get("device"))
    if record.stride > 1:
        run.notes.append(f"metrics.jsonl is very large: one in {record.stride} of its points counts")
    if record.resumed_after:
        run.notes.append(timed_since(record.resumed_after))
    run.axes["global_batch"] = summary.get("grown_batch_size") or run.axes["global_batch"]  # at which it is timed
    known = record.plugins.items()
    plugins = ", ".join(f"{name} {version[:8] if len(version) == 64 else version}" for name, version in known)  # 64: a file's
    cpu = (record.about.get("hardware") or {}).get("cpu")
    run.versions = summary.get("versions", {}) | {"cpu": cpu, "plugins": plugins}
    run.clock, first = json.dumps(summary.get("clock"), sort_keys=True), record.series(IMAGES.tags[0])
    run.beginning = (first.steps[0], first.values[0]) if len(first) else None
    run.status = _STATUS.get(str(summary.get("status")), "unfinished")
    if run.status == "unfinished" and record.status == "failed":
        run.status = "failed"
    run.reason = "" if run.ok else record.reason or record.status
    run.losses = loss_points(record)
    run.held = summary.get("held_memory_GiB", {})
    planned = record.settings.get("training.steps", record.last_step)
    run.warmup_steps = round(DEFAULT_WARM_UP * planned) if warmup_steps is None else warmup_steps
    if run.status in ("ok", "unfinished") and (damage := _damage(record)):
        run.status, run.reason = "damaged", damage
    elif run.ok:
        run.measures = measure_run(record, run.warmup_steps)
        if not run.points:
            run.status, run.reason = "short", f"no point of images/s after the {run.warmup_steps} warm-up steps"
            run.measures = {}
    return run


def _damage(record: RunRecord) -> str:
    finished = record.summary is not None
    lost = record.damaged_lines if finished else max(record.damaged_lines - 1, 0)  # a kill may cut the last line
    parts = [problem for problem in record.problems if finished or not problem.startswith("no ")]
    if lost:
        parts.insert(0, f"{counted(lost, 'line')} of metrics.jsonl cannot be read")
    return "; ".join(parts)


def _apply_rows(sweep: Sweep, by_path: dict[Path, Run]) -> list[Run]:
    """Apply the sweep's record to its runs; return those without a folder, which never started."""
    without_folder = []
    for row in sweep.rows:
        path = sweep.run_folder(row)
        run = by_path.get(path) if path else None
        if run is None:
            run = Run(str(row.get("name") or row["cell"]), None, axes_of(row["axes"]))
            run.reason = "the sweep calls it ok, but its folder is gone"
            without_folder.append(run)
        run.cell, run.repeat, status = row["cell"], row["repeat"], row["status"]
        if status != "ok":  # a damaged run, too, is what the sweep saw of it
            run.status, run.measures = status, {}
            run.reason = str(row.get("reason") or run.reason)
        elif run.status in ("unfinished", "interrupted", "failed"):
            run.status = "damaged"
            run.reason = f"the sweep calls it ok, its folder says: {run.reason}" if run.folder else run.reason
    below = [run for path, run in by_path.items() if sweep.folder in path.parents]  # one in progress has no row yet
    devices = {run.axes["device"] for run in below} - {None}
    for run in below:
        if run.axes["device"] is None and len(devices) == 1:  # killed before its summary
            run.axes["device"] = next(iter(devices))
    return without_folder
