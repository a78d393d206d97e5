"""Runner of a sweep's missing cells, several at the same time if requested, each in fresh processes."""

import sys
import threading
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from tqdm import tqdm

from torchtitan.experiments.cell_run import run_cell
from torchtitan.experiments.command_lines import check_cells, run_arguments, run_name
from torchtitan.experiments.engine import Advance, settle_cells
from torchtitan.experiments.grid import Cell, Sweep, SweepError
from torchtitan.experiments.launchers.choice import Launching
from torchtitan.experiments.launchers.job import Job, Launcher
from torchtitan.experiments.process import repeat_killed
from torchtitan.experiments.record import Row, SweepFolder

RETRIED = ("failed", "timeout", "refused", "killed")
_MOST_TRIES = 12  # of a search, in the time that a scheduler is asked for
_LEEWAY_SECONDS = 600.0


@dataclass(frozen=True)
class Task:
    """Task: one run of a cell."""

    cell: Cell
    repeat: int

    @property
    def key(self) -> tuple[str, int]:
        return self.cell.id, self.repeat


@dataclass
class SweepPlan:
    """Plan of a sweep's remaining work.

    Attributes:
        tasks: every requested run: all cells once, then all again with the next seed.
        retry_failed: repeat runs that failed, timed out, were killed or refused.
    """

    sweep: Sweep
    tasks: list[Task]
    rows: dict[tuple[str, int], Row]
    retry_failed: bool = False
    missing: list[Task] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = [task for task in self.tasks if self._is_missing(task)]

    def _is_missing(self, task: Task) -> bool:
        row = self.rows.get(task.key)
        if row is None or (self.retry_failed and row["status"] in RETRIED):
            return True
        return row["status"] == "skipped" and not self.known_out_of_memory(task)  # its reason has been withdrawn

    def known_out_of_memory(self, task: Task) -> str:
        """Reason to skip a run: the record proves that its cell, or a smaller batch of its arm, runs out of memory."""
        order, cell = self.sweep.settings.order, task.cell
        full = {cell_id: repeat for (cell_id, repeat), row in self.rows.items() if row["status"] == "oom"}
        if cell.id in full:
            return f"repeat {full[cell.id]} is out of memory already"
        if order not in cell.axes:
            return ""
        for other in self.sweep.cells:
            if other.id in full and other.axes[order] < cell.axes[order] and other.arm(order) == cell.arm(order):
                return f"{order} = {other.axes[order]} is out of memory already"
        return ""


def plan_sweep(
    sweep: Sweep, folder: SweepFolder, *, only: dict[str, list[str]] | None = None, retry_failed: bool = False,
    elsewhere: bool = False,
) -> SweepPlan:  # fmt: skip
    """Plan a sweep: check everything possible before anything is written or started.

    Args:
        only: axis -> the values to run, as text; other cells are left out.
        retry_failed: repeat runs that failed, timed out, were killed or refused.
        elsewhere: the runs are for other machines: packages and devices of this one refuse none.

    Raises:
        SweepError: a cell is refused, the folder belongs to another sweep, or `only` names unknown values.
    """
    folder.check(sweep)
    cells = _select(sweep, only or {})
    check_cells(sweep, cells, folder.path, elsewhere)
    tasks = [Task(cell, repeat) for repeat in range(sweep.settings.repeats) for cell in cells]
    return SweepPlan(sweep, tasks, folder.rows(), retry_failed)


def _select(sweep: Sweep, only: dict[str, list[str]]) -> list[Cell]:
    cells = sweep.cells
    for axis, values in only.items():
        if axis not in sweep.table["axes"]:
            raise SweepError(f"--only {axis}: is no axis (there are: {', '.join(sweep.table['axes'])})")
        known = list(dict.fromkeys(value_text(cell.axes[axis]) for cell in sweep.cells))
        for value in values:
            if value not in known:
                raise SweepError(f"--only {axis}={value}: is no value of the axis (there are: {', '.join(known)})")
        cells = [cell for cell in cells if value_text(cell.axes[axis]) in values]
    if not cells:
        raise SweepError("--only: no cell is left")
    return cells


def value_text(value: Any) -> str:
    """Format a value as on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def run_sweep(sweep: Sweep, folder: SweepFolder, plan: SweepPlan, launching: Launching) -> None:
    """Run the missing cells; every finished run is a row of the folder's record.

    Args:
        sweep, folder, plan: as `plan_sweep` takes and returns them.
        launching: where the runs are started, and how many at a time; on this machine with CUDA each has separate devices.

    Raises:
        ExperimentError: the folder is in use or cannot be written, or the launcher cannot run it.
        KeyboardInterrupt: a request to stop; running cells are ended and left out of the record.
    """
    launcher = launching.open(folder.path)
    runs = _Runs(sweep, folder, plan, launching, launcher)
    launcher.check([runs.job_of(task) for task in plan.tasks])
    with folder.held(sweep):
        runs.run()


class _Runs:
    """Settles runs of a sweep: what its jobs share."""

    def __init__(
        self, sweep: Sweep, folder: SweepFolder, plan: SweepPlan, launching: Launching, launcher: Launcher
    ) -> None:
        self._sweep, self._folder, self._plan, self._launching, self._launcher = sweep, folder, plan, launching, launcher
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self) -> None:
        missing = self._plan.missing
        if self._launching.concurrent > 1:  # small batches of all arms first, so that few are begun whose arm runs out of memory
            missing = sorted(missing, key=lambda task: (task.repeat, self._rank(task.cell)))
        settle_cells(
            self._plan.tasks, missing, self._settle, cost=lambda task: 1, unit="run",
            name=lambda task: run_name(task.cell, task.repeat), jobs=self._launching.concurrent, stop=self._stop,
        )  # fmt: skip

    def _rank(self, cell: Cell) -> float:
        return cell.axes.get(self._sweep.settings.order, 0)

    def job_of(self, task: Task) -> Job:
        """Job of a task: what it runs, and what it needs of machines."""
        settings, cell, name = self._sweep.settings, task.cell, run_name(task.cell, task.repeat)
        path = self._folder.path
        run = partial(
            run_cell, run_arguments(cell, task.repeat, path, self._folder.base), cell.processes, settings, path / "autotune",
            path / "logs" / f"{name}.log", self._launching.threads_of(cell.processes),
        )  # fmt: skip
        gpus = cell.processes if settings.needs.gpus else 0
        tries = _MOST_TRIES if settings.autotune else 0
        limit_s = (1 + tries) * settings.timeout_s + _LEEWAY_SECONDS
        return Job(name, run, cell.processes, gpus, limit_s)

    def _settle(self, task: Task, advance: Advance) -> None:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        axes, seconds = task.cell.axes, 0.0
        name = run_name(task.cell, task.repeat)
        if reason := self._skip_reason(task):
            status = "skipped"
        else:
            job = self.job_of(task)
            log = self._folder.path / "logs" / f"{name}.log"
            outcome = repeat_killed(lambda: self._launcher.run(job, self._stop), log, self._sweep.settings.retries)
            axes, status, reason, seconds = axes | outcome.chosen, outcome.status, outcome.reason, outcome.seconds
        row = {
            "cell": task.cell.id, "name": name, "axes": axes, "repeat": task.repeat, "status": status,
            "reason": reason, "seconds": round(seconds, 2), "run": name, "processes": task.cell.processes,
            "started": started,
        }  # fmt: skip
        with self._lock:
            self._folder.add(row)
            self._plan.rows[task.key] = row
            tqdm.write(f"{status:<8}{seconds:7.1f} s  {name}  {reason}".rstrip(), file=sys.stderr)

    def _skip_reason(self, task: Task) -> str:
        with self._lock:
            return self._plan.known_out_of_memory(task)
