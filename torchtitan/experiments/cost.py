"""Cost of a sweep that has not been run: hours and device-hours of each arm, by the roofline and the memory estimate."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.estimate.devices import DEVICES, Device
from torchtitan.estimate.memory import MemoryEstimate, memory_by_batch_size, model_on_meta
from torchtitan.estimate.report import fits
from torchtitan.estimate.roofline import Efficiency, estimate_step_time
from torchtitan.experiments.command_lines import run_arguments
from torchtitan.experiments.grid import BATCH_KEY, Cell, Sweep, SweepError, point_name
from torchtitan.experiments.runner import SweepPlan, Task
from torchtitan.models.base import DiffusionModel
from torchtitan.settings.record import effective

# Seconds from the start of the processes to the first step: imports, process group, model; and compiling the blocks.
START_SECONDS, COMPILE_SECONDS = 60.0, 60.0
# Tries of a batch size's search, of a few steps each.
_TRIES, _STEPS_OF_A_TRY = 6, 4
_LARGEST_BATCH = 1 << 16
# Sections and keys that neither memory nor time of a step depend on.
_WITHOUT_EFFECT = ("job", "comm", "metrics", "lr_scheduler", "debug", "compile", "float8")


@dataclass
class ArmCost:
    """Cost of an arm's remaining runs.

    Attributes:
        name: of the arm.
        runs: number of those that train.
        out_of_memory: of those that are expected to run out of memory.
        skipped: of those above one.
        seconds: of all, one after another.
        device_seconds: the same times their processes.
        refused: those in float8 that the device or the configuration does not allow.
    """

    name: str
    runs: int = 0
    out_of_memory: int = 0
    skipped: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    refused: int = 0


def device_of(sweep: Sweep, name: str | None) -> Device | None:
    """Device to estimate for: the named one, else the sweep's; None if neither is named. Raises SweepError."""
    wanted = name or sweep.settings.device
    if wanted and wanted not in DEVICES:
        place = "--device" if name else f"{sweep.path}: device"
        raise SweepError(f"{place}: {wanted!r} is none of {', '.join(DEVICES)}")
    return DEVICES[wanted] if wanted else None


def estimate_cost(plan: SweepPlan, folder: Path, device: Device) -> list[ArmCost]:
    """Estimate the cost of a sweep's missing runs, with a progress bar where it takes long.

    A run takes its start and its steps; one that is out of memory its start; larger batches of its arm and its other
    repeats nothing, as they are skipped. Products in float8 count by the device's peak of float8, whatever this machine has;
    where it has none, the run is refused and takes nothing. A searched batch size is the largest that fits, and its search
    counts as six short tries.

    Args:
        plan: of the sweep.
        folder: of its results.
        device: that every process has.
    """
    sweep = plan.sweep
    missing = [task for task in plan.missing if not plan.known_out_of_memory(task)]
    costs: dict[str, ArmCost] = {}
    steps = _StepEstimator(sweep, folder, device)
    full: dict[str, Cell] = {}  # arm -> its smallest cell that does not fit
    for task in steps.with_progress(missing):
        arm = task.cell.arm(sweep.settings.order)
        cost = costs.setdefault(arm, ArmCost(point_name(sweep, task.cell.axes, without=sweep.settings.order)))
        if arm in full and _is_skipped(task.cell, full[arm], sweep.settings.order):
            cost.skipped += 1
            continue
        try:
            seconds = steps.seconds_of(task)
        except _Refused:
            cost.refused += 1
            continue
        if seconds is None:
            cost.out_of_memory += 1
            full[arm] = task.cell
        else:
            cost.runs += 1
        cost.seconds += seconds or START_SECONDS
        cost.device_seconds += (seconds or START_SECONDS) * task.cell.processes
    return list(costs.values())


def cost_table(arms: list[ArmCost], device: Device, jobs: int) -> str:
    """Format the estimated hours of each arm and of all."""
    width = max((len(arm.name) for arm in arms), default=5)
    lines = [f"{'estimate, ' + device.name:<{width}}   runs    oom  skipped    hours  GPU-hours"]
    total = ArmCost("total")
    for arm in arms:
        for number in ("runs", "out_of_memory", "skipped", "seconds", "device_seconds", "refused"):
            setattr(total, number, getattr(total, number) + getattr(arm, number))
    for arm in [*arms, total]:
        lines.append(
            f"{arm.name:<{width}}  {arm.runs:5d}  {arm.out_of_memory:5d}  {arm.skipped:7d}  {arm.seconds / 3600:7.2f}"
            f"  {arm.device_seconds / 3600:9.1f}"
        )
    notes = [
        "one run after another", "speed assumed",
        f"a start counts {START_SECONDS:.0f} s and compiling {COMPILE_SECONDS:.0f} s",
        f"float8 by the peak of its products, derived, not measured; {total.refused} runs in it would be refused"
        if total.refused else "float8 by the peak of its products, derived, not measured",
    ]  # fmt: skip
    if jobs > 1:
        notes.append(f"with {jobs} jobs about {total.seconds / 3600 / jobs:.2f} hours")
    return "\n".join([*lines, "; ".join(notes)])


class _Refused(Exception):
    """Cell in float8 that would not train."""


def _is_skipped(cell: Cell, full: Cell, order: str) -> bool:
    return order not in cell.axes or cell.axes[order] >= full.axes[order]


class _StepEstimator:
    """Estimates runs; every distinct configuration is simulated once."""

    def __init__(self, sweep: Sweep, folder: Path, device: Device) -> None:
        self._sweep, self._folder, self._device = sweep, folder, device
        self._memory: dict[str, Callable[[int], MemoryEstimate]] = {}
        self._models: dict[str, DiffusionModel] = {}
        self._times: dict[str, tuple[float, float, float] | None] = {}

    def with_progress(self, tasks: Sequence[Task]) -> Iterable[Task]:
        return tqdm(tasks, desc="estimating", unit="run", file=sys.stderr, delay=2, leave=False)

    def seconds_of(self, task: Task) -> float | None:
        """Seconds of a run from its start to its end; None if it is out of memory. Raises _Refused."""
        cell = task.cell
        if cell.id not in self._times:
            self._times[cell.id] = self._of_cell(cell)
        found = self._times[cell.id]
        if found is None:
            return None
        start, step, all_steps = found
        search = _TRIES * (start + _STEPS_OF_A_TRY * step) if self._sweep.settings.autotune and task.repeat == 0 else 0.0
        return start + all_steps + search

    def _of_cell(self, cell: Cell) -> tuple[float, float, float] | None:
        """Seconds of the start, of a step and of all steps; None if they are out of memory."""
        autotune = self._sweep.settings.autotune
        batch_size = self._largest_batch(cell) if autotune else None
        if batch_size == 0:
            return None
        config = self._config(cell, batch_size)
        memory = self._memory_of(config, cell.processes)
        if not autotune and fits(memory, self._device) is False:
            return None
        time = estimate_step_time(config, self._model_of(config), memory, self._device, Efficiency())
        start = START_SECONDS + (COMPILE_SECONDS if config.compile.enable else 0.0)
        return start, time.step, 3600 * time.hours

    def _model_of(self, config: JobConfig) -> DiffusionModel:
        tables = effective(config)
        key = json.dumps([tables.get(name) for name in ("model", "data", "cache", "lora")], sort_keys=True, default=str)
        if key not in self._models:
            self._models[key] = model_on_meta(config)
        return self._models[key]

    def _config(self, cell: Cell, batch_size: int | None) -> JobConfig:
        arguments = run_arguments(cell, 0, self._folder, self._sweep.base)
        if batch_size is not None:
            arguments.append(f"--{BATCH_KEY}={batch_size}")
        try:
            config = load_config(arguments, cell.processes, elsewhere=True)
        except ConfigError as error:  # `check_cells` has passed all cells but those of dtype float8
            raise _Refused from error
        if config.float8.enable and not config.float8.emulate and self._device.tflops_float8 is None:
            raise _Refused
        return config

    def _largest_batch(self, cell: Cell) -> int:
        """Largest multiple that fits, memory being linear in the batch size; 0 if none does."""
        multiple = self._sweep.settings.autotune_multiple_of
        one, two = (self._memory_of(self._config(cell, n * multiple), cell.processes).needed for n in (1, 2))
        room = 0.9 * self._device.memory_gib * 2**30 - one
        if room < 0:
            return 0
        return multiple * min(1 + int(room / max(two - one, 1)), _LARGEST_BATCH // multiple)

    def _memory_of(self, config: JobConfig, processes: int) -> MemoryEstimate:
        training = config.training
        microbatches = training.global_batch_size // (training.local_batch_size * config.parallelism.data_ranks)
        tables = {name: table for name, table in effective(config).items() if name not in _WITHOUT_EFFECT}
        for key in ("local_batch_size", "global_batch_size", "max_local_batch_size", "steps"):
            tables["training"].pop(key, None)
        key = json.dumps([tables, processes, microbatches], sort_keys=True, default=str)
        if key not in self._memory:
            self._memory[key] = memory_by_batch_size(config, processes, self._device.name != "CPU")
        return self._memory[key](training.local_batch_size)
