"""Schedules of a run, pure functions of its progress: the learning rate, and a batch that grows by doublings."""

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torchtitan.training.config import TO_THE_END, LRSchedulerConfig


def lr_factor(config: LRSchedulerConfig, step: int, total_steps: int, images_per_step: int = 1) -> float:
    """Learning rate of a step as a fraction of the peak.

    Args:
        step: 1 for the first optimizer step, total_steps for the last, in steps of the first batch size.
        images_per_step: first global batch size; without effect on a schedule in steps.

    Returns:
        a linear rise during warm-up: step / warmup_steps, or the images before the step / warmup_images; a warm-up that is
        longer than the run is cut to a tenth of it; then 1, or a
        line or half cosine that would reach min_lr_factor one step after the last, or at the second of decay_between, from
        the first on. inverse_sqrt multiplies the rise by
        1 / sqrt(max(n / reference, 1)), n being what is done before the step, and doesn't know the length of the run.

        With epoch_images the factor is constant within an epoch: n and the images of inverse_sqrt are those before it,
        epoch e of a warm-up over W epochs has (e + 1) / W, and nothing decays before the warm-up has ended.

    Sources of inverse_sqrt: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", per
    image; its public multi-GPU port, per epoch.
    """
    at = _place(config, step, total_steps, images_per_step)
    warming = at.done < at.warmup
    rise = min(at.counted / at.warmup, 1.0) if warming else 1.0
    if config.decay_type == "inverse_sqrt" and not (warming and at.by_epoch):
        return rise / math.sqrt(max(at.done / at.reference, 1.0))
    if warming or config.decay_type not in TO_THE_END:
        return rise
    start, end = config.decay_between or (at.warmup, at.total)
    progress = min(max((at.done - start) / (end - start), 0.0), 1.0)
    shape = 1.0 - progress if config.decay_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * shape


def lr_phase(config: LRSchedulerConfig, step: int, total_steps: int, images_per_step: int = 1) -> str:
    """Phase of the schedule in words, with the learning rate as a share of the peak; arguments as of `lr_factor`."""
    factor, at = lr_factor(config, step, total_steps, images_per_step), _place(config, step, total_steps, images_per_step)
    if factor >= 0.995:
        return "at the peak learning rate"
    if at.done < at.warmup:
        return f"in warm-up, at {100 * factor:.0f} % of the peak learning rate"
    if config.decay_between and at.done >= config.decay_between[1]:
        return f"after the decay, at {100 * factor:.0f} % of the peak learning rate"
    shape = config.decay_type if config.decay_type in TO_THE_END else "inverse square root"
    return f"in the {shape} decay, at {100 * factor:.0f} % of the peak learning rate"


def warmup_problems(config: LRSchedulerConfig, steps: int, images_per_step: int | None) -> Iterator[tuple[str, str]]:
    """Find a warm-up longer than the run (images_per_step None: not known): (key of the section, reason)."""
    if config.unit == "steps" and config.warmup_steps > steps:
        yield "warmup_steps", f"{config.warmup_steps} is more than training.steps = {steps}"
    elif config.unit == "images" and images_per_step and config.warmup_images > (seen := steps * images_per_step):
        yield "warmup_images", f"{config.warmup_images} is more than {seen}, the images of training.steps = {steps}"


def decay_problems(config: LRSchedulerConfig) -> Iterator[tuple[str, str]]:
    """Find a decay without beginning or end, or that begins in the warm-up: (key of the section, reason)."""
    between, warmup = config.decay_between, config.warmup_steps if config.unit == "steps" else config.warmup_images
    if between and not (len(between) == 2 and warmup <= between[0] < between[1]):
        text = f"must be two rising numbers of {config.unit}, the first at least {warmup}, the warm-up"
        yield "decay_between", f"{between} {text}"


class _Place(NamedTuple):
    """Place of a step in its run, all in the schedule's unit; `counted` is what the warm-up has counted of it."""

    done: int
    counted: int
    warmup: int
    reference: int
    total: int
    by_epoch: bool = False


def _place(config: LRSchedulerConfig, step: int, total_steps: int, images_per_step: int) -> _Place:
    if config.unit == "steps":
        warmup = config.warmup_steps if config.warmup_steps <= total_steps else total_steps // 10
        return _Place(step - 1, step, warmup, config.reference_steps, total_steps)
    images, total, epoch = (step - 1) * images_per_step, total_steps * images_per_step, config.epoch_images
    if epoch:
        images -= images % epoch
    warmup = config.warmup_images if config.warmup_images <= total else total // 10
    return _Place(images, images + epoch, warmup, config.reference_images, total, epoch > 0)


_MOST_DOUBLINGS = 20  # a million times the first batch


def ramp_factor(doublings: Sequence[int], images: int) -> int:
    """Multiple of the first global batch size after some images: 2 per number passed in `doublings`, rising."""
    return 2 ** bisect_right(doublings, images)


def ramp_steps(doublings: Sequence[int], batch_size: int, steps: int) -> Counter[int]:
    """Optimizer steps by multiple of the first batch size, for a run of `steps` of the first; the last has the rest."""
    counts: Counter[int] = Counter()
    progress = 0  # in steps of the first batch size
    while progress < steps:
        factor = min(ramp_factor(doublings, progress * batch_size), steps - progress)
        end = min([steps, *(-(-images // batch_size) for images in doublings if images > progress * batch_size)])
        number = max(1, min(-(-(end - progress) // factor), (steps - progress) // factor))
        counts[factor] += number
        progress += number * factor
    return counts


def largest_growth(config: Any) -> int:
    """Largest multiple of the first global batch size that a step may come to have; 1 where the batch does not grow."""
    return 2 ** len(config.training.double_batch_after)


def completed(interval: int, before: int, after: int) -> bool:
    """Whether an interval ends within a step, or between two."""
    return after // interval > before // interval


def ramp_problems(doublings: Sequence[int]) -> Iterator[str]:
    """Find what is wrong with a ramp."""
    if len(doublings) > _MOST_DOUBLINGS:
        yield f"has {len(doublings)} doublings (give {_MOST_DOUBLINGS} at most)"
    if any(images < 1 for images in doublings) or any(a >= b for a, b in itertools.pairwise(doublings)):
        yield "must be numbers of images from 1 up, each above the one before"
