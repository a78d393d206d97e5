"""Samples to target losses: batch size x learning rate x seed, each run stopped at the last target, and B beside B_c.

A run ends when every loss of `validation.targets` has come down to its value, or at its cap. Its row in training.csv has the
samples to each target; where the configuration's own batch size and rate are trained, noise_scales.csv has the gradient noise
scale of each target's bin. Protocol and results: docs/critical_batch.md.
"""

import argparse
import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.config.job import JobConfig
from torchtitan.evaluation.loss_targets import TARGETS, target_name
from torchtitan.experiments.folder import STUDY_MARKS, ResultsFolder, StudyError
from torchtitan.experiments.record import ResultTable
from torchtitan.experiments.training import TrainingFailed
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_regular
from torchtitan.pictures.number_text import counted
from torchtitan.settings.schema import quoted
from torchtitan.settings.sizes import largest_divisor
from torchtitan.training.metric_points import iter_points
from torchtitan.training.metrics import METRICS_FILE
from torchtitan_dit.studies import grid_options
from torchtitan_dit.studies.critical_batch_report import noise_sums
from torchtitan_dit.studies.equal_samples import LR_RULES
from torchtitan_dit.studies.grid_options import at_least
from torchtitan_dit.studies.records import write_summary
from torchtitan_dit.studies.samples_to_target_report import NAME, studies_text
from torchtitan_dit.studies.samples_to_target_statistics import (
    AGES,
    NOISE_SCALES,
    SETTINGS,
    edges_of,
    part_of,
    read_study,
)
from torchtitan_dit.studies.training_grid import GridRun, RunRecord, TrainingGrid, plan_grid, train_grid

RUN_COLUMNS = ("batch", "lr", "factor", "seed", "steps", "images", "at_most", "machine", "commit")
NOISE_KEY = ("run", "target", "geometry", "age")
NOISE_COLUMNS = (*NOISE_KEY, "batch", "lr", "seed", "images", "step", "signal", "noise", "b_simple", "lower", "upper")


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_training_options(parser, NAME, seeds=3)
    add = parser.add_argument
    add("--batches", type=grid_options.batch_list, required=True, metavar="LIST", help="global batch sizes, commas between; "
        "the configuration's among them")
    add("--factors", type=factor_list, default=[0.25, 0.5, 1.0, 2.0, 4.0], metavar="LIST", help="learning rates of each batch "
        "size, as multiples of the rule's; 1 among them, commas between (default: 0.25,0.5,1,2,4)")
    add("--rule", choices=LR_RULES, default="sqrt", help="learning rate of a batch size, from the configuration's "
        "(default: sqrt)")
    add("--extensions", type=at_least(0), default=2, metavar="N", help="further rates that a batch size is given on each side, "
        "one by one, while the best rate to a target is at that edge (default: 2)")
    add("--samples", type=at_least(1), required=True, metavar="N", help="cap of a run, in images ...")
    add("--steps", type=at_least(0), default=0, metavar="M", help="... and steps in addition: N + M x batch (default: 0)")


def factor_list(text: str) -> list[float]:
    """Parse positive factors with commas between, rising."""
    factors = sorted({float(word) for word in text.split(",")})
    if not (factors[0] > 0 and math.isfinite(factors[-1])):
        raise argparse.ArgumentTypeError(f"must be positive, has {factors[0]:g}")
    return factors


factor_list.__name__ = "numbers"


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train the missing runs; return summary.md. Raises StudyError, ConfigError, LauncherError."""
    base = read_base(arguments)
    folder = grid_options.study_folder(arguments, base, NAME)
    _check(arguments, base)
    hold_to_settings(folder, arguments, base)
    factors = {batch: list(arguments.factors) for batch in arguments.batches}
    retry = arguments.retry_failed
    while True:
        runs = plan_runs(arguments, base, factors)
        grid = plan_grid(base, runs, folder, arguments.processes)
        _write_settings(folder, arguments, base)
        columns = (*RUN_COLUMNS, *map(target_name, base.validation.targets))
        train_grid(grid, retry, RunRecord(columns, partial(record_run, grid, {run.name: run.factor for run in runs})))
        wider = extended(factors, folder, arguments)
        if wider == factors:
            return write_summary(folder, NAME, lambda place: studies_text([read_study(folder)], place))
        factors, retry = wider, False


def read_base(arguments: argparse.Namespace) -> JobConfig:
    """Base of all runs: the configuration, validated up to its targets, without samples. Raises StudyError, ConfigError."""
    base = grid_options.read_base(arguments)
    validation = dataclasses.replace(base.validation, enable=True, stop_at_targets=True)
    checkpoint = dataclasses.replace(base.checkpoint, keep_latest_k=1)
    return dataclasses.replace(base, validation=validation, checkpoint=checkpoint)


def _check(arguments: argparse.Namespace, base: JobConfig) -> None:
    """Refuse what has no answer. Raises StudyError."""
    config, training, schedule = arguments.config, base.training, base.lr_scheduler
    grid_options.require_seeds(arguments)
    grid_options.require_constant_batch(arguments, base)
    if not base.validation.targets:
        raise StudyError(f"{config}: validation.targets: is empty (name the losses and their targets)")
    if base.validation.timesteps:
        raise StudyError(f"{config}: validation.timesteps: losses at single times have no noise scale (remove it)")
    if schedule.needs_length:
        raise StudyError(
            f"{config}: lr_scheduler.decay_type: {schedule.decay_type} depends on the length of a run, which ends at its targets "
            "(use constant)"
        )
    if training.global_batch_size not in arguments.batches or len(arguments.batches) < 3:
        raise StudyError(f"--batches: give 3 sizes at least, the configuration's {training.global_batch_size} among them")
    if 1.0 not in arguments.factors or len(arguments.factors) < 3:
        raise StudyError("--factors: give 3 at least, 1 among them")
    if wrong := [batch for batch in arguments.batches if batch % arguments.processes]:
        raise StudyError(f"--batches: {wrong[0]} images cannot be divided among {counted(arguments.processes, 'process', 'es')}")
    if not base.optimizer.rule.is_adams or base.optimizer.rule.quantised:
        raise StudyError(f"{config}: optimizer.name: {base.optimizer.name} has no Adam geometry to compare with (AdamW only)")


# ---------------------------------------------------------------------- settings


def hold_to_settings(folder: Path, arguments: argparse.Namespace, base: JobConfig) -> None:
    """Refuse to mix runs towards other targets, or by another rule, into a folder. Raises StudyError."""
    results = ResultsFolder(folder, STUDY_MARKS | {SETTINGS: b"{"})
    results.refuse_foreign()
    there, mine = results.read(SETTINGS, lambda text: dict(json.loads(text))), settings(arguments, base)
    if there is None:
        return
    for name in ("targets", "rule", "lr", "batch", "excess_images", "num_images", "validated_every"):
        if there.get(name) != mine[name]:
            results.refuse(f"a study with other settings, {name}: {quoted(there.get(name))} -> {quoted(mine[name])}")


def settings(arguments: argparse.Namespace, base: JobConfig) -> dict[str, Any]:
    """Settings of the whole study, planned cells included; a later start may add batches, factors and seeds."""
    validation = base.validation
    return {
        "data": base.data.name, "flavor": base.model.flavor, "batch": base.training.global_batch_size, "lr": base.optimizer.lr,
        "rule": arguments.rule, "batches": arguments.batches, "factors": arguments.factors, "seeds": arguments.seeds,
        "extensions": arguments.extensions, "samples": arguments.samples, "steps": arguments.steps,
        "targets": [[target.loss, target.value] for target in validation.targets], "excess_images": validation.excess_images,
        "num_images": validation.num_images, "validated_every": validation.interval * base.training.global_batch_size,
    }  # fmt: skip


def _write_settings(folder: Path, arguments: argparse.Namespace, base: JobConfig) -> None:
    make_folder(folder)
    replace_file(folder / SETTINGS, json.dumps(settings(arguments, base), indent=1) + "\n")


# ---------------------------------------------------------------------- runs


@dataclasses.dataclass(frozen=True)
class TargetRun(GridRun):
    """Run of the grid; its learning rate is `factor` times the rule's."""

    factor: float


def plan_runs(arguments: argparse.Namespace, base: JobConfig, factors: dict[int, list[float]]) -> list[TargetRun]:
    """Plan every batch size with its rates: seed by seed, each seed a whole grid; the configuration's own batch size and rate
    measure their noise scale.
    """
    own = base.training.global_batch_size
    runs = []
    for seed in range(arguments.seeds):
        for batch, of_batch in factors.items():
            for factor in of_batch:
                overrides = _overrides(arguments, base, batch) | {
                    "optimizer.lr": base.optimizer.lr * LR_RULES[arguments.rule](batch / own) * factor,
                    "debug.seed": base.debug.seed + seed,
                }
                if batch == own and factor == 1.0:
                    overrides |= _measured(base)
                runs.append(TargetRun(f"b{batch}_f{factor:g}_s{seed}", overrides, factor))
    return runs


def _overrides(arguments: argparse.Namespace, base: JobConfig, batch: int) -> dict[str, Any]:
    """Keys that depend on the batch size: intervals of the configuration are kept in images."""
    training, own = base.training, base.training.global_batch_size

    def in_images(steps: int) -> int:
        return max(round(steps * own / batch), 1)

    return {
        "training.global_batch_size": batch,
        "training.local_batch_size": largest_divisor(batch // arguments.processes, training.local_batch_size),
        "training.steps": math.ceil(arguments.samples / batch) + arguments.steps,
        "validation.interval": in_images(base.validation.interval),
        "checkpoint.interval": in_images(base.checkpoint.interval),
        "metrics.log_freq": in_images(base.metrics.log_freq),
    }


def _measured(base: JobConfig) -> dict[str, Any]:
    """Keys that measure the noise scale in every step, in the bins of the losses; training is the same without."""
    return {
        "gns.enable": True, "gns.interval": 1, "gns.num_bins": base.metrics.loss_bins,
        "gns.log_interval": max(base.validation.interval // 4, 1),
    }  # fmt: skip


def extended(
    factors: dict[int, list[float]], folder: Path, arguments: argparse.Namespace
) -> dict[int, list[float]]:
    """Extend the rates of a batch size at an edge that is the best rate to a target, once more where that is allowed."""
    study = read_study(folder)
    wider = {}
    for batch, of_batch in factors.items():
        sides = edges_of(study, batch)
        below = sum(factor < arguments.factors[0] for factor in of_batch)
        above = sum(factor > arguments.factors[-1] for factor in of_batch)
        wider[batch] = list(of_batch)
        if "lowest" in sides and below < arguments.extensions:
            wider[batch].insert(0, of_batch[0] ** 2 / of_batch[1])
        if "highest" in sides and above < arguments.extensions:
            wider[batch].append(of_batch[-1] ** 2 / of_batch[-2])
    return wider


# ---------------------------------------------------------------------- records


def record_run(grid: TrainingGrid, factors: dict[str, float], name: str) -> dict[str, Any]:
    """Record a run that has ended: samples to each target, infinite where it was not reached, and its noise scales.

    Args:
        grid: of the run.
        factors: of the runs' learning rates, by name.
        name: of the run.

    Raises:
        TrainingFailed: summary.json cannot be read.
    """
    run, config = grid.run_folder(name), grid.configs[name]
    try:
        summary = json.loads(read_regular(run / "summary.json"))
        reached, steps, images = summary.get(TARGETS, {}), summary["step"], summary["n_images_seen"]
    except (OSError, ValueError, KeyError) as error:
        raise TrainingFailed(f"{run / 'summary.json'}: cannot be read: {error}") from error
    targets = [target_name(target) for target in config.validation.targets]
    training = config.training
    row: dict[str, Any] = {
        "batch": training.global_batch_size, "lr": config.optimizer.lr, "factor": factors[name], "seed": config.debug.seed,
        "steps": steps, "images": images, "commit": summary.get("versions", {}).get("git_commit"),
        "machine": _machine(summary),
        "at_most": "; ".join(target for target in targets if target in reached and not reached[target]["interpolated"]),
    }  # fmt: skip
    row |= {target: float(reached[target]["n_images_seen"]) if target in reached else math.inf for target in targets}
    if config.gns.enable:
        _record_noise(grid.folder, run, config, row)
    return row


def _machine(summary: dict[str, Any]) -> str:
    hardware = summary.get("hardware", {})
    return f"{hardware.get('cpu', hardware.get('device'))}, {hardware.get('threads')} threads, torch {hardware.get('torch')}"


def _record_noise(folder: Path, run: Path, config: JobConfig, row: dict[str, Any]) -> None:
    """Record the sums of the noise scale that were logged last at each age of each target."""
    table = ResultTable(folder / NOISE_SCALES, NOISE_COLUMNS, NOISE_KEY)
    points = list(iter_points(run / METRICS_FILE, '"gns/'))
    of_run = {"run": run.name, "batch": row["batch"], "lr": row["lr"], "seed": row["seed"]}
    for target in config.validation.targets:
        name = target_name(target)
        for age, share in AGES.items() if math.isfinite(row[name]) else ():
            images = row[name] * share
            found = noise_sums(points, math.floor(images / row["batch"]), part_of(target.loss))
            for geometry, sums in found.items():
                table.add(of_run | {"target": name, "age": age, "images": images, "geometry": geometry} | sums)
