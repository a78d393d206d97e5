"""What a hostile input is: how it is made, which command meets it, and what must come of it."""

import ast
import atexit
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.faults.hostile_process import MORE_BYTES, SECONDS, AttackedPrograms, Command, Outcome

REFUSED, SURVIVED, STOPPED = "refused", "survived", "stopped at work"
LONGEST_LINE = 2000  # characters
# Programs that a run asks about the machine and its own sources, whatever it is given.
_OWN_PROGRAMS = ("git", "lscpu", "uname")
_DECOYS = ("gs", "gswin64c", "convert", "magick", "inkscape", "rsvg-convert", "pdftoppm", "xdg-open", "hostile")

CONFIG = """
[model]
flavor = "debug"
num_layers = 1
dim = 16
num_heads = 2
mlp_hidden_dim = 16
[lr_scheduler]
warmup_steps = 0
[training]
steps = 2
local_batch_size = 12
[metrics]
enable_tensorboard = false
log_freq = 1
[checkpoint]
enable = false
[sampling]
enable = false
[validation]
enable = false
"""


class Place:
    """A folder of one case: what it is given, what it may write, and what it must leave alone."""

    _made: ClassVar[dict[tuple[str, ...], Path]] = {}  # what runs left, by their command lines

    def __init__(self, folder: Path, programs: AttackedPrograms) -> None:
        self.folder, self._programs = folder, programs
        self.input, self.outputs, self.temporary = folder / "input", folder / "outputs", folder / "tmp"
        self.precious = folder / "precious"
        for each in (self.input, self.temporary, self.precious / ".hidden", folder / "home", folder / "bin"):
            each.mkdir(parents=True)
        (self.precious / "thesis.txt").write_text("years of work\n")
        (self.precious / ".hidden" / "key").write_text("secret\n")
        (self.precious / "metrics.jsonl").write_text('{"step": 5, "mine": 1}\n')
        (self.precious / "step-00000001").mkdir()
        (self.precious / "step-00000001" / "diary").write_text("mine\n")
        (folder / "small.toml").write_text(CONFIG)
        for name in _DECOYS:
            program = folder / "bin" / name
            program.write_text(f"#!/bin/sh\necho {name} \"$@\" >> {folder}/STARTED\n")
            program.chmod(0o755)

    @property
    def run(self) -> Path:
        return self.outputs / "run"

    def train(self, *more: object) -> tuple[str, ...]:
        """train.py on the small configuration."""
        given = ("--job.config_file", self.folder / "small.toml", "--job.dump_folder", self.outputs, "--job.name",
                 "run")  # fmt: skip
        return ("train.py", *map(str, (*given, *more)))

    def check(self, *more: object) -> tuple[str, ...]:
        """train.py --check-only on the same."""
        return (*self.train(*more), "--check-only")

    def fill_outputs(self, words: tuple[str, ...], change: Callable[[Path], None]) -> None:
        """Run a harmless command once for all cases; copy what it left, changed."""
        key = tuple(word.replace(str(self.folder), "") for word in words)
        if key not in self._made:
            outcome = self._programs.run(self.command(Case("", "", Place.train, ()), words))
            assert outcome.code == 0, shown(outcome)
            change(self.outputs)
            kept = tempfile.TemporaryDirectory(prefix="hostile-run-")
            atexit.register(kept.cleanup)
            self._made[key] = Path(shutil.move(self.outputs, kept.name))
        shutil.copytree(self._made[key], self.outputs)

    def command(self, case: "Case", words: tuple[str, ...]) -> Command:
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8",
        } | {name: os.environ[name] for name in ("VIRTUAL_ENV", "LD_LIBRARY_PATH") if name in os.environ}  # fmt: skip
        for name, value in case.environment.items():
            environment.pop(name) if value is None else environment.update({name: value.format(place=self.folder)})
        allowed = (str(self.outputs), str(self.temporary),
                   *(str(self.folder / each) for each in (*case.writes, *case.adds)))  # fmt: skip
        return Command(words, allowed, environment, case.seconds, case.before, case.more_mapped)

    def surroundings(self, writes: tuple[str, ...]) -> dict[str, tuple]:
        """Everything in the folder but what may be written: kind, times and content of each file."""
        found: dict[str, tuple] = {}
        skipped = {os.fsencode(self.folder / name) for name in ("outputs", "tmp", *writes)}
        pending = [os.fsencode(self.folder)]
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.path in skipped or b".tar.index" in entry.name or len(entry.path) > 4000:
                        continue
                    status = entry.stat(follow_symlinks=False)
                    folder = stat.S_ISDIR(status.st_mode)
                    small = stat.S_ISREG(status.st_mode) and status.st_size < 1 << 20
                    digest = hashlib.sha256(Path(os.fsdecode(entry.path)).read_bytes()).hexdigest() if small else ""
                    times = () if folder else (status.st_size, status.st_mtime_ns)
                    found[os.fsdecode(entry.path)] = (stat.filemode(status.st_mode), *times, digest)
                    if folder:
                        pending.append(entry.path)
        return found


DEVICES = {"zero": (1, 5), "full": (1, 7), "urandom": (1, 9), "tty": (5, 0), "ptmx": (5, 2)}


def device(place: Place, name: str) -> Path:
    """A device of the place's own where we may make one: the machine's must not be at stake."""
    own = place.folder / name
    try:
        os.mknod(own, stat.S_IFCHR | 0o666, os.makedev(*DEVICES[name]))
        os.close(os.open(own, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError:  # not root, or a file system without devices
        own.unlink(missing_ok=True)
        return Path("/dev") / name
    return own


Make = Callable[[Place], tuple[str, ...]]
Check = Callable[[Place, Outcome], None]


@dataclass(frozen=True)
class Case:
    """One hostile input.

    Attributes:
        kind: row of the table.
        name: unique.
        make: writes the input, returns program and arguments.
        verdicts: of which one must come about.
        said: must stand in what is printed.
        check: looks at what was left, and asserts.
        long: takes seconds.
        writes: other places where the command may write, relative to the case's folder.
        adds: folders to which it may add files, as it was told to, but not change what is there.
        environment: variables that differ; None: not set.
        before, seconds, more_mapped: see Command.
        lines: that a refusal has at most.
    """

    kind: str
    name: str
    make: Make
    verdicts: tuple[str, ...]
    said: tuple[str, ...] = ()
    check: Check | None = None
    long: bool = False
    writes: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    environment: dict[str, str | None] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    seconds: float = SECONDS
    more_mapped: int = 8 << 30
    lines: int = 3


CASES: dict[str, Case] = {}


def hostile(kind: str, *verdicts: str, name: str = "", **options: object) -> Callable[[Make], Make]:
    """Register the function below as what makes an input."""

    def register(make: Make) -> Make:
        called = name or make.__name__
        assert called not in CASES, called
        CASES[called] = Case(kind, called, make, verdicts, **options)
        return make

    return register


class Failed(AssertionError):
    """A command did what it must not."""


def attempt(
    case: Case, programs: AttackedPrograms, run: Callable[[Command, Path], Outcome] | None = None
) -> tuple[str, Outcome]:
    """Meet the input; returns the verdict. Raises Failed.

    Args:
        case: what to make and to run.
        programs: what runs it.
        run: called in the place of `programs.run`, with the command and a path for a log.
    """
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        place = Place(folder, programs)
        words = case.make(place)
        before = place.surroundings(case.writes)
        command = place.command(case, words)
        outcome = programs.run(command) if run is None else run(command, place.temporary / "log")
        outcome.events = [event for event in outcome.events if not _was_refused(event)]
        verdict = judge(case, outcome)
        after = place.surroundings(case.writes)
        changed = {name for name in before if after.get(name) != before[name]}
        added = tuple(str(folder / each) + "/" for each in case.adds)
        changed |= {name for name in after.keys() - before.keys() if not added or not name.startswith(added)}
        if changed:
            raise Failed(f"changed outside of the run's folder: {sorted(changed)[:5]}\n{shown(outcome)}")
        if case.check is not None:
            case.check(place, outcome)
        return verdict, outcome
    finally:
        subprocess.run(["chmod", "-Rf", "u+rwx", folder], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--one-file-system", folder], check=True)


def judge(case: Case, outcome: Outcome) -> str:
    """The verdict. Raises Failed."""
    started = [event for event in outcome.events if not _is_own(event)]
    problems = [f"started or touched: {started[:3]}"] if started else []
    if outcome.code is None:
        too_much = "took more than 1.5 GiB" if outcome.more_bytes > 1.4 * MORE_BYTES else "still at work"
        problems.append(f"{too_much} after {outcome.seconds:.1f} s")
    elif outcome.more_bytes > MORE_BYTES:
        problems.append(f"took {outcome.more_bytes / (1 << 30):.2f} GiB")
    text = (outcome.output + outcome.error).decode("utf-8", "replace")
    if "Traceback (most recent call last)" in text:
        problems.append("traceback")
    problems += _unprintable(text)
    verdict = {0: SURVIVED, 1: STOPPED, 2: REFUSED}.get(outcome.code, f"exit code {outcome.code}")
    if outcome.code is not None and verdict not in case.verdicts:
        problems.append(f"{verdict}, not {' or '.join(case.verdicts)}")
    if verdict == REFUSED and not 1 <= len(lines_said(outcome)) <= case.lines:
        problems.append(f"{len(lines_said(outcome))} lines, not one")
    problems += [f"does not say {words!r}" for words in case.said if words not in text]
    if problems:
        raise Failed("; ".join(problems) + "\n" + shown(outcome))
    return verdict


def lines_said(outcome: Outcome) -> list[str]:
    return [line for line in outcome.error.decode("utf-8", "replace").splitlines() if line.strip()]


def _was_refused(event: str) -> bool:
    """A folder that was asked for, and could not be made."""
    return event.startswith("os.mkdir ") and not os.path.lexists(ast.literal_eval(event.partition(" ")[2]))


def _is_own(event: str) -> bool:
    """What a run does anywhere: asks programs about the machine, keeps beside an archive what it holds."""
    if event.startswith("subprocess.Popen ('"):
        return event.split("'")[1].rpartition("/")[2] in _OWN_PROGRAMS
    return re.search(r"/input/\.([^/]*\.tar\.index|tmp\w{6}\b)", event) is not None


def _unprintable(text: str) -> list[str]:
    problems = []
    for line in text.replace("\r\n", "\n").split("\n"):
        # A progress bar begins anew by a carriage return of its own.
        plain = line.replace("\t", " ")
        plain = plain.replace("\r", "") if "%|" in line or "it/s" in line or "B/s" in line else plain
        if not plain.isprintable():
            at = next(place for place, letter in enumerate(plain) if not letter.isprintable())
            problems.append(f"control character in {plain[max(0, at - 40) : at + 40]!r}")
        elif len(plain) > LONGEST_LINE:
            problems.append(f"a line of {len(plain)} characters: {plain[:80]!r}")
    return problems[:2]


def shown(outcome: Outcome) -> str:
    text = (outcome.output[-1500:] + b"\n" + outcome.error[-2500:]).decode("utf-8", "backslashreplace")
    return f"exit code {outcome.code}, {outcome.seconds:.2f} s, {outcome.more_bytes >> 20} MiB\n{text}"
