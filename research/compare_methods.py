"""Methods of a file compared at equal images and equal FLOPs: methods x seeds, by what their runs measure themselves.

A row of training.csv is all that is kept of a run: a study resumes in another folder from a copy of that table.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research import compare_methods_report as methods_report
from research import grid_options
from research.compare_methods_report import MeasuredRun
from research.compare_settings import plan_runs, read_arms
from research.equal_samples import batch_overrides
from research.result_table import ResultTable
from research.study_folder import STUDY_MARKS
from research.trained_grid import PlannedRun, choose_weights
from research.training_grid import COLUMNS as TRAINED
from research.training_grid import TABLE, GridRun, RunRecord, plan_grid, train_grid
from torchtitan.config.job import JobConfig
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.experiments.training import TrainingFailed
from torchtitan.fidelity.measurement import Better
from torchtitan.fidelity.metrics import METRICS
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_toml
from torchtitan.runs.record import HELD_OUT_LOSS, read_run
from torchtitan.settings.sections import flattened

NAME = "compare_methods"
# Of a run: what it was trained with, FLOPs of training on an image, images at its measurements, their values by measure.
COLUMNS = ("settings", "flops_per_image", "images", "curves")


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_grid_options(parser, NAME, seeds=5)
    parser.add_argument("--methods", type=Path, required=True, metavar="FILE.toml", help="a table for each method, with the "
        "keys in which it differs from the configuration; the plain run first, which may differ in none")
    parser.add_argument("--report-only", action="store_true", help="train nothing; report on the runs that have ended")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train the missing runs; return summary.md. Raises StudyError, ConfigError."""
    arms = read_arms(read_methods(arguments.methods))
    base = grid_options.read_base(arguments, measured=True)
    if not base.validation.enable:
        raise StudyError("validation.enable: must be true, as methods are compared by what they measure")
    batch = base.training.global_batch_size
    samples = grid_options.equal_samples(arguments, [batch])
    shared = batch_overrides(base, batch, samples, arguments.checkpoints, "const", arguments.processes)
    measuring = ("validation", "evaluation") if base.evaluation.enable else ("validation",)
    shared |= {f"{section}.interval": shared["checkpoint.interval"] for section in measuring}
    runs = plan_runs(arms, shared, arguments.seeds, base)
    folder = grid_options.study_folder(arguments, base, NAME)
    ResultsFolder(folder, STUDY_MARKS).refuse_foreign()
    better: dict[str, Better] = {"loss": "lower"}
    for metric in base.evaluation.metrics if base.evaluation.enable else ():
        better |= {name: which for name, which in METRICS[metric].better.items() if which}
    if not arguments.report_only:
        _train_missing(base, runs, folder, arguments, better)
    table = _table(folder)
    rows = {(run.arm.label, run.seed): row for run in runs if (row := ended(table, run))}
    found = {key: MeasuredRun.of_row(row) for key, row in rows.items()}
    make_folder(folder)
    failed = sum((row := table.find({"run": run.name})) is not None and row["status"] != "ok" for run in runs)
    header = f"# {NAME}\n\n{len(found)} of {len(runs)} runs of {samples} images have ended, {failed} failed. "
    replace_file(folder / "summary.md", header + methods_report.write(found, list(arms), better, folder))
    return folder / "summary.md"


def read_methods(path: Path) -> list[list[str]]:
    """Read a file of methods: the words of an `--arm` for each of its tables. Raises StudyError."""
    try:
        tables = [(name, dict(flattened(keys))) for name, keys in read_toml(path).items()]
    except (OSError, ValueError, AttributeError) as error:
        raise StudyError(f"--methods: {path}: is no file of tables [NAME] with keys: {error}") from error
    text = {name: {key: v if isinstance(v, str) else json.dumps(v) for key, v in keys.items()} for name, keys in tables}
    return [[name, *(f"{key}={value}" for key, value in keys.items())] for name, keys in text.items()]


def measured(folder: Path, weights: str, better: Mapping[str, Better]) -> dict[str, Any]:
    """Columns of a finished run: its FLOPs, and its measures at the steps at which all were taken. Raises TrainingFailed."""
    run = read_run(folder)
    loss = HELD_OUT_LOSS if weights == "none" else f"validation_metrics/{weights}/loss"
    series = {name: run.series(loss if name == "loss" else f"evaluation_metrics/{name}") for name in better}
    steps = sorted(set.intersection(*(set(one.steps) for one in series.values())))
    if run.summary is None or run.last_step not in steps:
        raise TrainingFailed("not every measure is finite at its end")
    return {
        "flops_per_image": run.summary["flops_per_image"],
        "images": " ".join(str(run.images_at(step)) for step in steps),
        "curves": json.dumps({name: [one.at(step) for step in steps] for name, one in series.items()}),
    }


def _train_missing(
    base: JobConfig, runs: list[PlannedRun], folder: Path, options: argparse.Namespace, better: Mapping[str, Better]
) -> None:
    table, weights = _table(folder), choose_weights(base, options.weights)
    missing = {run.name: run for run in runs if not ended(table, run)}
    grid = plan_grid(base, list(missing.values()), folder, options.processes)

    def of_run(name: str) -> dict[str, Any]:
        return measured(grid.run_folder(name), weights, better) | {"settings": settings_text(missing[name])}

    train_grid(grid, options.retry_failed, RunRecord(COLUMNS, of_run))


def _table(folder: Path) -> ResultTable:
    return ResultTable(folder / TABLE, (*TRAINED, *COLUMNS), ("run",))


def settings_text(run: GridRun) -> str:
    """Overrides of a run, as its row has them."""
    return json.dumps(run.overrides, sort_keys=True)


def ended(table: ResultTable, run: GridRun) -> dict[str, str] | None:
    """Row of a run that has ended with these settings; None: it is to be trained."""
    row = table.find({"run": run.name})
    return row if row and row["status"] == "ok" and row["settings"] == settings_text(run) else None
