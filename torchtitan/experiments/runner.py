"""Runner of a sweep's missing cells, several at the same time if requested, each in fresh processes."""

import sys
import threading
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from tqdm import tqdm

from torchtitan.distributed.mesh import compute_device
from torchtitan.experiments.autotune.tuning import AutotuneRefused, memory_of
from torchtitan.experiments.cell_run import run_cell
from torchtitan.experiments.command_lines import check_cells, run_arguments, run_name
from torchtitan.experiments.engine import Advance, settle_cells
from torchtitan.experiments.grid import Cell, Sweep, SweepError
from torchtitan.experiments.launchers.choice import Launching
from torchtitan.experiments.launchers.job import Job
from torchtitan.experiments.launchers.on_slurm import sbatch_command
from torchtitan.experiments.process import repeat_killed
from torchtitan.experiments.record import Row, SweepFolder
from torchtitan.settings.record import value_text

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

    @property
    def name(self) -> str:
        return run_name(self.cell, self.repeat)


@dataclass
class SweepPlan:
    """Plan of a sweep's remaining work.

    Attributes:
        tasks: every requested run: all cells once, then all again with the next seed.
        retry_failed: repeat runs that failed, timed out, were killed or refused.
        rows: the latest of every cell and repeat on record.
    """

    sweep: Sweep
    folder: SweepFolder
    tasks: list[Task]
    retry_failed: bool = False
    rows: dict[tuple[str, int], Row] = field(init=False)
    missing: list[Task] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.folder.rows()
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
        elsewhere: the runs are for other machines: packages and devices of this one refuse none.

    Raises:
        SweepError: a cell is refused, the folder belongs to another sweep, or `only` names unknown values.
    """
    cells = _select(sweep, only or {})
    check_cells(sweep, cells, folder.path, elsewhere)
    folder.check(sweep)  # last: a key that is misspelt is no other sweep
    tasks = [Task(cell, repeat) for repeat in range(sweep.settings.repeats) for cell in cells]
    plan, settings = SweepPlan(sweep, folder, tasks, retry_failed), sweep.settings
    if settings.autotune and not (elsewhere or settings.needs.gpus) and plan.missing:
        try:
            memory_of(compute_device(), settings.autotune_memory_gib)
        except AutotuneRefused as error:
            text = "not given, and a CPU's memory is shared (give GiB of a process)"
            raise SweepError(f"{sweep.path}: autotune_memory_gib: {text}") from error
    return plan


def _select(sweep: Sweep, only: dict[str, list[str]]) -> list[Cell]:
    cells = sweep.cells
    for axis, values in only.items():
        if axis not in sweep.table["axes"]:
            raise SweepError(f"--only {axis}: is no axis (there are: {', '.join(sweep.table['axes'])})")
        known = list(dict.fromkeys(value_text(cell.axes[axis]) for cell in sweep.cells))
        values = [_as_written(value) for value in values]
        for value in values:
            if value not in known:
                raise SweepError(f"--only {axis}={value}: is no value of the axis (there are: {', '.join(known)})")
        cells = [cell for cell in cells if value_text(cell.axes[axis]) in values]
    if not cells:
        raise SweepError("--only: no cell is left")
    return cells


def _as_written(value: str) -> str:
    """Text of an axis' value as the grid writes it, however it was given: 0.0001 of 1e-4."""
    with suppress(ValueError):
        return value_text(tomllib.loads(f"value = {value}")["value"])
    return value


def run_sweep(plan: SweepPlan, launching: Launching) -> None:
    """Run the missing cells; every finished run is a row of the folder's record.

    Args:
        launching: where the runs are started, and how many at a time; on this machine with CUDA each has separate devices.

    Raises:
        ExperimentError: the folder is in use or cannot be written, or the launcher cannot run it.
        KeyboardInterrupt: a request to stop; running cells are ended and left out of the record.
    """
    sweep, folder, missing = plan.sweep, plan.folder, plan.missing
    launcher, stop, lock = launching.open(folder.path), threading.Event(), threading.Lock()

    def settle(task: Task, advance: Advance) -> None:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        axes, status, seconds = task.cell.axes, "skipped", 0.0
        with lock:
            reason = plan.known_out_of_memory(task)
        if not reason:
            job = _job_of(plan, task, launching)
            outcome = repeat_killed(lambda: launcher.run(job, stop), _log_of(plan, task), sweep.settings.retries)
            axes, status, reason, seconds = axes | outcome.chosen, outcome.status, outcome.reason, outcome.seconds
        row = {
            "cell": task.cell.id, "name": task.name, "axes": axes, "repeat": task.repeat, "status": status,
            "reason": reason, "seconds": round(seconds, 2), "run": task.name, "processes": task.cell.processes,
            "started": started,
        }  # fmt: skip
        with lock:
            folder.add(row)
            plan.rows[task.key] = row
            tqdm.write(f"{status:<8}{seconds:7.1f} s  {task.name}  {reason}".rstrip(), file=sys.stderr)

    launcher.check([_job_of(plan, task, launching) for task in plan.tasks])
    if launching.concurrent > 1:  # small batches first: an arm that runs out of memory has begun few others
        missing = sorted(missing, key=lambda task: (task.repeat, task.cell.axes.get(sweep.settings.order, 0)))
    with folder.held(sweep):
        settle_cells(
            plan.tasks, missing, settle, cost=lambda task: 1, unit="run", name=lambda task: task.name,
            jobs=launching.concurrent, stop=stop,
        )  # fmt: skip


def slurm_commands(plan: SweepPlan, launching: Launching) -> list[str]:
    """Commands that submit the missing cells, one for cells that differ in the name only."""
    jobs = [replace(_job_of(plan, task, launching), name="CELL") for task in plan.missing]
    return list(dict.fromkeys(sbatch_command(job, plan.folder.path, launching.options) for job in jobs))


def _job_of(plan: SweepPlan, task: Task, launching: Launching) -> Job:
    settings, cell, path = plan.sweep.settings, task.cell, plan.folder.path
    run = partial(
        run_cell, run_arguments(cell, task.repeat, path, plan.folder.base), cell.processes, settings, path / "autotune",
        _log_of(plan, task), launching.threads_of(cell.processes),
    )  # fmt: skip
    tries = _MOST_TRIES if settings.autotune else 0
    limit_s = (1 + tries) * settings.timeout_s + _LEEWAY_SECONDS
    return Job(task.name, run, cell.processes, cell.processes if settings.needs.gpus else 0, limit_s)


def _log_of(plan: SweepPlan, task: Task) -> Path:
    return plan.folder.path / "logs" / f"{task.name}.log"
