"""`[sampling]`, `[evaluation]`, `[validation]` and `[autoencoder]`: their keys, and unsupported combinations."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan.autoencoders import AUTOENCODERS
from torchtitan.data import DATASETS, LATENT_DATASETS, DataConfig
from torchtitan.diffusion.guidance import HEAD, Guidance
from torchtitan.diffusion.paths import PATHS, has_indices
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS, ScheduleConfig, SolverConfig
from torchtitan.diffusion.solvers.contract import Trained
from torchtitan.fidelity.metrics import METRICS
from torchtitan.files.regular import user_path
from torchtitan.pictures.number_text import counted
from torchtitan.programs import program
from torchtitan.settings import Choice, OneOf, choice, only_enabled, setting
from torchtitan.settings.sections import choices

SPLITS = ("train", "validation")
DECODERS = ("none", *AUTOENCODERS)
WITH_WEIGHTS = tuple(name for name in AUTOENCODERS if name != "identity")
OF_PIXELS = tuple(name for name in DATASETS if name not in LATENT_DATASETS)
_BY_HEAD = {"guide_track": (HEAD,)}
OF_LATENTS = {"data.name or cache.enable or encode": (*LATENT_DATASETS, True)}


OF_NO_PICTURE = ("enable", "interval", "classes", "previews", "batch_size")  # keys of `[sampling]`: a row's pictures are the same


@dataclass(kw_only=True)
class SamplingConfig:
    """`[sampling]`: the grids drawn during training, and the defaults of scripts/sample.py and of `[evaluation]`."""

    enable: bool = setting(True, "draw a grid of samples at intervals and at the end", trajectory=False)
    interval: int = setting(1000, "steps between grids", ge=1, trajectory=False)
    solver: SolverConfig = choice(
        Choice(SOLVERS, "euler"), "integrator from noise to image; default: ddim on the path edm", trajectory=False
    )
    num_steps: int = setting(
        50, "solver steps from noise to image; default of flux: 4, or 50 with a guidance embedding", ge=1, le=1_000_000,
        trajectory=False,
    )  # fmt: skip
    schedule: ScheduleConfig = choice(
        Choice(SCHEDULES, "uniform"), "times of the steps; default: those of the trained path, or of flux", trajectory=False
    )
    guidance_scale: float = setting(
        2.0, "guidance away from the null condition, or from guide_track: 1 is none, the default of flux", ge=0,
        trajectory=False,
    )  # fmt: skip
    embedded_guidance: float | None = setting(
        None, "guidance scale given to a network with model.guidance_embedding; default: model.guidance, 1 of mean flows", ge=0,
        le=100, trajectory=False,
    )  # fmt: skip
    guidance_interval: list[float] = setting(
        [0.0, 1.0], "lowest and highest t = sigma / (1 + sigma) with guidance; the plain model outside", trajectory=False
    )
    guidance_channels: Literal["all", "first_three"] = setting(
        "all", "channels with guidance; the plain conditional model's beyond",
        trajectory=False,
    )
    guide_track: str = setting(
        "", "weights of the same step to guide away from: a name of ema.tracks, 'none' for the trained weights; head: "
        "model.intermediate_head of the drawn ones; empty: the null condition (classifier-free guidance)", trajectory=False,
    )  # fmt: skip
    null_guidance_scale: float = setting(
        1.0, "guidance away from the null condition beside that by the intermediate head: 1 is none", ge=0,
        applies=_BY_HEAD, trajectory=False,
    )  # fmt: skip
    null_guidance_interval: list[float] = setting(
        [0.0, 1.0], "lowest and highest t of null_guidance_scale; guidance by the head alone outside",
        applies=_BY_HEAD, trajectory=False,
    )  # fmt: skip
    clip_x0: bool = setting(
        False, "clip each estimate of the clean image to [-1, 1]", applies={"data.name": OF_PIXELS},
        because="latents have no such limits", trajectory=False,
    )  # fmt: skip
    state_dtype: Literal["float32", "float64"] = setting(
        "float32", "dtype of the solver's state, not of the networks' compute", trajectory=False
    )
    classes: list[int] = setting(
        [], "classes of the grid, by number (or by names that are numbers), or prompts, a row each; empty: the first ten",
        trajectory=False,
    )  # fmt: skip
    previews: bool = setting(
        False, "draw before the first step too, keep the first sample of every row as a picture, and show all steps on one page "
        "with the change of each from the start", trajectory=False,
    )  # fmt: skip
    images_per_class: int = setting(8, "columns of the grid", ge=1, le=10_000, trajectory=False)
    ema_track: str = setting(
        "ema", "weights to sample with: a name of ema.tracks, or 'none' for the trained weights",
        trajectory=False,
    )
    batch_size: int = setting(256, "images drawn at a time on each rank", ge=1, le=1_000_000, trajectory=False)

    def method(self) -> dict[str, Any]:
        """Sampling method as keyword arguments of `ImageSampler.draw`."""
        return {
            "solver": self.solver,
            "num_steps": self.num_steps,
            "schedule": self.schedule,
            "guidance": self.guidance,
            "embedded_guidance": self.embedded_guidance,
            "clip_x0": self.clip_x0,
            "state_dtype": self.state_dtype,
        }

    @property
    def guidance(self) -> Guidance:
        (low, high), (null_low, null_high) = self.guidance_interval, self.null_guidance_interval
        null_interval = (null_low, null_high)
        return Guidance(
            self.guidance_scale, (low, high), self.guidance_channels, self.null_guidance_scale, null_interval
        )


@only_enabled("extractor", "reference", "held_out", "count", "allow_small")  # which scripts/ema.py takes too
@dataclass(kw_only=True)
class EvaluationConfig:
    """`[evaluation]`: metrics of samples drawn while training, by the solver, steps and weights of `[sampling]`."""

    enable: bool = setting(False, "measure samples by metrics of features, against a reference", trajectory=False)
    interval: int = setting(10_000, "steps between measurements; also at the last step", ge=1, trajectory=False)
    metrics: list[OneOf[str, METRICS]] = setting(["fd"], f"metrics, as {program('evaluate')} names them", trajectory=False)
    extractor: str = setting("inception", "feature extractor of metrics that are defined for any", trajectory=False)
    reference: str = setting(
        "", "reference to compare with: train or validation, the run's own images; or a name or a path of one made by "
        f"{program('evaluate')} reference", trajectory=False, path=True,
    )
    held_out: str = setting(
        "", "images that are not trained on, for memorisation: validation, or as reference", trajectory=False, path=True
    )
    count: int = setting(
        5000, "samples of a measurement, the same numbers each time, classes by turns", ge=2, le=10_000_000,
        trajectory=False,
    )  # fmt: skip
    guidance_scale: float = setting(
        1.0, "guidance of these samples, by the guide and interval of [sampling]: 1 is none", ge=0, trajectory=False
    )
    allow_small: bool = setting(
        False, "measure covariances of fewer samples than features, and KID without subsets", trajectory=False
    )
    targets: list[float] = setting(
        [], "values of the first metric; summary.json has the first step, epoch and images that reach each",
        trajectory=False,
    )  # fmt: skip

    @property
    def images_needed(self) -> dict[str, list[str]]:
        """Names of the metrics that need the images of each of the keys `reference` and `held_out`."""
        return {
            "reference": [name for name in self.metrics if METRICS[name].reference],
            "held_out": [name for name in self.metrics if METRICS[name].needs_held_out],
        }

    def describe(self, sampling: "SamplingConfig", data: DataConfig) -> str:
        """Samples of a measurement, what they are measured against, and the features, in words."""
        track = f" of {sampling.ema_track}" if sampling.ema_track != "ema" else ""
        guide = "the trained weights" if sampling.guide_track == "none" else sampling.guide_track
        how = track + method_text(dataclasses.asdict(sampling) | {"guidance_scale": self.guidance_scale}, guide)
        against = f" against {Path(self.reference).name}" if self.reference else ""
        if self.reference in SPLITS:
            held_out = data.validation_path if self.reference == "validation" else ""
            name = user_path(held_out or data.path or "/").resolve().name
            against += f" of {name}" if name not in ("", self.reference) else ""
        extractors = dict.fromkeys(METRICS[name].extractor or self.extractor for name in self.metrics)
        return f"{self.count:,} samples{how}{against} in features of {' and '.join(extractors)}"


def method_text(method: Mapping[str, Any], guide: str) -> str:
    """How samples are drawn, in words: solver, steps, guidance, and what else is not as by default.

    Args:
        method: keys of `[sampling]`, its sections as tables, or the record of a set.
        guide: what guides, beside the null condition; "" for that alone.
    """
    solver, schedule = (_named(method.get(kind) or {}, options) for kind, options in choices(SamplingConfig()).items())
    text = f" by {solver} in {counted(method['num_steps'], 'step')}"
    text += f" of the schedule {schedule}" if schedule not in ("", "uniform") else ""
    if (scale := method["guidance_scale"]) != 1:
        text += f", guidance {scale:g}" + (f" by {guide}" if guide else "") + _within(method["guidance_interval"])
        text += ", of the first three channels" if method.get("guidance_channels") == "first_three" else ""
        if (scale := method.get("null_guidance_scale", 1)) != 1:
            text += f", null guidance {scale:g}" + _within(method["null_guidance_interval"])
    if (scale := method.get("embedded_guidance")) is not None:
        text += f", embedded guidance {scale:g}"
    text += ", clipped" if method.get("clip_x0") else ""
    text += f", in {dtype}" if (dtype := method.get("dtype", "float32")) != "float32" else ""
    return text + (", with a float64 state" if method.get("state_dtype") == "float64" else "")


def _named(section: Mapping[str, Any], options: Choice) -> str:
    """Name of a solver or schedule, with its keys that are not their defaults."""
    name = section.get("name", "")
    usual = dataclasses.asdict(options.section(name)) if name in options.registry else {}
    differing = {key: value for key, value in section.items() if usual.get(key, name) != value}
    keys = [f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in differing.items()]
    return f"{name} ({', '.join(keys)})" if keys else name


def _within(interval: Sequence[float]) -> str:
    low, high = interval
    return f" at t from {low:g} to {high:g}" if (low, high) != (0.0, 1.0) else ""


@only_enabled("num_images", "timesteps")  # which scripts/ema.py takes from the run
@dataclass(kw_only=True)
class ValidationConfig:
    """`[validation]`"""

    enable: bool = setting(False, "measure the loss on held-out images", trajectory=False)
    interval: int = setting(1000, "steps between measurements; also at the last step", ge=1, trajectory=False)
    num_images: int = setting(
        1000, "held-out images, each at one fixed timestep with fixed noise", ge=1,
        trajectory=False,
    )
    batch_size: int = setting(128, "images at a time on each rank", ge=1, le=1_000_000, trajectory=False)
    timesteps: list[float] = setting(
        [], "times t, 0 clean data and 1 noise, that images take in turn by their number, as [0, 0.25, 0.5, 0.75]; empty: "
        "times spread over the training density", trajectory=False,
    )  # fmt: skip


@dataclass(kw_only=True)
class AutoencoderConfig:
    """`[autoencoder]`: decodes the latents of data.name = "latents", in grids and in scripts/sample.py; encodes for `[cache]`."""

    name: OneOf[str, DECODERS] = setting(
        "none", "autoencoder that decodes drawn latents to images; none: grids show latent channels as colours",
        applies=OF_LATENTS, because=f"nothing encodes the images (autoencoder.encode does, {program('extract_latents')} once)",
        trajectory=False,
    )  # fmt: skip
    path: str = setting(
        "", "folder of its weights, or for cosmos, diffusers and rae a name on the Hugging Face hub",
        applies=OF_LATENTS | {"name": WITH_WEIGHTS}, trajectory=False, path=True,
    )  # fmt: skip
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "dtype of compute; default: float32, and for cosmos that of its files",
        applies=OF_LATENTS | {"name": WITH_WEIGHTS}, trajectory=False,
    )  # fmt: skip
    tile: int = setting(
        0, "side in pixels of the tiles, a quarter of them shared, that larger images are decoded in; 0: none", ge=0,
        applies=OF_LATENTS | {"name": tuple(AUTOENCODERS)}, trajectory=False,
    )  # fmt: skip
    encode: bool = setting(
        False, "encode each batch of images while training, instead of reading a latent store", applies={"data.name": OF_PIXELS}
    )
    statistics: str = setting(
        "", "latent store of some of the images, made with this autoencoder, of which the latents have normalisation and dtype",
        applies={"encode": (True,)}, path=True,
    )  # fmt: skip
    batch_size: int = setting(
        16, "images decoded at a time on each rank", ge=1, le=1_000_000, applies=OF_LATENTS | {"name": tuple(AUTOENCODERS)},
        trajectory=False,
    )  # fmt: skip


def sampling_problems(
    config: SamplingConfig, path_name: str, learned_variance: bool, heads: bool = False, guidance_embedding: bool = False,
    two_times: bool = False,
) -> list[tuple[str, str]]:
    """Problems of sampling a model in this way: (key of `[sampling]`, cause and remedy)."""
    found = []
    for key in ("guidance_interval", "null_guidance_interval"):
        if problem := _interval_problem(getattr(config, key)):
            found.append((key, problem))
    if config.solver.two_times != two_times:
        text = "is for a network of one time, and the model's has two (use mean_flow)"
        if not two_times:
            text = "is for a network of two times, and the model's has one (use euler, or train with objective.name = mean_flow)"
        found.append(("solver.name", f"{config.solver.name} {text}"))
    if config.solver.two_times and config.clip_x0:
        found.append(("clip_x0", "clips the image that a velocity points to, and mean velocities point to none (leave it out)"))
    if config.solver.two_times and config.guide_track:
        found.append(("guide_track", "is for solvers of one time, not for sampling.solver.name = mean_flow (leave it out)"))
    trained = Trained(path_name, PATHS[path_name](), learned_variance)
    found += config.schedule.problems(trained, config.num_steps)
    found += [(f"solver.{key}", text) for key, text in config.solver.problems(trained, config.schedule)]
    if heads and config.guidance_channels != "all":
        found.append(("guidance_channels", "first_three is for a network of one prediction (use all)"))
    if config.embedded_guidance is not None and not guidance_embedding:
        key = "objective.guidance_max" if two_times else "model.guidance_embedding"
        text = f"the network takes no guidance scale as an input, as trained with {key} (leave it out)"
        found.append(("embedded_guidance", text))
    return found


def timesteps_problem(config: ValidationConfig, path_name: str, loss_at_zero: bool) -> str:
    """Problem of `validation.timesteps` on a path: cause and remedy, "" if there is none.
    """
    path, timesteps = PATHS[path_name](), config.timesteps
    if len(timesteps) > config.num_images:
        return f"{len(timesteps)} times are more than validation.num_images = {config.num_images} (each image has one)"
    lowest = path.index_to_t(torch.zeros(())).item() if has_indices(path) else 0.0
    # A float32 time stands for the float64 one that it was rounded from.
    if wrong := [t for t in timesteps if not lowest - 1e-7 <= t <= path.t_max + 1e-7]:
        text = f"{wrong[0]:g} is not a time of objective.path = {path_name}"
        return f"{text} (give times from {lowest:.4g} to {path.t_max:.4g}: 0 is clean data, 1 noise)"
    if not loss_at_zero and 0.0 in timesteps:
        return "0 has no loss in an objective that compares it with an earlier time (give times above 0)"
    if twice := [t for t in timesteps if timesteps.count(t) > 1]:
        return f"{twice[0]:g} is given twice (leave it out once)"
    return ""


def _interval_problem(interval: list[float]) -> str:
    if len(interval) != 2:
        return f"takes two times, has {len(interval)} (as [0.0, 1.0])"
    low, high = interval
    if 0.0 <= low <= high <= 1.0:
        return ""
    reason = "runs backwards" if low > high else "leaves 0..1"
    return f"[{low:g}, {high:g}] {reason} (give the lower t first, both in 0..1)"


def default_solver(path_name: str) -> str:
    """Default solver of a path: Euler's method in t, on EDM's path in sigma, of which t is far from linear."""
    return "ddim" if path_name == "edm" else "euler"


def default_schedule(path_name: str) -> str:
    """Default schedule of a path: the trained indices of a discrete path, EDM's own, else uniform."""
    return "ddpm" if PATHS[path_name]().discrete else "edm" if path_name == "edm" else "uniform"
