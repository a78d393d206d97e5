"""Phases of the train loop, for profiler, clock and watchdog alike."""

import time
from collections.abc import Callable
from types import TracebackType

import torch
from torch.profiler import record_function

BEFORE_FIRST_STEP = "start"
BETWEEN_STEPS = "between phases"
# They last as long as there is work in them, and not as long as a step.
LONG_PHASES = frozenset({BEFORE_FIRST_STEP, "validation", "sampling", "evaluation", "checkpoint", "finish"})


class Phases:
    """Phases of the train loop; `with phases("forward"): ...`, and phases may be nested.

    A phase costs two readings of the clock, and a range in the profiler's trace while the profiler is on. Nothing
    waits for the device, so on a GPU a phase is the host's. Other threads may read the attributes.

    Attributes:
        step: optimizer step, set by the train loop.
        name: innermost phase.
        since: time of its entry, of the return to it, or of `touch`; nanoseconds of `clock`.
        broken: phase that the first exception left; None without one.
    """

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, on_change: Callable[[str, int], None] | None = None
    ) -> None:
        """
        Args:
            clock: reads the time, in nanoseconds.
            on_change: called at each boundary with the phase that begins or continues there, and the time.
        """
        self.step = 0
        self.name = BETWEEN_STEPS
        self.broken: str | None = None
        self.clock = clock
        self._on_change = on_change
        self.since = clock()
        self._open: list[tuple[str, record_function | None]] = []
        self._known: dict[str, _Phase] = {}

    def __call__(self, name: str) -> "_Phase":
        """Enter a phase, as a context."""
        phase = self._known.get(name)
        if phase is None:
            phase = self._known[name] = _Phase(self, name)
        return phase

    def touch(self, *_: object) -> None:
        """Record progress inside the current phase; takes any arguments, to serve as a hook."""
        self.since = self.clock()

    @property
    def where(self) -> str:
        """Current phase, or the one that an exception left."""
        return self.broken or self.name

    def _enter(self, name: str) -> None:
        traced = None
        if torch.autograd._profiler_enabled():
            traced = record_function(name)
            traced.__enter__()
        now = self.clock()
        self._open.append((self.name, traced))
        self.name, self.since = name, now
        if self._on_change is not None:
            self._on_change(name, now)

    def _exit(self, failed: bool) -> None:
        name, now = self.name, self.clock()
        outer, traced = self._open.pop()
        if failed and self.broken is None:
            self.broken = name
        self.name, self.since = outer, now
        if self._on_change is not None:
            self._on_change(outer, now)
        if traced is not None:
            traced.__exit__(None, None, None)


class _Phase:
    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        self._phases._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._phases._exit(kind is not None)
