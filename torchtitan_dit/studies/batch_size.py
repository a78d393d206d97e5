"""Batch sizes compared at equal samples: batch size x learning-rate rule x seeds, each trained from the start."""

import argparse
from pathlib import Path

from torchtitan.config.job import JobConfig
from torchtitan.experiments.folder import StudyError
from torchtitan_dit.studies import grid_options
from torchtitan_dit.studies import trained_grid as grid_study
from torchtitan_dit.studies.equal_samples import LR_RULES, batch_overrides, rule_name
from torchtitan_dit.studies.trained_grid import Arm, PlannedRun

NAME = "batch_size"


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_grid_options(parser, NAME, seeds=2)
    add = parser.add_argument
    add("--batches", type=grid_options.batch_list, required=True, metavar="LIST", help="global batch sizes, commas "
        "between; the reference is the configuration's, or else the smallest")
    add("--rules", type=rule_list, default=["const", "sqrt", "linear"], metavar="LIST", help="learning rates at other "
        "batch sizes than the configuration's: const, sqrt (times the root of the ratio), linear (times the ratio); "
        "default: const,sqrt,linear")
    grid_study.add_measure_options(parser)


def rule_list(text: str) -> list[str]:
    """Parse names of learning-rate rules with commas between."""
    rules = list(dict.fromkeys(map(rule_name, text.split(","))))
    for rule in rules:
        if rule not in LR_RULES:
            raise argparse.ArgumentTypeError(f"{rule!r} is no rule (there are: {', '.join(LR_RULES)})")
    return rules


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train and measure the missing runs; return summary.md. Raises StudyError, ConfigError."""
    grid_options.require_seeds(arguments)
    if len(arguments.batches) < 2:
        raise StudyError("--batches: give 2 sizes at least")
    base = grid_options.read_base(arguments)
    grid_options.require_constant_batch(arguments, base)
    samples = grid_options.equal_samples(arguments, arguments.batches)
    return grid_study.train_and_measure(
        NAME, base, plan_runs(arguments, base, samples), arguments, "setting",
        f"{samples} samples per run; learning rate {base.optimizer.lr:g} at batch size "
        f"{base.training.global_batch_size}, the configuration's.",
    )  # fmt: skip


def plan_runs(arguments: argparse.Namespace, base: JobConfig, samples: int) -> list[PlannedRun]:
    """Plan every batch size with every rule, the reference first; at the configuration's batch size all rules are one.
    """
    own = base.training.global_batch_size
    batches = sorted(arguments.batches, key=lambda batch: (batch != own, batch))
    found = []
    for seed in range(arguments.seeds):
        for batch in batches:
            for rule in arguments.rules[:1] if batch == own else arguments.rules:
                overrides = batch_overrides(base, batch, samples, arguments.checkpoints, rule, arguments.processes)
                overrides["debug.seed"] = base.debug.seed + seed
                label, name = (f"{batch}", f"b{batch}") if batch == own else (f"{batch}, {rule}", f"b{batch}_{rule}")
                found.append(PlannedRun(f"{name}_s{seed}", overrides, Arm("batch size, rule", label), seed))
    return found


rule_list.__name__ = "rules"
