"""Prediction types of trained runs compared in one parametrisation on the same images and noise; intervals are over images."""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research.by_image import log_ratio
from research.cells import Cell, Row
from research.frame import config_and_steps, number, run_study
from research.grid_plots import finish_bins
from research.pictures import legend_outside, save
from research.slot_nodes import TimestepBin
from research.timestep_errors import FixedSamples
from research.trained_checkpoint import checkpoint_digest, samples_seen
from research.trained_grid import (
    add_measure_options,
    bin_columns,
    bin_errors,
    choose_weights,
    held_out_samples,
    read_bins,
)
from torchtitan.config.job import JobConfig
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.predictions import PREDICTIONS
from torchtitan.distributed.mesh import compute_device
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.experiments.training import TrainingFailed
from torchtitan.pictures.markdown import Markdown, inline, markdown_table
from torchtitan.pictures.style import colour, new_figure, note
from torchtitan.statistics.student import student_quantile
from torchtitan.training.config import EMATrackConfig
from torchtitan.weights.trained_model import TrainedModel, load_run

NAME = "prediction_types"
# Keys of `[data]` that change neither the held-out images nor what is learned of them.
_DATA_KEYS_APART = ("num_workers", "horizontal_flip")
# Public datasets: their images are the same in every folder.
_FIXED_DATA = ("cifar10", "cifar100", "digits")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN_FOLDER", type=Path, nargs="+", help="trained runs of the same data and path, the reference first")
    add("--parametrisation", choices=PREDICTIONS, default="v",
        help="parametrisation of the errors, whatever the model predicts (default: v)")
    add("--weights", metavar="none|TRACK",
        help="weights to compare: an EMA track, none for the trained weights (default: the first track)")
    add("--retry-failed", action="store_true", help="measure failed cells again")
    add("--output", type=Path, help=f"folder of the results (default: studies/{NAME} of the first run)")
    add_measure_options(parser)


def run_alone(arguments: argparse.Namespace) -> Path:
    """Measure what is missing; return summary.md. Raises StudyError, ConfigError, CheckpointError."""
    study, runs = open_runs(arguments.runs, arguments)
    return run_study(NAME, study, runs)


@dataclass(frozen=True)
class ComparedRun:
    """Run in the comparison.

    Attributes:
        name: of its folder, used in tables.
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
    """Runs to compare, in the frame of studies instead of a run; the first is the reference.

    Attributes:
        runs: of different names.
        digests: name of a run -> `checkpoint_digest` of its measured checkpoint.
        seen: name of a run -> images seen.
        bins: of timesteps.
        samples: held-out images with noise.
        options: the study's.
    """

    runs: list[ComparedRun]
    digests: dict[str, str]
    seen: dict[str, int]
    bins: list[TimestepBin]
    samples: FixedSamples
    options: argparse.Namespace
    _models: dict[str, TrainedModel] = field(default_factory=dict, repr=False)
    _errors: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def results(self) -> Path:
        """Folder of the reference's studies."""
        return self.runs[0].folder / "studies"

    @property
    def description(self) -> str:
        """Description of the comparison, for the first line of the summary."""
        described = ", ".join(
            f"{inline(run.name)} ({run.config.objective.prediction}, step {run.step}, {self.seen[run.name]} images seen, "
            f"{_averaging(run)})" for run in self.runs
        )  # fmt: skip
        unequal = ""
        if len(set(self.seen.values())) > 1:
            unequal += " The runs have not seen the same number of images, which also contributes to changes."
        if len({_averaging(run) for run in self.runs}) > 1:
            unequal += " Their weights are not averaged alike, which also contributes to changes."
        return f"{described} on {self.runs[0].config.data.name}, {self.runs[0].config.objective.path}.{unequal}"

    def errors(self, name: str, place: int, advance: Advance) -> Tensor:
        """Mean error of each image in a bin, in the chosen parametrisation, float64 [K]. Raises CheckpointError."""
        if (name, place) not in self._errors:
            run = next(run for run in self.runs if run.name == name)
            if name not in self._models:
                self._models[name] = load_run(run.folder, run.weights, run.step, compute_device())
            self._errors[name, place] = bin_errors(
                self._models[name], self.samples, self.bins[place], self.options.parametrisation, advance
            )
        return self._errors[name, place]


def open_runs(folders: list[Path], options: argparse.Namespace) -> tuple["PairedStudy", ComparedRuns]:
    """Open the runs and check that they can be compared.

    Raises:
        StudyError, ConfigError, CheckpointError: a folder is no run, has no checkpoint, or is of other data or of
            another path than the first; averages would be compared with trained weights; or the held-out images cannot
            be read.
    """
    if len(folders) < 2:
        raise StudyError(f"{folders[0]}: one run alone is no comparison (give 2 at least)")
    runs = [_open(folder, options.weights) for folder in folders]
    for run in runs:
        if [other.name for other in runs].count(run.name) > 1:
            raise StudyError(f"{run.folder}: two runs are called {run.name} (rename a folder)")
        _refuse_unlike(runs[0], run)
    bins = read_bins(build_objective(runs[0].config.objective, 0), options)
    digests = {run.name: checkpoint_digest(run.folder, run.step) for run in runs}
    seen = {run.name: samples_seen(run.folder, run.step) for run in runs}
    return PairedStudy(), ComparedRuns(runs, digests, seen, bins, held_out_samples(runs[0].config, options), options)


def _open(folder: Path, weights: str | None) -> ComparedRun:
    config, there = config_and_steps(folder)
    return ComparedRun(folder.resolve().name, folder, config, there[-1], choose_weights(config, weights))


def _averaging(run: ComparedRun) -> str:
    """Averaging of the measured weights, in words."""
    if run.weights == "none":
        return "trained weights"
    track: EMATrackConfig = next(track for track in run.config.ema.tracks if track.name == run.weights)
    length = {
        "constant": f"decay {track.decay:g} per step", "half_life": f"half-life {track.half_life:g} images",
        "power": f"sigma_rel {track.sigma_rel:g}",
    }  # fmt: skip
    return f"EMA {run.weights}, {length[track.kind]}"


def _refuse_unlike(first: ComparedRun, run: ComparedRun) -> None:
    apart = (*_DATA_KEYS_APART, "path") if first.config.data.name in _FIXED_DATA else _DATA_KEYS_APART
    mine, other = ({k: v for k, v in vars(r.config.data).items() if k not in apart} for r in (first, run))
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
    if (first.weights == "none") != (run.weights == "none"):
        raise StudyError(
            f"{run.folder}: would be measured by its {_averaging(run)}, {first.name} by its {_averaging(first)} (give "
            "--weights none)"
        )


class PairedStudy:
    """Study of existing runs, for the frame of studies."""

    UNIT = "error"
    COLUMNS = (
        "model", "checkpoint", "prediction", "step", "samples", "weights", "reference", "bin", "unit", "low", "high",
        "share", "nodes", "images", "parametrisation", "error", "error_se", "log_ratio", "log_ratio_low", "log_ratio_high",
        "status", "reason", "date", "runtime",
    )  # fmt: skip
    # A folder's name is not the run: another run may have it, or the same be trained further.
    KEY = (
        "model", "checkpoint", "step", "weights", "reference", "bin", "low", "high", "nodes", "images", "parametrisation",
    )  # fmt: skip

    def cells(self, run: ComparedRuns) -> list[Cell]:
        first, options = run.runs[0], run.options
        reference = f"{first.name} step {first.step} {first.weights} {run.digests[first.name]}"
        shared = {"reference": reference, "images": options.images}
        return [
            shared | {
                "model": one.name, "checkpoint": run.digests[one.name], "step": one.step,
                "prediction": one.config.objective.prediction, "samples": run.seen[one.name], "weights": one.weights,
                "parametrisation": options.parametrisation,
            } | bin_columns(place, where)
            for one in run.runs for place, where in enumerate(run.bins)
        ]  # fmt: skip

    def cost(self, cell: Cell) -> int:
        return cell["images"] * cell["nodes"]

    def measure(self, run: ComparedRuns, cell: Cell, advance: Advance) -> dict[str, Any]:
        errors = run.errors(cell["model"], cell["bin"], advance)
        reference = run.errors(run.runs[0].name, cell["bin"], lambda count: None)
        if not (errors.isfinite().all() and reference.isfinite().all()):
            raise TrainingFailed("the error, or the reference's, is not finite")
        ratio = log_ratio(errors[None], reference[None])
        return {
            "error": errors.mean().item(), "error_se": errors.std().item() / math.sqrt(len(errors)),
            "log_ratio": ratio.value, "log_ratio_low": ratio.lower, "log_ratio_high": ratio.upper,
        }  # fmt: skip

    def report(self, run: ComparedRuns, rows: list[Row], folder: Path) -> str:
        good = [row for row in rows if row["status"] == "ok"]
        text = (
            f"Held-out squared error of {run.options.parametrisation}, {run.options.images} images with fixed noise, "
            f"{len(run.bins)} bins of timesteps. Changes are against {inline(run.runs[0].name)}, paired by image; brackets "
            "hold 95 % intervals by Student's t over images. They are about these trained weights: another seed of the "
            "same training may differ by more.\n\n"
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


def _interval(row: Row) -> tuple[float, float, float]:
    low, middle, high = (100 * math.expm1(number(row, f"log_ratio{end}")) for end in ("_low", "", "_high"))
    return low, middle, high


def _change(row: Row | None) -> str:
    if row is None:
        return "-"
    low, middle, high = _interval(row)
    text = f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}]"
    return Markdown(f"**{text}**") if low * high > 0 else text


def _draw(run: ComparedRuns, rows: dict[tuple[str, int], Row], path: Path) -> str:
    figure, axes = new_figure("Held-out error by timestep, one parametrisation", rows=2, size=(10.5, 7.5), sharex=True)
    absolute, relative = axes[:, 0]
    quantile = student_quantile(0.975, run.options.images - 1.0)
    for place, one in enumerate(run.runs):
        there = [k for k in range(len(run.bins)) if (one.name, k) in rows]
        color, label = colour(place), f"{one.name} ({one.config.objective.prediction})"
        values = [number(rows[one.name, k], "error") for k in there]
        margins = [quantile * number(rows[one.name, k], "error_se") for k in there]
        absolute.errorbar(there, values, margins, color=color, marker="o", markersize=4, linewidth=1.3, label=label)
        if place:
            changes = torch.tensor([_interval(rows[one.name, k]) for k in there], dtype=torch.float64).reshape(-1, 3)
            found = 1.0 + changes / 100  # as ratios: on one axis with some that are a hundred times as large
            middle = found[:, 1]
            ends = torch.stack((middle - found[:, 0], found[:, 2] - middle))
            relative.errorbar(there, middle, ends.numpy(), color=color, marker="o", markersize=4, linewidth=1.3)
    finish_bins(absolute, relative, run.bins, run.options.parametrisation, run.runs[0].name)
    legend_outside(absolute, "run (prediction)")
    note(figure, f"bars: 95 % intervals over {run.options.images} images; ratios are paired by image")
    return save(figure, path)
