"""Processes of one run, from their start to its outcome."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchtitan.checkpoint.manifest import read_json
from torchtitan.config.job import ConfigError, load_config
from torchtitan.errors import DamagedFile, shortened, unwrapped
from torchtitan.experiments.outcome import Outcome, classify
from torchtitan.processes import parent_death

_TRAIN = Path(__file__).resolve().parents[2] / "train.py"  # of the checkout, which need not be installed
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
RETRIES = 2
_POLL_SECONDS = 0.1


class Stopped(Exception):
    """Run ended because `stop` was set; no result on the run."""


def repeat_killed(attempt: Callable[[], Outcome], log: Path, retries: int = RETRIES) -> Outcome:
    """Repeat a run as long as it is killed from outside, up to `retries` times; the log of each killed one is kept."""
    seconds = 0.0
    for number in range(retries + 1):
        outcome = attempt()
        seconds += outcome.seconds
        if outcome.status != "killed" or number == retries:
            break
        with suppress(OSError):
            log.replace(log.with_suffix(f".killed{number + 1}.log"))
    return replace(outcome, seconds=seconds)


def run_processes(
    arguments: list[str], *, processes: int = 1, timeout_s: float, log: Path, environment: dict[str, str] | None = None,
    memory_limit_gib: float | None = None, devices: list[int] | None = None, stop: threading.Event | None = None,
    stop_grace_s: float = 0.0, poll: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Run train.py once in separate processes until all of them have ended.

    None of the processes remains at the end, on Linux not even if this process is killed: each ends with its parent.

    Args:
        arguments: of train.py, `--section.key value`; relative paths in them are relative to the present folder.
        processes: number of them; torchrun starts more than one, on a separate port.
        memory_limit_gib: of each process's data (RLIMIT_DATA), so that allocating more on the CPU fails; Linux.
        devices: numbers of the CUDA devices to use, among those that this process sees.
        stop_grace_s: seconds that a run which is stopped has to save a checkpoint.

    Raises:
        KeyboardInterrupt, Stopped: after all processes were killed.
    """
    begun = time.perf_counter()
    try:
        config = load_config(arguments, processes)
    except ConfigError as error:
        return Outcome("refused", "; ".join(error.problems), time.perf_counter() - begun)
    summary = Path(config.job.dump_folder) / config.job.name / "summary.json"
    stale = _stamp(summary)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-S", parent_death.__file__, str(os.getpid()), *_command(arguments, processes)],
            env=_environment(processes, environment or {}, devices),
            stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            start_new_session=True,  # a Ctrl-C is for this process alone
        )  # fmt: skip
    if memory_limit_gib and sys.platform == "linux":
        _limit_data(process.pid, int(memory_limit_gib * 2**30))
    try:
        late = _wait(process, begun + timeout_s, stop, poll)
    except (KeyboardInterrupt, Stopped):
        if stop_grace_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(stop_grace_s)
        raise
    finally:
        process.kill()  # torchrun's workers end with it
        process.wait()
    seconds, code = time.perf_counter() - begun, process.returncode
    code = code if code >= 0 else 128 - code
    fresh = _read_summary(summary) if _stamp(summary) != stale else {}
    status, reason = classify(code, log.read_text(errors="replace"), fresh)
    if late and status != "oom":  # a rank that is out of memory may leave others waiting for it
        return Outcome("timeout", f"not done after {timeout_s:g} s", seconds)
    if status == "ok" and (problem := _unfinished(summary)):
        status, reason = "failed", f"exit code 0, but {problem}"
    return Outcome(status, reason, seconds)


def _limit_data(pid: int, limit: int) -> None:
    """Limit the data of a process that has just started, and of those that it will start."""
    import resource

    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _command(arguments: list[str], processes: int) -> list[str]:
    program = [str(_TRAIN)] if _TRAIN.is_file() else ["-m", "torchtitan_dit", "train"]
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [*words, *program, *arguments]


def _environment(processes: int, extra: dict[str, str], devices: list[int] | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    if devices is not None:
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = [visible[number] for number in devices] if visible else map(str, devices)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return environment | extra


def _wait(process: subprocess.Popen, deadline: float, stop: threading.Event | None, poll: Callable[[], None]) -> bool:
    """Wait for the end; True if there was none before the deadline. Raises Stopped."""
    while process.poll() is None:
        if stop is not None and stop.is_set():
            raise Stopped
        if time.perf_counter() > deadline:
            return True
        poll()
        time.sleep(_POLL_SECONDS)
    return False


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_summary(path: Path) -> dict:
    try:
        return read_json(path, dict)
    except DamagedFile:
        return {}


def _unfinished(summary: Path) -> str:
    """Reason why a run that ended well left nothing to measure; a previously finished run does not write anew."""
    if not summary.exists():
        return f"{summary} was not written"
    status = _read_summary(summary).get("status")
    return "" if status == "completed" else f"{summary}: the run's status is {shortened(unwrapped(str(status)))}, not completed"
