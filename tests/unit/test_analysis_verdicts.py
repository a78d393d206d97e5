"""Verdicts of the analysis: few false ones where nothing has an effect, true ones where something has."""

import itertools
import math
import random

import pytest

from torchtitan.runs.analysis.cells import Cell
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.effects import all_effects, geometric_mean, interactions
from torchtitan.runs.analysis.findings import Results, headlines, tables
from torchtitan.runs.analysis.verdicts import verdicts
from torchtitan.statistics.interval import Interval, positive_interval

SWITCHES = {"compile": ("false", "true"), "ac": ("none", "selective"), "layout": ("ddp", "fsdp"), "dtype": ("bfloat16", "float8")}
IMAGES = "images_per_second"
FIXED = {
    "model": "m", "patch": 2, "mesh": None, "world_size": 2, "device": "d", "compile": "false", "ac": "none", "layout": "ddp",
    "dtype": "bfloat16",
}  # fmt: skip


def cell(rates: list[float], **axes) -> Cell:
    """A cell of repeats with these rates."""
    named = FIXED | {"local_batch": 8, "global_batch": 16} | axes
    runs = [Run(f"r{n}", None, named, n, "ok", measures={IMAGES: Interval(rate)}) for n, rate in enumerate(rates)]
    return Cell(named, runs, {IMAGES: positive_interval(rates) if len(rates) > 1 else Interval(rates[0], 0.9, 1.1, 9)})


def grid(draw: random.Random, effect: float = 0.0) -> list[Cell]:
    """Every combination of the switches at two batches; log-normal noise, and one effect of compiling."""
    cells = []
    for values in itertools.product(*SWITCHES.values()):
        for batch in (8, 16):
            axes = dict(zip(SWITCHES, values, strict=True)) | {"local_batch": batch, "global_batch": 2 * batch}
            log = math.log(10.0 * batch) + effect * (axes["compile"] == "true") + draw.gauss(0, 0.02)
            cells.append(cell([math.exp(log)], **axes))
    return cells


def test_false_differences_are_as_rare_as_promised_where_nothing_has_an_effect():
    """150 grids of 4 + 4 effects and 6 interactions, under the null hypothesis."""
    draw, grids = random.Random(0), 150
    found = {"effects": [0, 0], "interactions": [0, 0]}
    for _ in range(grids):
        cells = grid(draw)
        for name, comparisons in (("effects", all_effects(cells)), ("interactions", interactions(cells))):
            assert len(comparisons) == (8 if name == "effects" else 6)
            found[name][0] += any(one.ratios[IMAGES].excludes(1.0) for one in comparisons)
            found[name][1] += any(verdict.outcome == "significant" for verdict in verdicts(comparisons))
    # Binomial of 150 and 0.05: above 15 with a probability of 0.3 %.
    assert all(corrected <= 15 for _, corrected in found.values()), found
    assert all(alone >= 25 for alone, _ in found.values()), found  # what the correction is for


def test_one_pair_of_cells_is_tested_by_its_repeats():
    draw, trials = random.Random(1), 600
    p_values = []
    for _ in range(trials):
        sides = [cell([math.exp(draw.gauss(0, noise)) for _ in range(repeats)]) for noise, repeats in ((0.02, 3), (0.05, 5))]
        p_values.append(geometric_mean([((sides[0],), (sides[1],))], IMAGES).p_value)
    # Welch's test is approximate; 6 % of 600 and three standard errors of it.
    assert sum(p <= 0.05 for p in p_values) <= 600 * 0.06 + 3 * math.sqrt(600 * 0.06 * 0.94)
    assert 0.4 < sum(p_values) / trials < 0.6
    clear = geometric_mean([((cell([1.30, 1.31, 1.32]),), (cell([1.0, 1.01, 0.99]),))], IMAGES)
    assert clear.p_value < 1e-3
    # By hand: equal variances and counts make it Student's test of 2 + 2 degrees of freedom.
    logs = (-0.1, 0.0, 0.1), (0.2, 0.3, 0.4)
    pair = geometric_mean([tuple((cell([math.exp(x) for x in side]),) for side in logs)], IMAGES)
    t = 0.3 / (0.1 * math.sqrt(2 / 3))
    sine = t / math.sqrt(4 + t * t)
    assert pair.p_value == pytest.approx(1 - 1.5 * sine + 0.5 * sine**3, abs=1e-9)


def test_a_pair_of_single_runs_is_not_tested():
    ratio = geometric_mean([((cell([1.3]),), (cell([1.0, 1.1]),))], IMAGES)
    assert ratio.p_value is None
    (verdict, other) = verdicts(all_effects([cell([1.3], compile="true"), cell([1.0], compile="false")]))
    assert verdict.outcome == other.outcome == "untested" and verdict.text == "not tested: single runs"


def test_every_comparison_is_reported_with_its_verdict():
    cells = grid(random.Random(2), effect=0.3)
    results = Results([], cells, all_effects(cells), interactions(cells), [], [])
    lines = headlines(results)
    effects = [line for line in lines if " pairs" in line]
    assert len(effects) == 8
    assert [("no significant difference" in line) for line in effects] == [False, False, *[True] * 6]
    assert "Interactions of two switches on images/s: 6, of which 0 significant; no significant difference: 6." in lines
    found = {table.heading: table for table in tables(results)}
    for heading, count in (("Effect of each switch", 8), ("Interaction of switches", 6)):
        table = found[heading]
        place = table.columns.index("difference in images/s")
        assert len(table.rows) == count and all(row[place] for row in table.rows)


def test_a_significant_interaction_is_a_headline():
    cells = [
        cell([100.0 * batch * (2.0 if (ac, compiled) == ("none", "true") else 1.0) * (1 + wiggle)],
             compile=compiled, ac=ac, local_batch=batch, global_batch=2 * batch)
        for compiled in ("false", "true") for ac in ("none", "selective")
        for batch, wiggle in ((8, 0.01 * (ac == "none")), (16, 0.0), (32, -0.01 * (compiled == "true")), (64, 0.005))
    ]  # fmt: skip
    results = Results([], cells, all_effects(cells), interactions(cells), [], [])
    lines = [line for line in headlines(results) if "is multiplied by" in line]
    assert len(lines) == 1 and "0.5" in lines[0]
