"""Statistics of samples to targets: best rates, hyperbolas and B_c over batch sizes, noise scales, their agreement."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from torchtitan.errors import unwrapped
from torchtitan.evaluation.config import LossTargetConfig
from torchtitan.evaluation.loss_targets import target_name
from torchtitan.experiments.cells import Row
from torchtitan.experiments.folder import StudyError
from torchtitan.files.regular import read_text
from torchtitan.statistics.interval import Interval
from torchtitan.statistics.rank_correlation import spearman
from torchtitan.statistics.ratio_intervals import fieller
from torchtitan.statistics.samples_to_target import (
    BestRate,
    EdgeOfGrid,
    Hyperbola,
    SamplesToTarget,
    best_learning_rate,
    fit_hyperbola,
    samples_at,
)
from torchtitan.statistics.student import student_quantile
from torchtitan_dit.studies.records import read_records
from torchtitan_dit.studies.training_grid import TABLE

SETTINGS, NOISE_SCALES = "settings.json", "noise_scales.csv"
# Age of a noise scale -> share of its run's own samples to the target. The first is the one of the comparison.
AGES = {"half": 0.5, "target": 1.0}
GEOMETRIES = ("plain", "adam")
LEAST_BATCHES = 4  # of a fit that can be rejected
RATIO = 2.0  # within which B is said to predict B_c
LEAST_RANK = 0.5
_RESAMPLES = 1000
_TAIL = 0.025

Seeds = Mapping[int, float]  # seed -> samples, infinite where the target was not reached


@dataclass(frozen=True)
class StudyRecord:
    """Record of a study, from its folder alone.

    Attributes:
        name: of the data set.
        settings: of the study.
        targets: names of the targets, as columns have them.
        rows: of its runs.
        noise: rows of its noise scales.
    """

    name: str
    settings: dict[str, Any]
    targets: list[str]
    rows: list[Row]
    noise: list[Row]

    @property
    def missing(self) -> int:
        """Number of planned runs without a row, those of extensions not counted."""
        there = {(int(row["batch"]), float(row["factor"]), int(row["seed"])) for row in self.rows if row["batch"]}
        there |= {key for row in self.rows if not row["batch"] and (key := _key_of(row["run"]))}
        planned = [
            (batch, factor, seed) for batch in self.settings["batches"] for factor in self.settings["factors"]
            for seed in range(self.settings["seeds"])
        ]  # fmt: skip
        return sum(key not in there for key in planned)

    @cached_property
    def samples(self) -> dict[str, dict[int, dict[float, dict[int, float]]]]:
        """Samples: target -> batch -> factor of the rate -> seed; those of a run that diverged are infinite."""
        found: dict[str, dict[int, dict[float, dict[int, float]]]] = {target: {} for target in self.targets}
        for row in self.rows:
            key = _key_of(row["run"])
            if key and row["status"] in ("ok", "diverged"):
                batch, factor, seed = key
                for target, of_batches in found.items():
                    value = float(row[target]) if row["status"] == "ok" else math.inf
                    of_batches.setdefault(batch, {}).setdefault(factor, {})[seed] = value
        return found

    @cached_property
    def noise_sums(self) -> dict[tuple[str, str, str], dict[int, tuple[float, float]]]:
        """Noise and signal: (target, geometry, age) -> seed."""
        found: dict[tuple[str, str, str], dict[int, tuple[float, float]]] = {}
        for row in self.noise:
            if row["noise"] and row["signal"]:
                sums = float(row["noise"]), float(row["signal"])
                found.setdefault((row["target"], row["geometry"], row["age"]), {})[int(row["seed"])] = sums
        return found

    def rate(self, batch: int, factor: float) -> float:
        """Learning rate of a batch size at a factor."""
        for row in self.rows:
            if row["batch"] and int(row["batch"]) == batch:
                return float(row["lr"]) * factor / float(row["factor"])
        return math.nan


def part_of(loss: str) -> str:
    """Part of the noise scale that belongs to a loss: the number of its timestep bin, or all."""
    found = re.search(r"_by_bin/(\d+)$", loss)
    return found[1] if found else "all"


def read_study(path: Path) -> StudyRecord:
    """Read a study's folder; of two rows of a run, the later counts. Raises StudyError."""
    try:
        settings = dict(json.loads(read_text(path / SETTINGS)))
        name = str(settings["data"])
        targets = [target_name(LossTargetConfig(loss=loss, value=value)) for loss, value in settings["targets"]]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StudyError(f"{path}: holds no record of samples_to_target: {unwrapped(error)}") from error
    needed = ("status", "batch", "factor", "seed", *targets)
    rows = read_records(path / TABLE, "samples_to_target", needed, ("run",))
    scales, key = path / NOISE_SCALES, ("run", "target", "geometry", "age")
    noise = read_records(scales, "samples_to_target", ("seed", "signal", "noise"), key) if scales.exists() else []
    return StudyRecord(name, settings, targets, rows, noise)


def _key_of(run: str) -> tuple[int, float, int] | None:
    found = re.fullmatch(r"b(\d+)_f([\d.e+-]+)_s(\d+)", run)
    return (int(found[1]), float(found[2]), int(found[3])) if found else None


# ---------------------------------------------------------------------- best rates


@dataclass(frozen=True)
class Tuned:
    """Samples to a target at a batch size's best learning rate.

    Attributes:
        best: of the mean over seeds; its rate is the factor. None without one.
        reason: why there is none.
        seeds: samples of each seed at that rate; empty without one.
    """

    best: BestRate | None
    reason: str
    seeds: tuple[float, ...]


def tuned(of_rates: Mapping[float, Seeds], seeds: Sequence[int] | None = None) -> Tuned:
    """Tune the learning rate of a batch size by the mean of its seeds.

    Args:
        of_rates: factor of the rate -> seed -> samples.
        seeds: to take, with repetitions; None: those that every rate has.
    """
    if seeds is None:
        seeds = sorted(set.intersection(*(set(of_seeds) for of_seeds in of_rates.values()))) if of_rates else []
    if len(seeds) < 2:
        return Tuned(None, "fewer than two seeds at every rate", ())
    try:
        best = best_learning_rate({rate: fmean(of_seeds[seed] for seed in seeds) for rate, of_seeds in of_rates.items()})
    except (EdgeOfGrid, ValueError) as error:
        return Tuned(None, str(error), ())
    if not best.interpolated:
        return Tuned(best, "", tuple(of_rates[best.of_grid][seed] for seed in seeds))
    each = [samples_at({rate: of[seed] for rate, of in of_rates.items()}, best.of_grid, best.lr) for seed in seeds]
    return Tuned(best, "", tuple(each))


def edges_of(record: StudyRecord, batch: int) -> set[str]:
    """Sides, lowest and highest, on which the best rate of a batch size to any target is at the edge of the grid."""
    sides = set()
    for target in record.targets:
        of_rates = record.samples[target].get(batch, {})
        seeds = sorted(set.intersection(*(set(of) for of in of_rates.values()))) if of_rates else []
        means = {rate: fmean(of[seed] for seed in seeds) for rate, of in of_rates.items()} if seeds else {}
        finite = {rate: mean for rate, mean in means.items() if math.isfinite(mean)}
        if finite:
            best = min(finite, key=lambda rate: finite[rate])
            sides |= {side for side, edge in (("lowest", min(means)), ("highest", max(means))) if best == edge}
    return sides


# ---------------------------------------------------------------------- hyperbolas


@dataclass(frozen=True)
class TargetResult:
    """Samples to a target over batch sizes.

    Attributes:
        tuned: batch size -> its tuning.
        fit: of the tuned batch sizes; None where they are too few or not fitted.
        reason: why there is no fit.
        noise: (geometry, age) -> noise scale.
    """

    tuned: dict[int, Tuned]
    fit: Hyperbola | None
    reason: str
    noise: dict[tuple[str, str], Interval]

    @property
    def critical(self) -> Interval | None:
        """B_c, where there is one: of a hyperbola that is not rejected."""
        return self.fit.critical if self.fit and not self.fit.rejected() else None


def target_result(record: StudyRecord, target: str, seeds: Sequence[int] | None = None) -> TargetResult:
    """Result of a target; seeds as of `tuned`."""
    of_batches = {batch: tuned(of_rates, seeds) for batch, of_rates in sorted(record.samples[target].items())}
    rows = [SamplesToTarget.of_runs(batch, found.seeds) for batch, found in of_batches.items() if found.seeds]
    fit, reason = None, ""
    if len(rows) < LEAST_BATCHES:
        reason = f"{len(rows)} tuned batch sizes, {LEAST_BATCHES} are needed"
    else:
        try:
            fit = fit_hyperbola(rows)
        except ValueError as error:
            reason = str(error)
    noise = {
        (geometry, age): noise_scale(record.noise_sums.get((target, geometry, age), {}), seeds)
        for geometry in GEOMETRIES for age in AGES
    }  # fmt: skip
    return TargetResult(of_batches, fit, reason, noise)


def noise_scale(by_seed: Mapping[int, tuple[float, float]], seeds: Sequence[int] | None = None) -> Interval:
    """Noise scale over seeds: mean noise over mean signal, with Fieller's interval between seeds; NaN without two seeds.

    Args:
        by_seed: noise and signal of each seed.
        seeds: as of `tuned`.
    """
    values = np.array([by_seed[seed] for seed in (by_seed if seeds is None else seeds) if seed in by_seed])
    if len(values) < 2:
        return Interval(math.nan)
    noise, signal = values.mean(0)
    covariance = np.cov(values.T) / len(values)
    lower, upper, unbounded = fieller(
        float(noise), float(signal), float(covariance[0, 0]), float(covariance[1, 1]), float(covariance[0, 1]),
        student_quantile(1 - _TAIL, len(values) - 1.0),
    )  # fmt: skip
    value = math.nan if unbounded else float(noise / signal)
    return Interval(value, max(lower, 0.0), max(upper, 0.0), len(values), 1 - 2 * _TAIL)  # no noise is negative


def ratio(critical: Interval | None, noise: Interval) -> Interval:
    """Ratio B_c / B, both intervals at their worst; NaN where one is not known."""
    known = critical is not None and critical.bounded and critical.lower > 0 and noise.bounded and noise.lower > 0
    if critical is None or not known:
        return Interval(math.nan)
    return Interval(critical.value / noise.value, critical.lower / noise.upper, critical.upper / noise.lower)


# ---------------------------------------------------------------------- agreement over bins


@dataclass(frozen=True)
class Agreement:
    """Agreement of the bins' B_c with their noise scales.

    Attributes:
        rank: Spearman's correlation over bins, with percentiles of resampled seeds.
        bins: number of them with both.
        geometry: of the noise scales.
    """

    rank: Interval
    bins: int
    geometry: str


def agreements(record: StudyRecord, results: Mapping[str, TargetResult], seed: int = 0) -> list[Agreement]:
    """Agreement in each geometry over the bins whose hyperbola is not rejected, at the age of the comparison.

    Args:
        record: of the study.
        results: target -> its result.
        seed: of the resamples.
    """
    seeds = sorted({int(row["seed"]) for row in record.rows if row["batch"]})
    generator = np.random.default_rng(seed)
    drawn = [tuple(sorted(generator.choice(seeds, len(seeds)).tolist())) for _ in range(_RESAMPLES if seeds else 0)]

    @cache  # few seeds have few different resamples
    def again(name: str, of_seeds: tuple[int, ...]) -> TargetResult | None:
        try:
            return target_result(record, name, of_seeds)
        except KeyError:  # a seed that a rate lacks
            return None

    found = []
    for geometry in GEOMETRIES:
        bins = [
            name for name, result in results.items()
            if part_of(name.partition(" ")[0]) != "all" and result.critical and _both(result, geometry)
        ]  # fmt: skip
        if len(bins) < 3:
            found.append(Agreement(Interval(math.nan), len(bins), geometry))
            continue
        value = _rank([_both(results[name], geometry) for name in bins])
        ranks = {
            of_seeds: _rank([_both(again(name, of_seeds), geometry) for name in bins])
            for of_seeds in set(drawn) if len(set(of_seeds)) > 1
        }  # fmt: skip
        known = [ranks[of_seeds] for of_seeds in drawn if math.isfinite(ranks.get(of_seeds, math.nan))]
        lower, upper = np.quantile(known, [_TAIL, 1 - _TAIL]) if known else (math.nan, math.nan)
        found.append(Agreement(Interval(value, float(lower), float(upper), len(seeds), 1 - 2 * _TAIL), len(bins), geometry))
    return found


def _both(found: TargetResult | None, geometry: str) -> tuple[float, float] | None:
    """B_c and B of a bin, that of a rejected hyperbola too; None where one has no value."""
    noise = found.noise[geometry, next(iter(AGES))].value if found else math.nan
    if found is None or found.fit is None or math.isnan(noise) or not found.fit.critical.value > 0:
        return None
    return found.fit.critical.value, noise


def _rank(pairs: Sequence[tuple[float, float] | None]) -> float:
    known = np.array([pair for pair in pairs if pair is not None])
    if len(known) < 3:
        return math.nan
    return float(spearman(known[:, 0], known[:, 1], np.ones(len(known))))
