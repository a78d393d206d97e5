"""Options of studies that train a grid of runs, and the base configuration of all their runs."""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

from research.equal_samples import study_base, whole_samples
from torchtitan.config.job import JobConfig, load_config
from torchtitan.config.places import written_places
from torchtitan.experiments.folder import StudyError
from torchtitan.processes.command_line import at_least


def add_grid_options(parser: argparse.ArgumentParser, name: str, *, seeds: int) -> None:
    """Add the options of every study that trains runs on equal samples; seeds: default of --seeds."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", type=Path, help="base configuration of every run")
    add("--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="keys of the configuration to "
        "override, as model.flavor=debug")
    add("--samples", type=at_least(1), required=True, metavar="N", help="images that every run sees; the "
        "nearest multiple of --checkpoints x the batch size (of several: their least common multiple) is taken")
    add("--checkpoints", type=at_least(1), default=8, metavar="N", help="of every run, equally spaced (default: 8)")
    add("--seeds", type=at_least(2), default=seeds, metavar="N",
        help=f"runs of each kind, with the configuration's seed and the following ones (default: {seeds})")
    add("--weights", metavar="none|TRACK",
        help="weights to compare: an EMA track, none for the trained weights (default: the first track)")
    add("--processes", type=at_least(1), default=1, metavar="N", help="of every run (default: 1)")
    add("--retry-failed", action="store_true", help="train and measure failed runs again")
    add("--output", type=Path, help=f"folder of runs and results (default: outputs/<configuration>/studies/{name})")


def read_base(arguments: argparse.Namespace, measured: bool = False) -> JobConfig:
    """Read the configuration of CONFIG.toml and --set, prepared for runs of a study; measured: they validate and evaluate.

    Raises:
        ConfigError: it is refused.
        StudyError: --set is no key=value, or names a path that runs write to.
    """
    words = ["--job.config_file", str(arguments.config)]
    for pair in arguments.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise StudyError(f"--set: {pair!r} is no KEY=VALUE")
        words.append(f"--{key}={value}")
    config = load_config(words, arguments.processes)
    given = {pair.partition("=")[0] for pair in arguments.set}
    for key, _, field in written_places(config):
        if key in given and field.metadata["writes"] == "run":
            raise StudyError(f"--set: {key}: every run has a separate folder in the study's (--output FOLDER sets that)")
    prepared = study_base(config)
    if measured:
        return dataclasses.replace(prepared, validation=config.validation, evaluation=config.evaluation)
    return prepared


def study_folder(arguments: argparse.Namespace, base: JobConfig, name: str) -> Path:
    """Folder of a study's runs and results."""
    return arguments.output or Path(base.job.dump_folder) / base.job.name / "studies" / name


def equal_samples(arguments: argparse.Namespace, batches: list[int]) -> int:
    """Number of samples of every run; prints it where it is not --samples. Raises StudyError."""
    wanted, checkpoints = arguments.samples, arguments.checkpoints
    samples = whole_samples(wanted, batches, checkpoints)
    if samples != wanted:
        each = f"{checkpoints} checkpoint{'s' if checkpoints > 1 else ''} x {math.lcm(*batches)}"
        print(f"--samples: {wanted} -> {samples} samples (a multiple of {each})", file=sys.stderr)
    return samples
