"""Show runs on one page: scripts/compare.py RUN_FOLDER... [--output compare.html] [--open] [--watch]
Or one run's loss with a published training log: scripts/compare.py RUN_FOLDER --log FILE

Of one run it is the run's page: curves, grids over training, noise scale, speed, and the commands to use it.
The page is a single file without any connection to the network: tables, curves, loss by timestep, speed, sample grids
and the differences between the configurations. Runs that differ in debug.seed only are averaged, with an interval.
"""

import argparse
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from torchtitan.experiments.record import SWEEP_FILE
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.run_lock import is_locked
from torchtitan.gns.config import GNS_FOLDER, PICTURE_FILE
from torchtitan.pictures.number_text import counted
from torchtitan.processes.command_line import OneLineParser, at_least, refusing
from torchtitan.runs.compare.page import PAGE_START, compare_page
from torchtitan.runs.compare.published_log import against_log, log_table, read_log
from torchtitan.runs.record import RUN_FILES, RunRecord, RunRecordError, read_run, read_runs

WATCH_SECONDS = 5
SHOWN_FILES = (*RUN_FILES, "samples/step-*.png", f"{GNS_FOLDER}/{PICTURE_FILE}")


@refusing(RunRecordError)
def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    arguments.runs = without_others(arguments.runs)
    if arguments.log:
        run, log = read_run(arguments.runs[0]), read_log(arguments.log)
        print(log_table(against_log(run, log), log, run.last_step))
        return 0
    try:
        refuse_foreign_file(arguments.output, PAGE_START.encode())
        state = state_of(arguments.runs)
        runs = read_runs(arguments.runs)
        make_folder(arguments.output.parent)
        watched = arguments.watch and any(is_locked(run.folder) for run in runs)
        size = write_page(runs, arguments, watched)
        note = ", not watched: no process trains it" if arguments.watch else ""
        note = ", rewritten while it trains (Ctrl-C ends this)" if watched else note
        print(f"{arguments.output}: {counted(len(runs), 'run')}, {size / 1e6:.1f} MB{note}", flush=True)
        if arguments.open:
            webbrowser.open(arguments.output.resolve().as_uri())
        if watched:
            watch(arguments, state)
    except OSError as error:
        return refuse_output(arguments.output, error)
    return 0


def without_others(folders: list[Path]) -> list[Path]:
    """Leave out, with a line, what is no run's folder among runs, as the analysis in outputs/sweep/*."""
    others = [folder for folder in folders if folder.exists() and not any((folder / name).exists() for name in RUN_FILES)]
    if not others or len(others) == len(folders):
        return folders
    if named := [str(each) for each in others if not (each.parent / SWEEP_FILE).exists()]:  # nor a grid's own
        print(f"left out, not a run's folder: {', '.join(named)}", file=sys.stderr)
    return [folder for folder in folders if folder not in others]


def write_page(runs: Sequence[RunRecord], arguments: argparse.Namespace, watched: bool) -> int:
    """Write the page and return its bytes. Raises OSError."""
    page = compare_page(runs, arguments.smoothing, WATCH_SECONDS if watched else 0)
    replace_file(arguments.output, page)
    return len(page.encode())


def watch(arguments: argparse.Namespace, written: list[tuple[Path, int, int]]) -> None:
    """Rewrite the page when files of the runs have changed, until no process writes them; a tenth of the time at most.

    Args:
        written: state of the files that the page shows.

    Raises:
        OSError: the page cannot be written.
        KeyboardInterrupt: after a last page, which does not reload.
    """
    running, due = True, 0.0
    try:
        while running:
            time.sleep(WATCH_SECONDS)
            running, began = any(map(is_locked, arguments.runs)), time.monotonic()
            if not running or (began >= due and state_of(arguments.runs) != written):
                written = state_of(arguments.runs)
                write_page(read_runs(arguments.runs), arguments, running)
                due = time.monotonic() + 9 * (time.monotonic() - began)
    except KeyboardInterrupt:
        write_page(read_runs(arguments.runs), arguments, watched=False)
        raise
    print(f"{arguments.output}: complete, for the training has ended")


def state_of(folders: Sequence[Path]) -> list[tuple[Path, int, int]]:
    """State of the files that a page shows: each with its time and size."""
    paths = [path for folder in folders for name in SHOWN_FILES for path in sorted(folder.glob(name))]
    return [(path, found.st_mtime_ns, found.st_size) for path in paths for found in [path.stat()]]


def refuse_output(path: Path, error: OSError) -> int:
    print(f"{path}: cannot be written: {error.strerror or error} (give another --output)", file=sys.stderr)
    return 2


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("runs", metavar="RUN_FOLDER", type=Path, nargs="+", help="a run's folder, as outputs/digits")
    add("--output", type=Path, help="file to write (default: compare.html)")
    add("--smoothing", type=at_least(0), metavar="STEPS",
        help="steps of the running mean of training loss, gradient norm and loss by timestep; 0: none (default: "
        "3 %% of the longest run)")
    add("--log", type=Path, metavar="FILE",
        help="text with a step and a mean loss on each line; prints the run's mean beside each, with a band, and writes no page")
    add("--watch", action="store_true", help="rewrite the page while a run trains; it reloads itself, and ends with the run")
    add("--open", action="store_true", help="show the page in the browser")
    arguments = parser.parse_args(words)
    of_page = [name for name in ("watch", "open", "output", "smoothing") if getattr(arguments, name) not in (None, False)]
    if arguments.log and of_page:
        parser.error(f"--log: writes no page (leave out --{of_page[0]})")
    if arguments.log and len(arguments.runs) > 1:
        parser.error(f"--log: is compared with one run, and {len(arguments.runs)} are given")
    arguments.output = arguments.output or Path("compare.html")
    return arguments
