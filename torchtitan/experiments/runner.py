"""Runner of a sweep's missing cells, several at the same time if requested, each in fresh processes."""

import os
import sys
import threading
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch
from tqdm import tqdm

from torchtitan.experiments.autotune.tuned_batch import tuned_batch_size
from torchtitan.experiments.command_lines import check_cells, run_arguments, run_name
from torchtitan.experiments.engine import Advance, settle_cells
from torchtitan.experiments.grid import BATCH_KEY, Cell, Sweep, SweepError
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import Stopped, run_processes
from torchtitan.experiments.record import Row, SweepFolder

RETRIED = ("failed", "timeout", "refused", "killed")


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
        sweep: of the tasks.
        tasks: every requested run: all cells once, then all again with the next seed.
        refused: id of a cell -> reason.
        rows: of the finished runs.
        retry_failed: repeat runs that failed, timed out, were killed or refused.
    """

    sweep: Sweep
    tasks: list[Task]
    refused: dict[str, str]
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
        for other in self.sweep.all_cells:
            if other.id in full and other.axes[order] < cell.axes[order] and other.arm(order) == cell.arm(order):
                return f"{order} = {other.axes[order]} is out of memory already"
        return ""


def plan_sweep(
    sweep: Sweep, folder: SweepFolder, *, only: dict[str, list[str]] | None = None, retry_failed: bool = False
) -> SweepPlan:
    """Plan a sweep: check everything possible before anything is written or started.

    Args:
        sweep: read from its file.
        folder: of its results.
        only: axis -> the values to run, as text; other cells are left out.
        retry_failed: repeat runs that failed, timed out, were killed or refused.

    Raises:
        SweepError: a cell is refused, the folder belongs to another sweep, or `only` names unknown values.
    """
    folder.check(sweep)
    sweep = folder.with_recorded_names(sweep)
    cells = _select(sweep, only or {})
    refused = check_cells(sweep, cells, folder.path)
    tasks = [Task(cell, repeat) for repeat in range(sweep.settings.repeats) for cell in cells]
    return SweepPlan(sweep, tasks, refused, folder.rows(), retry_failed)


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


def run_sweep(sweep: Sweep, folder: SweepFolder, plan: SweepPlan, jobs: int = 1) -> None:
    """Run the missing cells; every finished run is a row of the folder's record.

    Args:
        sweep, folder, plan: as `plan_sweep` takes and returns them.
        jobs: concurrent runs; on CUDA each has separate devices.

    Raises:
        SweepError: the folder is in use or cannot be written, or there are too few devices.
        KeyboardInterrupt: a request to stop; running cells are ended and left out of the record.
    """
    with folder.held(sweep):
        _Workers(sweep, folder, plan, jobs).run()


class _Workers:
    """Settles runs of a sweep: what its jobs share."""

    def __init__(self, sweep: Sweep, folder: SweepFolder, plan: SweepPlan, jobs: int) -> None:
        self._sweep, self._folder, self._plan, self._jobs = sweep, folder, plan, jobs
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._devices = self._free_devices()

    def run(self) -> None:
        settle_cells(
            self._plan.tasks, self._plan.missing, self._settle, cost=lambda task: 1, unit="run",
            name=lambda task: run_name(task.cell, task.repeat), jobs=self._jobs, stop=self._stop,
        )  # fmt: skip

    def _settle(self, task: Task, advance: Advance) -> None:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        axes, seconds, evidence = task.cell.axes, 0.0, {}
        if reason := self._plan.refused.get(task.cell.id):
            status = "refused"
        elif reason := self._skip_reason(task):
            status = "skipped"
        else:
            devices = self._acquire(task.cell.processes)
            try:
                outcome, tuned = self._run(task, devices)
            finally:
                self._release(devices)
            axes, status, reason, seconds = axes | tuned, outcome.status, outcome.reason, outcome.seconds
            evidence = {"evidence": outcome.evidence} if outcome.evidence else {}
        name = run_name(task.cell, task.repeat)
        row = {
            "cell": task.cell.id, "name": name, "axes": axes, "repeat": task.repeat, "status": status,
            "reason": reason, "seconds": round(seconds, 2), "run": name, "processes": task.cell.processes,
            "started": started, **evidence,
        }  # fmt: skip
        with self._lock:
            self._folder.add(row)
            self._plan.rows[task.key] = row
            tqdm.write(f"{status:<8}{seconds:7.1f} s  {name}  {reason}".rstrip(), file=sys.stderr)

    def _run(self, task: Task, devices: list[int] | None) -> tuple[Outcome, dict[str, Any]]:
        """Run a task; return its outcome, and the chosen axes."""
        settings, processes = self._sweep.settings, task.cell.processes
        arguments = run_arguments(task.cell, task.repeat, self._folder.path, self._folder.base)
        tuned: dict[str, Any] = {}
        if settings.autotune:
            found = tuned_batch_size(
                arguments, processes, settings, cache=self._folder.path / "autotune", devices=devices, stop=self._stop
            )
            if isinstance(found, Outcome):
                return found, tuned
            tuned = {BATCH_KEY: found}
            arguments = [*arguments, f"--{BATCH_KEY}={found}"]
        outcome = run_processes(
            arguments, processes=processes, timeout_s=settings.timeout_s, environment=self._environment(processes),
            log=self._folder.path / "logs" / f"{run_name(task.cell, task.repeat)}.log",
            memory_limit_gib=settings.memory_limit_gib, devices=devices, retries=settings.retries, stop=self._stop,
        )  # fmt: skip
        return outcome, tuned

    def _skip_reason(self, task: Task) -> str:
        with self._lock:
            return self._plan.known_out_of_memory(task)

    def _environment(self, processes: int) -> dict[str, str]:
        if "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // (processes * self._jobs), 1))}

    # ------------------------------------------------------------------ devices

    def _free_devices(self) -> list[int] | None:
        if not torch.cuda.is_available():
            return None
        there, most = torch.cuda.device_count(), max((task.cell.processes for task in self._plan.tasks), default=1)
        if most * self._jobs > there:
            advice = f"lower --jobs to {there // most}" if there >= most else "lower processes"
            raise SweepError(f"{most} processes x {self._jobs} jobs need more than the {there} CUDA devices ({advice})")
        return list(range(there))

    def _acquire(self, count: int) -> list[int] | None:
        if self._devices is None:
            return None
        with self._lock:
            while len(self._devices) < count:
                self._lock.wait(0.2)
                if self._stop.is_set():
                    raise Stopped
            taken, self._devices[:] = self._devices[:count], self._devices[count:]
        return taken

    def _release(self, devices: list[int] | None) -> None:
        if devices is not None and self._devices is not None:
            with self._lock:
                self._devices += devices
                self._lock.notify_all()
