"""Phases of the train loop, and the exclusive clock of a run: each second of its processes counts in one part.

Names, for all that read them:

    metrics.jsonl   clock/PART(s) for each of PARTS, clock/wall(s), clock/train(s), clock/steps
    summary.json    "clock": PART for each of PARTS, wall_seconds, train_seconds, steps, steps_per_second_train,
                    steps_per_second_wall
    state.json      "reports.clock": parts_ns, steps

All are totals since the run's first start, through its checkpoints. The parts add up to the wall seconds.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

PARTS = (
    "start_up", "data", "encode", "forward", "backward", "gradients", "optimizer", "averages", "validation", "sampling",
    "evaluation", "saving", "reports", "waiting", "other", "repeated",
)  # fmt: skip
# What the host waits for are steps that the device has not finished: without it, training on a GPU would lack them.
TRAIN_PARTS = ("data", "forward", "backward", "gradients", "optimizer", "averages", "waiting")
# Parts of a lost attempt that remain: the next attempt repeats steps, not these.
_NEVER_LOST = ("start_up", "saving", "repeated")
_PART_OF_PHASE = {
    "start": "start_up", "ema": "averages", "checkpoint": "saving", "report": "reports", "finish": "reports",
} | {name: name for name in PARTS}  # fmt: skip


@dataclass(frozen=True)
class ClockTotals:
    """Clock totals: nanoseconds of each of PARTS, and their optimizer steps, without those of lost attempts or that compiled."""

    parts: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    steps: int = 0

    @property
    def wall_ns(self) -> int:
        """Nanoseconds of all processes' lives, as far as they were recorded."""
        return sum(self.parts.values())

    @property
    def train_ns(self) -> int:
        """Nanoseconds of training alone: of TRAIN_PARTS."""
        return sum(self.parts[name] for name in TRAIN_PARTS)

    def metrics(self) -> dict[str, float]:
        """Values of a logged point, by tag."""
        found: dict[str, float] = {f"clock/{name}(s)": self.parts[name] / 1e9 for name in PARTS}
        return found | {
            "clock/wall(s)": self.wall_ns / 1e9, "clock/train(s)": self.train_ns / 1e9, "clock/steps": self.steps,
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Values of the summary's "clock"."""
        train, wall = self.train_ns / 1e9, self.wall_ns / 1e9
        found: dict[str, Any] = {name: self.parts[name] / 1e9 for name in PARTS}
        return found | {
            "train_seconds": train, "wall_seconds": wall, "steps": self.steps,
            "steps_per_second_train": self.steps / train if train else 0.0,
            "steps_per_second_wall": self.steps / wall if wall else 0.0,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"parts_ns": dict(self.parts), "steps": self.steps}

    def after_loss(self, last: "ClockTotals") -> "ClockTotals":
        """Totals of a run that goes back to these, after it had come to later ones.

        The time of the lost steps, and of the work between them, counts as repeated. Starts and saves keep their parts.
        """
        parts = {name: (last if name in _NEVER_LOST else self).parts[name] for name in PARTS}
        parts["repeated"] += last.wall_ns - sum(parts.values())
        return replace(self, parts=parts)


class RunClock:
    """Clock of one process of a run, which continues the totals of the processes before it.

    Attributes:
        now: reads the time, in nanoseconds.
        steps: as in ClockTotals, counted by the train loop.
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns, started: int | None = None) -> None:
        """started: time at which the process started; None: the present."""
        self.now = now
        self.steps = 0
        self._parts = dict.fromkeys(PARTS, 0)
        self._part = "start_up"
        self._since = now() if started is None else started

    def switch(self, phase: str, at: int) -> None:
        """Count the time until a moment; from it on, time belongs to a phase of the train loop."""
        self._parts[self._part] += at - self._since
        self._part, self._since = _PART_OF_PHASE.get(phase, "other"), at

    def totals(self) -> ClockTotals:
        """Totals up to the present; another thread may ask."""
        parts = dict(self._parts)
        parts[self._part] += self.now() - self._since
        return ClockTotals(parts, self.steps)

    def count_as_start(self, before: ClockTotals) -> None:
        """Count the training of one step, since these totals, as the start's, and the step not at all."""
        self.switch(self._part, self.now())
        for name in TRAIN_PARTS:
            self._parts["start_up"] += self._parts[name] - before.parts[name]
            self._parts[name] = before.parts[name]
        self.steps = before.steps

    def resume(self, totals: ClockTotals) -> None:
        """Add the time of this process so far to the totals of those before it."""
        self._parts = {name: self._parts[name] + totals.parts[name] for name in PARTS}
        self.steps = totals.steps

    def roll_back(self, totals: ClockTotals) -> None:
        """Roll back to the totals of a checkpoint; later time counts as repeated."""
        self.switch(self._part, self.now())
        rolled_back = totals.after_loss(ClockTotals(self._parts, self.steps))
        self._parts, self.steps = dict(rolled_back.parts), rolled_back.steps


def process_start() -> int:
    """Time at which this process started, in nanoseconds of time.perf_counter_ns, to 10 ms; the present where unknown."""
    present = time.perf_counter_ns()
    try:
        status = Path("/proc/self/stat").read_text(errors="replace")
        ticks = int(status.rpartition(")")[2].split()[19])  # since the machine's start, the time asleep included
        age = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # another system than Linux
        return present
    return present - max(age, 0)


BEFORE_FIRST_STEP = "start"
BETWEEN_STEPS = "between phases"
# They last as long as there is work in them, and not as long as a step.
LONG_PHASES = frozenset({BEFORE_FIRST_STEP, "validation", "sampling", "evaluation", "checkpoint", "finish"})


class Phases:
    """Phases of the train loop; `with phases("forward"): ...`, and phases may be nested.

    A phase costs two readings of the clock, and a range in the profiler's trace while the profiler is on. Nothing
    waits for the device, so on a GPU a phase is the host's. Other threads may read the attributes.

    Attributes:
        since: time of its entry, of the return to it, or of `touch`; nanoseconds of `clock`.
        broken: phase that the first exception left; None without one.
    """

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, on_change: Callable[[str, int], None] | None = None
    ) -> None:
        """on_change: called at each boundary with the phase that begins or continues there, and the time."""
        self.step = 0
        self.name = BETWEEN_STEPS
        self.broken: str | None = None
        self.clock = clock
        self._on_change = on_change or (lambda name, time: None)
        self.since = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter a phase; at the end of the `with` the outer one continues."""
        outer = self.name
        with record_function(name) if torch.autograd._profiler_enabled() else nullcontext():
            self._begin(name)
            try:
                yield
            except BaseException:
                self.broken = self.broken or self.name
                raise
            finally:
                self._begin(outer)

    def touch(self, *_: object) -> None:
        """Record progress inside the current phase; takes any arguments, to serve as a hook."""
        self.since = self.clock()

    @property
    def where(self) -> str:
        """Current phase, or the one that an exception left."""
        return self.broken or self.name

    def _begin(self, name: str) -> None:
        self.name, self.since = name, self.clock()
        self._on_change(name, self.since)
