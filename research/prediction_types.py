"""Prediction types compared in one parametrisation, timestep by timestep: of existing runs, or of runs that it trains.
"""

import argparse
from pathlib import Path

from research import grid_options, paired_runs
from research import trained_grid as grid_study
from research.equal_samples import batch_overrides
from research.frame import run_study
from research.trained_grid import Arm, PlannedRun
from torchtitan.config.job import JobConfig
from torchtitan.diffusion.predictions import PREDICTIONS
from torchtitan.experiments.folder import StudyError

NAME = "prediction_types"
_SEEDS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", metavar="RUN_FOLDER|CONFIG.toml", type=Path, nargs="+", help="trained runs of the same data and "
        "path, the reference first; or one configuration, of which --predictions are trained")
    add("--predictions", metavar="LIST", help=f"predictions to train, commas between, the reference first "
        f"({', '.join(PREDICTIONS)})")
    add("--parametrisation", choices=PREDICTIONS, default="v",
        help="parametrisation of the errors, whatever the model predicts (default: v)")
    grid_options.add_grid_options(parser, NAME, seeds=_SEEDS, positional=False)
    grid_study.add_measure_options(parser)


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train and measure the missing runs; return summary.md. Raises StudyError, ConfigError, CheckpointError."""
    configuration = arguments.sources[0].suffix == ".toml"
    if configuration != bool(arguments.predictions):
        raise StudyError("--predictions: goes with a CONFIG.toml, which is trained; runs have theirs already")
    if not configuration:
        grid_options.refuse_training_options(arguments)
        study, runs = paired_runs.open_runs(arguments.sources, arguments)
        return run_study(NAME, study, runs)
    if len(arguments.sources) > 1:
        raise StudyError(f"{arguments.sources[1]}: a configuration is trained alone (give no more than one)")
    if arguments.samples is None:
        raise StudyError("--samples: not given (images that every run sees)")
    grid_options.fill_training_options(arguments, _SEEDS)
    grid_options.require_seeds(arguments)
    arguments.config = arguments.sources[0]
    base = grid_options.read_base(arguments)
    if base.objective.heads_of_network():
        raise StudyError("objective.heads: --predictions trains one prediction at a time (leave them out; compare RUN RUN)")
    batch = base.training.global_batch_size
    samples = grid_options.equal_samples(arguments, [batch])
    return grid_study.train_and_measure(
        NAME, base, plan_runs(arguments, base, batch, samples), arguments, "prediction", f"{samples} samples per run."
    )


def plan_runs(arguments: argparse.Namespace, base: JobConfig, batch: int, samples: int) -> list[PlannedRun]:
    """Plan every prediction with every seed."""
    shared = batch_overrides(base, batch, samples, arguments.checkpoints, "const", arguments.processes)
    predictions = list(dict.fromkeys(arguments.predictions.split(",")))
    found = []
    for seed in range(arguments.seeds):
        for prediction in predictions:
            if prediction not in PREDICTIONS:
                known = ", ".join(PREDICTIONS)
                raise StudyError(f"--predictions: {prediction!r} is no prediction (there are: {known})")
            overrides = shared | {"objective.prediction": prediction, "debug.seed": base.debug.seed + seed}
            arm = Arm(f"batch size {batch}", prediction)
            found.append(PlannedRun(f"{prediction}_s{seed}", overrides, arm, seed))
    return found
