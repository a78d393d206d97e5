"""Time of a training step by kind of operation: scripts/breakdown.py RUN_FOLDER|TRACE [options].

The shares of attention, matrix products, pointwise operations and norms, communication, data, optimizer and EMA, per
phase of the step, and the ten longest kernels or operations. Of a run's folder the newest trace is read, and the page
is written to RUN_FOLDER/profile/breakdown.md and .json; of a trace file it is printed only, unless --output names a
folder.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from torchtitan.processes.command_line import OneLineParser, run_program
from torchtitan.profiling.breakdown import refuse_other_files, write_breakdown
from torchtitan.profiling.trace import PROFILE_FOLDER, TraceError, find_trace


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        if arguments.output:
            refuse_other_files(arguments.output)
        if arguments.source.is_dir():
            trace = find_trace(arguments.source, arguments.step, arguments.rank or 0)
            output = arguments.output or arguments.source / PROFILE_FOLDER
        elif arguments.step is not None or arguments.rank is not None:
            raise TraceError(f"{arguments.source}: is no run folder, whose step and rank could be chosen")
        else:
            trace, output = arguments.source, arguments.output
        page = write_breakdown(trace, output)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        place = error.filename or arguments.output or arguments.source
        print(f"{place}: cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    print(page)
    return 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="breakdown.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="RUN_FOLDER|TRACE", type=Path,
        help="a run's folder, as outputs/digits, or a trace exported by torch.profiler")
    add("--step", type=int, help="of a run folder: last step of the trace (default: the newest)")
    add("--rank", type=int, help="of a run folder: rank of the trace (default: 0)")
    add("--output", type=Path, metavar="FOLDER", help="folder for breakdown.md and breakdown.json")
    return parser.parse_args(words)


def run() -> NoReturn:
    """Run as a program, and end the process."""
    run_program(main)
