"""Timestep samplers compared at equal samples: samplers x batch sizes x seeds, each trained from the start."""

import argparse
from pathlib import Path

from torchtitan.evaluation.studies import grid_options
from torchtitan.evaluation.studies.equal_samples import LR_RULES, batch_overrides
from torchtitan.evaluation.studies.frame import StudyError
from torchtitan.evaluation.studies.sampler_specs import parse_samplers, without_sampler
from torchtitan.evaluation.studies.training_grid import GridRun, plan_grid, train_grid

NAME = "compare_samplers"


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_grid_options(parser, NAME, seeds=3)
    add = parser.add_argument
    add("--samplers", required=True, metavar="LIST", help="name[+spread][:key=value,...] of each, commas between, the "
        "reference first: uniform,uniform+stratified,logit_normal:logit_mean=0,slots:slot_edges_path=FILE")
    add("--batches", type=grid_options.batch_list, metavar="LIST", help="global batch sizes, commas between (default: "
        "the configuration's)")
    add("--lr-rule", choices=LR_RULES, default="sqrt", help="learning rate at other batch sizes than the "
        "configuration's: the same, or times the root of the ratio, or times the ratio (default: sqrt)")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train; returns the table of runs. Raises StudyError, ConfigError."""
    if arguments.seeds < 2:
        raise StudyError("--seeds: intervals need 2 seeds at least")
    base = grid_options.read_base(arguments)
    batches = arguments.batches or [base.training.global_batch_size]
    samples = grid_options.equal_samples(arguments, batches)
    folder = grid_options.study_folder(arguments, base, NAME)
    runs = []
    for seed in range(arguments.seeds):
        for batch in batches:
            of_batch = batch_overrides(base, batch, samples, arguments.checkpoints, arguments.lr_rule, arguments.processes)
            for spec in parse_samplers(arguments.samplers):
                overrides = of_batch | spec.overrides | {"debug.seed": base.debug.seed + seed}
                runs.append(GridRun(f"b{batch}_{spec.slug}_s{seed}", overrides))
    grid = plan_grid(without_sampler(base), runs, folder, arguments.processes)
    train_grid(grid, arguments.retry_failed)
    return folder / "training.csv"
