"""Choose the length of a weight average after training, from a run's snapshots (ema.snapshot_interval).

Lengths are standard deviations of the average's profile relative to the time trained, above 0 and below 0.2887. Under
torchrun a sweep divides its images among the ranks. Exit codes: 0; 2: refused; 130: stopped.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.checkpoint.checkpointer import CheckpointError
from torchtitan.config.job import ConfigError
from torchtitan.data.base import DatasetError
from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.mesh import compute_device, init_process_group, process_group
from torchtitan.errors import EvaluationError
from torchtitan.files.weight_files import WeightsError, refuse_existing
from torchtitan.processes.command_line import FirstRankParser, refusing
from torchtitan.programs import program
from torchtitan.sampling.ema_sweep import LOSS, sweep
from torchtitan.training.ema_snapshots import EMA_FOLDER
from torchtitan.weights.post_hoc_ema import MAX_ERROR, check_std, reconstruct, stored_averages, write_weights

FIRST = os.environ.get("RANK", "0") == "0"


@refusing(AutoencoderError, ConfigError, CheckpointError, DatasetError, EvaluationError)
def main(words: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments = parse_arguments(words)
    return arguments.command(arguments)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = FirstRankParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("reconstruct", help="write the weights of an average of any length to a file")
    command.set_defaults(command=write_reconstruction)
    add_series(command)
    add_max_error(command)
    command.add_argument("--std", type=float, required=True, help="length of the average")
    command.add_argument("--without", nargs="+", default=[], metavar="TRACK", help="tracks that are not used")
    command.add_argument("--output", type=Path, help="file to write (default: RUN/ema/step-N-std-S.safetensors)")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")

    command = commands.add_parser("sweep", help="score averages of several lengths, and name the best")
    command.set_defaults(command=score_lengths)
    add_series(command)
    add_max_error(command)
    command.add_argument("--stds", type=float, nargs="+", required=True, metavar="S", help="lengths of the averages")
    command.add_argument("--metric", default=LOSS, help="held-out loss, or a metric of samples as fd (default: loss)")
    for name in ("extractor", "reference"):
        command.add_argument(f"--{name}", help=f"{name} of a metric (default: evaluation.{name})")
    command.add_argument("--images", "--count", type=int, help="held-out images, or samples (default: validation.num_images, "
        "evaluation.count)")
    command.add_argument("--guidance-scale", type=float, help="guidance of samples (default: evaluation.guidance_scale)")
    command.add_argument("--guide", metavar="RUN[@STEP][:TRACK]", help="weights that samples are guided away from, as in "
        f"{program('sample')} (default: sampling.guide_track)")
    return parser.parse_args(words)


def add_series(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", type=Path, help="a run's folder")
    command.add_argument("--step", type=int, help="snapshot at whose step the average ends (default: the newest)")
    command.add_argument("--ignore-gaps", action="store_true", help="do without missing or damaged snapshots")


def add_max_error(command: argparse.ArgumentParser) -> None:
    command.add_argument("--max-error", type=float, default=MAX_ERROR, help=f"largest profile error (default: {MAX_ERROR:g})")


def write_reconstruction(arguments: argparse.Namespace) -> int:
    if not FIRST:  # one process writes the file
        return 0
    check_std(arguments.std)
    if arguments.output:
        refuse_output(arguments.output, arguments.overwrite)
    stored = stored_averages(arguments.run, arguments.step, arguments.without, arguments.ignore_gaps)
    found = reconstruct(stored, arguments.std, arguments.max_error)
    default = arguments.run / EMA_FOLDER / f"step-{stored.last.step:08d}-std-{arguments.std:g}.safetensors"
    output = arguments.output or default
    refuse_output(output, arguments.overwrite)
    for note in [*stored.notes, *found.warnings]:
        print(f"note: {note}", file=sys.stderr)
    write_weights(found, output, arguments.run, arguments.overwrite)
    print(found.describe())
    print(output)
    return 0


def refuse_output(path: Path, overwrite: bool) -> None:
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path}: must end in .safetensors, the format of the output")
    refuse_existing(path, overwrite)


def score_lengths(arguments: argparse.Namespace) -> int:
    for std in arguments.stds:
        check_std(std)
    init_process_group(CommConfig())
    with process_group():
        lines = sweep(
            arguments.run, sorted(set(arguments.stds)), arguments.metric, compute_device(), step=arguments.step,
            images=arguments.images, guidance_scale=arguments.guidance_scale, guide=arguments.guide,
            extractor=arguments.extractor, reference=arguments.reference, max_error=arguments.max_error,
            ignore_gaps=arguments.ignore_gaps,
        )  # fmt: skip
        for line in lines:
            if FIRST:
                print(line, flush=True)
    return 0
