"""Draw images from a trained model: scripts/sample.py RUN_FOLDER (or WEIGHTS [CONFIG]).

Without --count and --seeds a grid is drawn, named by step, weights and seed, and numbered where there is one; with one of
them a set of images, which resumes after a kill. Under torchrun the images are divided among the ranks; they are the same
on any number of them.
"""

import argparse
import itertools
import os
import re
import sys
from pathlib import Path

from safetensors.torch import save_file

from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.checkpoint.checkpointer import CheckpointError
from torchtitan.config.job import ConfigError
from torchtitan.distributed.collectives import group_for_work
from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.mesh import init_process_group
from torchtitan.evaluation.sample_plans import SampleNotFinite, SampleSetError
from torchtitan.evaluation.sample_sets import SampleSet, draw_set
from torchtitan.evaluation.sampling import ImageSampler, grid_choices, grid_labels
from torchtitan.files.durable import replacing
from torchtitan.pictures.grids import image_grid, save_image
from torchtitan.processes.command_line import FirstRankParser, at_least, refusing
from torchtitan.sampling.method_options import option
from torchtitan.sampling.prompts import check_prompted
from torchtitan.sampling.setup import SamplingSetup, add_drawing_options, beside, chosen_classes, open_prompted
from torchtitan.weights.trained_model import TrainedModel, WeightsError

FIRST = os.environ.get("RANK", "0") == "0"
# Options of the grid; none has an effect on a set.
GRID_OPTIONS = ("images_per_class", "seed", "files", "latents")


@refusing(SampleSetError, stopped="stopped; the same command resumes")
def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    try:
        refuse_unused(arguments)
        setup = open_prompted(arguments)
        check(arguments, setup)
        plan = setup.plan(arguments.seeds, arguments.count, arguments.classes) if arguments.set else None
        samples = SampleSet(arguments.output or beside(arguments.source, "set"), plan) if plan else None
    except (AutoencoderError, ConfigError, CheckpointError, SampleSetError, WeightsError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # processes are not joined yet: one of each machine says it
            print(error, file=sys.stderr)
        return 2
    for warning in setup.warnings if FIRST else ():
        print(warning, file=sys.stderr)
    init_process_group(CommConfig())
    if samples is None:
        try:
            draw_grid(arguments, setup)
        except OSError as error:
            print(f"{error.filename}: cannot be written: {error.strerror} (give another --output)", file=sys.stderr)
            return 1
        return 0
    return draw(arguments, setup, samples)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = FirstRankParser(description=__doc__)
    add = parser.add_argument
    add("source", type=Path, help="a run's folder, a safetensors file of weights, or a folder of diffusers")
    add("--classes", nargs="+", help="names or numbers, or all: one row of the grid each (default: the run's), or those of a "
        "set, by turns (default: drawn for each seed)")
    add("--images-per-class", type=at_least(1), help="columns of the grid (default: sampling.images_per_class)")
    add("--seed", type=at_least(0), help="of the grid's noise (default: 0)")
    add("--count", type=int, help="draw a set of this many images")
    add("--seeds", metavar="SEEDS", help="draw a set of these seeds, as 0-49999 or 1,5,10-19 (default: 0 to count - 1)")
    add_drawing_options(parser)
    add("--output", type=Path, help="folder to write to (default: RUN/samples/drawn, for a set RUN/samples/set; of a "
        "file of weights FILE-samples/drawn or set)")
    add("--files", action="store_true", help="one PNG per image besides the grid")
    add("--latents", action="store_true", help="also a file of the drawn latents, for cosmos_latent_decoder.py")
    arguments = parser.parse_args(words)
    arguments.set = arguments.count is not None or arguments.seeds is not None
    return arguments


def refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse options of a grid for a set. Raises WeightsError."""
    for name in GRID_OPTIONS:
        if arguments.set and getattr(arguments, name) not in (None, False):
            raise WeightsError(f"{option(name)}: has no effect on a set (--count, --seeds; leave it out)")


def check(arguments: argparse.Namespace, setup: SamplingSetup) -> None:
    """Check the options of a grid or a set. Raises WeightsError: one cannot be used."""
    config = setup.trained.config
    if arguments.output and arguments.output.suffix == ".png":
        raise WeightsError(f"--output: {arguments.output} names a picture (give a folder, which pictures are written to)")
    check_prompted(setup.trained)
    arguments.images_per_class = arguments.images_per_class or config.sampling.images_per_class
    arguments.seed = arguments.seed or 0
    if arguments.prompt:
        arguments.classes = list(range(len(arguments.prompt)))
    elif arguments.classes is None:
        arguments.classes = [] if arguments.set else config.sampling.classes
    arguments.classes = chosen_classes(arguments.classes, setup.trained)


def unused_name(folder: Path, trained: TrainedModel, seed: int) -> str:
    """Name of pictures, as `step-200-ema-seed-0`, which no file in the folder has: the second one ends in `-2`."""
    origin = [f"step-{trained.step}"] if trained.step is not None else []
    origin += [trained.track] if trained.track else []
    name = "-".join([*origin, f"seed-{seed}"])
    names = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    there = [path.name for path in folder.glob("*")]

    def used(name: str) -> bool:
        pattern = re.compile(rf"(?:grid|latents|class-\d+-image-\d+)-{re.escape(name)}\.\w+")
        return any(map(pattern.fullmatch, there))

    return next(name for name in names if not used(name))


def draw(arguments: argparse.Namespace, setup: SamplingSetup, samples: SampleSet) -> int:
    """Draw a set, or the rest of it."""
    try:
        sampler = setup.sampler()
        found = draw_set(samples, sampler, setup.method(), setup.decoder, group_for_work(), progress=True)
        if FIRST:
            print(f"{found}: {len(samples.plan.seeds)} images")
            print_evaluations(setup, sampler)
    except SampleNotFinite as error:  # of this rank alone
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{samples.folder}: cannot be written: {error.strerror or error} (the same command resumes)", file=sys.stderr)
        return 1
    return 0


def print_evaluations(setup: SamplingSetup, sampler: ImageSampler) -> None:
    """Print the number of evaluations that an adaptive solver has made."""
    if setup.sampling.solver.adaptive and sampler.evaluations:
        low, high = min(sampler.evaluations), max(sampler.evaluations)
        print(f"evaluations of the network: {low}" + (f" to {high} in a batch" if high > low else ""))


def draw_grid(arguments: argparse.Namespace, setup: SamplingSetup) -> None:
    trained = setup.trained
    kind = trained.info.condition_kind
    choices = grid_choices(arguments.classes, kind.choices, arguments.images_per_class)
    folder = arguments.output or beside(arguments.source, "drawn")
    if FIRST:
        folder.mkdir(parents=True, exist_ok=True)
    sampler = setup.sampler()
    drawn = sampler.draw(choices, arguments.seed, **setup.method(), batch_size=setup.batch_size, progress=FIRST)
    images = setup.decoder.decode(drawn) if setup.decoder else drawn
    if not FIRST:
        return
    rows = choices[:: arguments.images_per_class].tolist()
    name = unused_name(folder, trained, arguments.seed)
    grid = folder / f"grid-{name}.png"
    image_grid(images, len(rows), arguments.images_per_class, grid_labels(rows, kind), setup.title).save(grid)
    print(grid)
    print_evaluations(setup, sampler)
    if arguments.files:
        for number, (image, label) in enumerate(zip(images, choices.tolist(), strict=True)):
            save_image(image, folder / f"class-{label:04d}-image-{number:06d}-{name}.png")
        print(f"{folder}: {len(images)} images")
    if arguments.latents:
        file = folder / f"latents-{name}.safetensors"
        metadata = trained.record.latents.metadata() if trained.record.latents else None
        with replacing(file) as unfinished:
            save_file({"latents": drawn.float().contiguous(), "labels": choices}, unfinished, metadata)
        print(file)
