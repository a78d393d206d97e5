"""Effects of switches, and scaling over ranks: ratios of paired cells."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from torchtitan.runs.analysis.axes import BATCH, DATA, NAMED_AXES, SWITCHES, Axes, values_in_order
from torchtitan.runs.analysis.cells import Cell, arms, best_cell
from torchtitan.runs.analysis.measures import IMAGES, MEMORY, MFU
from torchtitan.statistics.interval import Interval, mean_interval

Paired = Literal["equal batch", "best batch"]
Kind = Literal["weak", "strong"]
# Work that is equal along a curve: images of a step on each process, or of all.
_EQUAL_WORK: dict[Kind, Callable[[Axes], Any]] = {
    "weak": lambda axes: axes["global_batch"] and Fraction(axes["global_batch"], axes["world_size"]),
    "strong": lambda axes: axes["global_batch"],
}
EFFECT_METRICS = (IMAGES, MFU, MEMORY)
MOST_VALUES = 6  # of a further axis that counts as a switch


@dataclass(frozen=True)
class Effect:
    """Effect of changing one switch.

    Attributes:
        ratios: metric's name -> after / before; metrics without a pair are left out.
        pairs: cells (before, after), equal in all other axes; with "best batch" each the best of its arm.
        alone: status of the partner -> number of measured cells without a measured partner; "none" where it never ran.
    """

    switch: str
    before: Any
    after: Any
    at: Paired
    ratios: dict[str, Interval]
    pairs: tuple[tuple[Cell, Cell], ...]
    alone: dict[str, int]


@dataclass(frozen=True)
class ScalingPoint:
    """Scaling point: one cell of a scaling curve.

    Attributes:
        efficiency: images/s per rank over that of the curve's smallest number of ranks, with its interval.
    """

    ranks: int
    cell: Cell
    efficiency: Interval


@dataclass(frozen=True)
class ScalingCurve:
    """Scaling curve: cells that differ in the number of ranks only, of equal work.

    Attributes:
        work: images of a step on each process (weak) or of all (strong).
    """

    kind: Kind
    work: Fraction
    axes: Axes
    points: tuple[ScalingPoint, ...]

    @property
    def batch(self) -> str:
        return f"{self.work} images a process" if self.kind == "weak" else f"global batch {self.work}"


def switches_of(cells: Sequence[Cell]) -> list[str]:
    """Switches to compare: axes with several values, the named ones, and further ones of few values."""
    further = dict.fromkeys(name for cell in cells for name in cell.axes if name not in (*NAMED_AXES, DATA))
    names = []
    for name in (*SWITCHES, *further):
        values = {cell.axes.get(name) for cell in cells} - {None}
        if len(values) > 1 and (name in SWITCHES or len(values) <= MOST_VALUES):
            names.append(name)
    return names


def all_effects(cells: Sequence[Cell]) -> list[Effect]:
    """Effects of all switches at equal batch and at each arm's best batch; those without a pair are left out."""
    best = [cell for arm in arms(cells).values() if (cell := best_cell(arm))]
    chosen_at: tuple[tuple[Paired, Sequence[Cell]], ...] = (("equal batch", cells), ("best batch", best))
    found = []
    for switch in switches_of(cells):
        values = values_in_order(switch, {cell.axes.get(switch) for cell in cells})
        for before, after in itertools.combinations(values, 2):
            for at, chosen in chosen_at:
                effect = effect_of(chosen, switch, before, after, at)
                if effect.pairs:
                    found.append(effect)
    return found


def effect_of(cells: Sequence[Cell], switch: str, before: Any, after: Any, at: Paired) -> Effect:
    """Effect of a switch from cells that are equal in all other axes.

    Args:
        cells: with "best batch" the best cell of every arm alone: then batches need not be equal.
    """
    ignored = ({"layout", "mesh"} if switch == "layout" else {switch}) | (set(BATCH) if at == "best batch" else set())
    firsts = {_rest(cell.axes, ignored): cell for cell in cells if cell.axes.get(switch) == before}
    seconds = {_rest(cell.axes, ignored): cell for cell in cells if cell.axes.get(switch) == after}
    pairs: list[tuple[Cell, Cell]] = []
    alone: Counter[str] = Counter()
    for key in dict.fromkeys((*firsts, *seconds)):
        first, second = firsts.get(key), seconds.get(key)
        if first and second and first.ok and second.ok:
            pairs.append((first, second))
        elif (first and first.ok) or (second and second.ok):
            other = second if first and first.ok else first
            alone[other.status if other else "none"] += 1
    ratios = {}
    for metric in EFFECT_METRICS:
        if found := [pair for pair in pairs if all(_usable(cell, metric.name) for cell in pair)]:
            ratios[metric.name] = mean_ratio(found, metric.name)
    return Effect(switch, before, after, at, ratios, tuple(pairs), dict(alone))


def mean_ratio(pairs: Sequence[tuple[Cell, Cell]], metric: str) -> Interval:
    """Geometric mean of the ratios after / before of pairs of cells, with Student's interval over their logarithms.

    The interval of one pair alone comes from those of its cells, as if their errors were independent.
    """
    logs = [math.log(after.measures[metric].value) - math.log(before.measures[metric].value) for before, after in pairs]
    mean = mean_interval(logs)
    lower, upper = mean.lower, mean.upper
    if len(logs) == 1:
        half = math.hypot(*(_log_half_width(cell.measures[metric]) for cell in pairs[0]))
        lower, upper = mean.value - half, mean.value + half
    value, lower, upper = (math.exp(end) for end in (mean.value, lower, upper))
    return Interval(value, lower, upper, len(logs), mean.coverage)


def scaling(cells: Sequence[Cell]) -> list[ScalingCurve]:
    """Scaling, weak and strong, of every arm that ran on several numbers of ranks; one process is the start of all."""
    curves = []
    for kind, equal in _EQUAL_WORK.items():
        ignored = {"world_size", "mesh", "layout", *BATCH}
        measured = [cell for cell in cells if _usable(cell, IMAGES.name) and cell.axes["world_size"] and equal(cell.axes)]
        measured.sort(key=lambda cell: cell.measures[IMAGES.name].value)  # of several meshes or accumulations the fastest counts
        groups: dict[tuple, list[Cell]] = {}
        for cell in measured:
            groups.setdefault((equal(cell.axes), *_rest(cell.axes, ignored)), []).append(cell)
        for (work, *_), members in groups.items():
            alone = [cell for cell in members if cell.axes["layout"] == "single"]
            for layout in values_in_order("layout", {cell.axes["layout"] for cell in members} - {"single"}):
                chosen = {cell.axes["world_size"]: cell for cell in members if cell.axes["layout"] == layout}
                chosen |= {1: alone[-1]} if alone else {}
                if len(chosen) > 1:
                    curves.append(_curve(kind, work, layout, [chosen[ranks] for ranks in sorted(chosen)]))
    return curves


def _curve(kind: Kind, work: Fraction, layout: str, cells: Sequence[Cell]) -> ScalingCurve:
    first = cells[0]
    points = [ScalingPoint(first.axes["world_size"], first, Interval(1.0))]
    for cell in cells[1:]:
        ranks = cell.axes["world_size"]
        efficiency = mean_ratio([(first, cell)], IMAGES.name).scaled(first.axes["world_size"] / ranks)
        points.append(ScalingPoint(ranks, cell, efficiency))
    return ScalingCurve(kind, work, first.axes | {"layout": layout}, tuple(points))


def _rest(axes: Axes, ignored: set[str]) -> tuple:
    return tuple((name, value) for name, value in axes.items() if name not in ignored)


def _usable(cell: Cell, metric: str) -> bool:
    value = cell.value(metric)
    return value is not None and value > 0


def _log_half_width(estimate: Interval) -> float:
    if estimate.lower <= 0 or not estimate.bounded:
        return math.inf
    return (math.log(estimate.upper) - math.log(estimate.lower)) / 2
