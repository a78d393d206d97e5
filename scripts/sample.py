"""Draw images from a trained model: scripts/sample.py RUN_FOLDER (or WEIGHTS.safetensors --config FILE).

Without --count and --seeds a grid is drawn; with one of them a set of images, which resumes after a kill. Under torchrun
the images are divided among the ranks; they are the same on any number of them.
"""

import argparse
import dataclasses
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan.processes.parent_death import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()  # before the seconds that importing torch takes

import torch.distributed as dist
from safetensors.torch import save_file

from data import DATASETS
from torchtitan.autoencoders import AUTOENCODERS
from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.checkpoint.checkpointer import CheckpointError
from torchtitan.config.job import ConfigError
from torchtitan.config.sampling_checks import data_text
from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.mesh import compute_device, init_process_group
from torchtitan.evaluation.config import LATENT_DATASETS, AutoencoderConfig, SamplingConfig
from torchtitan.evaluation.decoding import LatentDecoder, open_decoder
from torchtitan.evaluation.judges import judge_type
from torchtitan.evaluation.sample_files import SET_FORMATS
from torchtitan.evaluation.sample_plans import SampleNotFinite, SampleSetError, SetPlan, choices_of, read_seeds
from torchtitan.evaluation.sample_sets import SampleSet, draw_set
from torchtitan.evaluation.sampling import ImageSampler, grid_choices
from torchtitan.pictures.grids import class_labels, image_grid, save_image
from torchtitan.processes.command_line import OneLineParser, exit_code
from torchtitan.runs.guides import LoadedGuide, open_guide
from torchtitan.runs.sample_settings import set_settings
from torchtitan.runs.sampling_options import add_method_options, option, sampling_method
from torchtitan.runs.trained_model import TrainedModel, WeightsError, load_run, load_weights

FIRST = os.environ.get("RANK", "0") == "0"
# Options of the grid, and their defaults; none has an effect on a set.
GRID_OPTIONS = {"images_per_class": 8, "seed": 0, "files": False, "latents": False}
SET_OPTIONS = ("format", "judge")
LONGEST = timedelta(days=365)  # that one rank may wait for another


def main() -> int:
    arguments = parse_arguments()
    try:
        refuse_unused(arguments)
        trained = open_model(arguments)
        sampling = check(arguments, trained)
        guide = open_guide(
            arguments.guide, arguments.source, arguments.config, trained, sampling.guidance_scale, compute_device()
        )
        decoder = open_autoencoder(arguments, trained)
        samples = plan_set(arguments, trained, sampling, guide, decoder) if arguments.set else None
    except (AutoencoderError, ConfigError, CheckpointError, SampleSetError, WeightsError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # processes are not joined yet: one of each machine says it
            print(error, file=sys.stderr)
        return 2
    for warning in (*trained.warnings, *(guide.model.warnings if guide else ())) if FIRST else ():
        print(warning, file=sys.stderr)
    init_process_group(CommConfig())
    sampler = ImageSampler(trained.model, trained.objective, arguments.dtype, compute_device())
    method = sampling.method() | {"guide": guide.guide if guide else None}
    if samples is None:
        draw_grid(arguments, trained, sampler, method, decoder)
        return 0
    return draw(arguments, trained, sampler, method, decoder, samples)


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", type=Path, help="a run's folder, or a safetensors file of weights")
    add("--config", type=Path, help="the weights' configuration (for a safetensors file)")
    add("--step", type=int, help="checkpoint of this step (default: the newest good one)")
    add("--ema", metavar="TRACK", help="EMA track, or 'none' for the trained weights (default: sampling.ema_track)")
    add("--guide", metavar="RUN[@STEP][:TRACK]", help="weights to guide away from instead of the null condition: of "
        "this run (@STEP, :TRACK), another run, or a safetensors file; none: the null condition (default: "
        "sampling.guide_track)")
    add("--classes", type=int, nargs="+", help="classes: one row of the grid each (default: the run's), or those of a "
        "set, by turns (default: drawn for each seed)")
    add("--images-per-class", type=int, help="columns of the grid (default: 8)")
    add("--seed", type=int, help="of the grid's noise (default: 0)")
    add("--count", type=int, help="draw a set of this many images")
    add("--seeds", metavar="SEEDS", help="draw a set of these seeds, as 0-49999 or 1,5,10-19 (default: 0 to count - 1)")
    add("--format", choices=list(SET_FORMATS), help="files of a set (default: png)")
    add("--judge", action="store_true", help="judge the set against real images, as at the end of a run")
    add_method_options(parser)
    add("--batch-size", type=int, default=256, help="images at a time on each rank")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of compute")
    add("--autoencoder", choices=("none", *AUTOENCODERS),
        help="autoencoder that decodes latents to images (default: the run's)")
    add("--autoencoder-path", metavar="PATH", help="its folder or hub name, if not the run's")
    add("--output", type=Path, help="folder to write to (default: RUN/samples/drawn, for a set RUN/samples/set, or the "
        "weights' folder)")
    add("--files", action="store_true", help="one PNG per image besides the grid")
    add("--latents", action="store_true", help="also a file of the drawn latents, for cosmos_latent_decoder.py")
    arguments = parser.parse_args()
    arguments.set = arguments.count is not None or arguments.seeds is not None
    return arguments


def refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse options of a grid for a set, and of a set for a grid, then fill in the defaults. Raises WeightsError."""
    unused = GRID_OPTIONS if arguments.set else SET_OPTIONS
    for name in unused:
        if getattr(arguments, name) is not None and getattr(arguments, name) is not False:
            reason = "a set (--count, --seeds; leave it out)" if arguments.set else "a grid (give --count or --seeds too)"
            raise WeightsError(f"{option(name)}: has no effect on {reason}")
    for name, default in GRID_OPTIONS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)


def open_model(arguments: argparse.Namespace) -> TrainedModel:
    if arguments.source.is_dir():
        return load_run(arguments.source, arguments.ema, arguments.step, compute_device())
    if not arguments.source.exists():
        raise WeightsError(f"{arguments.source}: no such run folder or weights file")
    if arguments.config is None:
        raise WeightsError(f"{arguments.source}: which model is this? (add --config FILE)")
    if arguments.ema or arguments.step is not None:
        raise WeightsError(f"{arguments.source}: --ema and --step choose from a run folder, this is one set of weights")
    return load_weights(arguments.source, arguments.config, compute_device())


def check(arguments: argparse.Namespace, trained: TrainedModel) -> SamplingConfig:
    """Check the run's sampling method with the given options. Raises WeightsError: it cannot be used."""
    kind = trained.info.condition_kind
    if arguments.classes is None:
        arguments.classes = [] if arguments.set else trained.config.sampling.classes
    for name in ("images_per_class", "batch_size"):
        if getattr(arguments, name) < 1:
            raise WeightsError(f"{option(name)}: must be at least 1, is {getattr(arguments, name)}")
    if not 0 <= arguments.seed < 2**64:
        raise WeightsError(f"--seed: must be in 0..2^64 - 1, is {arguments.seed}")
    outside = [number for number in arguments.classes if not 0 <= number < max(kind.choices, 1)]
    if outside:
        raise WeightsError(f"--classes: {outside[0]} is not in 0..{max(kind.choices, 1) - 1}")
    if arguments.output and not arguments.set:
        refuse_earlier_pictures(arguments.output, arguments)
    data = trained.config.data
    if arguments.judge and not judge_type(data):
        raise WeightsError(f"--judge: {data_text(data)} has no judge (leave it out)")
    return sampling_method(arguments, trained)


def plan_set(
    arguments: argparse.Namespace, trained: TrainedModel, sampling: SamplingConfig, guide: LoadedGuide | None,
    decoder: LatentDecoder | None,
) -> SampleSet:  # fmt: skip
    """Plan the set of the options. Raises SampleSetError: there can be none."""
    channels = trained.model.image_shape[0]
    if decoder is None and (trained.config.data.name in LATENT_DATASETS or channels not in (1, 3)):
        raise SampleSetError(
            f"{arguments.source}: draws latents or images of {channels} channels, a set is of pictures (for latents give"
            " --autoencoder NAME --autoencoder-path PATH)"
        )
    seeds = read_seeds(arguments.seeds, arguments.count)
    settings = set_settings(trained, sampling, guide, decoder, arguments.dtype)
    kind = trained.model.condition_kind
    plan = SetPlan(seeds, choices_of(seeds, kind.choices, arguments.classes), arguments.batch_size, settings)
    folder = arguments.output or beside(arguments.source, "set")
    return SampleSet(folder, plan, arguments.format or "png")


def beside(source: Path, name: str) -> Path:
    """Folder for what is drawn from a run, or from a file of weights."""
    return source / "samples" / name if source.is_dir() else source.with_suffix("")


def refuse_earlier_pictures(folder: Path, arguments: argparse.Namespace) -> None:
    """Refuse to overwrite files in a folder of the user's. Raises WeightsError."""
    names = [f"grid-seed-{arguments.seed}.png"]
    names += [f"latents-seed-{arguments.seed}.safetensors"] if arguments.latents else []
    names += [f"class-*-image-*-seed-{arguments.seed}.png"] if arguments.files else []
    if there := [path for name in names for path in folder.glob(name)]:
        raise WeightsError(f"{min(there)}: exists already (give another --output or --seed)")


def open_autoencoder(arguments: argparse.Namespace, trained: TrainedModel) -> LatentDecoder | None:
    """Open the autoencoder that decodes the drawn latents; None for none. Raises AutoencoderError, WeightsError."""
    config, data = trained.config.autoencoder, trained.config.data
    given = arguments.autoencoder or arguments.autoencoder_path
    if data.name not in LATENT_DATASETS:
        if given:
            raise WeightsError(f"--autoencoder: the model draws images of data.name = {data.name} (leave it out)")
        return None
    if arguments.autoencoder not in (None, config.name):
        config = AutoencoderConfig(name=arguments.autoencoder)
    if arguments.autoencoder_path is not None:
        config = dataclasses.replace(config, path=arguments.autoencoder_path)
    if config.name == "none":
        if arguments.autoencoder_path is not None:
            raise WeightsError("--autoencoder-path: of which autoencoder? (add --autoencoder NAME)")
        if FIRST and not arguments.autoencoder:
            hint = "the grid shows latent channels as colours (for images: --autoencoder NAME --autoencoder-path PATH)"
            print(hint, file=sys.stderr)
        return None
    try:
        return open_decoder(config, DATASETS[data.name].store(data), compute_device())
    except AutoencoderError as error:
        elsewhere = "" if arguments.autoencoder_path else " (--autoencoder-path says where it is on this machine)"
        raise AutoencoderError(f"{error}{elsewhere}") from error


def draw(
    arguments: argparse.Namespace, trained: TrainedModel, sampler: ImageSampler, method: dict[str, Any],
    decoder: LatentDecoder | None, samples: SampleSet,
) -> int:  # fmt: skip
    """Draw a set, or the rest of it, and judge it if asked to."""
    group = dist.new_group(backend="gloo", timeout=LONGEST) if dist.is_initialized() else None
    try:
        found = draw_set(samples, sampler, method, decoder, group, progress=True)
        if FIRST:
            print(f"{found}: {len(samples.plan.seeds)} images")
        if FIRST and arguments.judge:
            for name, score in samples.judge(trained.config.data).items():
                print(f"{name:28} {score:.4f}")
    except SampleNotFinite as error:  # of this rank alone
        print(error, file=sys.stderr)
        return 1
    except SampleSetError as error:
        if FIRST:
            print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{samples.folder}: cannot be written: {error.strerror or error} (the same command resumes)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if FIRST:
            print("stopped; the same command resumes", file=sys.stderr)
        return 130
    return 0


def draw_grid(
    arguments: argparse.Namespace, trained: TrainedModel, sampler: ImageSampler, method: dict[str, Any],
    decoder: LatentDecoder | None,
) -> None:  # fmt: skip
    kind = trained.info.condition_kind
    choices = grid_choices(arguments.classes, kind.choices, arguments.images_per_class)
    drawn = sampler.draw(choices, arguments.seed, **method, batch_size=arguments.batch_size, progress=FIRST)
    images = decoder.decode(drawn) if decoder else drawn
    if not FIRST:
        return
    folder = arguments.output or beside(arguments.source, "drawn")
    folder.mkdir(parents=True, exist_ok=True)
    rows = choices[:: arguments.images_per_class].tolist()
    names = class_labels(rows, kind.choice_names)
    grid = folder / f"grid-seed-{arguments.seed}.png"
    image_grid(images, len(rows), arguments.images_per_class, names, trained.label).save(grid)
    print(grid)
    if arguments.files:
        for number, (image, label) in enumerate(zip(images, choices.tolist(), strict=True)):
            save_image(image, folder / f"class-{label:04d}-image-{number:06d}-seed-{arguments.seed}.png")
        print(f"{folder}: {len(images)} images")
    if arguments.latents:
        file = folder / f"latents-seed-{arguments.seed}.safetensors"
        data = trained.config.data
        metadata = DATASETS[data.name].store(data).index.metadata() if data.name in LATENT_DATASETS else None
        save_file({"latents": drawn.float().contiguous(), "labels": choices}, file, metadata)
        print(file)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    os._exit(exit_code(main))  # a gloo thread may abort the interpreter while it shuts down
