"""Measurement of a grid of trained runs: the held-out loss of every checkpoint in every bin of timesteps."""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from research import trained_grid_report as grid_report
from research.cells import Cell, Row
from research.grid_results import GridResults
from research.slot_nodes import TimestepBin, timestep_bins
from research.timestep_errors import FixedSamples, fixed_samples, in_parametrisation, timestep_errors
from research.trained_checkpoint import checkpoint_digest, samples_seen
from research.training_grid import GridRun, TrainingGrid
from torchtitan.checkpoint.checkpointer import CheckpointError, checkpoint_steps
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.config.job import JobConfig
from torchtitan.data import DATASETS
from torchtitan.data.base import DatasetError
from torchtitan.diffusion.objective import Objective
from torchtitan.distributed.mesh import compute_device
from torchtitan.errors import unwrapped
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.experiments.training import TrainingFailed
from torchtitan.processes.command_line import at_least
from torchtitan.training.schedules import largest_growth
from torchtitan.weights.trained_model import TrainedModel, load_run


@dataclass(frozen=True)
class Arm:
    """Arm: a run of the grid is one repetition of it.

    Attributes:
        group: runs are compared within it, as "batch size 16".
        label: of the arm within its group.
    """

    group: str
    label: str


@dataclass(frozen=True)
class PlannedRun(GridRun):
    """Planned run of the grid with its arm, and the number of its seed, by which arms are paired."""

    arm: Arm
    seed: int


@dataclass
class TrainedGrid:
    """Trained grid, in the frame of studies instead of a run.

    Attributes:
        grid: trained.
        runs: in the order of training.
        failures: name of a run -> reason.
        options: the study's.
        results: folder that holds the study's folder.
        description: of the training, for the summary.
        weights: EMA track to compare, or "none".
        bins: of timesteps, of the path that all runs share.
        samples: held-out images with noise, the same for every run.
    """

    grid: TrainingGrid
    runs: list[PlannedRun]
    failures: dict[str, str]
    options: argparse.Namespace
    results: Path
    description: str
    weights: str
    bins: list[TimestepBin]
    samples: FixedSamples
    _opened: tuple[Any, TrainedModel] | None = field(default=None, repr=False)

    def config(self, name: str) -> JobConfig:
        return self.grid.configs[name]

    def model(self, name: str, track: str, step: int) -> TrainedModel:
        """Model of a checkpoint; kept until another is requested. Raises CheckpointError."""
        asked = (name, track, step)
        if self._opened is None or self._opened[0] != asked:
            self._opened = None
            self._opened = (asked, load_run(self.grid.run_folder(name), track, step, compute_device()))
        return self._opened[1]


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of measuring a trained model."""
    add = parser.add_argument
    add("--images", type=at_least(2), default=64, metavar="K",
        help="held-out images, each with its own noise, the same for every model (default: 64)")
    add("--nodes", type=at_least(1), default=4, metavar="N", help="timesteps in each bin (default: 4)")
    add("--edges", type=Path, metavar="FILE", help="file of bin edges, as objective.timesteps.edges_path (default: the "
        "published slots on a DDPM path, else ten bins of equal width)")


def read_bins(objective: Objective, options: argparse.Namespace) -> list[TimestepBin]:
    """Read the bins of the options. Raises StudyError."""
    try:
        return timestep_bins(objective, options.nodes, options.edges)
    except ValueError as error:
        raise StudyError(f"--edges: {error}") from error


def held_out_samples(config: JobConfig, options: argparse.Namespace) -> FixedSamples:
    """Held-out images with noise, as many as the options say. Raises StudyError."""
    try:
        return fixed_samples(DATASETS[config.data.name](config.data, "validation"), options.images, seed=0)
    except DatasetError as error:
        raise StudyError(f"--images: {error}") from error


def choose_weights(base: JobConfig, asked: str | None) -> str:
    """Choose the EMA track to compare: the given one, else the first, else "none". Raises StudyError."""
    tracks = [track.name for track in base.ema.tracks]
    if asked is not None and asked not in ("none", *tracks):
        raise StudyError(f"--weights: {asked!r} is no EMA track (there are: {', '.join(['none', *tracks])})")
    return asked if asked is not None else (tracks or ["none"])[0]


def bin_errors(
    trained: TrainedModel, samples: FixedSamples, where: TimestepBin, parametrisation: str, advance: Advance
) -> torch.Tensor:
    """Bin errors: mean squared error of each image over a bin's timesteps, in a parametrisation; float64 [K]."""
    errors = timestep_errors(
        trained.model, trained.objective, samples, where.nodes, device=compute_device(), advance=advance,
        param_dtype=trained.config.training.mixed_precision_param,
    )  # fmt: skip
    return in_parametrisation(errors, trained.objective, where.nodes, parametrisation).mean(1)


class GridStudy:
    """Study of a grid of trained runs, for the frame of studies."""

    UNIT = "error"

    COLUMNS = (
        "model", "group", "settings", "batch", "lr", "seed", "checkpoint", "step", "samples", "weights", "bin", "unit", "low",
        "high", "share", "nodes", "images", "parametrisation", "error", "error_se", "status", "reason", "date", "runtime",
    )  # fmt: skip
    # Reports place a row by the number of its bin, and a run may have been trained anew under its old name.
    KEY = ("model", "checkpoint", "step", "weights", "bin", "low", "high", "nodes", "images", "parametrisation")

    def cells(self, run: TrainedGrid) -> list[Cell]:
        return [cell for planned in run.runs for cell in self._of_run(run, planned)]

    def cost(self, cell: Cell) -> int:
        return cell["images"] * cell["nodes"]

    def measure(self, run: TrainedGrid, cell: Cell, advance: Advance) -> dict[str, Any]:
        if cell["model"] in run.failures:
            raise TrainingFailed(run.failures[cell["model"]])
        trained = run.model(cell["model"], cell["weights"], cell["step"])
        errors = bin_errors(trained, run.samples, run.bins[cell["bin"]], run.options.parametrisation, advance)
        if not errors.isfinite().all():
            raise TrainingFailed("the error is not finite")
        return {"error": errors.mean().item(), "error_se": errors.std().item() / math.sqrt(len(errors))}

    def report(self, run: TrainedGrid, rows: list[Row], folder: Path) -> str:
        arms = list(dict.fromkeys((planned.arm.group, planned.arm.label) for planned in run.runs))
        configs = [run.config(planned.name) for planned in run.runs]
        points = {step * config.training.global_batch_size for config in configs for step in _planned_steps(config)}
        results = GridResults(rows, arms, run.weights, sorted(points))
        return grid_report.write(results, run.options.target, run.bins, folder)

    def _of_run(self, run: TrainedGrid, planned: PlannedRun) -> list[Cell]:
        name = planned.name
        config = run.config(name)
        of_run = {
            "model": name, "group": planned.arm.group, "settings": planned.arm.label,
            "batch": config.training.global_batch_size, "lr": config.optimizer.lr, "seed": planned.seed,
            "images": run.options.images, "parametrisation": run.options.parametrisation,
        }  # fmt: skip
        samples: dict[int, int] = {}
        if name not in run.failures:
            try:
                samples = _samples_at_checkpoints(run.grid.run_folder(name), config)
            except CheckpointError as error:
                run.failures[name] = unwrapped(error)
        if name in run.failures:
            return [of_run | {"nodes": 0}]
        last = max(samples)
        of_run["checkpoint"] = _digest(run, name, last)
        wanted = [(step, run.weights) for step in samples]
        if run.weights != "none":
            wanted.append((last, "none"))
        return [
            of_run | {"step": step, "samples": samples[step], "weights": track} | bin_columns(number, where)
            for step, track in wanted for number, where in enumerate(run.bins)
        ]  # fmt: skip


def _planned_steps(config: JobConfig) -> range:
    """Steps of a run's checkpoints, in its first batch size."""
    interval = config.checkpoint.interval
    return range(interval, config.training.steps + 1, interval)


def _samples_at_checkpoints(folder: Path, config: JobConfig) -> dict[int, int]:
    """Steps of a finished run's checkpoints -> samples seen there, both rising; without those that a stop saved between.

    Raises:
        CheckpointError: there are none, or one cannot be read.
    """
    batch = config.training.global_batch_size
    if largest_growth(config) == 1:
        return {step: step * batch for step in _planned_steps(config)}
    checkpoints = run_checkpoints(folder)
    if not (there := sorted(checkpoint_steps(checkpoints))):
        raise CheckpointError(f"{checkpoints}: holds no checkpoint")
    found: dict[int, int] = {}
    intervals = 0  # that the checkpoint before completed: one within the next was saved by a stop
    for step in there:
        samples = samples_seen(folder, step)
        completed = samples // (batch * config.checkpoint.interval)
        if completed > intervals or step == there[-1]:
            found[step], intervals = samples, completed
    return found


def _digest(run: TrainedGrid, name: str, last: int) -> str:
    """Digest of the last checkpoint, which identifies a run; empty for a damaged one, reported by its measurement."""
    try:
        return checkpoint_digest(run.grid.run_folder(name), last)
    except CheckpointError:
        return ""


def bin_columns(number: int, where: TimestepBin) -> Cell:
    """Columns of a bin in a table of errors."""
    return {
        "bin": number, "unit": where.unit, "low": where.low, "high": where.high, "share": where.share,
        "nodes": len(where.nodes.t),
    }  # fmt: skip
