"""Checks of `[sampling]` across sections; see `torchtitan.config.checks`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan.conditions import Unconditional, numbered_otherwise
from torchtitan.config.speed_checks import shards_of
from torchtitan.config.view import ConfigView, in_section
from torchtitan.data import DataConfig
from torchtitan.diffusion.guidance import HEAD, PATH_DROP
from torchtitan.diffusion.objective import ObjectiveConfig
from torchtitan.diffusion.timesteps.placement import LATENT_SIZE, latent_shift
from torchtitan.evaluation.config import SamplingConfig, default_schedule, default_solver, sampling_problems
from torchtitan.programs import program
from torchtitan.settings import has_key
from torchtitan.settings.schema import Problem, nearest, quoted
from torchtitan.settings.sections import choices


def unconditional(checked: ConfigView) -> bool:
    """Check whether the images come without conditions."""
    return isinstance(checked.dataset().condition_kind, Unconditional)


def data_text(data: DataConfig) -> str:
    """Name of the data, for messages about their classes."""
    return f"data.name = {data.name}" + ("" if data.labels else " with data.labels = false")


def cannot_guide(checked: ConfigView) -> bool:
    """Check whether there is neither a null condition nor a track to guide away from."""
    return not checked.sampling.guide_track and without_null(checked)


def without_null(checked: ConfigView) -> bool:
    """Check whether the network has no null condition."""
    return unconditional(checked) or not checked.whole("model").label_dropout


def resolved_objective(checked: ConfigView) -> ObjectiveConfig:
    """`[objective]` with what follows from the precision, and the shift that follows from the size of its data's images."""
    training = checked.training
    tf32 = training.float32_matmul_precision != "highest"
    coarse = training.mixed_precision_param == "bfloat16" and checked.parallelism.data_parallel_shard_degree != 1
    finest_step = 0.05 if coarse else 0.01 if tf32 else 0.002
    objective = checked.whole("objective").resolved(finest_step)
    if objective.shift != LATENT_SIZE:
        return objective
    return dataclasses.replace(objective, shift=latent_shift(checked.dataset().image_shape))


def resolved_sampling(checked: ConfigView) -> SamplingConfig:
    """`[sampling]` with the defaults of the objective's path and, above them, of the model for keys that are not given."""
    sampling, path_name = checked.whole("sampling"), checked.objective.path
    defaults = {"schedule.name": default_schedule(path_name), "solver.name": default_solver(path_name)}
    defaults |= checked.whole("model").sampling_defaults(path_name)
    defaults |= checked.whole("objective").sampling_defaults()
    values: dict[str, Any] = {}
    for key, value in defaults.items():
        if f"sampling.{key}" in checked.given:
            continue
        inner, _, last = key.rpartition(".")
        if not inner:
            values[last] = value
        elif getattr(sampling, inner).name != value:
            values[inner] = choices(sampling)[inner].section(value)
    sampling = dataclasses.replace(sampling, **values)
    shifts, given = has_key(sampling.schedule, "shift"), "sampling.schedule.shift" in checked.given
    if shifts and checked.objective.shift == LATENT_SIZE and not given:
        sampling.schedule = dataclasses.replace(sampling.schedule, shift="objective")
    if shifts and sampling.schedule.shift == "objective":
        sampling.schedule = sampling.schedule.resolved(resolved_objective(checked).shift)
    return sampling


def _draws_while_training(checked: ConfigView) -> bool:
    return checked.sampling.enable or checked.evaluation.enable


def _sampled_classes(checked: ConfigView) -> Iterator[Problem]:
    if not checked.sampling.enable or not checked.sampling.classes:
        return
    kind = checked.dataset().condition_kind
    count = kind.choices
    wrong = [label for label in checked.sampling.classes if not count or kind.number_of(label) is None]
    if wrong:
        names = f"named {', '.join(kind.choice_names)}" if numbered_otherwise(kind.choice_names) else f"0 to {count - 1}"
        known = f"the {kind.choices_noun} {names:.200}" if count else f"no {kind.choices_noun}"
        yield Problem("sampling.classes", f"{quoted(wrong)} is not in {data_text(checked.whole('data'))}, which has {known}")


def _sampled_tracks(checked: ConfigView) -> Iterator[Problem]:
    if not _draws_while_training(checked) and (not checked.checkpoint.enable or checked.checkpoint.final_weights == "none"):
        return
    drawn, guide = checked.sampling.ema_track, checked.sampling.guide_track
    if guide == HEAD and getattr(checked.whole("model"), "intermediate_head", None) is None:
        yield Problem("sampling.guide_track", "head is model.intermediate_head, which the network lacks (give that too)")
    tracks = [*dict.fromkeys(track.name for track in checked.ema.tracks), "none"]
    for key, track, known in (("ema_track", drawn, tracks), ("guide_track", guide or HEAD, [*tracks, HEAD])):
        if track == PATH_DROP and key == "guide_track":
            yield Problem("sampling.guide_track", f"path_drop is for --guide of {program('sample')} alone (leave it out)")
        elif track not in known:
            guess = nearest(track, known)
            listed = f"{'one of ' * (len(known) > 1)}{', '.join(known)}"
            advice = f"did you mean {guess}?" if guess not in ("", "none") else f"set it to {listed}"
            yield Problem(f"sampling.{key}", f"{quoted(track)} is not a name in ema.tracks ({advice})")
    if drawn == guide:
        yield Problem("sampling.guide_track", f"{quoted(guide)} is sampling.ema_track itself (give another, or remove it)")
    if guide and resolved_sampling(checked).guidance_scale == 1:
        scale = "sampling.guidance_scale = 1"
        scale += "" if "sampling.guidance_scale" in checked.given else f", the default of model.name = {checked.model.name}"
        yield Problem("sampling.guide_track", f"has no effect when {scale} (remove it)")


def _adaptive(checked: ConfigView) -> Iterator[Problem]:
    solver = checked.sampling.solver
    if _draws_while_training(checked) and solver.adaptive and checked.world_size > 1 and shards_of(checked) != 1:
        text = f"{solver.name} evaluates the network as often as the images need, which shards must do together"
        yield Problem("sampling.solver.name", f"{text} (choose another for training; sample.py can use it on the run)")


def _guidance(checked: ConfigView) -> Iterator[Problem]:
    for key in ("guidance_scale", "null_guidance_scale"):
        explicit = f"sampling.{key}" in checked.given and getattr(checked.sampling, key) != 1
        away_from_null = key == "null_guidance_scale" or not checked.sampling.guide_track
        if explicit and checked.sampling.enable and away_from_null and without_null(checked):
            yield Problem(f"sampling.{key}", f"{_lack_of_null(checked)} to guide away from (remove it or set it to 1)")


def _lack_of_null(checked: ConfigView) -> str:
    if unconditional(checked):
        return f"{data_text(checked.whole('data'))} has no classes"
    if has_key(checked.whole("model"), "label_dropout"):
        return "model.label_dropout = 0 trains no unconditional prediction"
    return f"model.name = {checked.model.name} trains no unconditional prediction"


def _sampling_method(checked: ConfigView) -> Iterator[Problem]:
    if not _draws_while_training(checked):
        return
    sampling, path_name = resolved_sampling(checked), checked.objective.path
    if not has_key(sampling.schedule, "shift") and "sampling.schedule.shift" in checked.given:
        of_model = "schedule.name" in checked.whole("model").sampling_defaults(path_name)
        owner = f"model.name = {checked.model.name}" if of_model else f"objective.path = {path_name}"
        remedy = "remove it, or give sampling.schedule.name" if of_model else "remove it"
        text = f"has no effect on the schedule of {owner}, {sampling.schedule.name} ({remedy})"
        yield Problem("sampling.schedule.shift", text)
    model, objective = checked.whole("model"), checked.whole("objective")
    heads, guided = bool(objective.heads_of_network()), model.guidance_embedding or objective.guidance_max > 1
    found = sampling_problems(sampling, path_name, model.learned_variance, heads, guided, objective.two_times)
    yield from in_section("sampling", found)


SAMPLING_CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [
    _sampled_classes,
    _sampled_tracks,
    _adaptive,
    _guidance,
    _sampling_method,
]
