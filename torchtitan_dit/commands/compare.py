"""Compare runs on one page: scripts/compare.py RUN_FOLDER... [--output compare.html] [--open]
Or one run's loss with a published training log: scripts/compare.py RUN_FOLDER --log FILE

The page is a single file without any connection to the network: tables, curves, loss by timestep, speed, sample grids
and the differences between the configurations. Runs that differ in debug.seed only are averaged, with an interval.
"""

import argparse
import sys
import webbrowser
from pathlib import Path

from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.pictures.number_text import counted
from torchtitan.processes.command_line import OneLineParser, at_least, refusing
from torchtitan.runs.compare.page import PAGE_START, compare_page
from torchtitan.runs.compare.published_log import against_log, log_table, read_log
from torchtitan.runs.record import RunRecordError, read_run, read_runs


@refusing(RunRecordError)
def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        if arguments.log:
            print(log_table(against_log(read_run(arguments.runs[0]), read_log(arguments.log))))
            return 0
        refuse_foreign_file(arguments.output, PAGE_START.encode())
        runs = read_runs(arguments.runs)
    except OSError as error:
        return refuse_output(arguments.output, error)
    page = compare_page(runs, arguments.smoothing)
    try:
        make_folder(arguments.output.parent)
        replace_file(arguments.output, page)
    except OSError as error:
        return refuse_output(arguments.output, error)
    print(f"{arguments.output}: {counted(len(runs), 'run')}, {len(page.encode()) / 1e6:.1f} MB")
    if arguments.open:
        webbrowser.open(arguments.output.resolve().as_uri())
    return 0


def refuse_output(path: Path, error: OSError) -> int:
    print(f"{path}: cannot be written: {error.strerror or error} (give another --output)", file=sys.stderr)
    return 2


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    add = parser.add_argument
    add("runs", metavar="RUN_FOLDER", type=Path, nargs="+", help="a run's folder, as outputs/digits")
    add("--output", type=Path, default=Path("compare.html"), help="file to write (default: compare.html)")
    add("--smoothing", type=at_least(0), metavar="STEPS",
        help="steps of the running mean of training loss, gradient norm and loss by timestep; 0: none (default: "
        "3 %% of the longest run)")
    add("--log", type=Path, metavar="FILE",
        help="text with a step and a mean loss on each line; prints the run's mean beside each, with a band, and writes no page")
    add("--open", action="store_true", help="show the page in the browser")
    arguments = parser.parse_args(words)
    if arguments.log and len(arguments.runs) > 1:
        parser.error(f"--log: is compared with one run, and {len(arguments.runs)} are given")
    return arguments
