"""Trace of a profiler as spans of work, with their operations and the phase of the step."""

import gzip
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.files.regular import open_regular

PROFILE_FOLDER = "profile"

# The ranges of the train loop, in their order; what lies in none of them is `outside`.
PHASES = ("data", "forward", "backward", "gradients", "optimizer", "ema", "report")
OUTSIDE = "outside"
BESIDES_TRAINING = "besides_training"  # key in a trace of this trainer

_LARGEST_TRACE = 1 << 29  # bytes, uncompressed
_LATEST = 1e300  # microseconds

_STEP_PREFIX = "ProfilerStep#"
_HOST_KINDS = {"cpu_op", "user_annotation"}
_LAUNCH_KINDS = {"cuda_runtime", "cuda_driver"}
_DEVICE_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
_COLLECTIVE_PREFIXES = ("gloo:", "nccl:", "ucc:", "mpi:")


class TraceError(Exception):
    """Trace that cannot be read; the message is one line."""


@dataclass(frozen=True)
class Span:
    """Span of time.

    Attributes:
        start, end: in microseconds.
        phase: one of PHASES, or OUTSIDE.
        names: operations, innermost last; a kernel follows the operations that launched it.
        first: whether it is the call's first span; an operation's time is cut by those inside it.
    """

    start: float
    end: float
    phase: str
    names: tuple[str, ...]
    first: bool = True


@dataclass(frozen=True)
class Trace:
    """Trace of one process in the traced steps.

    Attributes:
        cuda: whether `work` holds a GPU's kernels; else the operations of the train loop's thread.
        num_steps: steps in the trace.
        start, end: of all of them, in microseconds.
        phases: ranges of the train loop, in order; `names` holds the phase.
        work: kernels, which may overlap; or spans of the thread by innermost operation, which do not.
        collectives: of the communicating threads on the CPU; a GPU's are kernels in `work`.
        besides_training: other work in the steps; None in a trace of another program.
    """

    cuda: bool
    num_steps: int
    start: float
    end: float
    phases: list[Span]
    work: list[Span]
    collectives: list[Span]
    besides_training: list[str] | None = None


def trace_path(profile_folder: Path, step: int, rank: int) -> Path:
    """Path of the trace that ends with a step."""
    return profile_folder / "trace" / f"step-{step:08d}" / f"rank{rank}.json.gz"


def find_trace(run_folder: Path, step: int | None = None, rank: int = 0) -> Path:
    """Find a run's trace of one rank, of the newest step with one if none is given. Raises TraceError."""
    folder = run_folder / PROFILE_FOLDER
    paths = sorted((folder / "trace").glob(f"step-*/rank{rank}.json.gz"))
    steps = {int(path.parent.name.removeprefix("step-")): path for path in paths}
    if not steps:
        raise TraceError(
            f"{folder / 'trace'}: holds no trace of rank {rank} (train with --profiling.enable_profiling true)"
        )
    if step is not None and step not in steps:
        raise TraceError(f"--step: {step} has no trace of rank {rank} (there are: {', '.join(map(str, steps))})")
    return steps[max(steps) if step is None else step]


def read_trace(path: Path) -> Trace:
    """Read a trace of torch.profiler, gzipped or not, of this trainer or of another program.

    Raises:
        TraceError: the file cannot be read, or no operation is in it.
    """
    events, besides = _events(path)
    host = [event for event in events if event["cat"] in _HOST_KINDS | _LAUNCH_KINDS]
    steps = [event for event in host if event["name"].startswith(_STEP_PREFIX)]
    host = [event for event in host if not event["name"].startswith(_STEP_PREFIX)]
    if not host:
        raise TraceError(f"{path}: holds no operation (was the profiler on?)")
    thread = steps[0]["tid"] if steps else _busiest_thread(host)
    phases = _phases(event for event in host if event["tid"] == thread)
    kernels = [event for event in events if event["cat"] in _DEVICE_KINDS]
    bounds = steps or host
    start, end = min(event["ts"] for event in bounds), max(_end(event) for event in bounds)
    if kernels:
        end = max(end, max(_end(kernel) for kernel in kernels))
        work = _launched(kernels, host, phases)
    else:
        own = [event for event in host if event["tid"] == thread]
        work = [Span(a, b, _phase_at(phases, a), names, first) for a, b, names, first in _innermost(own)]
    collectives = [
        Span(event["ts"], _end(event), _phase_at(phases, event["ts"]), (event["name"],))
        for event in host
        if event["tid"] != thread and event["name"].startswith(_COLLECTIVE_PREFIXES) and not kernels
    ]
    return Trace(bool(kernels), max(len(steps), 1), start, end, phases, work, collectives, besides)


def _events(path: Path) -> tuple[list[dict[str, Any]], list[str] | None]:
    try:
        with open_regular(path) as file:
            content = (gzip.open(file) if path.suffix == ".gz" else file).read(_LARGEST_TRACE + 1)
        if len(content) > _LARGEST_TRACE:
            raise TraceError(f"{path}: has more than {_LARGEST_TRACE >> 20} MiB (trace fewer steps)")
        trace = json.loads(content)
        besides = trace.get(BESIDES_TRAINING)
        return list(filter(_is_operation, trace["traceEvents"])), [*map(str, besides)] if isinstance(besides, list) else None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or 'is not whole (a killed run?)'}") from error
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise TraceError(f"{path}: is not whole, or no trace ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: is no trace of torch.profiler (it has no traceEvents)") from error


def _is_operation(event: Any) -> bool:
    """Check whether an entry has a beginning and an end, and fields of the right types."""
    if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("args", {}), dict):
        return False
    times = event.get("ts"), event.get("dur", 0)
    return (
        all(isinstance(event.get(key), str) for key in ("name", "cat"))
        and all(isinstance(time, int | float) and abs(time) < _LATEST for time in times)
        and times[1] >= 0
        and isinstance(event.get("tid"), int | str)
        and isinstance(event.get("args", {}).get("correlation"), int | str | None)
    )


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event.get("dur", 0)


def _busiest_thread(events: list[dict[str, Any]]) -> Any:
    totals: dict[Any, float] = {}
    for event in events:
        totals[event["tid"]] = totals.get(event["tid"], 0.0) + event.get("dur", 0)
    return max(totals, key=totals.__getitem__)


def _phases(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Phases: the outermost ranges with a phase's name, in order."""
    ranges = (event for event in events if event["cat"] == "user_annotation" and event["name"] in PHASES)
    found: list[Span] = []
    for event in sorted(ranges, key=lambda event: event["ts"]):
        if not found or event["ts"] >= found[-1].end:
            found.append(Span(event["ts"], _end(event), event["name"], (event["name"],)))
    return found


def _phase_at(phases: list[Span], time: float) -> str:
    position = bisect_right(phases, time, key=lambda span: span.start) - 1
    return phases[position].phase if position >= 0 and time < phases[position].end else OUTSIDE


_Stretch = tuple[float, float, tuple[str, ...], bool]


def _innermost(events: list[dict[str, Any]]) -> Iterator[_Stretch]:
    """Cut one thread's time by the innermost operation: start, end, names from the outermost, whether the call begins.
    """
    stack: list[tuple[float, tuple[str, ...]]] = []  # end and names of what is open
    seen: list[bool] = []  # whether it has had a span already
    now = float("-inf")

    def advance(until: float) -> Iterator[_Stretch]:
        nonlocal now
        while stack and stack[-1][0] <= until:
            end, names = stack.pop()
            begun = seen.pop()
            if end > now:
                yield now, end, names, not begun
                now = end
        if stack and until > now:
            yield now, until, stack[-1][1], not seen[-1]
            seen[-1] = True
        now = max(now, until)

    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        yield from advance(event["ts"])
        # Clocks are rounded: a child may seem to outlast its parent.
        end = min(_end(event), stack[-1][0]) if stack else _end(event)
        stack.append((end, (*(stack[-1][1] if stack else ()), event["name"])))
        seen.append(False)
    yield from advance(float("inf"))


def _launched(kernels: list[dict[str, Any]], host: list[dict[str, Any]], phases: list[Span]) -> list[Span]:
    """Kernels with the operations that launched them, in the phase of these."""
    wanted = {kernel.get("args", {}).get("correlation") for kernel in kernels} - {None}
    launches: dict[Any, tuple[float, tuple[str, ...]]] = {}
    for thread in {event["tid"] for event in host}:
        stack: list[tuple[float, str]] = []
        own = (event for event in host if event["tid"] == thread)
        for event in sorted(own, key=lambda event: (event["ts"], -event.get("dur", 0))):
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            if event["cat"] in _HOST_KINDS:
                stack.append((_end(event), event["name"]))
            elif (correlation := event.get("args", {}).get("correlation")) in wanted:
                launches[correlation] = event["ts"], tuple(name for _, name in stack)
    found = []
    for kernel in kernels:
        at, names = launches.get(kernel.get("args", {}).get("correlation"), (float("-inf"), ()))
        found.append(Span(kernel["ts"], _end(kernel), _phase_at(phases, at), (*names, kernel["name"])))
    return found
