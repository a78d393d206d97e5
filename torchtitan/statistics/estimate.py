"""A value with its interval."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its interval.

    Attributes:
        value: estimate.
        lower, upper: ends; None where there is no interval.
        count: points or repeats that it is made of.
        coverage: probability with which the interval covers, in (0, 1); None where there is none.
    """

    value: float
    lower: float | None
    upper: float | None
    count: int
    coverage: float | None

    def scaled(self, factor: float) -> "Estimate":
        """The estimate of `factor` times the quantity, factor > 0."""
        ends = [None if end is None else end * factor for end in (self.lower, self.upper)]
        return Estimate(self.value * factor, ends[0], ends[1], self.count, self.coverage)
