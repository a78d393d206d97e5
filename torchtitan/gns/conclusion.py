"""Conclusions of a run's gradient noise scale in sentences: on the batch size, and on the sampler of timesteps.

Source: McCandlish et al., arXiv 1812.06162: to the same loss, a batch of b needs 1 + b / B times the images that a very small
batch needs, B the critical batch size, for which the noise scale B_simple stands in.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torchtitan.gns.allocate import WORTHWHILE, PredictedRatio, sampler_advice
from torchtitan.gns.pool import WHOLE_MODEL
from torchtitan.gns.step_sums import GEOMETRIES
from torchtitan.pictures.number_text import counted
from torchtitan.statistics.interval import Interval

Verdict = Literal["small", "near", "large", "unknown"]

_FACTOR = 4  # between the batch and the others that are spoken of
_LITTLE, _MUCH = 0.25, 1.0  # images beyond those of a very small batch, as a share of these
_LEAST_Z = 0.5  # of the signal: below, the number of steps that would be enough is anybody's guess
_ENOUGH_Z = 3.0

# Beginnings of the tags of what is concluded from.
_PLAIN, _MORE_STEPS, _SAMPLERS = f"gns/{GEOMETRIES[0]}", "gns/more_steps", "gns/samplers"


def verdict(scale: Interval, batch: int) -> Verdict:
    """Verdict on a batch: whether its waste b / B is significantly little, or much, or between; unknown without an upper end.

    Args:
        scale: noise scale in images; without an upper end only the lower one is known.
    """
    if not scale.lower > 0:
        return "unknown"
    if batch / scale.lower <= _LITTLE:
        return "small"
    if math.isinf(scale.upper):
        return "unknown"
    return "large" if batch / scale.upper >= _MUCH else "near"


def on_batch(scale: Interval, batch: int, more_steps: int | None) -> str:
    """Conclusion on a batch in one clause, by the ends of the interval.

    Args:
        scale: as of `verdict`.
        more_steps: that would give the noise scale an upper end; None: not known.
    """
    smaller, larger = max(batch // _FACTOR, 1), batch * _FACTOR
    found = verdict(scale, batch)
    if found == "small":
        waste = batch / scale.lower
        most = _images(larger, batch, scale.lower)
        return (
            f"batch {batch:,} wastes at most {_percent(waste / (1 + waste))} of its images; {larger:,} would need at most"
            f" {most:.2g} times as many"
        )
    if found == "large":
        fewer = 1 - _images(smaller, batch, scale.upper)
        return f"batch {batch:,} is large: {smaller:,} would need at least {_percent(fewer)} fewer images, in more steps"
    if found == "near":
        least, most = (1 - _images(smaller, batch, end) for end in (scale.upper, scale.lower))
        times = [_images(larger, batch, end) for end in (scale.upper, scale.lower)]
        return (
            f"batch {batch:,} is in the useful range: {smaller:,} would need {_percent(least)} to {_percent(most)} fewer"
            f" images in more steps, {larger:,} from {times[0]:.2g} to {times[1]:.2g} times as many in fewer"
        )
    return f"not enough signal to judge batch {batch:,}{_remedy(more_steps)}"


def on_timesteps(ratios: Sequence[PredictedRatio], more_steps: int | None) -> str:
    """Conclusion on the sampler of timesteps in one clause."""
    if advice := sampler_advice(ratios):
        return advice
    if all(ratio.lower > 1 / WORTHWHILE for ratio in ratios):
        return f"no other sampler of timesteps would save more than {_percent(1 - 1 / WORTHWHILE)} of the images"
    return f"not enough signal to choose another sampler of timesteps{_remedy(more_steps)}"


def history(points: Iterable[Mapping[str, Any]], batch: int) -> str:
    """Clause on the step since which the verdict on a batch holds, and why it was another before; "" without two points.

    Args:
        points: logged points in the order of their steps, with the whole objective's noise scale.
    """
    known = [(point["step"], scale) for point in points if (scale := _logged(point))]
    if len(known) < 2:
        return ""
    verdicts = [verdict(scale, batch) for _, scale in known]
    since = len(verdicts)
    while since and verdicts[since - 1] == verdicts[-1]:
        since -= 1
    clause = f"this verdict since step {known[since][0]:,}"
    before = next((known[place] for place in range(since - 1, -1, -1) if verdicts[place] != "unknown"), None)
    return f"{clause}; at step {before[0]:,} it was {in_words(before[1])}" if before else clause


def logged(ratios: Sequence[PredictedRatio], more_steps: int | None) -> dict[str, float]:
    """Metrics by tag that `conclusions` are drawn from, beside the noise scales; unknown ones are left out."""
    found = {
        f"{_SAMPLERS}/{each.name}/{end}": value for each in ratios
        for end, value in (("ratio", each.ratio), ("lower", each.lower), ("upper", each.upper)) if math.isfinite(value)
    }  # fmt: skip
    return found | ({_MORE_STEPS: float(more_steps)} if more_steps else {})


def conclusions(
    points: Sequence[Mapping[str, Any]], batch: int, first_batch: int, interval: int, phase_at: Callable[[int], str]
) -> list[str]:  # fmt: skip
    """Conclusions by what was logged last: on a batch, with its past, and on the sampler of timesteps; none where none was.

    Args:
        points: logged ones in the order of their steps.
        batch: global batch size now.
        first_batch: the one that `training.steps` counts in.
        interval: of measured steps.
        phase_at: step -> phase of the learning rate in words, which is told at the measurement's mean age; "": not known.
    """
    last = next((point for point in reversed(points) if _logged(point)), None)
    if last is None or (scale := _logged(last)) is None:
        return []
    lag = next((last.get(f"{_PLAIN}/{each}/all/lag", 0.0) for each in WHOLE_MODEL if _is_headline(last, each)), 0.0)
    phase = phase_at(max(round(last["step"] - last["step"] % interval - lag / batch), 1))
    known = f"gradient noise scale {in_words(scale)}" if scale.lower > 0 else ""
    more_steps = int(last.get(_MORE_STEPS, 0)) * (batch // first_batch) or None
    until = f"measured up to step {last['step']:,}" if last["step"] < points[-1]["step"] else ""
    details = "; ".join(filter(None, (known, until, history(points, batch))))
    found = [", ".join(filter(None, (phase, on_batch(scale, batch, more_steps)))) + (f" ({details})" if details else "")]
    names = [tag.split("/")[2] for tag in last if tag.startswith(_SAMPLERS) and tag.endswith("/lower")]
    ratios = [PredictedRatio(name, *_ends(last, f"{_SAMPLERS}/{name}/ratio", f"{_SAMPLERS}/{name}")) for name in names]
    return [*found, on_timesteps(ratios, more_steps)] if ratios else found


def in_words(scale: Interval) -> str:
    """Noise scale with its interval, in images; without an upper end only the lower one is known."""
    if math.isinf(scale.upper):
        return f"more than {_number(scale.lower)} images"
    return f"{_number(scale.value)} [{_number(scale.lower)}, {_number(scale.upper)}] images"


def steps_to_know(signal: float, stderr: float, measured: float, interval: int) -> int | None:
    """Further steps after which the signal would be three standard errors above zero, if it and the noise stayed as they are.

    As many as have the measured ones among them, rounded up to two digits.

    Args:
        measured: equally weighted measured steps that the estimate is worth.
        interval: steps between measured ones.
    """
    z = signal / stderr
    if not z > _LEAST_Z:
        return None
    steps = math.ceil(measured * ((_ENOUGH_Z / z) ** 2 - 1)) * interval
    size = 10 ** max(math.floor(math.log10(max(steps, 1))) - 1, 0)
    return math.ceil(steps / size) * size if steps > 0 else None


def _images(batch: int, than: int, scale: float) -> float:
    """Images that one batch needs to the same loss as another, as a multiple of the other's."""
    return (1 + batch / scale) / (1 + than / scale)


def _remedy(more_steps: int | None) -> str:
    if more_steps:
        return f": measure about {counted(more_steps, 'more step')}"
    return ": measure more steps (train longer, or lower gns.interval if it is above 1)"


def _logged(point: Mapping[str, Any]) -> Interval | None:
    """Noise scale of the whole objective in a point, of its headline estimator; an infinite upper end is not logged."""
    for estimator in WHOLE_MODEL:
        if _is_headline(point, estimator):
            return Interval(*_ends(point, f"{_PLAIN}/{estimator}/all/b_simple", f"{_PLAIN}/{estimator}/all"))
    return None


def _is_headline(point: Mapping[str, Any], estimator: str) -> bool:
    prefix = f"{_PLAIN}/{estimator}/all"
    measured = point.get(f"{prefix}/headline") and point.get(f"{prefix}/samples", 1)
    return bool(measured) and f"{prefix}/lower" in point


def _ends(point: Mapping[str, Any], tag: str, prefix: str) -> tuple[float, float, float]:
    """Value of a point with the ends of its interval; what is not finite is not logged."""
    return point.get(tag, math.nan), point[f"{prefix}/lower"], point.get(f"{prefix}/upper", math.inf)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"
