"""Processes that are forks of one which has torch imported already, which makes their starts cheap.

They are processes of their own all the same: with their own process group, signals, locks and exit codes.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent


class ForkedProcess:
    """What the tests use of a subprocess.Popen, for `sys.exit(function(*arguments))`."""

    def __init__(
        self, function: Callable[..., int], arguments: tuple, environment: dict[str, str], folder: Path = ROOT
    ) -> None:
        """
        Args:
            function: of a module, and called with picklable `arguments`; returns the exit code.
            environment: the process's whole environment. OMP_NUM_THREADS is 1 whatever it says.
            folder: where it works; the project's.
        """
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._log.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        with patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):  # read when torch is imported
            forkserver.ensure_running()
        self._process = context.Process(target=_call, args=(function, arguments, environment, folder, str(self._log)))
        self._process.start()
        self.pid = self._process.pid
        atexit.register(self.kill)  # a test that failed must not wait for an endless run

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the number of the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.said(), None

    def said(self) -> str:
        return self._log.read_text(errors="replace")


def start_script(*words: str, folder: Path = ROOT, **environment: str) -> ForkedProcess:
    """Start `python WORDS` as `run_script` does; both outputs are what it said."""
    return ForkedProcess(_as_main, (words, None), os.environ | environment, folder)


def run_script(
    *words: str, timeout: float = 300, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess:
    """Run `python WORDS`, of a script of the project, without the seconds that importing torch takes.

    Args:
        words: path of the script, or -m and a module, and its arguments.
        timeout: seconds for all of it.
        folder: where it works; the project's.
        environment: variables beside those of this process.

    Returns:
        exit code and both outputs.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    with tempfile.TemporaryDirectory() as outputs:
        errors = Path(outputs) / "errors"
        process = ForkedProcess(_as_main, (words, str(errors)), os.environ | environment, folder)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, process.said(), errors.read_text())


def _as_main(words: tuple[str, ...], errors: str | None) -> int:
    if errors:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _call(function: Callable[..., int], arguments: tuple, environment: dict[str, str], folder: Path, log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # that of a program, not of this process: it starts loaders
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves to the test's
    code = function(*arguments)  # what it raises, SystemExit too, multiprocessing turns into a code as Python does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a gloo thread may abort the interpreter while it shuts down
