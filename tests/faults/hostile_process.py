"""Commands of this project in forks of one process that has imported them, each watched from inside and from outside.

What a command starts, connects to, or changes outside of the folders it was given is seen by audit hooks; its time and
its memory by the process that forked it, which ends it when it has too much of either.
"""

import gc
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tests.faults.confinement import _WRITES, WriteWatch
from tests.forked import ROOT, ForkedProcess

SECONDS, MORE_BYTES = 10.0, 1 << 30
_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "webbrowser.open"}
_CONNECTS = {"socket.connect", "socket.getaddrinfo", "urllib.Request"}
_MOST_MAPPED = 8 << 30  # a net: what only one line of C takes at once must not take the machine
_POLL = 0.005  # seconds


@dataclass(frozen=True)
class Command:
    """What is run: `python words[0] words[1:]` in the project's folder.

    Attributes:
        words: program, relative to the project's folder, and its arguments.
        allowed: folders in which it may change something.
        environment: whole.
        seconds: it may take, imports and waits for a processor not counted.
        before: called in the process before the command begins; of a module, to be pickled.
        more_mapped: bytes of address space that it may take, as in a container with a limit.
    """

    words: tuple[str, ...]
    allowed: tuple[str, ...]
    environment: dict[str, str]
    seconds: float = SECONDS
    before: Callable[[], None] | None = None
    more_mapped: int = _MOST_MAPPED


@dataclass
class Outcome:
    """What became of a command.

    Attributes:
        code: exit code, minus a signal's number; None: it was still running when its time was over.
        output, error: bytes printed.
        seconds, more_bytes: it took, without waits for a processor; of memory beyond what the imports hold.
        events: what it started, connected to, or changed elsewhere.
    """

    code: int | None
    output: bytes
    error: bytes
    seconds: float
    more_bytes: int
    events: list[str] = field(default_factory=list)


class Watch(WriteWatch):
    """Writes what it sees to a descriptor at once, since a process may end without warning."""

    def __init__(self, descriptor: int, allowed: tuple[str, ...]) -> None:
        self._descriptor, self._allowed = descriptor, tuple(map(os.path.realpath, allowed))
        super().__init__()

    def begin(self) -> None:
        self._folder = self._allowed[0]

    def _see(self, event: str, arguments: tuple) -> None:
        if self._folder is None:
            return
        if event in _STARTS or event in _CONNECTS:
            self._write(f"{event} {arguments!r}")
        elif event == "open" and _writes_the_name_itself(arguments[2]):
            self._note("open without following", arguments[0])
        else:
            super()._see(event, arguments)

    def _note(self, event: str, path: object, folder: int | None = None) -> None:
        if isinstance(path, int):
            return
        path = os.fsdecode(path)
        if folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        if path == os.devnull or event == "os.mkdir" and os.path.isdir(path):
            return
        # What is opened through a link is changed where the link leads to; a link itself, where it lies.
        parent, name = os.path.split(os.path.abspath(path))
        place = os.path.realpath(path) if event == "open" else os.path.join(os.path.realpath(parent), name)
        if not any(place == each or place.startswith(each + os.sep) for each in self._allowed):
            self._write(f"{event} {path!r}")

    def _write(self, line: str) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def _writes_the_name_itself(flags: object) -> bool:
    """Whether a file is opened to be written, and refused where it is a link."""
    return isinstance(flags, int) and bool(flags & os.O_NOFOLLOW and flags & _WRITES)


class AttackedPrograms:
    """A process that has all commands imported, and forks for each that it is asked to run."""

    def __init__(self) -> None:
        self._connection, other = get_context("forkserver").Pipe()
        self._process = ForkedProcess(_serve, (other,), dict(os.environ))
        other.close()

    def run(self, command: Command) -> Outcome:
        self._connection.send(command)
        if not self._connection.poll(command.seconds + 60):
            raise TimeoutError(f"no answer: {self._process.said()}")
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.wait(30)


def _serve(connection: Connection) -> int:
    _import_everything()
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return 0
        connection.send(_run(command))


def _import_everything() -> None:
    """What any command imports while it is at work, too: it must not count as the input's memory and time."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import scipy.io  # noqa: F401
    from PIL import Image

    import torchtitan_dit.commands.cosmos_latent_decoder
    import torchtitan_dit.commands.optimization_analysis
    import torchtitan_dit.commands.train  # noqa: F401
    from tests.end_to_end.tools import load_tool

    Image.init()
    for name in ("sample", "checkpoint", "latents", "extract_latents", "compare", "sweep"):
        load_tool(name)
    gc.collect()
    gc.freeze()  # nor shall each of them go through all of torch's objects when it collects its own


def _run(command: Command) -> Outcome:
    names = ("output", "error", "events")
    files = [os.memfd_create(name) for name in names]
    start = time.monotonic()
    baseline = _resident(os.getpid())
    pid = os.fork()
    if pid == 0:
        try:
            _be(command, *files)
        except BaseException:  # noqa: BLE001 (printed as the interpreter would)
            traceback.print_exc()
        finally:
            os._exit(70)
    ended, killed, seconds = False, False, 0.0
    while not ended:
        time.sleep(_POLL)
        ended, status, usage = _wait(pid)
        if not ended:
            seconds = time.monotonic() - start - _seconds_in_queue(pid)
            if seconds > command.seconds or _resident(pid) - baseline > 1.5 * MORE_BYTES:
                killed = True
                _kill_group(pid)
    _kill_group(pid)
    content = []
    for descriptor in files:
        content.append(os.pread(descriptor, 1 << 24, 0))
        os.close(descriptor)
    code = None if killed else os.waitstatus_to_exitcode(status)
    more = max(0, usage.ru_maxrss * 1024 - baseline)
    return Outcome(code, *content[:2], seconds, more, [json.loads(line) for line in content[2].splitlines()])


def _wait(pid: int) -> tuple[bool, int, resource.struct_rusage]:
    found, status, usage = os.wait4(pid, os.WNOHANG)
    return found == pid, status, usage


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _seconds_in_queue(pid: int) -> float:
    """Time for which a process was ready to run while others had the processors; most of its time on a busy machine."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):  # not Linux, a kernel without this file, or ended
        return 0.0


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _be(command: Command, output: int, error: int, events: int) -> None:
    """Become the command, as `python words...` does."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(error, 2)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.dont_write_bytecode = True  # a fresh installation's modules would be compiled by whichever case imports them first
    tempfile.tempdir = None  # it was chosen when torch was imported
    watch = Watch(events, command.allowed)
    if command.before is not None:
        command.before()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + command.more_mapped,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = list(command.words)
    program = ROOT / command.words[0]
    sys.path[0] = str(program.parent)
    sys.path.insert(1, str(ROOT))
    watch.begin()
    try:
        runpy.run_path(str(program), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (printed as the interpreter would)
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 120  # as Python does
    os._exit(code)
