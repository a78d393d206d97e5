"""Checks of `[evaluation]` across sections; see `torchtitan.config.checks`."""

from collections.abc import Callable, Iterator

from torchtitan.config.latent_cache import has_latents
from torchtitan.config.sampling_checks import cannot_guide
from torchtitan.config.view import ConfigView
from torchtitan.fidelity.metrics import METRICS
from torchtitan.programs import program
from torchtitan.settings.schema import Problem

_INCEPTION = "inception"


def _measurable(checked: ConfigView) -> Iterator[Problem]:
    evaluation = checked.evaluation
    if not evaluation.enable:
        return
    names = evaluation.metrics
    if not names:
        yield Problem("evaluation.metrics", f"names no metric (there are: {', '.join(METRICS)})")
    if twice := [name for name in names if names.count(name) > 1]:
        yield Problem("evaluation.metrics", f"{twice[0]} is given twice (leave it out once)")
    if "fid" in names and evaluation.extractor != _INCEPTION:
        text = f"fid is of {_INCEPTION} features; with evaluation.extractor = {evaluation.extractor} it is fd"
        yield Problem("evaluation.metrics", text)
    for key, needing in evaluation.images_needed.items():
        if needing and not getattr(evaluation, key):
            split = "train" if key == "reference" else "validation"
            text = f"is empty, and {needing[0]} needs one ({split}, or one made by {program('evaluate')} reference)"
            yield Problem(f"evaluation.{key}", text)
        if not needing and getattr(evaluation, key):
            yield Problem(f"evaluation.{key}", f"has no effect on {', '.join(names)} (remove it)")


def _drawn(checked: ConfigView) -> Iterator[Problem]:
    if not checked.evaluation.enable:
        return
    if has_latents(checked) and checked.autoencoder.name == "none":
        text = f"metrics are of images, and data.name = {checked.data.name} has latents (set autoencoder.name)"
        yield Problem("evaluation.enable", text)
    if checked.evaluation.guidance_scale != 1 and cannot_guide(checked):
        yield Problem("evaluation.guidance_scale", "there is no null condition to guide away from (remove it or set it to 1)")


EVALUATION_CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [_measurable, _drawn]
