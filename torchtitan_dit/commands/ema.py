"""Choose the length of a weight average after training, from a run's snapshots (ema.snapshot_interval).

Lengths are standard deviations of the average's profile relative to the time trained, above 0 and below 0.2887. Under
torchrun a sweep divides its images among the ranks. Exit codes: 0; 2: refused; 130: stopped.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.checkpoint.checkpointer import CheckpointError
from torchtitan.config.job import ConfigError
from torchtitan.data.base import DatasetError
from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.mesh import compute_device, init_process_group, process_group
from torchtitan.files.weight_files import WeightsError, refuse_existing
from torchtitan.processes.command_line import FirstRankParser, exit_code, interrupt_by_signals
from torchtitan.programs import program
from torchtitan.runs.ema_sweep import SweepOptions, sweep
from torchtitan.runs.post_hoc_ema import (
    MAX_ERROR,
    check_std,
    left_out_tracks,
    reconstruct,
    stored_averages,
    write_weights,
)
from torchtitan.training.ema_snapshots import EMA_FOLDER

FIRST = os.environ.get("RANK", "0") == "0"


def main(words: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = parse_arguments(words)
    try:
        return arguments.command(arguments)
    except (AutoencoderError, ConfigError, CheckpointError, DatasetError) as error:
        if FIRST:
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if FIRST:
            print("stopped; the same command resumes", file=sys.stderr)
        return 130


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = FirstRankParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("reconstruct", help="write the weights of an average of any length to a file")
    command.set_defaults(command=write_reconstruction)
    add_series(command)
    add_max_error(command)
    command.add_argument("--std", type=float, required=True, help="length of the average")
    command.add_argument("--without", nargs="+", default=[], metavar="TRACK", help="tracks that are not used")
    command.add_argument("--output", type=Path, help="file to write (default: RUN/ema/step-N-std-S.safetensors)")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")

    command = commands.add_parser("sweep", help="score averages of several lengths, and draw the curve")
    command.set_defaults(command=score_lengths)
    add_series(command)
    add_max_error(command)
    command.add_argument("--stds", type=float, nargs="+", required=True, metavar="S", help="lengths of the averages")
    command.add_argument("--metric", default="loss", help="held-out loss, or a metric of samples as fd, by the "
        "extractor and the reference of [evaluation] (default: loss)")
    command.add_argument("--images", type=int, help="held-out images, or samples (default: validation.num_images, "
        "evaluation.count)")
    command.add_argument("--batch-size", type=int, default=256, help="images at a time on each rank (default: 256)")
    command.add_argument("--guidance-scale", type=float, help="of samples (default: sampling.guidance_scale)")
    command.add_argument("--guide", metavar="RUN[@STEP][:TRACK]", help="weights that samples are guided away from, "
        f"as of {program('sample')} (default: sampling.guide_track)")
    command.add_argument("--num-steps", type=int, help="solver steps of samples (default: sampling.num_steps)")
    command.add_argument("--seed", type=int, help="of noise and timesteps (default: debug.seed)")
    command.add_argument("--output", type=Path, metavar="FILE.json", help="record of the scores, its picture beside "
        "(default: RUN/ema/sweep-step-N-METRIC.json)")

    command = commands.add_parser("check", help="reconstruct each tracked average from the others, and compare")
    command.set_defaults(command=check_accuracy)
    add_series(command)
    command.add_argument("--snapshots", type=int, nargs="+", metavar="K", help="numbers of evenly spaced snapshots to use "
        "(default: all)")
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
    options = SweepOptions(
        tuple(sorted(set(arguments.stds))), arguments.metric, arguments.images, arguments.batch_size, arguments.guidance_scale,
        arguments.num_steps, arguments.guide, arguments.seed, arguments.max_error,
    )  # fmt: skip
    init_process_group(CommConfig())
    with process_group():
        for line in sweep(arguments.run, arguments.step, options, arguments.output, arguments.ignore_gaps, compute_device()):
            if FIRST:
                print(line)
    return 0


def check_accuracy(arguments: argparse.Namespace) -> int:
    if not FIRST:
        return 0
    rows = left_out_tracks(arguments.run, arguments.step, arguments.snapshots, arguments.ignore_gaps)
    titles = f"{'track':>16}  {'std':>7}  {'snapshots':>9}  {'profile error':>13}  {'error of weights':>16}  sum of |c|\n"
    for number, row in enumerate(rows):
        print("" if number else titles, end="")
        print(
            f"{row.track:>16}  {row.found.std:>7g}  {len(row.found.stored.snapshots):>9}  "
            f"{row.found.combination.error:>13.3e}  {row.error:>16.3e}  {row.found.combination.magnitude:.3g}"
        )
    return 0


def run() -> NoReturn:
    """Run as a program, and end the process."""
    logging.basicConfig(level=logging.WARNING)
    interrupt_by_signals()
    os._exit(exit_code(main))  # a gloo thread may abort the interpreter while it shuts down
