"""Results of a grid of trained runs: losses by group, arm, seed and timestep bin."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from research.cells import Row
from research.frame import number

Score = Callable[[Sequence[float], Sequence[float]], float]


@dataclass
class GridResults:
    """Results of a grid, by group, arm and seed.

    Attributes:
        rows: of the table.
        arms: (group, label) in order; the first of a group is its reference.
        weights: to compare.
        planned: samples of the points to compare; empty: those of all rows. A run without a checkpoint there, as its batch
            has grown, has between its neighbours each bin's ln error on a line in ln samples.
    """

    rows: list[Row]
    arms: list[tuple[str, str]]
    weights: str
    planned: InitVar[Sequence[int]] = ()
    _errors: dict[tuple, dict[int, float]] = field(init=False, repr=False)
    _checkpoints: dict[tuple, list[int]] = field(init=False, repr=False)
    _steps: dict[tuple, dict[int, int]] = field(init=False, repr=False)

    def __post_init__(self, planned: Sequence[int]) -> None:
        self._errors = {}
        for row in self.rows:
            if row["status"] == "ok":
                key = (row["group"], row["settings"], int(row["seed"]), row["weights"], int(row["samples"]))
                self._errors.setdefault(key, {})[int(row["bin"])] = number(row, "error")
        # What was to be measured counts, failed or not: a bin, a checkpoint or a seed must not drop out unseen.
        asked = [row for row in self.rows if row["bin"]]
        bins = {int(row["bin"]): number(row, "share") for row in asked}
        self.shares = [bins[place] for place in sorted(bins)]
        self.seeds = sorted({int(row["seed"]) for row in self.rows})
        of_runs: dict[tuple, dict[int, int]] = {}
        for row in asked:
            run = (row["group"], row["settings"], int(row["seed"]), row["weights"])
            of_runs.setdefault(run, {})[int(row["samples"])] = int(row["step"])
        self._checkpoints = {run: sorted(found) for run, found in of_runs.items()}
        self._steps = {run: found for run, found in of_runs.items() if run[3] == self.weights}
        self.samples = sorted(planned) or sorted({int(row["samples"]) for row in asked})
        self.images = max((int(row["images"]) for row in asked), default=0)
        self.parametrisation = self.rows[0]["parametrisation"] if self.rows else ""

    @property
    def measured(self) -> bool:
        """True if there is anything to report."""
        return bool(self._errors)

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(group for group, _ in self.arms))

    def labels(self, group: str) -> list[str]:
        """Labels of a group's arms, its reference first."""
        return [label for of_group, label in self.arms if of_group == group]

    def legend(self, group: str, arm: str) -> str:
        """Legend: the arm's label, with the number of its seeds if it lost some."""
        there = sum(bool(self.errors(group, arm, seed, self.samples[-1])) for seed in self.seeds)
        return arm if there == len(self.seeds) else f"{arm} ({there} of {len(self.seeds)} seeds)"

    def errors(self, group: str, arm: str, seed: int, samples: int, weights: str | None = None) -> list[float]:
        """Errors in every bin, or nothing if some are missing."""
        run = (group, arm, seed, weights or self.weights)
        there = self._checkpoints.get(run, [])
        after = bisect.bisect_left(there, samples)
        if after == len(there) or there[after] == samples or after == 0:
            return self._measured_at(run, samples)
        start, end = there[after - 1], there[after]
        first, last = self._measured_at(run, start), self._measured_at(run, end)
        share = math.log(samples / start) / math.log(end / start)
        return [one ** (1 - share) * other**share for one, other in zip(first, last, strict=True)] if first and last else []

    def _measured_at(self, run: tuple, samples: int) -> list[float]:
        found = self._errors.get((*run, samples), {})
        complete = len(found) == len(self.shares)
        return [found[place] for place in sorted(found)] if complete else []

    def steps(self, group: str, arm: str) -> dict[int, int]:
        """Optimizer steps of each run at its last checkpoint: seed -> steps."""
        return {run[2]: max(found.values()) for run, found in self._steps.items() if run[:2] == (group, arm)}

    def scores(
        self, group: str, arm: str, score: Score, samples: int | None = None, weights: str | None = None
    ) -> dict[int, float]:
        """Scores: seed -> ln loss at a number of samples, the last by default."""
        found = {}
        for seed in self.seeds:
            if errors := self.errors(group, arm, seed, samples or self.samples[-1], weights):
                found[seed] = score(errors, self.shares)
        return found

    def of_bin(self, group: str, arm: str, place: int) -> dict[int, float]:
        """Losses of one bin at the end: seed -> ln loss."""
        found = {seed: self.errors(group, arm, seed, self.samples[-1]) for seed in self.seeds}
        return {seed: math.log(errors[place]) for seed, errors in found.items() if errors}
