"""Conflict matrix as prediction: measured change of every bin's loss by training on one, against -eta G_c'P G_b.

A cell is a checkpoint and the bin that is trained. Protocol and results: docs/critical_batch.md.
"""

import argparse
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.evaluation.offline_gradients import Gradients, timestep_bin
from torchtitan.experiments.cells import Cell, Row
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.experiments.record import as_text
from torchtitan_dit.studies import gns_cells
from torchtitan_dit.studies.bin_conflict import BLOCKS, FrozenBins, measure_bins, measure_moves
from torchtitan_dit.studies.branch_training import run_lr
from torchtitan_dit.studies.frame import StudyRun, checkpoint_name, require_at_least, require_seed
from torchtitan_dit.studies.gns_calibration import adam_scale, machine, numbers_text, require_one_preconditioner
from torchtitan_dit.studies.gns_calibration_statistics import UPDATES
from torchtitan_dit.studies.gns_conflict_report import report_text
from torchtitan_dit.studies.gns_conflict_statistics import MOVES
from torchtitan_dit.studies.trained_checkpoint import checkpoint_digest
from torchtitan_dit.studies.weights_loss import MovedWeights, WeightsLoss

_OF_CHECKPOINT = ("model", "checkpoint", "edges", "bin_unit", "samples", "held", "dtype", "seed")
KEY = (*_OF_CHECKPOINT, "bin", "batch", "several", "several_batch")
COLUMNS = (
    "model", "data", "flavor", "run_seed", "step", "bin", *(name for name in KEY if name not in ("model", "bin")),
    "mass", "lr", "loss",
    *(f"{update}_{name}" for update in UPDATES for name in (
        "step_size", "products", "products_se", "signals", "signals_se",
        *(f"{move}_{kind}" for move in MOVES for kind in ("change", "change_se", "along")),
    )),
    "machine", "status", "reason", "date", "runtime",
)  # fmt: skip
UNIT = "gradient"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    gns_cells.add_bins(parser)
    add("--samples", type=int, default=512, help=f"samples of each bin's mean gradient, a multiple of {BLOCKS} (default: 512)")
    add("--batch", type=int, default=128, help="samples of a single step (default: 128)")
    add("--several", type=int, default=20, metavar="STEPS", help="consecutive steps of the longest move (default: 20)")
    add("--several-batch", type=int, default=32, metavar="BATCH", help="samples of each of these (default: 32)")
    add("--held", type=int, default=256, metavar="SAMPLES", help="held samples of each bin (default: 256)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of compute (default: float32)")
    add("--batch-size", type=int, default=128, help="images at a time (default: 128)")
    add("--seed", type=int, default=0, help="of every draw (default: 0)")


def cells(run: StudyRun) -> list[Cell]:
    _check(run)
    options = run.options
    bins = gns_cells.bins(run)
    edges = [bins[0][0], *(high for _, high, _ in bins)]
    return [
        {
            "model": checkpoint_name(run, step), "checkpoint": checkpoint_digest(run.folder, step),
            "data": run.config.data.name, "flavor": run.config.model.flavor, "run_seed": run.config.debug.seed,
            "step": step, "bin": number, "edges": " ".join(map(as_text, edges)), "bin_unit": bins[0][2],
            "samples": options.samples, "batch": options.batch, "several": options.several,
            "several_batch": options.several_batch, "held": options.held, "dtype": options.dtype, "seed": options.seed,
        }
        for step in run.steps for number in range(len(bins))
    ]  # fmt: skip


def _check(run: StudyRun) -> None:
    """Refuse what has no answer. Raises StudyError."""
    options = run.options
    require_one_preconditioner(run)
    require_at_least(options, {"samples": BLOCKS, "batch": 1, "several": 1, "several_batch": 1, "held": 2, "batch_size": 1})
    if options.samples % BLOCKS:
        raise StudyError(f"--samples: must be a multiple of {BLOCKS}, is {options.samples}")
    require_seed(options)


def cost(cell: Cell) -> int:
    """Cost of a cell: gradients of single samples; the mean gradients of a checkpoint are in its first cell."""
    bins = len(cell["edges"].split()) - 1
    return (0 if cell["bin"] else bins * cell["samples"]) + 2 * (cell["batch"] + cell["several"] * cell["several_batch"])


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Measure a cell: the other columns of its row."""
    key = tuple(as_text(cell[name]) for name in _OF_CHECKPOINT)
    if run.kept.get("key") != key:
        run.kept.clear()
        run.kept["opened"], run.kept["key"] = OpenedCheckpoint(run, cell, advance), key
    return run.kept["opened"].measure(cell, advance)


class OpenedCheckpoint:
    """Bins of a checkpoint, measured once for all of its cells."""

    def __init__(self, run: StudyRun, cell: Cell, advance: Advance) -> None:
        trained = run.model(cell["step"])
        edges = [float(edge) for edge in cell["edges"].split()]
        self._where = [timestep_bin(trained.objective, *ends, cell["bin_unit"]) for ends in pairwise(edges)]
        gradients = Gradients(
            trained.model, trained.objective, run.dataset("train"), label_dropout=trained.config.model.label_dropout,
            horizontal_flip=trained.config.data.horizontal_flip, seed=cell["seed"], device=run.device,
            dtype=cell["dtype"], batch_size=run.options.batch_size,
        )  # fmt: skip
        self._weights = MovedWeights(gradients)
        names = [as_text(cell[name]) for name in _OF_CHECKPOINT]
        streams = [zlib.crc32("|".join([*names, str(number)]).encode()) & 0xFFFFFF for number in range(len(self._where))]
        losses = [
            WeightsLoss(gradients, where, stream, self._weights)
            for where, stream in zip(self._where, streams, strict=True)
        ]
        adam = adam_scale(run, cell["step"], gradients)
        self._scales: dict[str, Tensor | None] = {"plain": None, "adam": adam}
        self._bins = measure_bins(losses, self._scales, cell["samples"], cell["held"], advance)
        self._lr = run_lr(run.config, cell["step"])
        self._step_sizes = step_sizes(self._bins, [where.mass for where in self._where], adam, self._lr)
        self._machine = machine(run)

    def measure(self, cell: Cell, advance: Advance) -> dict[str, Any]:
        """Measure the moves of one trained bin."""
        number = cell["bin"]
        row: dict[str, Any] = {
            "mass": self._where[number].mass, "lr": self._lr, "machine": self._machine,
            "loss": numbers_text(self._bins.before.mean(1).tolist()),
        }  # fmt: skip
        try:
            for update in UPDATES:
                products = self._bins.products[update]
                values, errors = products.values, products.errors
                row[f"{update}_step_size"] = self._step_sizes[update]
                found = {
                    "products": values[number], "products_se": errors[number],
                    "signals": values.diagonal(), "signals_se": errors.diagonal(),
                }  # fmt: skip
                moves = measure_moves(
                    self._bins, number, self._scales[update], self._step_sizes[update], cell["batch"], cell["several"],
                    cell["several_batch"], advance,
                )  # fmt: skip
                for move, change in moves.items():
                    found |= {f"{move}_change": change.values, f"{move}_change_se": change.errors, f"{move}_along": change.along}
                row |= {f"{update}_{name}": numbers_text(numbers.tolist()) for name, numbers in found.items()}
        finally:
            self._weights.move(None)
        return row


def step_sizes(bins: FrozenBins, masses: list[float], adam: Tensor, lr: float) -> dict[str, float]:
    """Step size of each update: Adam's learning rate, and the plain one of the same length along the objective's gradient.

    Args:
        bins: of a checkpoint.
        masses: of the bins.
        adam: diagonal of P, [P].
        lr: learning rate.
    """
    whole = torch.tensor(masses) @ bins.means
    return {"plain": lr * ((adam * whole).norm() / whole.norm()).item(), "adam": lr}


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    return report_text(rows, folder)
