"""Alignment through its gradient noise: a stop by rule from gradients at checkpoints, against fixed stops and none.

Of every seed and aligned arm one run is trained to its end with the alignment. Its checkpoints are measured (results.csv), then
runs branch from two of them without the alignment: from the one after a third of the training, and from the first at which
the rule stops. Up to its stop, a branch is the aligned run.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from research import alignment_noise_report as noise_report
from research import grid_options
from research.aligned_gradients import ESTIMATES, AlignedGradients, estimates
from research.block_products import block_products
from research.branch_training import begin_branch
from research.compare_methods import ended, read_methods, settings_text
from research.compare_settings import plan_runs, read_arms
from research.equal_samples import batch_overrides
from research.offline_gradients import equal_mass_edges, timestep_bin
from research.result_table import ResultTable
from research.study_folder import STUDY_MARKS
from research.trained_grid import Arm, PlannedRun, choose_weights
from research.training_grid import COLUMNS as TRAINED
from research.training_grid import TABLE, RunRecord, plan_grid, train_grid
from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps
from torchtitan.config.job import JobConfig
from torchtitan.distributed.mesh import compute_device
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.experiments.training import TrainingFailed
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.processes.command_line import at_least
from torchtitan.runs.record import HELD_OUT_LOSS, read_run
from torchtitan.statistics.student import student_quantile

NAME = "alignment_noise"
THIRD, RULE = "third", "rule"  # where a branch's alignment ends
# Of a run: what it was trained with, FLOPs of training on an image, held-out losses by step, measures of its samples at its end.
COLUMNS = ("settings", "flops_per_image", "losses", "accuracy", "fd")
_ERRORS = tuple(f"{name}_se" for name in ESTIMATES)
MEASURED = ("model", "arm", "seed", "step", "bin", "t_low", "t_high", *ESTIMATES, *_ERRORS)
_SEED = 48  # of the measuring draws, the same at every checkpoint


def add_options(parser: argparse.ArgumentParser) -> None:
    grid_options.add_grid_options(parser, NAME, seeds=5)
    add = parser.add_argument
    add("--methods", type=Path, required=True, metavar="FILE.toml",
        help="a table for each arm, as of compare_methods: the plain run first, then those with an alignment")
    add("--bins", type=at_least(2), default=5, metavar="K", help="timestep bins that training visits equally often (default: 5)")
    add("--blocks", type=at_least(3), default=16, metavar="N", help="independent blocks of samples in a bin (default: 16)")
    add("--block-size", type=at_least(1), default=16, metavar="N", help="samples of a block (default: 16)")
    add("--report-only", action="store_true", help="train nothing; report on the runs that have ended")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train and measure what is missing; return summary.md. Raises StudyError, ConfigError."""
    study = _Study(arguments)
    if not arguments.report_only:
        for run in study.runs:
            study.train(run)
    make_folder(study.folder)
    text = noise_report.write(study.found(), study.measured_rows(), study.arms, arguments.seeds, study.folder)
    replace_file(study.folder / "summary.md", f"# {NAME}\n\n{text}")
    return study.folder / "summary.md"


class _Study:
    """Checked options of a study, with its tables."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.options, self.base = arguments, grid_options.read_base(arguments, measured=True)
        arms = read_arms(read_methods(arguments.methods))
        if any(("alignment.teacher" in keys) == (place == 0) for place, keys in enumerate(arms.values())):
            raise StudyError("--methods: the first arm is without alignment.teacher, all others are with it")
        self.arms, batch = list(arms), self.base.training.global_batch_size
        samples = grid_options.equal_samples(arguments, [batch])
        shared = batch_overrides(self.base, batch, samples, arguments.checkpoints, "const", arguments.processes)
        self.interval, self.steps = shared["checkpoint.interval"], shared["training.steps"]
        shared |= {"validation.interval": self.interval, "evaluation.interval": self.steps}
        self.runs = plan_runs(arms, shared, arguments.seeds, self.base)
        self.folder = grid_options.study_folder(arguments, self.base, NAME)
        ResultsFolder(self.folder, STUDY_MARKS).refuse_foreign()
        self.weights = choose_weights(self.base, arguments.weights)
        self.measured = ResultTable(self.folder / "results.csv", MEASURED, ("model", "step", "bin"))

    def train(self, run: PlannedRun) -> None:
        """Train a run, then the branches of an aligned one."""
        if not self.ended(run) or any(self._lacks_start(branch) for branch in self.branches(run)):
            self._train(run, measured=run.arm.label != self.arms[0])
        for branch in self.branches(run):
            if not self.ended(branch):
                if self._lacks_start(branch):
                    raise StudyError(f"{branch.name}: has no checkpoint to branch from (give another --output)")
                self._train(branch, measured=False)

    def found(self) -> dict[tuple[str, int, str], dict[str, str]]:
        """Rows of the runs that have ended, by arm, seed and stop; one by rule may be another of them."""
        rows = {}
        for run in self.runs:
            stops = {"": run} | {branch.arm.group: branch for branch in self.branches(run)}
            for stop, one in stops.items():
                if row := self.ended(one):
                    rows[run.arm.label, run.seed, stop] = row | {"stop": str(one.overrides.get("alignment.stop_steps", ""))}
        return rows

    def measured_rows(self) -> list[dict[str, str]]:
        """Rows of all measurements that there are."""
        steps, bins = range(self.interval, self.steps + 1, self.interval), (*range(self.options.bins), "all")
        asked = [{"model": run.name, "step": step, "bin": place} for run in self.runs for step in steps for place in bins]
        return [row for cell in asked if (row := self.measured.find(cell))]

    def branches(self, run: PlannedRun) -> list[PlannedRun]:
        """Runs that branch from an aligned run, once it has been measured; equal ones twice."""
        steps = range(self.interval, self.steps, self.interval)
        third = self.interval * max(self.options.checkpoints // 3, 1)
        rows = [self.measured.find({"model": run.name, "step": step, "bin": "all"}) for step in steps]
        if run.arm.label == self.arms[0] or not all(rows):
            return []
        stops = {THIRD: third, RULE: stop_by_rule([row for row in rows if row], self.options.blocks)}
        return [_branch(run, *stop) for stop in stops.items()]

    def ended(self, run: PlannedRun) -> dict[str, str] | None:
        return ended(ResultTable(self.folder / TABLE, (*TRAINED, *COLUMNS), ("run",)), run)

    def _lacks_start(self, run: PlannedRun) -> bool:
        return not self.ended(run) and not checkpoint_steps(self.folder / "runs" / run.name / "checkpoint")

    def _train(self, run: PlannedRun, measured: bool) -> None:
        grid = plan_grid(self.base, [run], self.folder, self.options.processes)

        def of_run(name: str) -> dict[str, Any]:
            folder = grid.run_folder(name)
            if measured:
                self._measure(run, folder)
                for branch in self.branches(run):
                    if step := branch.overrides.get("alignment.stop_steps"):
                        begin_branch(checkpoint_path(folder / "checkpoint", step), grid.run_folder(branch.name))
            return _outcome(folder, self.weights, grid.configs[name]) | {"settings": settings_text(run)}

        train_grid(grid, self.options.retry_failed, RunRecord(COLUMNS, of_run))

    def _measure(self, run: PlannedRun, folder: Path) -> None:
        options = self.options
        for step in range(self.interval, self.steps + 1, self.interval):
            if self.measured.find({"model": run.name, "step": step, "bin": "all"}):
                continue
            gradients = AlignedGradients(folder, step, seed=_SEED, device=compute_device())
            edges, unit = equal_mass_edges(gradients.gradients.objective, options.bins)
            bins = [timestep_bin(gradients.gradients.objective, *ends, unit) for ends in itertools.pairwise(edges)]
            measured = [gradients.blocks(where, stream, options.blocks, options.block_size) for stream, where in enumerate(bins)]
            products = block_products(torch.stack(measured, 1).flatten(0, 1))
            values = estimates(products, options.block_size).T.tolist()
            errors = products.error_of(lambda kept: estimates(kept, options.block_size)).T.tolist()
            of_run = {"model": run.name, "arm": run.arm.label, "seed": run.seed, "step": step}
            places = [(place, where.t_low, where.t_high) for place, where in enumerate(bins)] + [("all", 0.0, 1.0)]
            for where, *found in zip(places, values, errors, strict=True):
                rounded = [float(f"{value:.4g}") for value in itertools.chain(*found)]
                self.measured.add(of_run | dict(zip(MEASURED[4:], [*where, *rounded], strict=True)))


def _branch(run: PlannedRun, stop: str, step: int) -> PlannedRun:
    keys = {"alignment.stop_steps": step, "job.allow_config_change": True} if step else {}
    return PlannedRun(f"{run.name}_stop{step}" if step else run.name, run.overrides | keys, Arm(stop, run.arm.label), run.seed)


def stop_by_rule(rows: list[dict[str, str]], blocks: int) -> int:
    """Step of the first row at which the product's one-sided 95 % bound is not above 0; 0: of none.

    Args:
        rows: of the whole range at the checkpoints of a run, rising.
        blocks: of samples, of which the bound is.
    """
    quantile = student_quantile(0.95, blocks - 1.0)
    return next((int(row["step"]) for row in rows if float(row["product"]) <= quantile * float(row["product_se"])), 0)


def _outcome(folder: Path, weights: str, config: JobConfig) -> dict[str, Any]:
    """Columns of a finished run. Raises TrainingFailed: it has not all measures."""
    run = read_run(folder)
    losses = run.series(HELD_OUT_LOSS if weights == "none" else f"validation_metrics/{weights}/loss")
    measures = {name: run.series(f"evaluation_metrics/{name}").final() for name in ("accuracy", "fd")}
    if run.summary is None or config.training.steps not in losses.steps or None in measures.values():
        raise TrainingFailed("not every measure is finite at its end")
    by_step = {step: float(f"{losses.at(step):.6g}") for step in losses.steps}
    return {"flops_per_image": run.summary["flops_per_image"], "losses": json.dumps(by_step), **measures}
