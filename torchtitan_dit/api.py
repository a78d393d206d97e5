"""What Python code calls: load a model and draw from it, train a configuration. The commands do the same in files."""

import argparse
import dataclasses
import operator
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import tomli_w
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.evaluation.sampling import grid_choices, grid_labels
from torchtitan.experiments.command_lines import words_of
from torchtitan.experiments.training import TrainingFailed
from torchtitan.experiments.training import train as train_to_the_end
from torchtitan.pictures.grids import image_grid, to_rgb
from torchtitan.processes.command_line import OneLineParser
from torchtitan.runs.folder import RunFolder
from torchtitan.runs.record import TRAINING_LOSS, RunRecord, read_run
from torchtitan.sampling.method_options import option
from torchtitan.sampling.prompts import check_prompted, with_prompts
from torchtitan.sampling.setup import SamplingSetup, add_setup_options, chosen_classes, open_setup, setup_of
from torchtitan.settings.plugins import PluginError, require_unchanged
from torchtitan.settings.plugins import load_plugins as _load_plugins
from torchtitan.texts.opening import OPTIONS
from torchtitan.trainer import Trainer
from torchtitan.weights.trained_model import WeightsError

Classes = Sequence[int | str]  # by number or name
_OF_LOADING = ("config", "step", "ema", "lora", "autoencoder", "autoencoder_path")


class Model:
    """Model that is loaded once and drawn from many times; `load` makes one.

    Attributes:
        network: the network, in eval mode, float32: `forward(x [B, C, H, W], noise, condition)`.
        label: origin of the weights, such as `step 1000, ema`.
        warnings: damaged checkpoints that were skipped, limits of a reconstructed average.
        image_shape: (C, H, W) of what the network draws: an image's, or a latent's.
        class_names: of its classes, by number; empty where there are none.
    """

    def __init__(self, setup: SamplingSetup, options: Mapping[str, Any]) -> None:
        trained = setup.trained
        self._setup, self._options = setup, dict(options)
        self.config, self.network, self.label = trained.config, trained.model, trained.label
        self.warnings, self.image_shape = tuple(setup.warnings), setup.image_shape
        self.class_names = tuple(trained.info.condition_kind.choice_names)

    def __repr__(self) -> str:
        model = self.config.model
        return f"Model({model.name}, {self.label}, draws {'x'.join(map(str, self.image_shape))})"

    @overload
    def sample(
        self, classes: Classes | None = ..., *, prompts: str | Sequence[str] | None = ..., images_per_class: int = ...,
        seed: int = ..., output: Literal["pil"] = ..., encoders: Mapping[str, str] | None = ..., progress: bool = ...,
        **method: Any,
    ) -> list[Image.Image]: ...  # fmt: skip

    @overload
    def sample(
        self, classes: Classes | None = ..., *, prompts: str | Sequence[str] | None = ..., images_per_class: int = ...,
        seed: int = ..., output: Literal["tensor", "latents"], encoders: Mapping[str, str] | None = ...,
        progress: bool = ..., **method: Any,
    ) -> Tensor: ...  # fmt: skip

    def sample(
        self,
        classes: Classes | None = None,
        *,
        prompts: str | Sequence[str] | None = None,
        images_per_class: int = 1,
        seed: int = 0,
        output: Literal["pil", "tensor", "latents"] = "pil",
        encoders: Mapping[str, str] | None = None,
        progress: bool = False,
        **method: Any,
    ) -> list[Image.Image] | Tensor:
        """Draw images; the same arguments give the same images.

        Args:
            classes: names or numbers of classes, of names that are numbers the names; "all"; None: the training's, or the
                first ten.
            prompts: texts instead, for a model of captions; a string is one text. "[trigger]" is replaced by the
                `data.trigger_word` of the training.
            images_per_class: of each class or prompt, one after the other.
            seed: of the noise, 0 to 2^64 - 1.
            output: "pil": a list of PIL images; "tensor": float32 [N, C, H, W] on the CPU, black at -1 and white at 1. Pixels
                are as drawn, mostly between the two but not clipped to them, as those of "pil" are (`clip_x0=True` clips the
                estimates that they are made from); decoded latents are clipped. "latents": of latents as they are drawn.
            encoders: of prompts that are no captions of the training: `text` and `pooled` -> folder or hub name.
            method: options of `torchtitan-dit sample` that say how an image is drawn, with _ for -, such as
                guidance_scale=3, num_steps=50, solver="heun". Left out: those of the training.

        Raises:
            WeightsError: an argument cannot be used with this model; the message is one line.
            TypeError: there is no such option.
        """
        if output not in ("pil", "tensor", "latents"):
            raise WeightsError(f'output: must be "pil", "tensor" or "latents", is {output!r}')
        setup, _, drawn = self._draw(
            classes, prompts=prompts, images_per_class=images_per_class, seed=seed, encoders=encoders, progress=progress, **method
        )
        if setup.decoder and output != "latents":
            drawn = setup.decoder.decode(drawn)
        return [Image.fromarray(pixels) for pixels in to_rgb(drawn.numpy())] if output == "pil" else drawn

    def grid(self, classes: Classes | None = None, *, images_per_class: int = 8, **options: Any) -> Image.Image:
        """One picture of samples, a labelled row for each class. Arguments and errors: as of `sample`, without `output`."""
        setup, choices, drawn = self._draw(classes, images_per_class=images_per_class, **options)
        rows, kind = choices[::images_per_class].tolist(), setup.trained.info.condition_kind
        images = setup.decoder.decode(drawn) if setup.decoder else drawn
        return image_grid(images, len(rows), images_per_class, grid_labels(rows, kind), setup.title)

    def _draw(
        self, classes: Classes | None, *, images_per_class: int, prompts: str | Sequence[str] | None = None, seed: int = 0,
        encoders: Mapping[str, str] | None = None, progress: bool = False, **method: Any,
    ) -> tuple[SamplingSetup, Tensor, Tensor]:  # fmt: skip
        """Draw images [N, C, H, W], as the network does; returns what with, and the choice of each too."""
        images_per_class, seed = operator.index(images_per_class), operator.index(seed)
        if images_per_class < 1:
            raise WeightsError(f"images_per_class: must be at least 1, is {images_per_class}")
        if not 0 <= seed < 2**64:
            raise WeightsError(f"seed: must be in 0..2^64 - 1, is {seed}")
        classes, prompts = _words(classes), _texts(prompts)
        for name, given in (("classes", classes), ("prompts", prompts)):
            if given is not None and not given:
                raise WeightsError(f"{name}: is empty (leave it out to draw the run's)")
        if classes is not None and prompts:
            raise WeightsError("classes: has no effect with prompts (leave one out)")
        if encoders and not prompts:
            raise WeightsError("encoders: has no effect without prompts")
        if given := [name for name in _OF_LOADING if name in method]:
            raise WeightsError(f"{given[0]}: is an option of loading (give it to load)")
        arguments = _options(self._setup.source, self._options | method)
        trained, decoder = self._setup.trained, self._setup.decoder
        if prompts:
            trained = with_prompts(trained, prompts, _places(encoders or {}))
        check_prompted(trained)
        names = trained.info.condition_kind.choice_names
        setup = dataclasses.replace(setup_of(arguments, trained, decoder), prompts=names if prompts else ())
        try:
            rows = list(range(len(prompts))) if prompts else chosen_classes(classes or self.config.sampling.classes, trained)
        except WeightsError as error:
            raise WeightsError(str(error).replace("--classes", "classes").replace("--prompt takes", "prompts takes")) from None
        choices = grid_choices(rows, trained.info.condition_kind.choices, images_per_class)
        drawn = setup.sampler().draw(choices, seed, **setup.method(), batch_size=setup.batch_size, progress=progress)
        return setup, choices, drawn


@dataclass(frozen=True)
class Run:
    """Finished run; its folder has the configuration, metrics, checkpoints and samples."""

    folder: Path

    @cached_property
    def record(self) -> RunRecord:
        return read_run(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """Contents of summary.json: status, final losses, throughput, memory."""
        return self.record.summary or {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Points of metrics.jsonl, a mapping each: `step`, `loss_metrics/global_avg_loss` and others."""
        return self.record.points

    def series(self, name: str = TRAINING_LOSS) -> list[tuple[int, float]]:
        """Pairs of step and value of one metric. Raises KeyError: no point has it."""
        if name not in self.record.tags:
            raise KeyError(f"{name}: not measured in {self.folder} (there are: {', '.join(sorted(self.record.tags))})")
        return [(point["step"], point[name]) for point in self.metrics if name in point]

    def load(self, **options: Any) -> Model:
        """Load its model; options as of `load`."""
        return load(self.folder, **options)


def load(source: str | Path, **options: Any) -> Model:
    """Load a model to draw from.

    Args:
        source: folder of a run, or safetensors file of weights.
        options: those of `torchtitan-dit sample`, with _ for -: step=1000 (of the checkpoint), ema="none" (an EMA track,
            or the trained weights), config="x.toml" (of a file of weights), autoencoder, autoencoder_path, lora, size,
            dtype, batch_size; also those of `Model.sample`, as its defaults.

    Raises:
        WeightsError, ConfigError, CheckpointError, AutoencoderError: it cannot be loaded so; the message says why, and
            what to do.
        TypeError: there is no such option.
    """
    return Model(open_setup(_options(Path(source), options)), options)


def sample(source: str | Path, classes: Classes | None = None, **options: Any) -> list[Image.Image]:
    """Draw PIL images from a run or a file, once: `load` and `Model.sample` in one. Arguments: as of both, without `output`."""
    of_images = {"prompts", "images_per_class", "seed", "encoders", "progress"}
    images = {name: options.pop(name) for name in of_images & options.keys()}
    return load(source, **options).sample(classes, **images)


def load_plugins(names: str | Path | Sequence[str | Path]) -> None:
    """Load plugins, each once in a process; `train` passes them on where the configuration names none.

    Args:
        names: Python files, ending in .py, or entry points in the group `torchtitan_dit.plugins` of installed packages.

    Raises:
        PluginError: one cannot be loaded, or its file has changed since.
    """
    files = [str(name) for name in ([names] if isinstance(names, str | Path) else names)]
    require_unchanged(files)
    _load_plugins(files)


def train(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    processes: int = 1,
    progress: bool = True,
) -> Run:
    """Train a configuration to its end in separate processes; the same call resumes a run that was stopped.

    Args:
        config: TOML file, name of a shipped configuration such as "digits", or its contents as nested mappings:
            {"model": {"flavor": "DiT-S/2"}, "data": {"name": "cifar10", "path": "cifar"}}.
        overrides: keys with dots and their values, over those of `config`: {"training.steps": 200}.
        processes: how many train together, with a share of the batch each.

    Returns:
        the run, in `job.dump_folder` / `job.name`.

    Raises:
        ConfigError: the configuration cannot run.
        TrainingFailed: the run did not finish; the message has its reason.
        KeyboardInterrupt: stopped; the run has saved a checkpoint if there was time.
    """
    with tempfile.TemporaryDirectory() as scratch:
        resolved = configure(config, overrides, processes=processes)
        images = resolved.training.steps * resolved.training.global_batch_size
        with tqdm(total=images, unit="image", unit_scale=True, disable=not progress) as bar:
            def advance(images: int) -> None:
                if images or sys.stderr.isatty():  # each is a line elsewhere
                    bar.update(images)

            train_to_the_end(resolved, processes, Path(scratch) / "run.toml", Path(scratch) / "log", advance)
    return Run(RunFolder(resolved).path)


def configure(
    config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, processes: int = 1
) -> JobConfig:
    """Read and check a configuration, for `Trainer`; arguments as of `train`. Raises ConfigError: with all problems."""
    words = words_of({key: _plain(value) for key, value in (overrides or {}).items()})
    with tempfile.TemporaryDirectory() as scratch:
        path = str(config)
        if isinstance(config, Mapping):
            path = str(Path(scratch) / "run.toml")
            Path(path).write_text(tomli_w.dumps(_plain(config)), encoding="utf-8")
        try:
            resolved = load_config(["--job.config_file", path, *words], processes)
            require_unchanged(resolved.job.plugins)
            return resolved
        except PluginError as error:
            raise ConfigError([f"job.plugins: {error}"]) from None
        except ConfigError as error:
            places = {path: "config"} if isinstance(config, Mapping) else {}
            raise ConfigError([_named(line, places | {"command line: --": "overrides: "}) for line in error.problems]) from None


class _Parser(OneLineParser):
    """Parser of the command's own options; what it refuses is an exception here."""

    def error(self, message: str) -> NoReturn:
        raise WeightsError(message)


def _options(source: Path, options: Mapping[str, Any]) -> argparse.Namespace:
    """Options as of a command line, checked and converted by the parser of `torchtitan-dit sample`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_setup_options(parser)
    known = {action.dest for action in parser._actions}
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"{unknown[0]!r} is no option (there are: {', '.join(sorted(known))})")
    words = []
    for name, value in options.items():
        if value is not None:
            value = value.item() if getattr(value, "ndim", None) == 0 else value
            several = isinstance(value, Iterable) and not isinstance(value, str)
            parts = [_word(each) for each in (value if several else [value])]
            words += [option(name), *(["x".join(parts)] if name == "size" else parts)]
    arguments = parser.parse_args(words)
    arguments.source = source
    return arguments


def _named(line: str, places: Mapping[str, str]) -> str:
    """Line of a refusal, with its beginning as the caller of Python knows it."""
    for shown, name in places.items():
        line = line.replace(shown, name, 1) if line.startswith(shown) else line
    return line


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(classes: Classes | None) -> list[int | str] | None:
    if classes is None:
        return None
    given = [classes] if isinstance(classes, str) else classes
    return [each if isinstance(each, str) else operator.index(each) for each in given]


def _texts(prompts: str | Sequence[str] | None) -> list[str] | None:
    return [prompts] if isinstance(prompts, str) else list(prompts) if prompts is not None else None


def _places(encoders: Mapping[str, str]) -> dict[str, str]:
    names = {entry.removesuffix("_encoder"): entry for entry in OPTIONS}
    if unknown := sorted(encoders.keys() - names.keys() - OPTIONS.keys()):
        raise WeightsError(f"encoders: {unknown[0]!r} is none of {', '.join(OPTIONS)}")
    return {names.get(name, name): place for name, place in encoders.items()}


def _plain(value: Any) -> Any:
    """Value as TOML has it: paths as text, sequences as lists, numbers of numpy as Python's, mappings without what is None."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple | range) else value


__all__ = [
    "ConfigError", "Model", "Run", "Trainer", "TrainingFailed", "WeightsError", "configure", "load", "load_plugins", "sample",
    "train",
]  # fmt: skip
