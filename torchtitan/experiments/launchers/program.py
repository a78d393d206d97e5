"""Commands of this program as jobs: their output comes here while they run, and so does their exit code."""

import hashlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.experiments.launchers.choice import DAY_SECONDS, Launching, without_launcher_options
from torchtitan.experiments.launchers.job import Job, Launcher, importable_environment
from torchtitan.experiments.outcome import Outcome
from torchtitan.experiments.process import RETRIES, Node, repeat_killed, run_program
from torchtitan.processes.exit_codes import FAILED, REFUSED

_SAVING_SECONDS = 60.0  # for a command that is stopped


@dataclass(frozen=True)
class Program:
    """Command of this program, to be run as a job.

    Attributes:
        words: command and its arguments, as after `torchtitan-dit`.
        processes: of the command.
        folder: for the files of what it prints.
    """

    words: tuple[str, ...]
    processes: int
    folder: Path

    @property
    def log(self) -> Path:
        """File of what it prints besides its results."""
        digest = hashlib.sha256(repr(self.words).encode()).hexdigest()[:12]
        return self.folder / f"{self.words[0]}-{digest}.log"

    @property
    def output(self) -> Path:
        """File of its standard output."""
        return self.log.with_suffix(".out")


def run_program_job(
    program: Program, *, devices: list[int] | None, stop: threading.Event | None, node: Node | None,
    poll: Callable[[], None],
) -> Outcome:  # fmt: skip
    """Run a command on the machine of a job. Raises Stopped."""
    return run_program(
        program.words, processes=program.processes, log=program.log, output=program.output, devices=devices, stop=stop,
        environment=importable_environment(), stop_grace_s=_SAVING_SECONDS, poll=poll,
    )  # fmt: skip


def program_job(name: str, program: Program, launching: Launching) -> Job:
    """Job that runs a command."""
    gpus = launching.devices_of(program.processes)
    return Job(name, run_program_job, (program,), program.processes, 1, gpus, DAY_SECONDS, _SAVING_SECONDS)


def run_job(launcher: Launcher, job: Job, program: Program, stop: threading.Event, poll: Callable[[], None]) -> Outcome:
    """Run a command's job to its end, again if it was killed from outside. Raises Stopped, LauncherError."""
    return repeat_killed(lambda: launcher.run(job, stop, poll), program.log, RETRIES)


def as_job(launching: Launching, name: str, words: Sequence[str], results: Path, processes: int = 1) -> int | None:
    """Run a command as one job, if it is for a scheduler, and print what it prints.

    Args:
        launching: where.
        name: of the job.
        words: command and its arguments, those of the launcher too.
        results: folder or file that the command writes; the job's own files are beside it, in RESULTS.jobs.
        processes: of the command.

    Returns:
        the command's exit code; None: it is for this process.

    Raises:
        LauncherError: the job cannot be run as requested.
        KeyboardInterrupt: after the job was ended.
    """
    folder = jobs_folder(results)
    program = Program((words[0], *without_launcher_options(list(words[1:]))), processes, folder)
    job, launcher = program_job(name, program, launching), launching.open(folder)
    launcher.check([job])
    if not launching.elsewhere:
        return None
    shown = Followed(program.log)
    outcome = run_job(launcher, job, program, threading.Event(), shown)
    shown()
    return report(outcome, program)


def jobs_folder(results: Path) -> Path:
    """Folder of jobs' own files, beside what they write."""
    return results.with_name(f"{results.name}.jobs")


def report(outcome: Outcome, program: Program) -> int:
    """Print the results of a command's job, or why it has none; return its exit code."""
    if outcome.status == "ok":
        try:
            sys.stdout.write(program.output.read_text(encoding="utf-8"))
        except OSError as error:
            print(f"{program.output}: cannot be read: {error.strerror} (is it on a disk that all machines see?)", file=sys.stderr)
            return FAILED
        return 0
    if outcome.status not in ("failed", "refused") or outcome.evidence:  # else the command has said it
        print(f"{outcome.status}: {outcome.reason} (its output: {program.log})", file=sys.stderr)
    return REFUSED if outcome.status == "refused" else FAILED


class Followed:
    """Log of a job, copied to standard error as it grows."""

    def __init__(self, log: Path) -> None:
        self._log, self._read = log, log.stat().st_size if log.exists() else 0

    def __call__(self) -> None:
        try:
            with open(self._log, "rb") as file:
                if file.seek(0, 2) < self._read:  # begun anew
                    self._read = 0
                file.seek(self._read)
                new = file.read()
        except OSError:
            return
        self._read += len(new)
        sys.stderr.write(new.decode("utf-8", errors="replace"))
        sys.stderr.flush()
