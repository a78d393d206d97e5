"""Many comparisons at once: correction of their p-values."""

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method, in their order.

    To reject those of at most alpha makes the probability of any wrong rejection at most alpha, whichever of the null
    hypotheses hold and however the tests depend on one another.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6, 1979.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted
