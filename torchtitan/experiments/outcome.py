"""Outcome of a run in separate processes, classified by exit code, output, summary and the kernel's memory kills."""

import re
import signal
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.distributed.failures import OUT_OF_MEMORY_WORDS
from torchtitan.errors import unwrapped
from torchtitan.experiments.memory_kills import MemoryKills

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
        status: ok; oom (device or host memory, of any rank, with proof); killed (ended by a signal from outside, as a
            preempted rank is; nothing is known about the run); failed; timeout; refused (nothing was trained: bad
            configuration, run folder or data).
        reason: one line; empty if ok.
        seconds: wall time, from start to end of all processes, of all attempts.
        exit_code: of the launcher, 128 + signal if a signal ended it; torchrun's own is 1 for every failure.
        evidence: of oom and killed: `exit_codes` of the ranks, `memory_kills` (file, before, after), the `proof` of an
            oom; `killed_before`: the reason of each attempt that was killed and repeated.
    """

    status: Status
    reason: str
    seconds: float
    exit_code: int
    evidence: dict[str, Any] = field(default_factory=dict)


def classify(
    exit_code: int, log: str, summary: dict, before: MemoryKills | None = None, after: MemoryKills | None = None
) -> tuple[Status, str, dict[str, Any]]:
    """Classify the end of a run.

    A rank that runs out of memory may end others, which report a closed connection in the summary: the allocators' own
    messages, from any rank, take precedence. SIGKILL means memory only if the kernel has counted a memory kill.

    Args:
        exit_code: of the launcher.
        log: output of all ranks, and of torchrun.
        summary: the run's summary.json, if this run wrote it.
        before, after: the kernel's memory kills before and after the run.

    Returns:
        status, reason and evidence (see Outcome).
    """
    if exit_code == 0:
        return "ok", "", {}
    ours, codes = _before_launcher(log), _exit_codes(log) or [exit_code]
    said = next((line for line in ours if any(word in line for word in OUT_OF_MEMORY_WORDS)), None)
    evidence: dict[str, Any] = {"exit_codes": codes}
    if before and after:
        evidence["memory_kills"] = {"source": after.source, "before": before.count, "after": after.count}
    if summary.get("status") == "oom":
        return "oom", _one_line(summary.get("reason", "")), evidence | {"proof": "the run's summary"}
    if said:
        return "oom", _one_line(said), evidence | {"proof": "an allocator's message"}
    if signal.SIGKILL in map(_signal_of, codes):
        return _killed(evidence, before, after)
    if summary.get("status") == "interrupted" or _signal_of(codes[0]) in _FROM_OUTSIDE:
        number = _signal_of(codes[0])
        by = signal.Signals(number).name if number in _FROM_OUTSIDE else "a signal"
        return "killed", f"a rank was ended by {by} from outside, as by a scheduler that preempts it", evidence
    if 2 in codes:
        return "refused", _one_line("; ".join(ours) or "exit code 2"), {}
    reasons = [str(summary.get("reason"))] if summary.get("status") == "failed" else []
    reasons += [f"exit code {codes[0]}: {line}" for line in ours if _EXCEPTION.match(line)]
    reasons += [f"exit code {codes[0]}: {ours[-1] if ours else 'no output'}"]
    own = [reason for reason in reasons if not any(word in reason for word in _OTHER_RANKS_END)]
    return "failed", _one_line((own or reasons)[0]), {}


def _killed(
    evidence: dict[str, Any], before: MemoryKills | None, after: MemoryKills | None
) -> tuple[Status, str, dict[str, Any]]:
    if before is None or after is None:
        return "killed", "a rank was killed by SIGKILL; no count of memory kills is readable here", evidence
    counted = f"{after.source}: oom_kill {before.count} -> {after.count}"
    if after.count > before.count:
        proof = {"proof": "the kernel's count of memory kills"}
        return "oom", f"a rank was killed by SIGKILL because memory had run out ({counted})", evidence | proof
    return "killed", f"a rank was killed by SIGKILL from outside, not for want of memory ({counted})", evidence


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
    return unwrapped(text)[:300]
