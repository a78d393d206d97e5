"""Find the largest local batch size for this device: scripts/autotune_batch_size.py CONFIG [options] [--section.key value ...]

Each batch size is tried by a few steps of train.py in fresh processes. The number for training.local_batch_size is
printed to stdout, all else to stderr. Tries are kept in <job.dump_folder>/autotune: the same question again is answered
from there, and an interrupted search resumes. Exit codes: 0 found, 1 nothing fits or a try failed, 2 refused.
"""

import argparse
import logging
import sys

from torchtitan.config.job import ConfigError
from torchtitan.experiments.autotune.candidates import AutotuneRefused
from torchtitan.experiments.autotune.probe import ProbeFailed
from torchtitan.experiments.autotune.record import RecordError
from torchtitan.experiments.autotune.tuning import MAX_BATCH_SIZE, NothingFits, autotune
from torchtitan.processes.command_line import OneLineParser, at_least, positive, refusing
from torchtitan.programs import program
from torchtitan.settings.sources import read_command_line, split_keys


@refusing(ConfigError, AutotuneRefused, RecordError, stopped="stopped; the same command resumes")
def main(words: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    words = sys.argv[1:] if words is None else words
    own, overrides = split_keys(words)
    options = parse_arguments(own)
    arguments = ["--job.config_file", options.config, *overrides]
    try:
        _refuse_given_batch_size(overrides)
        result = autotune(
            arguments, options.processes, memory_gib=options.memory, headroom=options.headroom,
            multiple_of=options.multiple_of, max_batch_size=options.max, fresh=options.fresh, timeout_s=options.timeout,
            report=_say,
        )  # fmt: skip
    except (NothingFits, ProbeFailed) as error:
        print(error, file=sys.stderr)
        return 1
    _say(f"training.local_batch_size = {result.batch_size} ({result.record})")
    print(result.batch_size)
    return 0


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = OneLineParser(prog=program("autotune_batch_size"), description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("config", metavar="CONFIG", help="TOML file of the run, or the name of a shipped one")
    add("--multiple-of", type=at_least(1), default=1, metavar="M", help="try multiples of M only (default: 1)")
    add("--max", type=at_least(1), default=MAX_BATCH_SIZE, metavar="B", help=f"largest to try (default: {MAX_BATCH_SIZE})")
    add("--headroom", type=share, default=0.1, help="share of the memory to leave free (default: 0.1)")
    add("--memory", type=positive, metavar="GIB", help="of each process (default: the CUDA device's; needed on the CPU)")
    add("--processes", type=at_least(1), default=1, metavar="N", help="of the run (default: 1)")
    add("--timeout", type=positive, default=1800.0, metavar="SECONDS", help="for one try (default: 1800)")
    add("--fresh", action="store_true", help="do not use results of earlier searches")
    return parser.parse_args(words)


def share(text: str) -> float:
    """Type of options: numbers from 0 up to, not including, 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be a share from 0 up to, not including, 1, is {text}")
    return value


def _refuse_given_batch_size(overrides: list[str]) -> None:
    if "training.local_batch_size" in read_command_line(overrides)[0]:
        raise AutotuneRefused("command line: --training.local_batch_size: is the result of the search (remove it)")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
