"""Outcome of a run in separate processes, classified by exit code, output and summary."""

import re
import signal
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.distributed.failures import OUT_OF_MEMORY_WORDS
from torchtitan.errors import shortened, unwrapped

Status = Literal["ok", "oom", "killed", "failed", "timeout", "refused"]

# What ranks say that have only lost another one.
_OTHER_RANKS_END = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Timeout)\b")
# Signals by which schedulers and people end a process; others are faults of the program.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        status: ok; oom (an allocator of any rank said so); killed (ended by a signal from outside, as a preempted rank
            is; nothing is known about the run); failed; timeout; refused (nothing was trained: bad configuration, run
            folder or data).
        seconds: wall time, from start to end of all processes, of all attempts.
        chosen: configuration keys that were searched first, with the values found.
    """

    status: Status
    reason: str
    seconds: float
    chosen: dict[str, Any] = field(default_factory=dict)


def classify(exit_code: int, log: str, summary: dict) -> tuple[Status, str]:
    """Classify the end of a run: its status and the reason.

    A rank that runs out of memory may end others, which report a closed connection in the summary: the allocators' own
    messages, from any rank, take precedence.

    Args:
        summary: the run's summary.json, if this run wrote it.
    """
    if exit_code == 0:
        return "ok", ""
    ours, codes = _before_launcher(log), _exit_codes(log) or [exit_code]
    if summary.get("status") == "oom":
        return "oom", _one_line(summary.get("reason", ""))
    if said := next((line for line in ours if any(word in line for word in OUT_OF_MEMORY_WORDS)), ""):
        return "oom", _one_line(said)
    if signal.SIGKILL in map(_signal_of, codes):
        return "killed", "a rank was killed by SIGKILL from outside, as by a scheduler, or by the kernel for want of memory"
    if summary.get("status") == "interrupted" or _signal_of(codes[0]) in _FROM_OUTSIDE:
        number = _signal_of(codes[0])
        by = signal.Signals(number).name if number in _FROM_OUTSIDE else "a signal"
        return "killed", f"a rank was ended by {by} from outside, as by a scheduler that preempts it"
    if 2 in codes:
        return "refused", _one_line("; ".join(ours) or "exit code 2")
    reasons = [str(summary.get("reason"))] if summary.get("status") == "failed" else []
    reasons += [f"exit code {codes[0]}: {line}" for line in ours if _EXCEPTION.match(line)]
    reasons += [f"exit code {codes[0]}: {ours[-1] if ours else 'no output'}"]
    own = [reason for reason in reasons if not any(word in reason for word in _OTHER_RANKS_END)]
    return "failed", _one_line((own or reasons)[0])


def _signal_of(code: int) -> int:
    """Number of the signal that an exit code stands for, 0 if for none."""
    return -code if code < 0 else max(code - 128, 0)


def _exit_codes(log: str) -> list[int]:
    """Exit codes of the ranks, from torchrun's report, root cause first; without those that torchrun killed."""
    reported = re.findall(r"exitcode\s*:\s*(-?\d+)\)? (?:local_rank: \d+ )?\(pid: (\d+)\)", log)
    killed = set(re.findall(r"Unable to shutdown process (\d+)", log))
    return [int(code) for pid, code in {pid: code for code, pid in reported}.items() if pid not in killed]


def _before_launcher(log: str) -> list[str]:
    """Lines of the ranks, without torchrun's report, the program's log lines and the names of ranks."""
    lines = []
    for line in filter(str.strip, log.splitlines()):
        if re.match(r"[EF]\d{4} .*torch/distributed/elastic/", line):
            break
        if not re.match(r"[WI]\d{4} .*torch/distributed/|W\d{4} .*\*{5,}|\d\d:\d\d:\d\d (?!.*out of memory)", line):
            lines.append(re.sub(r"^\[rank\d+\]: ?", "", line))
    return lines


def _one_line(text: str) -> str:
    return shortened(unwrapped(text))
