"""Analyse speed and memory of a folder of runs: optimization_analysis.py FOLDER... [--output DIR]

Reads every run below the folders, those of sweeps with the sweep's record of failures, and writes to FOLDER/analysis:
results.csv (a row per run), analysis.md (findings and tables), and pictures of MFU, throughput and memory over the batch
size and the number of ranks, and of the loss over images, FLOPs and hours.
"""

import argparse
import sys
from pathlib import Path

from torchtitan.processes.command_line import OneLineParser, at_least, refusing
from torchtitan.programs import program
from torchtitan.runs.analysis.findings import headlines
from torchtitan.runs.analysis.report import analyse, refuse_other_files, write_report
from torchtitan.runs.record import RunRecordError


@refusing(RunRecordError)
def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    folder = arguments.output or arguments.folders[0] / "analysis"
    try:
        refuse_other_files(folder)  # before everything is read
        results = analyse(arguments.folders, arguments.warmup_steps, progress=True)
        files = write_report(results, folder)
    except OSError as error:
        print(f"{error.filename or folder}: cannot be written: {error.strerror or error} (give another --out)", file=sys.stderr)
        return 2
    for remark in results.remarks:
        print(remark, file=sys.stderr)
    print("\n".join(headlines(results)))
    print(f"{folder}: {len(files)} files, analysis.md shows all of them")
    return 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=program("optimization_analysis"), description=__doc__)
    add = parser.add_argument
    add("folders", metavar="FOLDER", type=Path, nargs="+", help="a sweep's folder, or any above run folders, as "
        "outputs; several are analysed together")
    add("--output", "--out", type=Path, metavar="DIR", help="folder of the results (default: analysis in the first FOLDER)")
    add("--warmup-steps", type=at_least(0), metavar="N",
        help="steps left out at the start of every run (default: its sweep's setting, else a tenth of its steps)")
    return parser.parse_args(words)
