"""Samples in a few steps at equal training FLOPs: methods of a file x seeds, each measured at several numbers of steps.

A method's training is shorter than the plain one's by the calls without gradient of its objective. Every combination of a
seed draws from the same noise. A row of training.csv and drawn/<run>.npy, for the picture, are all that is kept of a run.
"""

import argparse
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from research import grid_options
from research.compare_methods import ended, read_methods, settings_text
from research.compare_methods_report import change_text
from research.compare_settings import plan_runs, read_arms
from research.result_table import ResultTable
from research.study_folder import STUDY_MARKS
from research.trained_grid import PlannedRun
from research.training_grid import COLUMNS as TRAINED
from research.training_grid import TABLE, RunRecord, configure, plan_grid, train_grid
from torchtitan.config.job import JobConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.distributed.mesh import compute_device
from torchtitan.errors import EvaluationError
from torchtitan.evaluation.config import EvaluationConfig
from torchtitan.evaluation.dataset_images import DatasetImages
from torchtitan.evaluation.sample_metrics import SampleMetrics, measure_samples
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices
from torchtitan.experiments.folder import ResultsFolder
from torchtitan.experiments.training import TrainingFailed
from torchtitan.fidelity.measurement import Better
from torchtitan.fidelity.metrics import METRICS
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.pictures.grids import image_grid
from torchtitan.pictures.markdown import markdown_table
from torchtitan.processes.command_line import at_least
from torchtitan.statistics.interval import mean_interval, positive_interval
from torchtitan.weights.trained_model import load_run

NAME = "few_steps"
# Of a run: what it was trained with, FLOPs of its training, values by number of steps and measure.
COLUMNS = ("settings", "flops", "values")
SHOWN = 10  # samples of a run in a row of the picture

Values = Mapping[tuple[str, int], dict[str, dict[str, float]]]  # by method and seed: number of steps -> measure -> value


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_training_options(parser, NAME, seeds=5)
    add = parser.add_argument
    add("--methods", type=Path, required=True, metavar="FILE.toml", help="as of compare_methods, the plain run first")
    add("--num-steps", type=at_least(1), nargs="+", default=[1, 2, 4, 20], metavar="N", help="steps of the solver, rising; "
        "changes are against the plain run at the last one (default: 1 2 4 20)")
    add("--report-only", action="store_true", help="train nothing; report on the runs that have ended")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train and measure the missing runs; return summary.md. Raises StudyError, ConfigError."""
    grid_options.require_seeds(arguments)
    arms = read_arms(read_methods(arguments.methods))
    base = grid_options.read_base(arguments, measured=True)
    shared = {"evaluation.enable": False, "validation.enable": False}
    lengths = {name: keys | _length(base, keys, name) for name, keys in arms.items()}
    runs = plan_runs(lengths, shared, arguments.seeds, base)
    folder = grid_options.study_folder(arguments, base, NAME)
    ResultsFolder(folder, STUDY_MARKS).refuse_foreign()
    if not arguments.report_only:
        missing = {run.name: run for run in runs if not ended(_table(folder), run)}
        grid = plan_grid(base, list(missing.values()), folder, arguments.processes)

        def of_run(name: str) -> dict[str, Any]:
            found = _measured(grid.run_folder(name), base.evaluation, arguments.num_steps, folder)
            return {"settings": settings_text(missing[name])} | found

        train_grid(grid, arguments.retry_failed, RunRecord(COLUMNS, of_run))
    table = _table(folder)
    rows = {(run.arm.label, run.seed): row for run in runs if (row := ended(table, run))}
    found = {key: json.loads(row["values"]) for key, row in rows.items()}
    better = {name: which for metric in base.evaluation.metrics for name, which in METRICS[metric].better.items() if which}
    make_folder(folder)
    text = f"# {NAME}\n\n{len(found)} of {len(runs)} runs have ended. {_tables(found, list(arms), better, arguments.num_steps)}"
    replace_file(folder / "summary.md", text + _picture(runs, list(arms), arguments.num_steps, folder))
    return folder / "summary.md"


def _table(folder: Path) -> ResultTable:
    return ResultTable(folder / TABLE, (*TRAINED, *COLUMNS), ("run",))


def _length(base: JobConfig, keys: dict[str, str], name: str) -> dict[str, str]:
    """Steps of a method's training: a call without gradient is a third of a denoising step."""
    objective = build_objective(configure(base, dict(keys), 1, name).objective, 0)
    steps = str(round(base.training.steps * 3 / (3 + objective.untrained_forwards)))
    return {"training.steps": steps, "checkpoint.interval": steps}


def _measured(run: Path, evaluation: EvaluationConfig, counts: list[int], folder: Path) -> dict[str, Any]:
    """Columns of a finished run; its first samples go to the folder. Raises TrainingFailed."""
    device = compute_device()
    trained = load_run(run, None, None, device)
    config, info, sampling = trained.config, trained.info, trained.config.sampling
    sampler, values, drawn = ImageSampler(trained.model, trained.objective, "float32", device), {}, []
    try:
        open_split = partial(DatasetImages, config.data, info)
        metrics = SampleMetrics(evaluation, device, info.image_shape[1:], None, open_split, info.num_classes)
        choices = balanced_choices(metrics.count, info.num_classes)
        for count in counts:
            method = sampling.method() | {"num_steps": count}
            found = measure_samples(
                metrics, sampler, choices, config.debug.seed, batch_size=sampling.batch_size, **method
            )
            values[count] = {name: value.value for name, value in found.values.items()}
            method |= {"batch_size": SHOWN, "purpose": "evaluation"}
            drawn.append(sampler.draw(choices[:SHOWN], config.debug.seed, **method).numpy())
    except EvaluationError as error:
        raise TrainingFailed(str(error)) from error
    make_folder(folder / "drawn")
    np.save(folder / "drawn" / f"{run.name}.npy", np.stack(drawn))  # [counts, SHOWN, C, H, W]
    images = config.training.steps * config.training.global_batch_size
    flops = json.loads((run / "summary.json").read_text())["flops_per_image"] * images
    return {"flops": flops, "values": json.dumps(values)}


def _tables(found: Values, methods: list[str], better: Mapping[str, Better], counts: list[int]) -> str:
    header = ["method", "seeds", "steps", *better]
    header += [f"{name} against {methods[0]}, {which}" for which in (f"{counts[-1]} steps", "as many") for name in better]
    lines = []
    for method in methods:
        runs = {seed: values for (name, seed), values in found.items() if name == method}
        plain = {seed: found[methods[0], seed] for seed in runs if (methods[0], seed) in found}
        for count in map(str, counts) if runs else ():
            line = [method, str(len(runs)), count]
            line += [_interval([run[count][name] for run in runs.values()], which) for name, which in better.items()]
            for against in (str(counts[-1]), count):
                for name, which in better.items():
                    pairs = [(runs[seed][count][name], values[against][name]) for seed, values in plain.items()]
                    changes = [math.log(a / b) if which == "lower" else a - b for a, b in pairs]
                    same = method == methods[0] and against == count
                    line.append("-" if same or not changes else change_text(changes, which))
            lines.append(line)
    text = "95 % intervals by Student's t over seeds; changes are paired by seed, bold where the interval excludes 0.\n\n"
    return text + markdown_table(header, lines)


def _interval(values: list[float], better: Better) -> str:
    found, unit = (positive_interval(values), 1) if better == "lower" else (mean_interval(values), 100)
    text, percent = f"{unit * found.value:.3g}", " %" if unit == 100 else ""
    return text + (f" [{unit * found.lower:.3g}, {unit * found.upper:.3g}]" if found.bounded else "") + percent


def _picture(runs: list[PlannedRun], methods: list[str], counts: list[int], folder: Path) -> str:
    """Picture of the first samples of each method, of the first seed that all have."""
    for seed in sorted({run.seed for run in runs}):
        paths = {run.arm.label: folder / "drawn" / f"{run.name}.npy" for run in runs if run.seed == seed}
        if all(path.is_file() for path in paths.values()):
            images = np.concatenate([np.concatenate(np.load(paths[method])) for method in methods])  # [rows x SHOWN, C, H, W]
            labels = [f"{method}, {count}" for method in methods for count in counts]
            image_grid(torch.from_numpy(images), len(labels), SHOWN, labels).save(folder / "samples.png", "PNG")
            return f"![Samples of seed {seed}, by method and steps](samples.png)\n"
    return ""
