"""Extraction of a latent store by jobs, each for a part of its files; a last one writes the index."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from torchtitan.experiments.engine import Advance, settle_cells
from torchtitan.experiments.launchers.choice import Launching, without_launcher_options
from torchtitan.experiments.launchers.program import Followed, Program, jobs_folder, program_job, report, run_job
from torchtitan.experiments.outcome import Outcome
from torchtitan.processes.exit_codes import FAILED, REFUSED


def run_parts(launching: Launching, words: Sequence[str], store: Path, parts: int, processes: int) -> int:
    """Run the command of an extraction as a job for each part, and once more for the index.

    Files on record are not written again, so that an interrupted extraction resumes with any number of parts.

    Args:
        launching: where; as many jobs at the same time as parts.
        words: the command and its arguments.
        store: folder that it writes; the jobs' own files are beside it.
        parts: number of jobs.
        processes: of each.

    Returns:
        the exit code of the command.

    Raises:
        LauncherError: the jobs cannot be run as requested.
        KeyboardInterrupt: after all jobs were ended.
    """
    folder, stop = jobs_folder(store), threading.Event()
    command = (words[0], *without_launcher_options(list(words[1:])))
    numbered = {
        number: Program((*command, "--part", f"{number}/{parts}"), processes, folder) for number in range(1, parts + 1)
    }
    jobs = {
        number: program_job(f"{store.name}, part {number} of {parts}", program, launching)
        for number, program in numbered.items()
    }
    launcher = launching.open(folder)
    launcher.check(list(jobs.values()))
    outcomes: dict[int, Outcome] = {}

    def settle(number: int, advance: Advance) -> None:
        outcome = run_job(launcher, jobs[number], numbered[number], stop, lambda: None)
        outcomes[number] = outcome
        text = f"{outcome.status:<8}{outcome.seconds:7.1f} s  {jobs[number].name}  {outcome.reason}"
        tqdm.write(text.rstrip(), file=sys.stderr)

    settle_cells(list(jobs), list(jobs), settle, cost=lambda number: 1, unit="part", jobs=parts, stop=stop)
    if bad := [number for number in jobs if outcomes[number].status != "ok"]:
        print(f"{store}: {len(bad)} of {parts} parts are not written (output of the first: {numbered[bad[0]].log});"
              " finished shards stay, and the same command resumes", file=sys.stderr)  # fmt: skip
        return REFUSED if all(outcomes[number].status == "refused" for number in bad) else FAILED
    whole = Program(command, 1, folder)
    shown = Followed(whole.log)
    outcome = run_job(launcher, program_job(f"{store.name}, index", whole, launching), whole, threading.Event(), shown)
    shown()
    return report(outcome, whole)
