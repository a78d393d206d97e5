"""Traces of single steps, and snapshots of CUDA's memory.

    <run>/profile/trace/step-00000100/rank0.json.gz    for chrome://tracing or perfetto.dev
    <run>/profile/trace/step-00000100/rank0.txt        its phases and operations, those first that take longest
    <run>/profile/memory/step-00000100/rank0.pickle    for pytorch.org/memory_viz

Traced steps, and the profiler's warm-up steps, are left out of throughput.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan.distributed.mesh import Layout
from torchtitan.files.optional import OptionalOutputs
from torchtitan.profiling.config import WARMUP_STEPS, ProfilingConfig

logger = logging.getLogger(__name__)

# Allocations and releases that a snapshot looks back on: some steps of a large model.
_HISTORY_ENTRIES = 100_000
_SNAPSHOT_FREQ = 100  # steps between snapshots of CUDA's memory
_TABLE_ROWS = 60


class Profiler:
    """Profiler of one process's steps at the section's intervals; does nothing where the section is off."""

    def __init__(
        self, config: ProfilingConfig, run_folder: Path, layout: Layout, excluded: Callable[[], AbstractContextManager],
        steps: int | None = None, within: Sequence[int] = (), between: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            excluded: makes the context of work that is not training time.
            steps: number of steps; the first and the last one log.
            within, between: intervals, in steps, of other work than training: in a step, and after it.
        """
        self._config = config
        self._cycle = min(config.profile_freq, steps or config.profile_freq)
        self._steps, self._within, self._between = steps, within, between
        self._end = self._last = 0  # of the present cycle, and its traced step
        self._folder = run_folder / "profile"
        self._layout = layout
        self._excluded = excluded
        self._profile: profile | None = None
        self._outputs = OptionalOutputs()
        if config.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES)

    @contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """Surround a step of the loop; yields whether the profiler is on in it, so that the step is not timed."""
        if self._config.enable_profiling and step > self._end:
            self._end = -(-step // self._cycle) * self._cycle
            self._last = self._quietest()
        # A run that resumes after it leaves this window out: without a warm-up its trace would be distorted.
        if self._config.enable_profiling and step == self._last - WARMUP_STEPS:
            self._start()
        yield self._profile is not None
        if self._profile is not None:
            with self._excluded():
                self._profile.step()
                if step == self._last:
                    self._finish(self._profile, step)
        if self._config.enable_memory_snapshot and step % _SNAPSHOT_FREQ == 0:
            with self._excluded():
                self._dump_memory(f"step-{step:08d}")

    def out_of_memory(self, step: int) -> None:
        """Save the allocator's history up to a failed step, if snapshots are enabled."""
        if self._config.enable_memory_snapshot:
            self._dump_memory(f"step-{step:08d}-out-of-memory")

    def close(self) -> None:
        """Close; an incomplete trace is dropped."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        if self._config.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _quietest(self) -> int:
        """Traced step of the cycle: the latest with the least other work than training."""

        def works(step: int) -> int:
            logs = step in (1, self._steps) or any(step % interval == 0 for interval in self._within)
            return logs + any((step - 1) % interval == 0 for interval in self._between)

        return min(range(self._end, self._end - self._cycle + WARMUP_STEPS, -1), key=works)

    def _start(self) -> None:
        cuda = self._layout.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()  # the work of the steps before counts in their time
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            schedule=schedule(wait=0, warmup=WARMUP_STEPS, active=1, repeat=1),
        )
        self._profile.start()

    def _finish(self, finished: profile, step: int) -> None:
        if self._layout.device.type == "cuda":
            torch.cuda.synchronize()  # the next step's time begins with an idle device, as the first traced one's did
        self._profile = None
        path = self._folder / "trace" / f"step-{step:08d}" / f"rank{self._layout.rank}.json.gz"
        unfinished = path.with_name(f"unfinished-{path.name}")
        with self._outputs.attempt("the trace", path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                finished.export_chrome_trace(str(unfinished))
                unfinished.replace(path)
            finally:
                finished.stop()
                unfinished.unlink(missing_ok=True)
            path.with_name(f"rank{self._layout.rank}.txt").write_text(self._table(finished))
            if self._layout.rank == 0:
                logger.info(f"trace of step {step}: {path}")

    def _table(self, finished: profile) -> str:
        """Phases of a traced step, in milliseconds of the host, and operations by their own time on the device."""
        order = f"self_{'device' if self._layout.device.type == 'cuda' else 'cpu'}_time_total"
        averages = finished.key_averages()
        ranges = sorted((each for each in averages if each.is_user_annotation), key=lambda each: -each.cpu_time_total)
        phases = [f"{each.key:<60} {each.cpu_time_total / 1e3:12.3f} ms {each.count:6}\n" for each in ranges]
        return "".join(phases) + "\n" + averages.table(sort_by=order, row_limit=_TABLE_ROWS, max_name_column_width=60)

    def _dump_memory(self, name: str) -> None:
        path = self._folder / "memory" / name / f"rank{self._layout.rank}.pickle"
        with self._outputs.attempt("the memory snapshot", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            logger.info(f"memory snapshot: {path}")
