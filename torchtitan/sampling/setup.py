"""What commands draw images from: a run or a file of weights, with its guide, autoencoder and sampling method."""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.autoencoders import AUTOENCODERS
from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.checkpoint.manifest import MANIFEST, checkpoint_steps
from torchtitan.conditions import Classes, Embeddings, Unconditional, numbered_otherwise
from torchtitan.distributed.mesh import compute_device
from torchtitan.errors import look_alike
from torchtitan.evaluation.config import WITH_WEIGHTS, AutoencoderConfig, SamplingConfig
from torchtitan.evaluation.decoding import LatentDecoder, open_decoder
from torchtitan.evaluation.sample_plans import SampleSetError, SetPlan, choices_of, read_seeds
from torchtitan.evaluation.sampling import ImageSampler, guidance_text
from torchtitan.files.hub import is_hub_name, local_folder
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapter_files import read_adapter
from torchtitan.models.adapters.adapters import add_frozen_adapter
from torchtitan.models.adapters.target import LowRankWeights
from torchtitan.processes.command_line import sides
from torchtitan.sampling.guides import LoadedGuide, open_guide
from torchtitan.sampling.image_size import sampled_shape
from torchtitan.sampling.method_options import add_method_options, given_options, sampling_method
from torchtitan.sampling.prompts import add_prompt_options, check_prompted, places, with_prompts
from torchtitan.sampling.set_settings import set_settings
from torchtitan.weights.adapted_network import drawn_sha256
from torchtitan.weights.pipeline_folder import is_published_folder
from torchtitan.weights.trained_model import TrainedModel, WeightsError, load_run, load_weights

_WEIGHTS = "weights.safetensors"  # of this program, in a repository on the hub
_FILES_OF_DIFFUSERS = ["*.json", *(f"{part}*.safetensors" for part in ("", "transformer/", "vae/"))]
DTYPE = "float32"
_MOST_NAMES = 10  # of classes, in a message


@dataclass(frozen=True)
class SamplingSetup:
    """Everything that images are drawn with.

    Attributes:
        guide: of its guidance; None for the null condition.
        decoder: of its latents; None for a model of images, or where latents are shown as they are.
        image_shape: (C, H, W) of what the network draws.
        prompts: texts that are drawn instead of the data's; none: those.
        options: those of the method that were given, in words.
    """

    source: Path
    trained: TrainedModel
    sampling: SamplingConfig
    guide: LoadedGuide | None
    decoder: LatentDecoder | None
    image_shape: tuple[int, int, int]
    batch_size: int
    dtype: str
    prompts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def warnings(self) -> Iterator[str]:
        yield from self.trained.warnings
        yield from self.guide.model.warnings if self.guide and self.guide.model else ()
        if (own := self.sampling.guide_track) and not self.guide and self.sampling.guidance_scale != 1:
            text = "is not in a file of weights; guided by the null condition (--guide gives another)"
            yield f"sampling.guide_track = {own}: {text}"
        given, most = self.sampling.embedded_guidance, self.trained.config.objective.guidance_max
        if given is not None and most > 1 and not 1 <= given <= most:
            yield f"--embedded-guidance: {given:g} was not trained, only 1 to objective.guidance_max = {most:g}"
        low, high = self.sampling.guidance_interval
        if given is not None and most > 1 and not low <= 0.5 <= high:
            yield f"--guidance-interval: {low:g} to {high:g} was not trained, only intervals with 0.5 in them"

    @property
    def title(self) -> str:
        """Title of a grid: the weights, the guidance, and the options of the method that were given."""
        guidance = guidance_text(self.sampling.guidance_scale, self.trained.info.condition_kind)
        return ", ".join(filter(None, (self.trained.label, guidance, *self.options)))

    def sampler(self) -> ImageSampler:
        kind = self.trained.info.condition_kind
        return ImageSampler(self.trained.model, self.trained.objective, self.dtype, compute_device(), kind)

    def method(self) -> dict[str, Any]:
        """Method, as `ImageSampler.drawing` takes it."""
        return self.sampling.method() | {
            "guide": self.guide.guide if self.guide else None,
            "image_shape": self.image_shape,
        }

    def plan(self, seeds: str | None, count: int | None, classes: list[int]) -> SetPlan:
        """Plan pictures of classes by turns; none: drawn by seed. Raises SampleSetError, WeightsError: impossible."""
        check_prompted(self.trained)
        channels = self.image_shape[0]
        if self.decoder is None and (self.trained.record.latents or channels not in (1, 3)):
            raise SampleSetError(
                f"{self.source}: draws latents or images of {channels} channels, a set is of pictures (for latents give"
                " --autoencoder NAME --autoencoder-path PATH)"
            )
        settings = set_settings(self.trained, self.sampling, self.guide, self.decoder, self.image_shape, self.dtype)
        if self.prompts:
            settings |= {"prompts": list(self.prompts)}
        numbers = read_seeds(seeds, count)
        kind = self.trained.info.condition_kind
        prompts = kind.choice_names if isinstance(kind, Embeddings) else ()
        if isinstance(kind, Classes):
            settings |= {"num_classes": kind.count}
        return SetPlan(numbers, choices_of(numbers, kind.choices, classes), self.batch_size, settings, prompts)


def add_drawing_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of `open_prompted`, but for --classes."""
    add_prompt_options(parser)
    add_setup_options(parser)


def add_setup_options(parser: argparse._ActionsContainer) -> None:
    """Add the arguments of `open_setup`, which follow `source`."""
    add = parser.add_argument
    add("config", type=Path, nargs="?", metavar="CONFIG", help="configuration of weights (default: the one in their header)")
    add("--step", type=int, help="checkpoint of this step (default: the newest good one)")
    add("--ema", metavar="TRACK", help="EMA track, or 'none' for the trained weights (default: sampling.ema_track)")
    add("--guide", metavar="RUN[@STEP][:TRACK]", help="weights to guide away from instead of the null condition: of "
        "this run (@STEP, :TRACK), another run, or a safetensors file; head: the network's intermediate head; path_drop: the "
        "network without its routed blocks; none: the null condition (default: sampling.guide_track)")
    add_method_options(parser)
    add("--lora", nargs="+", metavar="FILE[:WEIGHT]", help="files of adapters to draw with, in any known layout, each with a"
        " multiple of its update (default: 1)")
    add("--size", type=sides, metavar="HEIGHTxWIDTH", help="of the images, in pixels also where latents are drawn, for models "
        "of images of any size (default: the largest of training)")
    add("--batch-size", type=int, help="images at a time on each rank (default: sampling.batch_size)")
    add("--dtype", choices=("float32", "bfloat16"), help=f"dtype of compute (default: {DTYPE})")
    add("--autoencoder", choices=("none", *AUTOENCODERS),
        help="autoencoder that decodes latents to images (default: the run's)")
    add("--autoencoder-path", metavar="PATH", help="its folder or hub name, if not the run's")


def open_setup(arguments: argparse.Namespace) -> SamplingSetup:
    """Open what the options name, on this process's device.

    Raises:
        WeightsError, ConfigError, CheckpointError, AutoencoderError: it cannot be used as they say.
    """
    trained = _with_adapters(_open_model(arguments), arguments.lora or [])
    return setup_of(arguments, trained, _open_autoencoder(arguments, trained))


def open_prompted(arguments: argparse.Namespace) -> SamplingSetup:
    """Open what the options name, to draw their prompts if there are any. Raises as `open_setup`."""
    encoders = places(arguments)
    if arguments.prompt and arguments.classes is not None:
        raise WeightsError("--classes: has no effect with --prompt (leave one out)")
    setup = open_setup(arguments)
    if not arguments.prompt:
        return setup
    trained = with_prompts(setup.trained, arguments.prompt, encoders)
    return dataclasses.replace(setup, trained=trained, prompts=trained.info.condition_kind.choice_names)


def setup_of(arguments: argparse.Namespace, trained: TrainedModel, decoder: LatentDecoder | None) -> SamplingSetup:
    """SamplingSetup by the method of the options, with what is loaded already. Raises as `open_setup` does."""
    batch_size = trained.config.sampling.batch_size if arguments.batch_size is None else arguments.batch_size
    if batch_size < 1:
        raise WeightsError(f"--batch-size: must be at least 1, is {batch_size}")
    sampling = sampling_method(arguments, trained)
    guide = open_guide(
        arguments.guide, arguments.source, arguments.config, trained, sampling.guidance_scale, compute_device(),
        sampling.null_guidance_scale,
    )
    shape = sampled_shape(arguments.size, trained, decoder)
    of_one = guide.model if guide and guide.model and not MODELS[guide.model.config.model.name].many_shapes else None
    if of_one and shape != of_one.model.image_shape:
        raise WeightsError("--size: the guide takes images of one shape only (leave it out)")
    dtype, options = arguments.dtype or DTYPE, given_options(arguments)
    return SamplingSetup(arguments.source, trained, sampling, guide, decoder, shape, batch_size, dtype, options=options)


def chosen_classes(given: Sequence[str | int], trained: TrainedModel) -> list[int]:
    """Numbers of classes given by name or number, as `ConditionKind.number_of`, or as "all" unless a class has that name.

    Raises WeightsError: there is no such class.
    """
    kind = trained.info.condition_kind
    if given and isinstance(kind, Unconditional):
        raise WeightsError("--classes: the network has no classes (leave it out)")
    if list(given) == ["all"] and kind.choices and kind.number_of("all") is None:
        return list(range(kind.choices))
    for word in map(str, given):
        if kind.number_of(word) is not None:
            continue
        if word.lstrip("-").isdigit() and not numbered_otherwise(kind.choice_names):
            raise WeightsError(f"--classes: {word} is not in 0..{max(kind.choices, 1) - 1}")
        texts = "; --prompt takes other texts" if isinstance(kind, Embeddings) else ""
        raise WeightsError(f"--classes: {word!r} is no class ({_known_names(word, kind.choice_names)}{texts})")
    return kind.numbers_of(given)


def _known_names(word: str, names: Sequence[str]) -> str:
    """First names, with their numbers where these choose too, for a message; how to choose where there are none."""
    if not names:
        return "the classes have no names: give numbers"
    alone, listed = numbered_otherwise(names), enumerate(names[:_MOST_NAMES])
    shown = ", ".join(name if alone or name == str(number) else f"{number} {name}" for number, name in listed)
    return f"one of {shown}{', ...' if len(names) > _MOST_NAMES else ''}{look_alike(word, names)}"


def beside(source: Path, name: str) -> Path:
    """Folder for images drawn from a run, from a checkpoint alone, or from a file of weights.

    Images are never written into a checkpoint: old checkpoints are removed.
    """
    if not source.is_dir():
        return source.with_name(f"{source.stem}-samples") / name  # NAME may be the folder of the pictures that it learned
    whole, single = source.resolve(), (source / MANIFEST).is_file()
    if single or (checkpoint_steps(source) and not (source / "config.toml").exists()):
        folder = whole.parent if single else whole
        source = folder.parent if folder.name == "checkpoint" else whole.with_name(f"{whole.name}-drawn")
    return source / "samples" / name


def _open_model(arguments: argparse.Namespace) -> TrainedModel:
    if arguments.source.is_dir() and not is_published_folder(arguments.source):
        if arguments.config and not (arguments.guide and Path(arguments.guide).is_file()):
            text = f"is of a file of weights; {arguments.source} is a folder of a run (leave it out)"
            raise WeightsError(f"{arguments.config}: {text}")
        return load_run(arguments.source, arguments.ema, arguments.step, compute_device())
    if not arguments.source.exists():
        arguments.source = _from_hub(arguments.source)
    if arguments.ema or arguments.step is not None:
        raise WeightsError(f"{arguments.source}: --ema and --step choose from a run folder, this is one set of weights")
    return load_weights(arguments.source, arguments.config, compute_device())


def _from_hub(source: Path) -> Path:
    """File or folder of weights of a repository on the Hugging Face hub. Raises WeightsError: it is none."""
    if not is_hub_name(str(source)):
        stored = str(source).startswith(("s3:/", "gs:/"))
        advice = " (give the folder of the run that has its checkpoints there)" * stored
        raise WeightsError(f"{source}: no such run folder or weights file{advice}")
    folder = local_folder("weights", str(source), [_WEIGHTS, *_FILES_OF_DIFFUSERS], WeightsError, missing="run, file or folder")
    return folder / _WEIGHTS if (folder / _WEIGHTS).is_file() else folder


def _with_adapters(trained: TrainedModel, given: list[str]) -> TrainedModel:
    """Add adapters `FILE[:WEIGHT]` to a model. Raises WeightsError."""
    notes: list[str] = []
    of_weights = bool(given) and not trained.config.lora.enable  # a run's own frozen weights are known to be the right ones
    base = drawn_sha256(trained.model) if of_weights else ""
    for number, word in enumerate(given):
        path, weight = _weighted(word)
        found = read_adapter(Path(path), trained.model, MODELS[trained.config.model.name].adapter_layouts)
        # The multiple is in B, so that the recorded hash of the weights sees it.
        scaled = {
            target: LowRankWeights(values.down, weight * values.up, values.alpha) for target, values in found.weights.items()
        }
        add_frozen_adapter(trained.model, f"drawn{number}", scaled, 1.0, 1.0, path)
        notes += found.notes
        if (name := found.metadata.get("trigger_word")) and not getattr(trained.config.data, "trigger_word", ""):
            trained.config.data.trigger_word = name
        if base and found.metadata.get("base_sha256", base) != base:
            notes.append(f"{path}: was trained on other weights than {trained.label}; if these have it merged, it counts twice")
    if given and trained.config.lora.enable:
        notes.append("--lora: drawn beside the run's own adapters, which count once (their own file at FILE:-0.5 halves them)")
    label = ", ".join([trained.label, *(word.rpartition("/")[2] for word in given)])
    return dataclasses.replace(trained, label=label, warnings=(*trained.warnings, *notes)) if given else trained


def _weighted(word: str) -> tuple[str, float]:
    """Path and multiple of `FILE[:WEIGHT]`. Raises WeightsError."""
    path, colon, text = word.rpartition(":")
    if not colon or Path(word).exists():
        return word, 1.0
    try:
        weight = float(text)
    except ValueError:
        return word, 1.0  # a path with a colon, which is missed when it is read
    if not math.isfinite(weight):
        raise WeightsError(f"--lora: {word} has no finite multiple (give FILE:WEIGHT, as adapter.safetensors:0.8)")
    return path, weight


def _open_autoencoder(arguments: argparse.Namespace, trained: TrainedModel) -> LatentDecoder | None:
    """Open the autoencoder that decodes the drawn latents; None for none. Raises AutoencoderError, WeightsError."""
    config, record = trained.config.autoencoder, trained.record
    given = arguments.autoencoder or arguments.autoencoder_path
    if record.latents is None:
        if given:
            raise WeightsError("--autoencoder: the model draws images, not latents (leave it out)")
        return None
    if arguments.autoencoder not in (None, config.name):
        config = AutoencoderConfig(name=arguments.autoencoder)
    if arguments.autoencoder_path is not None:
        config = dataclasses.replace(config, path=arguments.autoencoder_path)
    if config.name == "none":
        if arguments.autoencoder_path is not None:
            raise WeightsError("--autoencoder-path: of which autoencoder? (add --autoencoder NAME)")
        if os.environ.get("RANK", "0") == "0" and not arguments.autoencoder:
            hint = "the grid shows latent channels as colours (for images: --autoencoder NAME --autoencoder-path PATH)"
            print(hint, file=sys.stderr)
        return None
    if config.name in WITH_WEIGHTS and not config.path and not arguments.autoencoder:
        text = f"names the autoencoder {config.name} and no place of it: weights open nothing else"
        raise WeightsError(f"{arguments.source}: {text} (give --autoencoder-path PATH, or the configuration after the weights)")
    try:
        place = "the recorded latents" if record.elsewhere else trained.config.data.path
        return open_decoder(config, record.latents, place, compute_device())
    except AutoencoderError as error:
        elsewhere = "" if arguments.autoencoder_path else " (--autoencoder-path says where it is on this machine)"
        raise AutoencoderError(f"{error}{elsewhere}") from error
