"""Runs of train.py whose processes are forks of one that has torch imported already, which makes starts cheap.

They are processes of their own all the same: with their own process group, signals, locks and exit codes.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

from tests.end_to_end.runs import Run
from tests.launcher import ROOT

# Asks for a fault in one rank: its number, then what `tests.faults.moments.arm` takes, colons between.
FAULT = "TEST_FAULT"


class ForkedRun(Run):
    """A `Run` without the seconds that importing torch takes."""

    def said(self) -> str:
        """Output of all ranks so far."""
        return "".join(process.said() for process in self.processes)

    def start(self, arguments: list[str], environment: dict[str, str]) -> "ForkedProcess":
        return ForkedProcess(arguments, environment)


class ForkedProcess:
    """What the tests use of a subprocess.Popen, for one process of a training."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._log = tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace")  # noqa: SIM115
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["train", "torchtitan.run", "tests.faults.moments"])
        with patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):  # read when torch is imported
            forkserver.ensure_running()
        self._process = context.Process(target=_train, args=(arguments, environment, self._log.name))
        self._process.start()
        self.pid = self._process.pid
        atexit.register(self.send_signal, signal.SIGKILL)  # a test that failed must not wait for an endless run

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the number of the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("train.py", timeout)
        return self.said(), None

    def said(self) -> str:
        return Path(self._log.name).read_text(errors="replace")


def _train(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """What train.py does as a program."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    from tqdm import tqdm

    from tests.faults.moments import arm
    from train import main

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves to the test's

    if FAULT in environment:
        rank, moment, occurrence = environment[FAULT].split(":")
        if rank == environment["RANK"]:
            arm(moment, int(occurrence))
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
