"""Settings of one configuration compared at equal samples: arms of keys x batch sizes x seeds, each trained from the start."""

import argparse
from pathlib import Path
from typing import Any

from research import grid_options
from research import trained_grid as grid_study
from research.equal_samples import LR_RULES, batch_overrides
from research.frame import run_study
from research.trained_grid import Arm, PlannedRun
from research.training_grid import plan_grid, train_grid
from torchtitan.config.job import JobConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.predictions import PREDICTIONS
from torchtitan.experiments.folder import StudyError
from torchtitan.pictures.number_text import counted
from torchtitan.processes.command_line import at_least

NAME = "compare_settings"
# Arms have these in common; batch sizes are compared by --batches.
_SHARED = ("training.steps", "training.global_batch_size", "debug.seed")


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_grid_options(parser, NAME, seeds=3)
    add = parser.add_argument
    add("--arm", nargs="+", action="append", required=True, metavar=("NAME", "KEY=VALUE"), help="an arm: its name, and "
        "the keys in which it differs from the configuration; the reference first, which may differ in none")
    add("--batches", type=_batch_sizes, metavar="LIST", help="global batch sizes at which arms are compared, commas between "
        "(default: the configuration's)")
    add("--lr-rule", choices=LR_RULES, default="sqrt", help="learning rate at other batch sizes than the configuration's: the "
        "same, or times the root of the ratio, or times the ratio (default: sqrt)")
    add("--parametrisation", choices=PREDICTIONS, help="parametrisation of the errors (default: the configuration's "
        "prediction)")
    add("--target", action="store_true", help="count the samples until the final loss of the reference is reached")
    grid_study.add_measure_options(parser)


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train and measure the missing runs; return summary.md. Raises StudyError, ConfigError."""
    arms = read_arms(arguments.arm)
    base = grid_options.read_base(arguments)
    if arguments.parametrisation is None:
        arguments.parametrisation = base.objective.prediction
    batches = arguments.batches or [base.training.global_batch_size]
    samples, runs = grid_options.equal_samples(arguments, batches), []
    for batch in batches:
        shared = batch_overrides(base, batch, samples, arguments.checkpoints, arguments.lr_rule, arguments.processes)
        runs += plan_runs(arms, shared, arguments.seeds, base, f"b{batch}_" * (len(batches) > 1))
    runs.sort(key=lambda run: run.seed)  # an unfinished grid has whole seeds
    folder, weights = grid_options.study_folder(arguments, base, NAME), grid_study.choose_weights(base, arguments.weights)
    grid = plan_grid(base, runs, folder, arguments.processes)
    reference = next(iter(grid.configs.values()))
    bins = grid_study.read_bins(build_objective(reference.objective, 0), arguments)
    held_out = grid_study.held_out_samples(reference, arguments)
    failures = train_grid(grid, arguments.retry_failed)
    what = (
        f"{counted(len(runs), 'run')} of {base.model.flavor} on {base.data.name}, {base.objective.path}: {samples} samples per "
        f"run; learning rate by the rule {arguments.lr_rule} from {base.optimizer.lr:g} at batch size "
        f"{base.training.global_batch_size}, unless an arm sets it."
    )
    trained = grid_study.TrainedGrid(grid, runs, failures, arguments, folder.parent, what, weights, bins, held_out)
    return run_study(NAME, grid_study.GridStudy(), trained)


def read_arms(given: list[list[str]]) -> dict[str, dict[str, str]]:
    """Read arms: name -> dotted key -> text of its value. Raises StudyError."""
    arms: dict[str, dict[str, str]] = {}
    for name, *pairs in given:
        if "=" in name or not all(letter.isalnum() or letter in " -_." for letter in name):
            raise StudyError(f"--arm: {name!r} names runs (letters, digits, blanks, - _ . first, then KEY=VALUE)")
        if name in arms:
            raise StudyError(f"--arm: {name!r} is given twice")
        arms[name] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise StudyError(f"--arm {name}: {pair!r} is no KEY=VALUE")
            if key in _SHARED:
                raise StudyError(f"--arm {name}: {key} cannot differ between arms: give it with --set or --samples")
            arms[name][key] = value
    if len(arms) < 2:
        raise StudyError("--arm: give 2 arms at least")
    return arms


def plan_runs(
    arms: dict[str, dict[str, str]], shared: dict[str, Any], seeds: int, base: JobConfig, prefix: str = ""
) -> list[PlannedRun]:
    """Plan every arm with every seed at the batch size of the shared overrides; prefix: of the runs' names."""
    group = f"batch size {shared['training.global_batch_size']}"
    return [
        PlannedRun(
            f"{prefix}{name.replace(' ', '_')}_s{seed}", shared | overrides | {"debug.seed": base.debug.seed + seed},
            Arm(group, name), seed,
        )
        for seed in range(seeds) for name, overrides in arms.items()
    ]  # fmt: skip


def _batch_sizes(text: str) -> list[int]:
    return sorted({at_least(1)(size) for size in text.split(",")})


_batch_sizes.__name__ = "batch sizes"  # as argparse names it
