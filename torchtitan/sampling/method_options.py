"""Options of a command line that say how images are drawn: the keys of `[sampling]`, over a run's own."""

import argparse
import dataclasses
import typing
from functools import partial
from typing import Any, cast

from torchtitan.diffusion.guidance import HEAD
from torchtitan.evaluation.config import SamplingConfig, sampling_problems
from torchtitan.settings import has_key, key_types
from torchtitan.settings.record import unmet_condition
from torchtitan.settings.schema import parse_text, validate_section, without_none, words_beside
from torchtitan.settings.sections import choices, keys, put_section, section_at
from torchtitan.weights.trained_model import TrainedModel, WeightsError

# Keys of `[sampling]` that say how an image is drawn; each is an option, as are those of the inner sections.
METHOD_KEYS = [
    "num_steps", "guidance_scale", "guidance_interval", "guidance_channels", "null_guidance_scale", "null_guidance_interval",
    "embedded_guidance", "clip_x0", "state_dtype",
]
GUIDE = "guide_track"  # key of the option --guide


def add_method_options(parser: argparse._ActionsContainer) -> None:
    """Add an option for every key of the method to a parser or a group of one."""
    for name, options in choices(SamplingConfig()).items():
        text = f"{_described(SamplingConfig, name)} (default: the run's)"
        parser.add_argument(option(name), choices=list(options.registry), help=text)
    for section, key in method_keys():
        text = f"{_described(section, key)} (default: the run's)"
        parser.add_argument(option(key), help=text, **_reader(section, key))


def option(key: str) -> str:
    """Command-line option of a key of `[sampling]`."""
    return "--" + key.replace("_", "-")


def method_keys() -> list[tuple[type, str]]:
    """Section and key of every option that says how an image is drawn, but for the names of inner sections."""
    inner = [type(each.section(name)) for each in choices(SamplingConfig()).values() for name in each.registry]
    found: dict[str, type] = dict.fromkeys(METHOD_KEYS, SamplingConfig)
    for section in inner:  # a key that several have is one option, for the one that is chosen
        found = {key.name: section for key in keys(section) if key.name != "name"} | found
    return [(section, key) for key, section in found.items()]


def given_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Options of the method that were given, in words for a title that names the guidance scale itself."""
    names = (*choices(SamplingConfig()), *(key for _, key in method_keys()), "guide")
    given = {name: getattr(arguments, name) for name in names if name != "guidance_scale"}
    texts = {name: f"{value:g}" if isinstance(value, float) else value for name, value in given.items()}
    return tuple(f"{name.replace('_', ' ')} {text}" for name, text in texts.items() if text is not None)


def sampling_method(arguments: argparse.Namespace, trained: TrainedModel) -> SamplingConfig:
    """Sampling method: `[sampling]` of the run, with the options given here. Raises WeightsError."""
    given = {key: getattr(arguments, key) for _, key in method_keys() if getattr(arguments, key) is not None}
    sampling = dataclasses.replace(trained.config.sampling, enable=True)
    if arguments.guide is not None:
        sampling.guide_track = "" if arguments.guide == "none" else arguments.guide
    problems: list[tuple[str, str]] = []
    for name, options in choices(sampling).items():
        if chosen := getattr(arguments, name):
            section = getattr(sampling, name)
            setattr(sampling, name, section if section.name == chosen else options.section(chosen))
    config = dataclasses.replace(trained.config, sampling=sampling)
    for name in ("sampling", *(f"sampling.{inner}" for inner in choices(sampling))):
        section = section_at(config, name)
        own = {key: given.pop(key) for key in list(given) if has_key(section, key)}
        filled, refused = validate_section(name, section, own)
        put_section(config, name, filled)
        problems += [(problem.key.rpartition(".")[2], problem.text) for problem in refused]
        for field in keys(filled):
            if field.name in own and (unmet := unmet_condition(config, name, field)):
                without = "without --guide head" if unmet[0].endswith(GUIDE) else f"when {unmet[0]} = {unmet[1]}"
                problems.append((field.name, f"has no effect {without} (leave it out)"))
    sampling = config.sampling
    if arguments.null_guidance_scale not in (None, 1) and (sampling.guide_track, sampling.guidance_scale) == (HEAD, 1):
        advice = "for guidance by the null condition alone give it as --guidance-scale, with --guide none"
        problems.append(("null_guidance_scale", f"has no effect at a guidance scale of 1 ({advice})"))
    sampling.schedule = sampling.schedule.resolved(cast(float, config.objective.shift))
    for key in given:
        chosen_names = ", ".join(f"--{name} {getattr(sampling, name).name}" for name in choices(sampling))
        problems.append((key, f"has no effect with {chosen_names} (leave it out)"))
    model, heads = config.model, bool(config.objective.heads_of_network())
    problems += sampling_problems(
        sampling, config.objective.path, model.learned_variance, heads, model.guidance_embedding, config.objective.two_times
    )
    if problems:
        raise WeightsError("\n".join(f"{option(_option_of(key))}: {text}" for key, text in problems))
    return sampling


def _option_of(key: str) -> str:
    """Key that names an option, for one within `[sampling]`: `solver` of `solver.name`, `churn` of `solver.churn`."""
    section, _, last = key.rpartition(".")
    if key == GUIDE:
        return "guide"
    return section if last == "name" else last


def _described(section: Any, key: str) -> str:
    return section.__dataclass_fields__[key].metadata["description"]


def _reader(section: type, key: str) -> dict:
    hint, _ = without_none(key_types(section)[key])
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if words_beside(hint):
        return {"type": partial(parse_text, annotation=hint)}
    if hint is bool:
        return {"type": _true_or_false, "metavar": "{true,false}"}
    return {"type": float, "nargs": "+"} if hint == list[float] else {"type": hint}


def _true_or_false(text: str) -> bool:
    """Read a truth value. Raises ValueError."""
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"
