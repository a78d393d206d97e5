"""Timestep samplers compared at equal samples: samplers x batch sizes x seeds, each trained from the start."""

import argparse
from pathlib import Path

from research import grid_options
from research import trained_grid as grid_study
from research.equal_samples import LR_RULES, batch_overrides
from research.sampler_specs import parse_samplers, without_sampler
from research.trained_grid import Arm, PlannedRun
from torchtitan.config.job import JobConfig

NAME = "compare_samplers"


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_grid_options(parser, NAME, seeds=3)
    add = parser.add_argument
    add("--samplers", required=True, metavar="LIST", help="name[+spread][:key=value,...] of each, commas between, the "
        "reference first: uniform,uniform+stratified,logit_normal:mean=0,slots:edges_path=FILE")
    add("--batches", type=grid_options.batch_list, metavar="LIST", help="global batch sizes, commas between (default: "
        "the configuration's)")
    add("--lr-rule", choices=LR_RULES, default="sqrt", help="learning rate at other batch sizes than "
        "the configuration's: the same, or times the root of the ratio, or times the ratio (default: sqrt)")
    add("--target", choices=("reference", "worst"), default="reference",
        help="target loss for counting samples: the final loss of the reference, or of the worst sampler "
        "(default: reference)")
    grid_study.add_measure_options(parser)


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train and measure the missing runs; return summary.md. Raises StudyError, ConfigError."""
    grid_options.require_seeds(arguments)
    base = grid_options.read_base(arguments)
    batches = arguments.batches or [base.training.global_batch_size]
    samples = grid_options.equal_samples(arguments, batches)
    return grid_study.train_and_measure(
        NAME, without_sampler(base), _planned(arguments, base, batches, samples), arguments, "sampler",
        f"{samples} samples per run; learning rate by the rule {arguments.lr_rule} from {base.optimizer.lr:g} at batch "
        f"size {base.training.global_batch_size}.",
    )  # fmt: skip


def _planned(arguments: argparse.Namespace, base: JobConfig, batches: list[int], samples: int) -> list[PlannedRun]:
    """Plan a seed's runs one after the other, so that an unfinished grid has whole seeds."""
    specs, found = parse_samplers(arguments.samplers), []
    checkpoints, rule, processes = arguments.checkpoints, arguments.lr_rule, arguments.processes
    for seed in range(arguments.seeds):
        for batch in batches:
            of_batch = batch_overrides(base, batch, samples, checkpoints, rule, processes)
            for spec in specs:
                overrides = of_batch | spec.overrides | {"debug.seed": base.debug.seed + seed}
                arm = Arm(f"batch size {batch}", spec.label)
                found.append(PlannedRun(f"b{batch}_{spec.slug}_s{seed}", overrides, arm, seed))
    return found
