"""Breakdown of the time of traced steps on one page: by kind of work, by phase, by kernel or operation.

Every instant of the steps is counted once, so that the shares add up to 100 %. On a GPU it belongs to a kernel that
computes, else to one that communicates, else it is idle (or data, while the train loop waits for data). On the CPU it
belongs to the innermost operation of the train loop's thread, else to a collective that another thread runs meanwhile,
else to Python between operations. So only exposed communication counts; hidden communication is given separately.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan.files.durable import replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.profiling.trace import OUTSIDE, PHASES, Span, Trace, read_trace

ATTENTION, PRODUCTS, POINTWISE, COMMUNICATION = "attention", "matrix products", "pointwise and norms", "communication"
DATA, OPTIMIZER, EMA, OTHER, IDLE = "data", "optimizer", "EMA", "other", "idle"
KINDS = (ATTENTION, PRODUCTS, POINTWISE, COMMUNICATION, DATA, OPTIMIZER, EMA, OTHER, IDLE)

TOP = 10
_FILES = ("breakdown.md", "breakdown.json")
_HEADING = "# Where the time goes: "

# Phases whose work is of one kind, whatever the operation.
_KIND_OF_PHASE = {"data": DATA, "optimizer": OPTIMIZER, "ema": EMA}

# Patterns of names of operations and of kernels; of one name, the first that matches decides.
_COMMUNICATES = re.compile(
    r"nccl|^gloo:|^c10d|^FSDP::|torch(::|\.)distributed|AllReduce|AllGather|ReduceScatter", re.I
)
_PATTERNS = {
    ATTENTION: re.compile(
        r"scaled_dot_product|(^|::)_?(flash|efficient)_attention|flash_(fwd|bwd)|fmha|sdpa|flash::|_attn_", re.I
    ),
    PRODUCTS: re.compile(
        r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm|_int_mm|convolution\w*|_convolution)$|^mkl(dnn)?::_\w*linear"
        r"|gemm|nvjet|cutlass|xmma|cublas|splitKreduce|triton_tem|implicit_convolve",
        re.I,
    ),
    POINTWISE: re.compile(
        r"^aten::|^triton_|CompiledFxGraph|cpp_fused|elementwise|reduce_kernel|(layer|rms)_?norm|softmax|multi_tensor"
        r"|CatArray|index|scatter|gather|copy|^Mem(cpy|set)|^at::native|at_cuda_detail|DeviceReduce",
        re.I,
    ),
}
# An operation that is neither: its own time is the price of Python and of autograd.
_OVERHEAD = re.compile(
    r"^autograd::|Backward\d*$|^torch::autograd|^Torch-Compiled Region|^CompiledFunction$|^Optimizer\.|^enumerate\("
    r"|^DistributedDataParallel\."
)
# FSDP2 names its ranges after the layer, the compiler its graphs by a hash: one operation all the same.
_SAME_OPERATION = re.compile(r"^(?:## Call )?(FSDP::\w+|CompiledFxGraph) .*")


@dataclass(frozen=True)
class Breakdown:
    """Breakdown of all traced steps together, in microseconds.

    Attributes:
        trace: the file.
        cuda: whether kernels of a GPU are counted; else the CPU.
        num_steps: steps in the trace.
        total: their time.
        by_phase_and_kind: (phase, kind) -> time; adds up to `total`.
        hidden_communication: time of collectives behind computation; not part of `total`.
        top: longest kernels or operations: name, kind, calls, time; overlapping ones count in full.
        besides_training: other work in the steps; None where it is not known.
    """

    trace: str
    cuda: bool
    num_steps: int
    total: float
    by_phase_and_kind: dict[tuple[str, str], float]
    hidden_communication: float
    top: list[tuple[str, str, int, float]]
    besides_training: list[str] | None = None

    def of_kind(self, kind: str) -> float:
        return sum(time for (_, found), time in self.by_phase_and_kind.items() if found == kind)

    def of_phase(self, phase: str) -> float:
        return sum(time for (found, _), time in self.by_phase_and_kind.items() if found == phase)


def break_down(trace: Trace, name: str) -> Breakdown:
    """Break down a trace: count every instant once; `name` is the trace's name on the page."""
    computing, communicating, waiting = [], [], []
    for span in trace.work:
        kind = _kind(span)
        if kind == COMMUNICATION:
            communicating.append(span)
        elif kind == IDLE:
            waiting.append(span)
        else:
            computing.append(span)
    communicating += trace.collectives
    if trace.cuda:
        between = [span for span in trace.phases if span.phase == "data"]
    else:
        between = trace.phases
    layers: list[tuple[list[Span], str | None]] = [
        (computing, None),
        (communicating, COMMUNICATION),
        (between, DATA if trace.cuda else None),
        ([Span(trace.start, trace.end, OUTSIDE, ())], IDLE),
    ]
    totals: dict[tuple[str, str], float] = {}
    taken: list[Span] = []
    exposed = 0.0
    for layer, of_layer in layers:
        left = _uncovered(_disjoint(_clip(layer, trace.start, trace.end)), taken)
        for span in left:
            found = of_layer or (_kind(span) if layer is computing else _KIND_OF_PHASE.get(span.phase, IDLE))
            totals[span.phase, found] = totals.get((span.phase, found), 0.0) + span.end - span.start
        if of_layer == COMMUNICATION:
            exposed = _length(left)
        taken = sorted(taken + left, key=lambda span: span.start)
    hidden = _length(_disjoint(_clip(communicating, trace.start, trace.end))) - exposed
    return Breakdown(
        name, trace.cuda, trace.num_steps, trace.end - trace.start, totals, hidden, _longest(computing + communicating),
        trace.besides_training,
    )  # fmt: skip


def write_breakdown(trace: Path, folder: Path | None) -> str:
    """Break a trace file down into breakdown.md and breakdown.json of a folder, if one is given.

    Returns:
        the page.

    Raises:
        TraceError: the trace cannot be read.
        OSError: the folder cannot be written.
    """
    found = break_down(read_trace(trace), f"{trace.parent.name}/{trace.name}")
    page = as_text(found)
    if folder is None:
        return page
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(_FILES, (page, json.dumps(as_record(found), indent=1) + "\n"), strict=True):
        replace_file(folder / name, content)
    return page


def refuse_other_files(folder: Path) -> None:
    """Check that `write_breakdown` replaces only its own files in a folder. Raises OSError."""
    page, record = (folder / name for name in _FILES)
    refuse_foreign_file(page, _HEADING.encode())
    if not page.exists():
        refuse_foreign_file(record, b"\0")  # nothing is known of it


def as_record(found: Breakdown) -> dict[str, Any]:
    """Return the breakdown as JSON: milliseconds per step, and shares that add up to 1."""
    def entry(time: float) -> dict[str, float]:
        return {"ms_per_step": _ms(found, time), "share": time / found.total}

    return {
        "trace": found.trace,
        "device": "cuda" if found.cuda else "cpu",
        "num_steps": found.num_steps,
        "besides_training": found.besides_training,
        "ms_per_step": _ms(found, found.total),
        "kinds": {kind: entry(found.of_kind(kind)) for kind in KINDS},
        "phases": {phase: entry(found.of_phase(phase)) for phase in (*PHASES, OUTSIDE)},
        "phases_and_kinds": {
            phase: {kind: _ms(found, found.by_phase_and_kind.get((phase, kind), 0.0)) for kind in KINDS}
            for phase in (*PHASES, OUTSIDE)
        },
        "hidden_communication_ms_per_step": _ms(found, found.hidden_communication),
        "top": [
            {"name": name, "kind": kind, "calls_per_step": calls / found.num_steps, **entry(time)}
            for name, kind, calls, time in found.top
        ],
    }


def as_text(found: Breakdown) -> str:
    """Format the breakdown as one page of Markdown with aligned columns."""
    def numbers(time: float) -> tuple[str, str]:
        return f"{_ms(found, time):.2f}", f"{100 * time / found.total:.1f} %"

    work = "kernels" if found.cuda else "operations of the train loop's thread"
    nobody = "idle: no kernel runs" if found.cuda else "idle: Python between operations"
    labels = {COMMUNICATION: "communication, exposed", IDLE: nobody}
    kinds = [(labels.get(kind, kind), *numbers(found.of_kind(kind))) for kind in KINDS]
    phases = [(phase, *numbers(found.of_phase(phase))) for phase in (*PHASES, OUTSIDE)]
    top = [
        (_shortened(name), kind, f"{calls / found.num_steps:g}", *numbers(time))
        for name, kind, calls, time in found.top
    ]
    total = ("total", *numbers(found.total))
    longest = "longest kernels" if found.cuda else "longest operations"
    steps = "1 step" if found.num_steps == 1 else f"{found.num_steps} steps"
    besides = [] if found.besides_training is None else [", ".join(found.besides_training) or "nothing"]
    return "\n".join((
        f"{_HEADING}{found.trace}, {steps}, {work}\n",
        _table(("kind", "ms per step", "share"), [*kinds, total]),
        *(f"Traced {steps}, besides training: {each}.\n" for each in besides),
        f"Communication hidden behind computation: {_ms(found, found.hidden_communication):.2f} ms per step more.\n",
        _table(("phase", "ms per step", "share"), [*phases, total]),
        _table((longest, "kind", "calls per step", "ms per step", "share"), top),
    ))


def _ms(found: Breakdown, time: float) -> float:
    return time / 1000.0 / found.num_steps


def _kind(span: Span) -> str:
    if any(_COMMUNICATES.search(name) for name in span.names):
        return COMMUNICATION
    if span.phase in _KIND_OF_PHASE:
        return _KIND_OF_PHASE[span.phase]
    *outer, innermost = span.names
    if innermost in PHASES or _OVERHEAD.search(innermost):
        return IDLE
    if re.match(r"triton_(?!tem)", innermost):  # named after all that is fused around attention and products, too
        return POINTWISE
    # The kernel knows best; then the outermost operation that is known: a softmax inside attention is attention.
    for name in (innermost, *outer) if "::" not in innermost else span.names:
        for kind in (ATTENTION, PRODUCTS):
            if _PATTERNS[kind].search(name):
                return kind
    return POINTWISE if any(_PATTERNS[POINTWISE].search(name) for name in span.names) else OTHER


def _clip(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    clipped = (replace(span, start=max(span.start, start), end=min(span.end, end)) for span in spans)
    return [span for span in clipped if span.end > span.start]


def _disjoint(spans: Iterable[Span]) -> list[Span]:
    """Cut overlaps of spans; the earlier one keeps them."""
    found: list[Span] = []
    reached = float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        if span.end > reached:
            found.append(replace(span, start=max(span.start, reached)))
            reached = span.end
    return found


def _uncovered(spans: list[Span], cover: list[Span]) -> list[Span]:
    """Parts of each span that no span of `cover` overlaps; both are disjoint and in order."""
    found = []
    for span in spans:
        start = span.start
        position = max(bisect_right(cover, start, key=lambda other: other.start) - 1, 0)
        while start < span.end and position < len(cover) and cover[position].start < span.end:
            other = cover[position]
            if other.end > start:
                if other.start > start:
                    found.append(replace(span, start=start, end=other.start))
                start = other.end
            position += 1
        if start < span.end:
            found.append(replace(span, start=start))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def _longest(spans: Iterable[Span]) -> list[tuple[str, str, int, float]]:
    calls: dict[tuple[str, str], int] = {}
    times: dict[tuple[str, str], float] = {}
    for span in spans:
        name = span.names[-1]
        if name in PHASES or _OVERHEAD.search(name):
            continue
        key = _SAME_OPERATION.sub(r"\1", name), _kind(span)
        calls[key] = calls.get(key, 0) + span.first
        times[key] = times.get(key, 0.0) + span.end - span.start
    longest = sorted(times, key=lambda key: -times[key])[:TOP]
    return [(name, kind, calls[name, kind], times[name, kind]) for name, kind in longest]


def _shortened(name: str, length: int = 60) -> str:
    name = " ".join(name.removeprefix("void ").split()).replace("|", "/")
    return name if len(name) <= length else name[: length - 1] + "…"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table with names at the left, numbers at the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    number = [all(row[column][:1].isdigit() for row in rows) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        columns = zip(row, widths, number, strict=True)
        return "| " + " | ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns) + " |"

    dashes = ("-" * (width + 1) + (":" if right else "-") for width, right in zip(widths, number, strict=True))
    rule = "|" + "|".join(dashes) + "|"
    return "\n".join((line(header), rule, *map(line, rows))) + "\n"
