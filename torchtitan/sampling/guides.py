"""Guides of sampling: other weights of the sampled run, another run, a file of weights, or the network's own head."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.conditions import Classes, Condition, ConditionKind, Unconditional
from torchtitan.diffusion.guidance import HEAD, PATH_DROP, Guide, HeadGuide
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import CONFIG, header_of
from torchtitan.settings.schema import nearest
from torchtitan.weights.pipeline_folder import is_published_folder
from torchtitan.weights.trained_model import TrainedModel, WeightsError, checkpoints_of_source, load_run, load_weights

_REFERENCE = re.compile(r"(?P<run>.*?)(@(?P<step>\d+))?(:(?P<track>[A-Za-z0-9][A-Za-z0-9._=-]*))?", re.DOTALL)


@dataclass(frozen=True)
class GuideReference:
    """Reference to a guide, `RUN[@step][:track]`.

    Attributes:
        source: run's folder, or a file of weights; None for the sampled run itself.
        track: EMA track, "none" for the trained weights, or `std=0.15` as of `load_run`; None if not given.
    """

    source: Path | None
    step: int | None
    track: str | None


@dataclass(frozen=True)
class LoadedGuide:
    """Loaded guide, and the model that it is; None: the sampled one; run: folder of another run, as given, or ""."""

    guide: Guide | HeadGuide
    model: TrainedModel | None
    run: str = ""


def open_guide(
    text: str | None, source: Path, config_file: Path | None, sampled: TrainedModel, guidance_scale: float,
    device: torch.device, null_guidance_scale: float = 1.0,
) -> LoadedGuide | None:  # fmt: skip
    """Open the guide of a command line.

    Args:
        text: of --guide, "none" for the null condition, "head" for the intermediate head, "path_drop" for the network without
            its routed blocks; None for the run's own choice.
        null_guidance_scale: of guidance by the null condition beside that by the head.

    Returns:
        the guide; None for guidance by the null condition, or none.

    Raises:
        WeightsError: it has no effect, or there is neither a guide nor a null condition; or as by `load_guide`.
        ConfigError, CheckpointError.
    """
    own = sampled.config.sampling.guide_track
    if text is None and own and (own == HEAD or source.is_dir()) and guidance_scale != 1:
        text = own if own == HEAD else f":{own}"
    if text not in (None, "none"):
        if guidance_scale == 1:
            raise WeightsError("--guide: has no effect at a guidance scale of 1 (give --guidance-scale, as 2)")
        if text == PATH_DROP:
            return LoadedGuide(_without_path(sampled), None)
        if text != HEAD:
            return load_guide(read_reference(text), source, config_file, sampled, device)
        if getattr(sampled.config.model, "intermediate_head", None) is None:
            raise WeightsError("--guide head: the model has no second output layer (train with model.intermediate_head)")
        _check_null_condition(sampled, "--null-guidance-scale", null_guidance_scale, "leave it at 1")
        return LoadedGuide(HeadGuide(), None)
    _check_null_condition(sampled, "--guidance-scale", guidance_scale, "leave it at 1, or give --guide")
    return None


def _without_path(sampled: TrainedModel) -> Guide:
    """Reference without routed blocks and, where the null condition was trained, without the condition.

    Source: path-drop guidance of Park et al., arXiv 2510.21986; Krause et al., arXiv 2501.04765, guide by fewer tokens too.
    """
    network = getattr(sampled.model, "without_path", None)
    if network is None:
        raise WeightsError("--guide path_drop: the model has no path to drop (train with model.routing.name = tread or sprint)")
    kind, trains_null = sampled.model.condition_kind, sampled.config.model.label_dropout > 0

    def reference(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        dropped = torch.full((len(x),), trains_null, device=x.device)
        return network(x, t, kind.drop(condition, dropped))

    return Guide(reference, sampled.objective, conditional=True)


def _check_null_condition(sampled: TrainedModel, option: str, scale: float, remedy: str) -> None:
    unconditional = isinstance(sampled.model.condition_kind, Unconditional)
    if scale != 1 and (unconditional or sampled.config.model.label_dropout == 0):
        lacks = "classes" if unconditional else "a null class"
        raise WeightsError(f"{option}: the model was trained without {lacks} ({remedy})")


def read_reference(text: str) -> GuideReference:
    """Read `RUN[@step][:track]`: without RUN the sampled run; an existing path as it is. Raises WeightsError."""
    if text and Path(text).exists():
        return GuideReference(Path(text), None, None)
    match = _REFERENCE.fullmatch(text)
    if match is None or not text:
        raise WeightsError(f"--guide: {text!r} names no weights (give RUN, RUN@step, RUN:track, @step or :track)")
    run, step, track = match["run"], match["step"], match["track"]
    return GuideReference(Path(run) if run else None, None if step is None else int(step), track)


def load_guide(
    reference: GuideReference, source: Path, config_file: Path | None, sampled: TrainedModel, device: torch.device
) -> LoadedGuide:
    """Load a guide for a sampled model.

    Of the sampled run itself, a step or track that is not given is that of the sampled weights; of another run, the
    newest good checkpoint and the run's own choice. A file of weights is of the sampled model's configuration.

    Args:
        source: run's folder or file of weights of the sampled model.
        config_file: configuration of the sampled file of weights; None for a run.

    Raises:
        WeightsError: there are no such weights, they are the sampled ones, or they cannot guide them.
        ConfigError, CheckpointError.
    """
    place, own = reference.source or source, None
    if source.is_dir() and not is_published_folder(source):
        run, own, _ = checkpoints_of_source(source, None)
        if place is source and reference.step is not None:  # of a checkpoint's folder: another of its run
            place = run if (run / "config.toml").exists() else Path(str(own))
    if not place.exists():
        guess = nearest(str(place), (HEAD, PATH_DROP, "none"))
        raise WeightsError(f"--guide: {place}: no such run folder or weights file{guess and f' (did you mean {guess}?)'}")
    elsewhere = ""
    if not place.is_dir():
        if reference.step is not None or reference.track is not None:
            raise WeightsError(f"--guide: {place}: a file of weights has no steps and tracks (leave them out)")
        guide = load_weights(place, config_file or _config_beside(place, source), device)
    else:
        step, track = reference.step, reference.track
        _, checkpoints, step = checkpoints_of_source(place, step)
        if own is not None and _same(checkpoints, own):
            step, track = step if step is not None else sampled.step, track or sampled.track
            if (step, track) == (sampled.step, sampled.track):
                raise WeightsError(
                    f"--guide: {sampled.label} are the sampled weights themselves (give an earlier @step, or another :track)"
                )
        else:
            elsewhere = str(place)
        guide = load_run(place, track, step, device)
    if problem := guide_problem(sampled, guide):
        raise WeightsError(f"--guide: {place}: {problem}")
    conditional = not isinstance(guide.model.condition_kind, Unconditional)
    return LoadedGuide(Guide(guide.model, guide.objective, conditional), guide, elsewhere)


def _same(one: AnyPath, other: AnyPath) -> bool:
    return one == other or isinstance(one, Path) and isinstance(other, Path) and one.resolve() == other.resolve()


def guide_problem(sampled: TrainedModel, guide: TrainedModel) -> str:
    """Find the reason why a model cannot guide another one; "" if there is none."""
    wanted, found = sampled.model.image_shape, guide.model.image_shape
    if tuple(wanted) != tuple(found):
        return f"is trained on images {list(found)}, the sampled model on {list(wanted)} (give a guide of the same shape)"
    paths = [model.config.objective.path for model in (sampled, guide)]
    if paths[0] != paths[1]:
        return f"is trained on objective.path = {paths[1]}, the sampled model on {paths[0]} (give a guide of the same path)"
    stds = [model.config.objective.noise_std for model in (sampled, guide)]
    if stds[0] != stds[1]:
        text = f"is trained on objective.noise_std = {stds[1]:g}, the sampled model on {stds[0]:g}"
        return f"{text} (give a guide of the same noise)"
    if problem := _condition_problem(sampled.model.condition_kind, guide.model.condition_kind):
        return problem
    scales = [_latent_scale(model) for model in (sampled, guide)]
    if scales[0] != scales[1]:
        return "is trained on latents of another normalization, or one of both on images (give a guide of the same data)"
    return ""


def _condition_problem(sampled: ConditionKind, guide: ConditionKind) -> str:
    if isinstance(guide, Unconditional):
        return ""
    if sampled.name != guide.name or sampled.entries != guide.entries:
        return f"takes {guide.wanted}, the sampled model {sampled.wanted} (give a guide of the same conditions, or of none)"
    if not isinstance(sampled, Classes):  # prompts are rows of a grid alone
        return ""
    if sampled.choices != guide.choices:
        noun = sampled.choices_noun
        return f"has {guide.choices} {noun}, the sampled model {sampled.choices} (give a guide of the same {noun}, or of none)"
    names = sampled.choice_names, guide.choice_names
    if all(names) and names[0] != names[1]:
        place = next(n for n, (one, other) in enumerate(zip(*names, strict=True)) if one != other)
        return (
            f"names {names[1][place]!r} what the sampled model names {names[0][place]!r} (give a guide of the same"
            f" {sampled.choices_noun})"
        )
    return ""


def _latent_scale(model: TrainedModel) -> tuple[list[float], list[float]] | None:
    """Shift and scale of the latents that a model is trained on; None for images."""
    if model.record.latents is None:
        return None
    normalization = model.record.latents.normalization
    return normalization.shift, normalization.scale


def _config_beside(weights: Path, source: Path) -> Path | None:
    """Configuration of a file of weights without one in its header: that of the sampled run."""
    return source / "config.toml" if source.is_dir() and CONFIG not in header_of(weights) else None
