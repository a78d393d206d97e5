"""Targets of held-out and excess losses: which losses may have one, and the number of images after which each is reached."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtitan.evaluation.config import LossTargetConfig, ValidationConfig
from torchtitan.statistics.samples_to_target import crossing

TARGETS = "targets"  # key of a run's results
PREFIX = "validation_metrics/"
# Key of the results: images of the last validation, from which the next crossing is interpolated.
VALIDATED_AFTER = "validated_after"


def target_name(target: LossTargetConfig) -> str:
    """Name of a target in records, as "excess_loss_by_bin/3 <= 0.05"."""
    return f"{target.loss} <= {target.value:.10g}"


def all_reached(config: ValidationConfig, results: Mapping[str, Any]) -> bool:
    """True if the run ends at its targets and its results, as those of `summary.json`, have them all."""
    reached = results.get(TARGETS, {})
    return config.enable and config.stop_at_targets and all(target_name(target) in reached for target in config.targets)


def follow_targets(
    config: ValidationConfig, before: Mapping[str, Any], losses: Mapping[str, float], step: int, images: int
) -> dict[str, Any]:
    """Find the targets that a validation reaches for the first time.

    Args:
        config: with the targets.
        before: results up to the validation before this one, its losses by tag among them.
        losses: just measured, by tag.
        step, images: trained so far.

    Returns:
        results to add: every target reached so far, by `target_name`, with `n_images_seen` at its crossing, `step` of the
        validation that saw it, and `interpolated`: 0 where no validation before was above the target, so that the crossing was
        at that number of images or before.
    """
    reached = dict(before.get(TARGETS, {}))
    for target in config.targets:
        tag, name = PREFIX + target.loss, target_name(target)
        if name in reached or not losses.get(tag, math.inf) <= target.value:
            continue
        at = crossed_at((before.get(VALIDATED_AFTER, 0), before.get(tag, math.nan)), (images, losses[tag]), target.value)
        known = at is not None
        reached[name] = {"n_images_seen": at if known else images, "step": step, "interpolated": int(known)}
    return {TARGETS: reached, VALIDATED_AFTER: images}


def crossed_at(before: tuple[float, float], after: tuple[float, float], target: float) -> float | None:
    """Images at which the loss crosses a target between two validations: a line in ln loss over ln images.

    Args:
        before, after: (images, loss) of each.
        target: above 0.

    Returns:
        None where there is no line, as the first is not above the target, or an image count or loss is not positive.
    """
    (start, high), (end, low) = before, after
    if not (0 < start < end and 0 < low <= target < high < math.inf):
        return None
    return crossing((start, math.log(high)), (end, math.log(low)), math.log(target))


def target_problems(
    config: ValidationConfig, tracks: Sequence[str], loss_bins: int
) -> Iterator[tuple[int, str, str]]:
    """Problems of `validation.targets`: (place in the list, key, cause and remedy) of each.

    Args:
        config: of validation.
        tracks: names of the averages.
        loss_bins: timestep bins of the losses.
    """
    part, parts = ("time", len(config.timesteps)) if config.timesteps else ("bin", loss_bins)
    images = {"loss": config.num_images, "excess_loss": config.excess_images}
    seen: set[str] = set()
    for place, target in enumerate(config.targets):
        track, slash, rest = target.loss.partition("/")
        loss = rest if slash and track in tracks else target.loss
        name, of_part, number = loss.partition(f"_by_{part}/")
        if name not in images or (of_part and number not in map(str, range(parts))):
            known = f"loss, excess_loss, and of each _by_{part}/0 .. _by_{part}/{parts - 1}"
            of_tracks = f"; of averages after {' or '.join(f'{each}/' for each in tracks)}" if tracks else ""
            yield place, "loss", f"{target.loss!r} is no loss of this validation (there are: {known}{of_tracks})"
        elif name == "excess_loss" and not config.excess_images:
            yield place, "loss", f"{target.loss} is not measured (set validation.excess_images above 0)"
        elif of_part and images[name] < parts:
            key = "excess_images" if name == "excess_loss" else "num_images"
            yield place, "loss", f"{target.loss} has no image where validation.{key} = {images[name]} (give {parts} or more)"
        elif target_name(target) in seen:
            yield place, "value", f"{target_name(target)} is given twice (leave it out once)"
        seen.add(target_name(target))
