"""Processes of one run, from their start to its outcome."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, cast

from torchtitan.checkpoint.manifest import read_json
from torchtitan.config.job import ConfigError, load_config
from torchtitan.distributed.failures import OUT_OF_MEMORY_WORDS
from torchtitan.errors import DamagedFile, unwrapped
from torchtitan.experiments.memory_kills import count_memory_kills
from torchtitan.experiments.outcome import Outcome, classify

_TRAIN = Path(__file__).resolve().parents[2] / "train.py"  # of the checkout, which need not be installed
_GUARD = Path(__file__).with_name("guard.py")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
RETRIES = 2
_POLL_SECONDS = 0.1
_LARGEST_SUMMARY = 1 << 24  # bytes
_MOST_OF_A_LOG = 1 << 22  # bytes, of its beginning and of its end


class Stopped(Exception):
    """Run ended because `stop` was set; no result on the run."""


@dataclass(frozen=True)
class Node:
    """Node: one machine of a run; processes of all machines connect to the first.

    Attributes:
        rank: of the machine, from 0.
        count: of machines.
        endpoint: host:port where torchrun's agents meet.
        name: of the run, the same on all of them.
    """

    rank: int
    count: int
    endpoint: str
    name: str


def run_processes(
    arguments: list[str],
    *,
    processes: int = 1,
    timeout_s: float,
    log: Path,
    environment: dict[str, str] | None = None,
    memory_limit_gib: float | None = None,
    devices: list[int] | None = None,
    node: Node | None = None,
    retries: int = RETRIES,
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
        timeout_s: seconds after which everything is killed, of each attempt.
        log: file for the output of all processes, written anew.
        environment: variables to set besides the present ones.
        memory_limit_gib: of each process's data (RLIMIT_DATA), so that allocating more on the CPU fails; Linux.
        devices: numbers of the CUDA devices to use, among those that this process sees.
        node: this machine among several; each calls this function, and gets the result of its local processes.
        retries: times that a run which is killed from outside is started again.
        stop: set from another thread, ends the run.
        oom_grace_s: seconds for the other ranks to end by themselves once one is out of memory.
        stop_grace_s: seconds that a run which is stopped has to save a checkpoint.
        poll: called again and again while the run lasts.

    Raises:
        KeyboardInterrupt, Stopped: after all processes were killed.
    """
    attempt = partial(
        _attempt, arguments, processes, timeout_s, log, environment or {}, memory_limit_gib, devices, node, stop,
        oom_grace_s, stop_grace_s, poll,
    )  # fmt: skip
    return repeat_killed(attempt, log, retries)


def run_program(
    words: Sequence[str], *, processes: int, log: Path, output: Path, environment: dict[str, str],
    devices: list[int] | None = None, stop: threading.Event | None = None, stop_grace_s: float = 0.0,
    poll: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Run another command of this program until all of its processes have ended.

    Args:
        words: command and its arguments, as after `torchtitan-dit`.
        output: file for its standard output; the log is of all else.
        processes, log, environment, devices, stop, stop_grace_s, poll: as of `run_processes`.

    Returns:
        its outcome, with the command's own exit code; that of torchrun is 1 for every failure.

    Raises:
        KeyboardInterrupt, Stopped: after all processes were killed.
    """
    begun, kills_before = time.perf_counter(), count_memory_kills()
    command = [*_launcher(processes, None), "-m", "torchtitan_dit", *words]
    code, _ = _run_guarded(
        command, _environment(processes, environment, devices), log, output=output, stop=stop, stop_grace_s=stop_grace_s,
        oom_grace_s=math.inf, poll=poll,  # a command may survive a lack of memory of what it has started
    )  # fmt: skip
    status, reason, evidence = classify(code, _ends_of(log), {}, kills_before, count_memory_kills())
    return Outcome(status, reason, time.perf_counter() - begun, code, evidence)


def repeat_killed(attempt: Callable[[], Outcome], log: Path, retries: int) -> Outcome:
    """Repeat a run as long as it is killed from outside, up to `retries` times; the log of each killed one is kept."""
    seconds, killed_before = 0.0, []
    for left in range(retries, -1, -1):
        outcome = attempt()
        seconds += outcome.seconds
        if outcome.status != "killed" or not left:
            break
        killed_before.append(outcome.reason)
        with suppress(OSError):
            log.replace(log.with_suffix(f".killed{len(killed_before)}.log"))
    evidence = outcome.evidence | ({"killed_before": killed_before} if killed_before else {})
    return replace(outcome, seconds=seconds, evidence=evidence)


def _attempt(
    arguments: list[str], processes: int, timeout_s: float, log: Path, environment: dict[str, str],
    memory_limit_gib: float | None, devices: list[int] | None, node: Node | None, stop: threading.Event | None,
    oom_grace_s: float, stop_grace_s: float, poll: Callable[[], None],
) -> Outcome:  # fmt: skip
    """Run train.py once; see `run_processes`."""
    begun = time.perf_counter()
    try:
        config = load_config(arguments, processes)
    except ConfigError as error:
        return Outcome("refused", "; ".join(error.problems), time.perf_counter() - begun, 2)
    summary = Path(config.job.dump_folder) / config.job.name / "summary.json"
    stale, kills_before = _stamp(summary), count_memory_kills()
    if node and node.rank:
        log = log.with_suffix(f".node{node.rank}.log")
    limit = int((memory_limit_gib or 0) * 2**30)
    command = _command(arguments, processes, node)
    variables = _environment(processes // (node.count if node else 1), environment, devices)
    code, late = _run_guarded(
        command, variables, log, limit=limit, deadline=begun + timeout_s, stop=stop, oom_grace_s=oom_grace_s,
        stop_grace_s=stop_grace_s, poll=poll,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    text = _ends_of(log)
    if late:
        return Outcome("timeout", f"not done after {timeout_s:g} s", seconds, code)
    fresh = _read_summary(summary) if _stamp(summary) != stale else {}
    status, reason, evidence = classify(code, text, fresh, kills_before, count_memory_kills())
    if status == "ok" and not (node and node.rank) and (problem := _unfinished(summary)):
        status, reason = "failed", f"exit code 0, but {problem}"
    return Outcome(status, reason, seconds, code, evidence)


def _run_guarded(
    command: list[str], variables: dict[str, str], log: Path, *, output: Path | None = None, limit: int = 0,
    deadline: float = math.inf, stop: threading.Event | None = None, oom_grace_s: float = 30.0, stop_grace_s: float = 0.0,
    poll: Callable[[], None] = lambda: None,
) -> tuple[int, bool]:  # fmt: skip
    """Run a command of which no process outlives this one; its exit code, and whether it was killed at the deadline.

    `output` is a file for its standard output where that is apart, `limit` bytes of each process's data, `deadline` a time
    of `time.perf_counter`. Raises KeyboardInterrupt, Stopped.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-S", str(_GUARD), str(limit), *command]
    with open(log, "wb") as printed, open(output, "wb") if output else nullcontext(printed) as results:
        guard = subprocess.Popen(
            words, env=variables, stdin=subprocess.PIPE, stdout=results, stderr=printed,
            start_new_session=True,  # a Ctrl-C is for this process alone
        )  # fmt: skip
    try:
        late = _wait(guard, log, deadline, stop, oom_grace_s, poll)
    except (KeyboardInterrupt, Stopped):
        if stop_grace_s:
            guard.terminate()
            with suppress(subprocess.TimeoutExpired):
                guard.wait(stop_grace_s)
        raise
    finally:
        cast(IO[bytes], guard.stdin).close()  # the lifeline: the guard kills what is left
        guard.wait()
    return guard.returncode, late


def _command(arguments: list[str], processes: int, node: Node | None) -> list[str]:
    program = [str(_TRAIN)] if _TRAIN.is_file() else ["-m", "torchtitan_dit", "train"]
    return [*_launcher(processes, node), *program, *arguments]


def _launcher(processes: int, node: Node | None = None) -> list[str]:
    words = [sys.executable]
    if node:
        words += [
            "-m", "torch.distributed.run", "--nnodes", str(node.count), "--node_rank", str(node.rank),
            "--nproc_per_node", str(processes // node.count), "--rdzv_backend", "c10d", "--rdzv_id", node.name,
            "--rdzv_endpoint", node.endpoint,
        ]  # fmt: skip
    elif processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return words


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
    return "" if status == "completed" else f"{summary}: the run's status is {unwrapped(str(status))[:300]}, not completed"
