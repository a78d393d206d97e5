"""Statistics of trained arms over seeds: paired differences, their significance, samples to a target loss."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from research.equal_samples import crossing
from torchtitan.statistics.interval import Interval, mean_interval, paired_difference

NOT_TOLD_APART = "no significant difference"


def direction(difference: Interval) -> str:
    """Direction: lower, higher or no significant difference."""
    if not difference.bounded or not difference.excludes(0.0):
        return NOT_TOLD_APART
    return "lower" if difference.value < 0 else "higher"


def shared_seeds(losses: Mapping[str, Mapping[int, float]]) -> list[int]:
    """Seeds shared by all arms, except arms without any."""
    present = [set(of_arm) for of_arm in losses.values() if of_arm]
    return sorted(set.intersection(*present)) if present else []


def ranking(losses: Mapping[str, Mapping[int, float]]) -> list[tuple[str, list[str]]]:
    """Order arms by mean ln loss over the seeds that all share, the lowest first; as given where they share none.

    Args:
        losses: arm -> seed -> ln loss.

    Returns:
        each arm with the others from which it does not differ significantly, in the same order.
    """
    present = {arm: of_arm for arm, of_arm in losses.items() if of_arm}
    shared, order = shared_seeds(present), list(present)
    if shared:
        order.sort(key=lambda arm: fmean(present[arm][seed] for seed in shared))
    found = []
    for arm in order:
        others = [other for other in order if other != arm]
        like = [o for o in others if direction(paired_difference(present[arm], present[o])) == NOT_TOLD_APART]
        found.append((arm, like))
    return found


def verdict(losses: Mapping[int, float], reference: Mapping[int, float], seeds: int) -> str:
    """Verdict of a difference, or the number of seeds of an arm that lost some: the remaining ones are a selection.

    Args:
        losses, reference: seed -> ln loss.
        seeds: planned for both arms.
    """
    for whose, present in (("", len(losses)), ("reference: ", len(reference))):
        if present < seeds:
            return f"{whose}{present} of {seeds} seeds; {seeds - present} failed"
    return direction(paired_difference(losses, reference))


def samples_to_target(samples: Sequence[float], log_losses: Sequence[float], target: float) -> float:
    """Samples after which a learning curve first is at or below a target.

    Between two checkpoints ln loss is taken to be linear in ln samples.

    Args:
        samples: at the checkpoints, rising, positive [N].
        log_losses: ln loss there [N].
        target: ln loss.

    Returns:
        the number of samples; 0 if the first checkpoint is at the target already; infinite if none is.
    """
    for place, value in enumerate(log_losses):
        if value > target:
            continue
        if place == 0:
            return samples[0] if value == target else 0.0
        return crossing((samples[place - 1], log_losses[place - 1]), (samples[place], value), target)
    return math.inf


def counts_text(counts: Sequence[float | None], first: int, last: int) -> str:
    """Format samples to a target of every seed: their mean with its 95 % interval if all are known, else one by one.

    Args:
        counts: of `samples_to_target`; None for a failed seed.
        first, last: samples at the first and the last checkpoint.
    """
    known = [count for count in counts if count is not None and 0 < count < math.inf]
    if known and len(known) == len(counts):
        mean = mean_interval(known)
        return f"{mean.value:.0f}" + (f" [{max(mean.lower, 0):.0f}, {mean.upper:.0f}]" if mean.bounded else "")
    words = {None: "failed", 0.0: f"before {first}", math.inf: f"not within {last}"}
    each = [words[count] if count in words else f"{count:.0f}" for count in counts]
    return each[0] if len(set(each)) == 1 else ", ".join(each)


def uniform_log_loss(errors: Sequence[float], shares: Sequence[float]) -> float:
    """Log of the mean error under the reference density: bins' errors weighted by their shares of it."""
    return math.log(sum(error * share for error, share in zip(errors, shares, strict=True)) / sum(shares))


def mean_log_loss(errors: Sequence[float]) -> float:
    """Mean log over the bins' errors: every bin counts the same, whatever the size of its errors."""
    return sum(map(math.log, errors)) / len(errors)


def percent(found: Interval) -> str:
    """Format a difference of ln loss as a change in per cent with its interval."""
    if not math.isfinite(found.value):
        return "-"
    change, low, high = (100 * math.expm1(end) for end in (found.value, found.lower, found.upper))
    if not found.bounded:
        return f"{change:+.2f} %"
    return f"{change:+.2f} % [{low:+.2f}, {high:+.2f}]"
