"""Processes of one run, and its outcome: done, out of memory, failed, too slow, or refused."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from torchtitan.checkpoint.manifest import read_json
from torchtitan.config.job import ConfigError, load_config
from torchtitan.distributed.failures import OUT_OF_MEMORY_WORDS
from torchtitan.errors import DamagedFile, unwrapped

Status = Literal["ok", "oom", "failed", "timeout", "refused"]

_TRAIN = Path(__file__).resolve().parents[2] / "train.py"  # of the checkout, which need not be installed
_GUARD = Path(__file__).with_name("guard.py")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.1
_KILLED = 128 + signal.SIGKILL
_LARGEST_SUMMARY = 1 << 24  # bytes
_MOST_OF_A_LOG = 1 << 22  # bytes, of its beginning and of its end
# What ranks say that have only lost another one.
_OTHER_RANKS_END = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Timeout)\b")


class Stopped(Exception):
    """Run ended because `stop` was set; no result on the run."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        status: ok; oom (device or host memory, of any rank); failed; timeout; refused (nothing was trained: bad
            configuration, run folder or data).
        reason: one line; empty if ok.
        seconds: wall time, from start to end of all processes.
        exit_code: of the launcher, 128 + signal if a signal ended it; torchrun's own is 1 for every failure.
    """

    status: Status
    reason: str
    seconds: float
    exit_code: int


def run_processes(
    arguments: list[str],
    *,
    processes: int = 1,
    timeout_s: float,
    log: Path,
    environment: dict[str, str] | None = None,
    memory_limit_gib: float | None = None,
    devices: list[int] | None = None,
    stop: threading.Event | None = None,
    oom_grace_s: float = 30.0,
    stop_grace_s: float = 0.0,
    poll: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run train.py in separate processes until all of them have ended.

    None of the processes remains at the end, not even if this process is killed.

    Args:
        arguments: of train.py, `--section.key value`; relative paths in them are relative to the present folder.
        processes: number of them; torchrun starts more than one, on a separate port.
        timeout_s: seconds after which everything is killed.
        log: file for the output of all processes, written anew.
        environment: variables to set besides the present ones.
        memory_limit_gib: of each process's data (RLIMIT_DATA), so that allocating more on the CPU fails; Linux.
        devices: numbers of the CUDA devices to use, among those that this process sees.
        stop: set from another thread, ends the run.
        oom_grace_s: seconds for the other ranks to end by themselves once one is out of memory.
        stop_grace_s: seconds that a run which is stopped has to save a checkpoint.
        poll: called again and again while the run lasts.

    Raises:
        KeyboardInterrupt, Stopped: after all processes were killed.
    """
    begun = time.perf_counter()
    try:
        config = load_config(arguments, processes)
    except ConfigError as error:
        return Outcome("refused", "; ".join(error.problems), time.perf_counter() - begun, 2)
    summary = Path(config.job.dump_folder) / config.job.name / "summary.json"
    stale = _stamp(summary)
    log.parent.mkdir(parents=True, exist_ok=True)
    limit = int((memory_limit_gib or 0) * 2**30)
    command = [sys.executable, "-S", str(_GUARD), str(limit), *_command(arguments, processes)]
    with open(log, "wb") as output:
        guard = subprocess.Popen(
            command, env=_environment(processes, environment or {}, devices), stdin=subprocess.PIPE, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,  # a Ctrl-C is for this process alone
        )  # fmt: skip
    try:
        late = _wait(guard, log, begun + timeout_s, stop, oom_grace_s, poll)
    except (KeyboardInterrupt, Stopped):
        if stop_grace_s:
            guard.terminate()
            with suppress(subprocess.TimeoutExpired):
                guard.wait(stop_grace_s)
        raise
    finally:
        cast(IO[bytes], guard.stdin).close()  # the lifeline: the guard kills what is left
        guard.wait()
    seconds = time.perf_counter() - begun
    text = _ends_of(log)
    if late:
        return Outcome("timeout", f"not done after {timeout_s:g} s", seconds, guard.returncode)
    fresh = _read_summary(summary) if _stamp(summary) != stale else {}
    status, reason = classify(guard.returncode, text, fresh)
    if status == "ok" and (problem := _unfinished(summary)):
        status, reason = "failed", f"exit code 0, but {problem}"
    return Outcome(status, reason, seconds, guard.returncode)


def classify(exit_code: int, log: str, summary: dict) -> tuple[Status, str]:
    """Classify the end of a run.

    A rank that runs out of memory may end others, which report a closed connection in the summary: the allocators' own
    messages, from any rank, take precedence.

    Args:
        exit_code: of the launcher.
        log: output of all ranks, and of torchrun.
        summary: the run's summary.json, if this run wrote it.

    Returns:
        status and reason.
    """
    if exit_code == 0:
        return "ok", ""
    ours, codes = _before_launcher(log), _exit_codes(log) or [exit_code]
    said = next((line for line in ours if any(word in line for word in OUT_OF_MEMORY_WORDS)), None)
    if summary.get("status") == "oom":
        return "oom", _one_line(summary.get("reason", ""))
    if said:
        return "oom", _one_line(said)
    if -signal.SIGKILL in codes or _KILLED in codes:
        return "oom", "a rank was killed by SIGKILL, as the system does where memory has run out"
    if 2 in codes:
        return "refused", _one_line("; ".join(ours) or "exit code 2")
    reasons = [str(summary.get("reason"))] if summary.get("status") == "failed" else []
    reasons += [f"exit code {codes[0]}: {line}" for line in ours if _EXCEPTION.match(line)]
    reasons += [f"exit code {codes[0]}: {ours[-1] if ours else 'no output'}"]
    own = [reason for reason in reasons if not any(word in reason for word in _OTHER_RANKS_END)]
    return "failed", _one_line((own or reasons)[0])


def _command(arguments: list[str], processes: int) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    program = [str(_TRAIN)] if _TRAIN.is_file() else ["-m", "torchtitan_dit", "train"]
    return [*launcher, *program, *arguments]


def _environment(processes: int, extra: dict[str, str], devices: list[int] | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    if devices is not None:
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = [visible[number] for number in devices] if visible else map(str, devices)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return environment | extra


def _wait(
    guard: subprocess.Popen, log: Path, deadline: float, stop: threading.Event | None, oom_grace_s: float,
    poll: Callable[[], None],
) -> bool:  # fmt: skip
    """Wait for the end; True if there was none before the deadline. Raises Stopped."""
    watched = _OutOfMemoryWatch(log)
    while guard.poll() is None:
        now = time.perf_counter()
        if stop is not None and stop.is_set():
            raise Stopped
        seconds_since_oom = watched.seconds_since(now)
        if seconds_since_oom is not None and (seconds_since_oom > oom_grace_s or now > deadline):
            return False
        if now > deadline:
            return True
        poll()
        time.sleep(_POLL_SECONDS)
    return False


class _OutOfMemoryWatch:
    """Watch for memory errors in the log, and their age; reads only new text."""

    def __init__(self, log: Path) -> None:
        self._log, self._read, self._last = log, 0, b""
        self._seen_at: float | None = None

    def seconds_since(self, now: float) -> float | None:
        if self._seen_at is None:
            with open(self._log, "rb") as file:
                file.seek(self._read)
                new = file.read()
            self._read += len(new)
            text = self._last + new
            self._last = text[-200:]  # words may come in two pieces
            if any(word.encode() in text for word in OUT_OF_MEMORY_WORDS):
                self._seen_at = now
        return None if self._seen_at is None else now - self._seen_at


def _exit_codes(log: str) -> list[int]:
    """Exit codes of the ranks, from torchrun's report, root cause first; without those that torchrun killed."""
    reported = re.findall(r"exitcode\s*:\s*(-?\d+)\)? (?:local_rank: \d+ )?\(pid: (\d+)\)", log)
    killed = set(re.findall(r"Unable to shutdown process (\d+)", log))
    return [int(code) for code, pid in reported if pid not in killed]


def _before_launcher(log: str) -> list[str]:
    """Lines of the ranks, without torchrun's report, the program's log lines and the names of ranks."""
    lines = []
    for line in filter(str.strip, log.splitlines()):
        if re.match(r"[EF]\d{4} .*torch/distributed/elastic/", line):
            break
        if not re.match(r"[WI]\d{4} .*torch/distributed/|W\d{4} .*\*{5,}|\d\d:\d\d:\d\d (?!.*out of memory)", line):
            lines.append(re.sub(r"^\[rank\d+\]: ?", "", line))
    return lines


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_summary(path: Path) -> dict:
    try:
        return read_json(path, dict, _LARGEST_SUMMARY)
    except DamagedFile:
        return {}


def _ends_of(log: Path) -> str:
    """Begin and end of a log, of a run that may have printed endlessly."""
    with open(log, "rb") as file:
        content = file.read(_MOST_OF_A_LOG)
        middle = file.tell()
        file.seek(max(file.seek(0, os.SEEK_END) - _MOST_OF_A_LOG, middle))
        content += file.read(_MOST_OF_A_LOG)
    return content.decode("utf-8", errors="replace")


def _unfinished(summary: Path) -> str:
    """Reason why a run that ended well left nothing to measure; a previously finished run does not write anew."""
    if not summary.exists():
        return f"{summary} was not written"
    status = _read_summary(summary).get("status")
    return "" if status == "completed" else f"{summary}: the run's status is {_one_line(str(status))}, not completed"


def _one_line(text: str) -> str:
    return unwrapped(text)[:300]
