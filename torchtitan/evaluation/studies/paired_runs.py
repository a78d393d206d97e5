"""Runs that exist, compared in one currency on the same images with the same noise; intervals are over images."""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import DATASETS
from torchtitan.config import JobConfig
from torchtitan.diffusion.objective import Objective
from torchtitan.distributed.mesh import compute_device
from torchtitan.evaluation.studies.frame import Advance, Cell, Row, StudyError, markdown_table, number
from torchtitan.evaluation.studies.gns_plots import legend_outside, new_figure, note, save
from torchtitan.evaluation.studies.grid_plots import arm_color
from torchtitan.evaluation.studies.grid_study import bin_errors, choose_weights, read_bins
from torchtitan.evaluation.studies.slot_nodes import TimestepBin
from torchtitan.evaluation.timestep_errors import FixedSamples, fixed_samples
from torchtitan.evaluation.trained_model import TrainedModel, load_run, read_config
from torchtitan.training.checkpoint import checkpoint_steps
from torchtitan.training.checkpoint_location import run_checkpoints

# Keys of `[data]` that change neither the held-out images nor what is learned of them.
_DATA_KEYS_APART = ("num_workers", "path", "horizontal_flip")


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs.

    Attributes:
        name: of its folder, which tables call it by.
        folder, config: the run's.
        step: its newest checkpoint.
        weights: EMA track, or "none".
    """

    name: str
    folder: Path
    config: JobConfig
    step: int
    weights: str


@dataclass
class ComparedRuns:
    """What the frame of studies takes in the place of a run; the first is the reference."""

    runs: list[ComparedRun]
    bins: list[TimestepBin]
    options: argparse.Namespace
    _models: dict[str, TrainedModel] = field(default_factory=dict, repr=False)
    _errors: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)
    _samples: FixedSamples | None = field(default=None, repr=False)

    @property
    def results(self) -> Path:
        """The reference's folder of studies."""
        return self.runs[0].folder / "studies"

    @property
    def description(self) -> str:
        """What is compared, for the first line of the summary."""
        described = ", ".join(
            f"{run.name} ({run.config.objective.prediction}, step {run.step}, {run.weights})" for run in self.runs
        )
        return f"{described} on {self.runs[0].config.data.name}, {self.runs[0].config.objective.path}."

    def errors(self, name: str, place: int, advance: Advance) -> Tensor:
        """Mean error of each image in a bin, in the currency asked for, float64 [K]. Raises CheckpointError."""
        if (name, place) not in self._errors:
            run = next(run for run in self.runs if run.name == name)
            if name not in self._models:
                self._models[name] = load_run(run.folder, run.weights, run.step, compute_device())
            if self._samples is None:
                dataset = DATASETS[run.config.data.name](run.config.data, "validation")
                self._samples = fixed_samples(dataset, self.options.images, seed=0)
            self._errors[name, place] = bin_errors(
                self._models[name], self._samples, self.bins[place], self.options.currency, advance
            )
        return self._errors[name, place]


def open_runs(folders: list[Path], options: argparse.Namespace) -> tuple["PairedStudy", ComparedRuns]:
    """Check that the runs can be compared.

    Raises:
        StudyError, ConfigError, CheckpointError: a folder is no run, has no checkpoint, or is of other data or of
            another path than the first.
    """
    if len(folders) < 2:
        raise StudyError(f"{folders[0]}: one run alone is no comparison (give 2 at least, or a CONFIG.toml)")
    runs = [_open(folder, options.weights) for folder in folders]
    for run in runs:
        if [other.name for other in runs].count(run.name) > 1:
            raise StudyError(f"{run.folder}: two runs are called {run.name} (rename a folder)")
        _refuse_unlike(runs[0], run)
    return PairedStudy(), ComparedRuns(runs, read_bins(Objective(runs[0].config.objective, 0), options), options)


def _open(folder: Path, weights: str | None) -> ComparedRun:
    if not (folder / "config.toml").is_file():
        raise StudyError(f"{folder}: is no run folder (it has no config.toml)")
    config = read_config(folder / "config.toml")
    there = checkpoint_steps(run_checkpoints(folder))
    if not there:
        raise StudyError(f"{folder}: holds no checkpoint (train with checkpoint.enable = true)")
    return ComparedRun(folder.resolve().name, folder, config, max(there), choose_weights(config, weights))


def _refuse_unlike(first: ComparedRun, run: ComparedRun) -> None:
    mine, other = ({k: v for k, v in vars(r.config.data).items() if k not in _DATA_KEYS_APART} for r in (first, run))
    for key in mine:
        if other.get(key) != mine[key]:
            raise StudyError(
                f"{run.folder}: data.{key} = {other.get(key)}, that of {first.name} is {mine[key]} (compare runs of "
                "the same data)"
            )
    paths = first.config.objective.path, run.config.objective.path
    if paths[0] != paths[1]:
        raise StudyError(
            f"{run.folder}: objective.path = {paths[1]}, that of {first.name} is {paths[0]} (compare runs of one path)"
        )


class PairedStudy:
    """A study, as the frame takes it, of runs that exist."""

    UNIT = "error"
    COLUMNS = (
        "model", "prediction", "step", "weights", "reference", "bin", "unit", "low", "high", "share", "nodes", "images",
        "currency", "error", "error_se", "log_ratio", "log_ratio_se", "status", "reason", "date", "runtime",
    )  # fmt: skip
    KEY = ("model", "step", "weights", "reference", "low", "high", "nodes", "images", "currency")

    def cells(self, run: ComparedRuns) -> list[Cell]:
        first, options = run.runs[0], run.options
        shared = {"reference": f"{first.name} step {first.step} {first.weights}", "images": options.images}
        return [
            shared | {
                "model": one.name, "prediction": one.config.objective.prediction, "step": one.step,
                "weights": one.weights, "bin": place, "unit": where.unit, "low": where.low, "high": where.high,
                "share": where.share, "nodes": len(where.nodes.t), "currency": options.currency,
            }
            for one in run.runs for place, where in enumerate(run.bins)
        ]  # fmt: skip

    def cost(self, cell: Cell) -> int:
        return cell["images"] * cell["nodes"]

    def measure(self, run: ComparedRuns, cell: Cell, advance: Advance) -> dict[str, Any]:
        errors = run.errors(cell["model"], cell["bin"], advance)
        reference = run.errors(run.runs[0].name, cell["bin"], lambda count: None)
        ratio, ratio_se = log_ratio(errors, reference)
        return {
            "error": errors.mean().item(), "error_se": errors.std().item() / math.sqrt(len(errors)),
            "log_ratio": ratio, "log_ratio_se": ratio_se,
        }  # fmt: skip

    def report(self, run: ComparedRuns, rows: list[Row], folder: Path) -> str:
        good = [row for row in rows if row["status"] == "ok"]
        text = (
            f"Held-out squared error of {run.options.currency}, {run.options.images} images with fixed noise, "
            f"{len(run.bins)} bins of timesteps. Changes are against {run.runs[0].name}, paired by image; brackets "
            "hold 95 % intervals over images. They are about these trained weights: another seed of the same training "
            "may differ by more.\n\n"
        )
        header = ["timesteps", f"{run.runs[0].name}: error", *(one.name for one in run.runs[1:])]
        by_place = {(row["model"], int(row["bin"])): row for row in good}
        lines = []
        for place, where in enumerate(run.bins):
            first = by_place.get((run.runs[0].name, place))
            line = [where.label, f"{number(first, 'error'):.4g}" if first else "-"]
            line += [_change(by_place.get((one.name, place))) for one in run.runs[1:]]
            lines.append(line)
        return text + markdown_table(header, lines) + _draw(run, by_place, folder / "bins.png")


def log_ratio(errors: Tensor, reference: Tensor) -> tuple[float, float]:
    """ln of the ratio of two mean errors of the same images, and its standard error.

    The standard error is that of the mean of e_i / mean(e) - r_i / mean(r), the ratio's linear part (delta method).

    Args:
        errors, reference: of each image [K], K >= 2, positive.
    """
    residual = errors / errors.mean() - reference / reference.mean()
    return math.log(errors.mean() / reference.mean()), residual.std().item() / math.sqrt(len(errors))


def _interval(row: Row) -> tuple[float, float, float]:
    middle, margin = number(row, "log_ratio"), 1.96 * number(row, "log_ratio_se")
    low, mid, high = (100 * math.expm1(middle + sign * margin) for sign in (-1, 0, 1))
    return low, mid, high


def _change(row: Row | None) -> str:
    if row is None:
        return "-"
    low, middle, high = _interval(row)
    text = f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if low * high > 0 else text


def _draw(run: ComparedRuns, rows: dict[tuple[str, int], Row], path: Path) -> str:
    figure, axes = new_figure("Held-out error by timestep, in one currency", rows=2, size=(10.5, 7.5), sharex=True)
    absolute, relative = axes[:, 0]
    for place, one in enumerate(run.runs):
        there = [k for k in range(len(run.bins)) if (one.name, k) in rows]
        color, label = arm_color(place), f"{one.name} ({one.config.objective.prediction})"
        values = [number(rows[one.name, k], "error") for k in there]
        margins = [1.96 * number(rows[one.name, k], "error_se") for k in there]
        absolute.errorbar(there, values, margins, color=color, marker="o", markersize=4, linewidth=1.3, label=label)
        if place:
            found = torch.tensor([_interval(rows[one.name, k]) for k in there], dtype=torch.float64).reshape(-1, 3)
            middle = found[:, 1]
            ends = torch.stack((middle - found[:, 0], found[:, 2] - middle))
            relative.errorbar(there, middle, ends.numpy(), color=color, marker="o", markersize=4, linewidth=1.3)
    absolute.set_yscale("log")
    absolute.set_ylabel(f"squared error of {run.options.currency}")
    absolute.grid(alpha=0.25)
    legend_outside(absolute, "run (prediction)")
    relative.axhline(0.0, color="black", linewidth=1)
    relative.grid(alpha=0.25)
    relative.set_ylabel(f"change against\n{run.runs[0].name} (%)")
    relative.set_xticks(range(len(run.bins)), [where.label for where in run.bins], fontsize=8)
    relative.set_xlabel(f"timestep bin ({'DDPM indices' if run.bins[0].unit == 'index' else 't'}), from data to noise")
    note(figure, f"bars: 95 % intervals over {run.options.images} images; changes are paired by image")
    return save(figure, path)


__all__ = ["ComparedRuns", "PairedStudy", "log_ratio", "open_runs"]
