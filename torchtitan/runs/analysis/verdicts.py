"""Verdicts on many comparisons of images/s: significant differences, corrected for the number of comparisons.

Without correction one comparison in twenty without an effect would be significant, and a grid of five switches has ten
interactions or more. Effects of switches and their interactions are two families; in each the probability of any false
significant difference is at most 5 %.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan.runs.analysis.effects import Effect, Interaction, Ratio
from torchtitan.runs.analysis.measures import IMAGES
from torchtitan.statistics.multiple_comparisons import holm

ALPHA = 0.05
Outcome = Literal["significant", "not significant", "untested"]


_TEXTS: dict[Outcome, str] = {
    "significant": "significant", "not significant": "no significant difference", "untested": "not tested: single runs",
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Verdict on one comparison.

    Attributes:
        outcome: significant or not; untested where a single ratio is of single runs.
        p_value: after Holm's correction; None without a test.
        tested: comparisons of its family with a test.
    """

    outcome: Outcome
    p_value: float | None = None
    tested: int = 0

    @property
    def text(self) -> str:
        return _TEXTS[self.outcome]


def verdicts(found: Sequence[Effect] | Sequence[Interaction]) -> list[Verdict | None]:
    """Verdicts on the images/s of effects or interactions, one family; None where images/s were not measured."""
    ratios = [one.ratios.get(IMAGES.name) for one in found]
    tested = [ratio for ratio in ratios if ratio and ratio.p_value is not None]
    adjusted = iter(holm([ratio.p_value for ratio in tested if ratio.p_value is not None]))
    return [_verdict(ratio, adjusted, len(tested)) if ratio else None for ratio in ratios]


def _verdict(ratio: Ratio, adjusted: Iterator[float], tested: int) -> Verdict:
    if ratio.p_value is None:
        return Verdict("untested", None, tested)
    p_value = next(adjusted)
    clear = p_value <= ALPHA and ratio.excludes(1.0)
    return Verdict("significant" if clear else "not significant", p_value, tested)
