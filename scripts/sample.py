"""Draw images from a trained model: scripts/sample.py RUN_FOLDER (or WEIGHTS.safetensors --config FILE).

Under torchrun the images are divided among the ranks; they are the same on any number of them.
"""

import argparse
import dataclasses
import logging
import os
import sys
import typing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan.processes.parent_death import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()  # before the seconds that importing torch takes

from safetensors.torch import save_file

from data import DATASETS
from torchtitan.autoencoders import AUTOENCODERS
from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.checkpoint.checkpointer import CheckpointError
from torchtitan.conditions import Unconditional
from torchtitan.config.job import ConfigError
from torchtitan.distributed.config import CommConfig
from torchtitan.distributed.mesh import compute_device, init_process_group
from torchtitan.evaluation.config import LATENT_DATASETS, AutoencoderConfig, SamplingConfig, sampling_problems
from torchtitan.evaluation.decoding import LatentDecoder, open_decoder
from torchtitan.evaluation.sampling import ImageSampler, grid_choices
from torchtitan.pictures.grids import class_labels, image_grid, save_image
from torchtitan.processes.command_line import OneLineParser, exit_code
from torchtitan.runs.trained_model import TrainedModel, WeightsError, load_run, load_weights
from torchtitan.settings import has_key
from torchtitan.settings.record import unmet_condition
from torchtitan.settings.schema import validate_section
from torchtitan.settings.sections import choices, keys, put_section, section_at

FIRST = os.environ.get("RANK", "0") == "0"
# Keys of `[sampling]` that say how an image is drawn; each is an option here too, as are those of the inner sections.
METHOD_KEYS = [
    "num_steps", "guidance_scale", "guidance_interval", "guidance_interval_unit", "guidance_channels", "clip_x0", "state_dtype",
]


def main() -> int:
    arguments = parse_arguments()
    try:
        trained = open_model(arguments)
        sampling = check(arguments, trained)
        decoder = open_autoencoder(arguments, trained)
    except (AutoencoderError, ConfigError, CheckpointError, WeightsError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # processes are not joined yet: one of each machine says it
            print(error, file=sys.stderr)
        return 2
    for warning in trained.warnings if FIRST else ():
        print(warning, file=sys.stderr)
    init_process_group(CommConfig())
    draw(arguments, trained, sampling, decoder)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", type=Path, help="a run's folder, or a safetensors file of weights")
    add("--config", type=Path, help="the weights' configuration (for a safetensors file)")
    add("--step", type=int, help="checkpoint of this step (default: the newest good one)")
    add("--ema", metavar="TRACK", help="EMA track, or 'none' for the trained weights (default: sampling.ema_track)")
    add("--classes", type=int, nargs="+", help="classes, one row of the grid each (default: the run's)")
    add("--images-per-class", type=int, default=8)
    add("--seed", type=int, default=0, help="of the images' noise")
    for name, options in choices(SamplingConfig()).items():
        add(option(name), choices=list(options.registry), help=f"{described(SamplingConfig, name)} (default: the run's)")
    for section, key in method_keys():
        add(option(key), help=f"{described(section, key)} (default: the run's)", **reader(section, key))
    add("--batch-size", type=int, default=256, help="images at a time on each rank")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of compute")
    add("--autoencoder", choices=("none", *AUTOENCODERS),
        help="autoencoder that decodes latents to images (default: the run's)")
    add("--autoencoder-path", metavar="PATH", help="its folder or hub name, if not the run's")
    add("--output", type=Path, help="folder to write to (default: RUN/samples/drawn, or the weights' folder)")
    add("--files", action="store_true", help="one PNG per image besides the grid")
    add("--latents", action="store_true", help="also a file of the drawn latents, for cosmos_latent_decoder.py")
    return parser.parse_args()


def option(key: str) -> str:
    """Command-line option of a key of `[sampling]`."""
    return "--" + key.replace("_", "-")


def option_of(key: str) -> str:
    """Key that names an option, for one within `[sampling]`: `solver` of `solver.name`, `churn` of `solver.churn`."""
    section, _, last = key.rpartition(".")
    return section if last == "name" else last


def method_keys() -> list[tuple[type, str]]:
    """Section and key of every option that says how an image is drawn, but for the names of inner sections."""
    inner = [type(each.section(name)) for each in choices(SamplingConfig()).values() for name in each.registry]
    found: dict[str, type] = dict.fromkeys(METHOD_KEYS, SamplingConfig)
    for section in inner:  # a key that several have is one option, for the one that is chosen
        found = {key.name: section for key in keys(section) if key.name != "name"} | found
    return [(section, key) for key, section in found.items()]


def described(section: Any, key: str) -> str:
    """Description of a key."""
    return section.__dataclass_fields__[key].metadata["description"]


def reader(section: type, key: str) -> dict:
    """Reader of a key's values for argparse."""
    hint = typing.get_type_hints(section)[key]
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if hint is bool:
        return {"type": true_or_false, "metavar": "{true,false}"}
    return {"type": float, "nargs": "+"} if hint == list[float] else {"type": hint}


def true_or_false(text: str) -> bool:
    """Read a truth value. Raises ValueError."""
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


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
        arguments.classes = trained.config.sampling.classes
    for name in ("images_per_class", "batch_size"):
        if getattr(arguments, name) < 1:
            raise WeightsError(f"{option(name)}: must be at least 1, is {getattr(arguments, name)}")
    if not 0 <= arguments.seed < 2**64:
        raise WeightsError(f"--seed: must be in 0..2^64 - 1, is {arguments.seed}")
    outside = [number for number in arguments.classes if not 0 <= number < max(kind.choices, 1)]
    if outside:
        raise WeightsError(f"--classes: {outside[0]} is not in 0..{max(kind.choices, 1) - 1}")
    if arguments.output:
        refuse_earlier_pictures(arguments.output, arguments)
    sampling = sampling_method(arguments, trained)
    if sampling.guidance_scale != 1 and (isinstance(kind, Unconditional) or trained.config.model.label_dropout == 0):
        raise WeightsError("--guidance-scale: the model was trained without a null class (leave it at 1)")
    return sampling


def refuse_earlier_pictures(folder: Path, arguments: argparse.Namespace) -> None:
    """Refuse to overwrite files in a folder of the user's. Raises WeightsError."""
    names = [f"grid-seed-{arguments.seed}.png"]
    names += [f"latents-seed-{arguments.seed}.safetensors"] if arguments.latents else []
    names += [f"class-*-image-*-seed-{arguments.seed}.png"] if arguments.files else []
    if there := [path for name in names for path in folder.glob(name)]:
        raise WeightsError(f"{min(there)}: exists already (give another --output or --seed)")


def sampling_method(arguments: argparse.Namespace, trained: TrainedModel) -> SamplingConfig:
    """Sampling method: `[sampling]` of the run, with the options given here. Raises WeightsError."""
    given = {key: getattr(arguments, key) for _, key in method_keys() if getattr(arguments, key) is not None}
    sampling = dataclasses.replace(trained.config.sampling, enable=True)
    problems = []
    for name, options in choices(sampling).items():
        if chosen := getattr(arguments, name):
            section = getattr(sampling, name)
            setattr(sampling, name, section if section.name == chosen else options.section(chosen))
    config = dataclasses.replace(trained.config, sampling=sampling)
    for name in ("sampling", *(f"sampling.{inner}" for inner in choices(sampling))):
        section = section_at(config, name)
        own = {key: given.pop(key) for key in list(given) if has_key(section, key)}
        filled, refused = validate_section(name, section, own, lambda key: "")
        put_section(config, name, filled)
        problems += [(problem.key.rpartition(".")[2], problem.text) for problem in refused]
        for field in keys(filled):
            if field.name in own and (unmet := unmet_condition(config, name, field)):
                problems.append((field.name, f"has no effect when {unmet[0]} = {unmet[1]} (leave it out)"))
    sampling = config.sampling
    for key in given:
        chosen_names = ", ".join(f"--{name} {getattr(sampling, name).name}" for name in choices(sampling))
        problems.append((key, f"has no effect with {chosen_names} (leave it out)"))
    problems += sampling_problems(
        sampling, config.objective.path, config.model.learned_variance, bool(config.objective.heads_of_network())
    )
    if problems:
        raise WeightsError("\n".join(f"{option(option_of(key))}: {text}" for key, text in problems))
    return sampling


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
    arguments: argparse.Namespace, trained: TrainedModel, sampling: SamplingConfig, decoder: LatentDecoder | None
) -> None:
    kind = trained.info.condition_kind
    choices = grid_choices(arguments.classes, kind.choices, arguments.images_per_class)
    sampler = ImageSampler(trained.model, trained.objective, arguments.dtype, compute_device())
    drawn = sampler.draw(
        choices, arguments.seed, **sampling.method(), batch_size=arguments.batch_size, progress=FIRST
    )
    images = decoder.decode(drawn) if decoder else drawn
    if not FIRST:
        return
    beside = arguments.source / "samples" / "drawn" if arguments.source.is_dir() else arguments.source.with_suffix("")
    folder = arguments.output or beside
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
