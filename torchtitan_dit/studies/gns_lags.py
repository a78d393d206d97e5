"""Noise scale of checkpoints against that of the training's window, and the cosine of the mean gradient by lag.

A cell is an age and a bin of timesteps, measured at checkpoints before that age. Protocol and results:
docs/critical_batch.md.
"""

import argparse
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtitan.checkpoint.checkpointer import checkpoint_steps
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.evaluation.offline_gradients import Gradients, TimestepBin, timestep_bin
from torchtitan.experiments.cells import Cell, Row
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.experiments.record import as_text
from torchtitan_dit.studies import gns_cells
from torchtitan_dit.studies.frame import StudyRun, checkpoint_name, require_at_least, require_seed
from torchtitan_dit.studies.gns_calibration import machine, numbers_text
from torchtitan_dit.studies.gns_lags_report import report_text
from torchtitan_dit.studies.gns_trajectory import last_logged, same_bins
from torchtitan_dit.studies.gradient_lags import BLOCKS, GROUPS, PointGradient, lag_cosines, measure_trajectory
from torchtitan_dit.studies.trained_checkpoint import checkpoint_digest
from torchtitan_dit.studies.weights_loss import MovedWeights, flat_weights

_OF_AGE = ("model", "checkpoint", "back", "samples", "dtype", "seed")
KEY = (*_OF_AGE, "t_min", "t_max", "bin_unit")
COLUMNS = (
    "model", "data", "flavor", "run_seed", "step", "bin", *(name for name in KEY if name != "model"), "mass",
    "points", "signals", "noises", "b", "b_lower", "b_upper", "window", "window_lower", "window_upper",
    "lags", "cosines", "cosines_se", "products",
    "logged", "logged_lower", "logged_upper", "logged_lag", "logged_estimator",
    "machine", "status", "reason", "date", "runtime",
)  # fmt: skip
UNIT = "gradient"
_MULTIPLE = BLOCKS * GROUPS


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    gns_cells.add_bins(parser)
    add("--back", type=int, nargs="+", default=[32, 28, 24, 20, 16, 12, 8, 6, 4, 3, 2, 1], metavar="STEPS",
        help="checkpoints that many steps before each of --steps are measured too (default: 32 28 24 20 16 12 8 6 4 3 2 1)")
    add("--lags", type=int, nargs="+", default=[1, 2, 3, 4, 8, 16, 32], metavar="STEPS",
        help="lags of the cosines (default: 1 2 3 4 8 16 32)")
    add("--samples", type=int, default=1024, help=f"samples at each checkpoint, a multiple of {_MULTIPLE} (default: 1024)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of compute (default: float32)")
    add("--batch-size", type=int, default=128, help="images at a time (default: 128)")
    add("--seed", type=int, default=0, help="of every draw (default: 0)")


def cells(run: StudyRun) -> list[Cell]:
    _check(run)
    options = run.options
    back = sorted(options.back, reverse=True)
    found = [
        {
            "model": checkpoint_name(run, step), "checkpoint": checkpoint_digest(run.folder, step),
            "data": run.config.data.name, "flavor": run.config.model.flavor, "run_seed": run.config.debug.seed,
            "step": step, "bin": number, "back": " ".join(map(str, back)), "samples": options.samples,
            "dtype": options.dtype, "seed": options.seed, "t_min": where[0], "t_max": where[1], "bin_unit": where[2],
        }
        for step in run.steps for number, where in enumerate(gns_cells.bins(run))
    ]  # fmt: skip
    if not same_bins(run, [{name: as_text(value) for name, value in cell.items()} for cell in found]):
        raise StudyError(f"{run.folder}: has logged no noise scales of these bins (train with gns.enable = true)")
    return found


def _check(run: StudyRun) -> None:
    """Refuse what has no answer. Raises StudyError."""
    options = run.options
    if run.track != "none":
        raise StudyError(f"--weights: a run logs the noise scale of its trained weights, not of {run.track!r} (leave it out)")
    require_at_least(options, {"samples": _MULTIPLE, "batch_size": 1})
    if options.samples % _MULTIPLE:
        raise StudyError(f"--samples: must be a multiple of {_MULTIPLE}, is {options.samples}")
    for name in ("back", "lags"):
        given = getattr(options, name)
        if min(given) < 1 or len(set(given)) < len(given):
            raise StudyError(f"--{name}: must be different numbers of steps, 1 or more")
    require_seed(options)
    there = set(checkpoint_steps(run_checkpoints(run.folder)))
    for step in run.steps:
        if missing := {step - back for back in options.back} - there:
            raise StudyError(
                f"--back: {min(missing)} is no checkpoint of the run, for step {step} (train with checkpoint.interval = 1 "
                "and checkpoint.keep_latest_k = 0)"
            )


def cost(cell: Cell) -> int:
    """Cost of a cell: gradients of single samples."""
    return (len(cell["back"].split()) + 1) * cell["samples"]


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Measure a cell: the other columns of its row."""
    key = tuple(as_text(cell[name]) for name in _OF_AGE)
    if run.kept.get("key") != key:
        run.kept.clear()
        run.kept["opened"], run.kept["key"] = OpenedWindow(run, cell), key
    opened: OpenedWindow = run.kept["opened"]
    where = timestep_bin(opened.gradients.objective, cell["t_min"], cell["t_max"], cell["bin_unit"])
    stream = zlib.crc32("|".join(as_text(cell[name]) for name in KEY).encode()) & 0xFFFFFF
    found = measure_trajectory(opened.points(where, stream), cell["samples"], advance)
    values, lags = found.products.values, run.options.lags
    return {
        "mass": where.mass, "machine": machine(run), "points": " ".join(map(str, opened.steps)),
        "signals": numbers_text([one.signal for one in found.scales]),
        "noises": numbers_text([one.noise for one in found.scales]),
        "b": numbers_text([one.noise / one.signal for one in found.scales]),
        "b_lower": numbers_text([one.lower for one in found.scales]),
        "b_upper": numbers_text([one.upper for one in found.scales]),
        "window": found.window.noise / found.window.signal,
        "window_lower": found.window.lower, "window_upper": found.window.upper,
        "lags": " ".join(map(str, lags)),
        "cosines": numbers_text(lag_cosines(values, opened.steps, lags).tolist()),
        "cosines_se": numbers_text(found.products.error_of(lambda products: lag_cosines(products, opened.steps, lags)).tolist()),
        "products": numbers_text(values.flatten().tolist()),
        **_logged(run, cell["step"], cell["bin"], where.mass),
    }  # fmt: skip


class OpenedWindow:
    """Weights of an age's checkpoints and of those before it, kept for all bins.

    Attributes:
        gradients: of the model into which the weights are put.
        steps: of the checkpoints, rising.
    """

    def __init__(self, run: StudyRun, cell: Cell) -> None:
        self.steps = [cell["step"] - int(back) for back in cell["back"].split()] + [cell["step"]]
        self._weights: list[Tensor] = []
        for step in self.steps:  # the last one's model is used
            trained = run.model(step)
            self._weights.append(flat_weights(list(trained.model.parameters())))
        self.gradients = Gradients(
            trained.model, trained.objective, run.dataset("train"), label_dropout=trained.config.model.label_dropout,
            horizontal_flip=trained.config.data.horizontal_flip, seed=cell["seed"], device=run.device,
            dtype=cell["dtype"], batch_size=run.options.batch_size,
        )  # fmt: skip
        self._moved = MovedWeights(self.gradients)

    def points(self, where: TimestepBin, stream: int) -> list[Callable[[], PointGradient]]:
        """Gradient of a bin at each checkpoint; opening a point loads its weights into the model."""

        def opened(weights: Tensor) -> PointGradient:
            self._moved.put(weights)
            return StayingLoss(self.gradients, where, stream)

        return [partial(opened, weights) for weights in self._weights]


class StayingLoss:
    """Gradient of a bin at the model's present weights."""

    def __init__(self, gradients: Gradients, where: TimestepBin, stream: int) -> None:
        self._gradients, self._where, self._stream = gradients, where, stream

    def gradient(self, numbers: Tensor) -> Tensor:
        return self._gradients.mean_gradient(self._where, numbers, self._stream)


def _logged(run: StudyRun, step: int, number: int, mass: float) -> dict[str, Any]:
    """Columns of the noise scale that the run last logged, of the headline estimator; empty ones where it is not known."""
    point = last_logged(run, step, "gns/plain/sketch/all/headline")
    estimator = next((name for name in ("sketch", "composite") if point.get(f"gns/plain/{name}/all/headline")), "")
    value, lower, upper, lag = (
        point.get(f"gns/plain/{estimator}/{number}/{name}") for name in ("b_simple", "lower", "upper", "lag")
    )
    steps = None if lag is None else lag / (mass * run.config.training.global_batch_size)
    upper = float("inf") if upper is None and lower is not None else upper  # an infinite end is not logged
    return {
        "logged": value, "logged_lower": lower, "logged_upper": upper, "logged_lag": steps, "logged_estimator": estimator,
    }  # fmt: skip


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    return report_text(rows, folder)
