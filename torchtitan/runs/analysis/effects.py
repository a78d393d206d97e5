"""Effects of switches, their interactions, and scaling over ranks: ratios of paired cells."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from torchtitan.runs.analysis.axes import BATCH, DATA, NAMED_AXES, SWITCHES, Axes, context_degree, values_in_order
from torchtitan.runs.analysis.cells import Cell, arms, best_cell
from torchtitan.runs.analysis.measures import IMAGES, MEMORY, MFU
from torchtitan.statistics.interval import Interval, mean_interval
from torchtitan.statistics.student import student_quantile, student_two_sided

Paired = Literal["equal batch", "best batch"]
Kind = Literal["weak", "strong"]
# Work that is equal along a curve: images of each process and forward, which are parts of images where processes share
# tokens; images of a step.
_EQUAL_WORK: dict[Kind, Callable[[Axes], Any]] = {
    "weak": lambda axes: axes["local_batch"] and Fraction(axes["local_batch"], context_degree(axes)),
    "strong": lambda axes: axes["global_batch"],
}
EFFECT_METRICS = (IMAGES, MFU, MEMORY)
MOST_VALUES = 6  # of a further axis that counts as a switch


@dataclass(frozen=True)
class Ratio(Interval):
    """Geometric mean of `count` ratios with its 95 % interval, that of the cells themselves for a single ratio.

    Attributes:
        ratios: each of them.
        p_value: two-sided, of no effect; None of a single ratio with a cell of a single run.
    """

    ratios: tuple[float, ...] = ()
    p_value: float | None = None


@dataclass(frozen=True)
class Effect:
    """Effect of changing one switch.

    Attributes:
        switch, before, after: the axis and its two values.
        at: rule of pairing.
        ratios: metric's name -> after / before; metrics without a pair are left out.
        pairs: cells (before, after), equal in all other axes; with "best batch" each the best of its arm.
        alone: status of the partner -> number of measured cells without a measured partner; "none" where it never ran.
    """

    switch: str
    before: Any
    after: Any
    at: Paired
    ratios: dict[str, Ratio]
    pairs: tuple[tuple[Cell, Cell], ...]
    alone: dict[str, int]


@dataclass(frozen=True)
class Interaction:
    """Interaction: dependence of one switch's effect on another.

    Attributes:
        first, second: (switch, before, after); their order has no meaning.
        ratios: metric's name -> effect of the first with `after` of the second, over that with its `before`.
    """

    first: tuple[str, Any, Any]
    second: tuple[str, Any, Any]
    ratios: dict[str, Ratio]


@dataclass(frozen=True)
class ScalingPoint:
    """Scaling point: one cell of a scaling curve.

    Attributes:
        ranks: processes.
        cell: measured.
        efficiency: images/s per rank over that of the curve's smallest number of ranks, with its interval.
    """

    ranks: int
    cell: Cell
    efficiency: Interval


@dataclass(frozen=True)
class ScalingCurve:
    """Scaling curve: cells that differ in the number of ranks only, at an equal batch per rank (weak) or in all
    (strong).
    """

    kind: Kind
    axes: Axes
    points: tuple[ScalingPoint, ...]


def switches_of(cells: Sequence[Cell]) -> list[str]:
    """Switches to compare: axes with several values, the named ones, and further ones of few values."""
    further = dict.fromkeys(name for cell in cells for name in cell.axes if name not in (*NAMED_AXES, DATA))
    names = []
    for name in (*SWITCHES, *further):
        values = {cell.axes.get(name) for cell in cells} - {None}
        if len(values) > 1 and (name in SWITCHES or len(values) <= MOST_VALUES):
            names.append(name)
    return names


def contrasts(cells: Sequence[Cell], switch: str) -> list[tuple[Any, Any]]:
    """Contrasts: every (before, after) of a switch's values, the first one in the order of values before."""
    return list(itertools.combinations(values_in_order(switch, {cell.axes.get(switch) for cell in cells}), 2))


def all_effects(cells: Sequence[Cell]) -> list[Effect]:
    """Effects of all switches at equal batch and at each arm's best batch; those without a pair are left out."""
    best = [cell for arm in arms(cells).values() if (cell := best_cell(arm))]
    found = []
    for switch in switches_of(cells):
        for before, after in contrasts(cells, switch):
            chosen_at: tuple[tuple[Paired, Sequence[Cell]], ...] = (("equal batch", cells), ("best batch", best))
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
    ignored = _dependent(switch) | (set(BATCH) if at == "best batch" else set())
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
            ratios[metric.name] = geometric_mean([(pair[1:], pair[:1]) for pair in found], metric.name)
    return Effect(switch, before, after, at, ratios, tuple(pairs), dict(alone))


def interactions(cells: Sequence[Cell]) -> list[Interaction]:
    """Interactions of every two switches, each against its first value: fours of cells that differ in these two alone.
    """
    found = []
    for one, other in itertools.combinations(switches_of(cells), 2):
        for change, condition in itertools.product(*(_against_first(cells, switch) for switch in (one, other))):
            ignored = _dependent(one) | _dependent(other)
            index = {
                (_rest(cell.axes, ignored), cell.axes.get(one), cell.axes.get(other)): cell for cell in cells if cell.ok
            }
            fours = []
            for rest in dict.fromkeys(key[0] for key in index):
                corners = [(change[1], condition[1]), (change[0], condition[0]),
                           (change[0], condition[1]), (change[1], condition[0])]
                four = [cell for corner in corners if (cell := index.get((rest, *corner)))]
                if len(four) == len(corners):
                    fours.append((four[:2], four[2:]))
            ratios = {}
            for metric in (IMAGES, MEMORY):
                usable = [four for four in fours if all(_usable(cell, metric.name) for side in four for cell in side)]
                if usable:
                    ratios[metric.name] = geometric_mean(usable, metric.name)
            if ratios:
                found.append(Interaction((one, *change), (other, *condition), ratios))
    return found


def geometric_mean(pairs: Sequence[tuple[Sequence[Cell], Sequence[Cell]]], metric: str) -> Ratio:
    """Geometric mean of ratios of cells, with Student's interval over the logarithms.

    Args:
        pairs: (cells above, cells below) each; a ratio is the product of the former over that of the latter.
        metric: of every cell, positive.

    Returns:
        the mean; of one ratio alone interval and p-value come from those of its cells, as if their errors were independent,
        with Welch's degrees of freedom.
    """
    logs = [
        sum(math.log(cell.known(metric)) for cell in above) - sum(math.log(cell.known(metric)) for cell in below)
        for above, below in pairs
    ]
    mean = mean_interval(logs)
    lower, upper = mean.lower, mean.upper
    if len(logs) == 1:
        cells = [cell for side in pairs[0] for cell in side]
        half = math.hypot(*(_log_half_width(cell.measures[metric]) for cell in cells))
        lower, upper = mean.value - half, mean.value + half
        p_value = _p_value_of_cells(mean.value, cells, metric)
    else:
        degrees = len(logs) - 1.0
        p_value = _p_value(mean.value, mean.half_width / student_quantile(0.975, degrees), degrees)
    ends = math.exp(lower), math.exp(min(upper, 700.0))
    return Ratio(math.exp(mean.value), *ends, len(logs), mean.coverage, tuple(map(math.exp, logs)), p_value)


def scaling(cells: Sequence[Cell]) -> list[ScalingCurve]:
    """Scaling, weak and strong, of every arm that ran on several numbers of ranks; one process is the start of all."""
    curves = []
    for kind, equal in _EQUAL_WORK.items():
        ignored = {"world_size", "mesh", "layout", *BATCH}
        measured = [cell for cell in cells if _usable(cell, IMAGES.name) and cell.axes["world_size"]]
        measured.sort(key=lambda cell: cell.known(IMAGES.name))  # of several meshes or accumulations the fastest counts
        groups: dict[tuple, list[Cell]] = {}
        for cell in measured:
            groups.setdefault((equal(cell.axes), *_rest(cell.axes, ignored)), []).append(cell)
        for members in groups.values():
            alone = [cell for cell in members if cell.axes["layout"] == "single"]
            for layout in values_in_order("layout", {cell.axes["layout"] for cell in members} - {"single"}):
                chosen = {cell.axes["world_size"]: cell for cell in members if cell.axes["layout"] == layout}
                chosen |= {1: alone[-1]} if alone else {}
                if len(chosen) > 1:
                    curves.append(_curve(kind, layout, [chosen[ranks] for ranks in sorted(chosen)]))
    return curves


def pareto(cells: Sequence[Cell]) -> list[Cell]:
    """Pareto front: cells not beaten in both memory and images/s, memory rising; of comparable cells only."""
    front: list[Cell] = []
    measured = [cell for cell in cells if _usable(cell, IMAGES.name) and _usable(cell, MEMORY.name)]
    for cell in sorted(measured, key=lambda cell: (cell.known(MEMORY.name), -cell.known(IMAGES.name))):
        if not front or cell.known(IMAGES.name) > front[-1].known(IMAGES.name):
            front.append(cell)
    return front


def _curve(kind: Kind, layout: str, cells: Sequence[Cell]) -> ScalingCurve:
    first = cells[0]
    points = []
    for cell in cells:
        ranks = cell.axes["world_size"]
        share = first.axes["world_size"] / ranks
        if cell is first:
            efficiency = Interval(1.0)
        else:
            efficiency = geometric_mean([((cell,), (first,))], IMAGES.name).scaled(share)
        points.append(ScalingPoint(ranks, cell, efficiency))
    return ScalingCurve(kind, first.axes | {"layout": layout}, tuple(points))


def _against_first(cells: Sequence[Cell], switch: str) -> list[tuple[Any, Any]]:
    values = values_in_order(switch, {cell.axes.get(switch) for cell in cells})
    return [(values[0], value) for value in values[1:]]


def _dependent(switch: str) -> set[str]:
    return {"layout", "mesh"} if switch == "layout" else {switch}


def _rest(axes: Axes, ignored: set[str]) -> tuple:
    return tuple((name, value) for name, value in axes.items() if name not in ignored)


def _usable(cell: Cell, metric: str) -> bool:
    value = cell.value(metric)
    return value is not None and value > 0


def _p_value_of_cells(log_ratio: float, cells: Sequence[Cell], metric: str) -> float | None:
    """P-value of one ratio by the repeats of its cells, Welch's test over logarithms; None if one has a single run.

    Source: Welch, "The generalization of 'Student's' problem when several different population variances are involved", 1947.
    """
    if any(cell.single for cell in cells):
        return None
    degrees = [cell.measures[metric].count - 1.0 for cell in cells]
    halves = [_log_half_width(cell.measures[metric]) for cell in cells]
    if not all(math.isfinite(half) for half in halves) or min(degrees) < 1:
        return None
    variances = [(half / student_quantile(0.975, n)) ** 2 for half, n in zip(halves, degrees, strict=True)]
    total, fourth = sum(variances), sum(v**2 / n for v, n in zip(variances, degrees, strict=True))
    return _p_value(log_ratio, math.sqrt(total), total**2 / fourth if fourth else sum(degrees))


def _p_value(log_ratio: float, error: float, degrees: float) -> float:
    if error == 0:
        return 1.0 if log_ratio == 0 else 0.0
    return student_two_sided(log_ratio / error, degrees)


def _log_half_width(estimate: Interval) -> float:
    if estimate.lower <= 0 or not estimate.bounded:
        return math.inf
    return (math.log(estimate.upper) - math.log(estimate.lower)) / 2
