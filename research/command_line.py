"""Run a study of a run's checkpoints, or of runs that the study trains.

    python -m research NAME RUN_FOLDER [options]      NAME --help lists them
    python -m research NAME CONFIG.toml [options]     of a study that trains

Results are in RUN_FOLDER/studies/NAME, or outputs/<configuration>/studies/NAME, unless --output of NAME --help says otherwise:
a table, pictures and summary.md. An interrupted measurement resumes.
"""

import argparse
import logging
import os
import sys
from typing import NoReturn

from research import STUDIES, load_study
from research.frame import CellsFailed, add_run_options, open_run, run_study
from torchtitan.checkpoint.checkpointer import CheckpointError
from torchtitan.config.job import ConfigError
from torchtitan.data.base import DatasetError
from torchtitan.experiments.folder import ExperimentError
from torchtitan.experiments.training import TrainingFailed
from torchtitan.processes.command_line import OneLineParser, interrupt_by_signals, run_program
from torchtitan.weights.trained_model import WeightsError
from torchtitan_dit.cli import load_named_plugins


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        for name, entry in STUDIES.items():
            print(f"  {name:22} {entry.description}")
        return 0 if words else 2
    name = words[0]
    if name not in STUDIES:
        print(f"{name}: no such study (there are: {', '.join(STUDIES)})", file=sys.stderr)
        return 2
    entry, study, arguments = STUDIES[name], load_study(name), parse_arguments(words)
    try:
        if entry.of_a_run:
            run = open_run(arguments, entry.several_weights)
            summary = run_study(name, study, run)
        else:
            summary = study.run_alone(arguments)
    except (ExperimentError, ConfigError, CheckpointError, WeightsError, DatasetError) as error:
        print(error, file=sys.stderr)
        return 2
    except (TrainingFailed, CellsFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command resumes", file=sys.stderr)
        return 130
    print(summary)
    return 0


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Read a study's name and its options; bad ones end the process."""
    name, entry = words[0], STUDIES[words[0]]
    parser = OneLineParser(prog=f"research {name}", description=entry.description)
    if entry.of_a_run:
        add_run_options(parser, entry.several_weights)
    load_study(name).add_options(parser)
    return parser.parse_args(words[1:])


def run() -> NoReturn:
    """Run as a program in one process, and end it."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.exit("research: runs in one process (start it without torchrun, or unset WORLD_SIZE)")
    logging.basicConfig(level=logging.WARNING)
    interrupt_by_signals()
    load_named_plugins()
    run_program(main)
