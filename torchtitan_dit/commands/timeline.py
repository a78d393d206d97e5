"""Draw a timeline of all ranks: scripts/timeline.py RUN_FOLDER [--output trace.json.gz]

Merges the ranks' event logs into a trace for https://ui.perfetto.dev or chrome://tracing, a track per rank. A name that
ends in .gz is compressed.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from torchtitan.processes.command_line import OneLineParser, run_program
from torchtitan.supervision.timeline import TimelineError, build_timeline, write_timeline


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    output = arguments.output or arguments.run / "timeline.json.gz"
    try:
        trace, damaged = build_timeline(arguments.run)
        write_timeline(trace, output)
    except TimelineError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{output}: cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    ranks = {entry["pid"] for entry in trace["traceEvents"]}
    phases = sum(entry["ph"] == "X" for entry in trace["traceEvents"])
    left_out = f", {damaged} damaged lines left out" if damaged else ""
    print(f"{output}: {phases} phases of {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}{left_out}")
    return 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="timeline.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run", metavar="RUN_FOLDER", type=Path, help="a run's folder, as outputs/digits")
    add("--output", type=Path, metavar="FILE", help="file to write (default: RUN_FOLDER/timeline.json.gz)")
    return parser.parse_args(words)


def run() -> NoReturn:
    """Run as a program, and end the process."""
    run_program(main)
