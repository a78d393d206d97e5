"""Calibration of noise scales: the batch at which one step on a bin makes half of the best progress, against B per bin.

A cell is a checkpoint and a bin of timesteps: the noise scale in three geometries at the frozen weights, and the half-progress
batch of the plain and of Adam's update. Protocol and results: docs/research/critical_batch.md.
"""

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from research import gns_cells
from research.cells import Cell, Row
from research.frame import StudyRun, checkpoint_name, require_at_least, require_seed
from research.gns_calibration_report import report_text
from research.gns_calibration_statistics import GEOMETRIES, UPDATES, interval_columns
from research.half_progress import Replicate, SampleNumbers, UpdateGeometry, WeightsLoss, measure_progress
from research.half_progress_fit import half_progress
from research.offline_gradients import (
    GradientError,
    Gradients,
    GroupNorms,
    NoiseScale,
    TimestepBin,
    noise_scale,
    square_norm,
    timestep_bin,
)
from research.result_table import as_text
from research.trained_checkpoint import checkpoint_digest
from torchtitan.checkpoint.checkpointer import checkpoint_path, read_tensors
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.statistics.interval import Interval
from torchtitan.training.hardware import device_name
from torchtitan.training.hardware_description import cpu_name

KEY = (
    "model", "checkpoint", "t_min", "t_max", "bin_unit", "batches", "samples", "replicates", "held", "dtype", "seed",
)  # fmt: skip
COLUMNS = (
    "model", "data", "step", "bin", *KEY[1:], "mass",
    *(name for geometry in GEOMETRIES for name in interval_columns(geometry)),
    *(name for update in UPDATES for kind in ("half", "interpolated") for name in interval_columns(f"{update}_{kind}")),
    *(f"{update}_{name}" for update in UPDATES for name in ("best", "progress", "progress_se", "step_sizes")),
    "loss", "machine", "status", "reason", "date", "runtime",
)  # fmt: skip
UNIT = "gradient"
GROUP = 32  # samples in a group of the noise scale
BLOCKS = 16  # independent blocks of groups, for its interval


def add_options(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser, [1, 4, 16, 64, 256], samples=8192, unit=GROUP * BLOCKS, replicates=64, batch_size=32)


def add_step_options(
    parser: argparse.ArgumentParser, batches: list[int], samples: int, unit: int, replicates: int, batch_size: int
) -> None:
    """Add the options of a calibration by steps, with these defaults; unit: samples are a multiple of it."""
    add = parser.add_argument
    gns_cells.add_bins(parser)
    add("--batches", type=int, nargs="+", default=batches, metavar="B", help="batch sizes of the steps, rising "
        f"(default: {' '.join(map(str, batches))}); the full gradient is one more")
    add("--samples", type=int, default=samples, help=f"samples of the full gradient, a multiple of {unit} (default: {samples})")
    add("--replicates", type=int, default=replicates, help="replicates of every step, even: half to tune the step size, half to "
        f"evaluate it (default: {replicates})")
    add("--held", type=int, default=32, metavar="SAMPLES", help="held samples of each replicate (default: 32)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of compute (default: float32)")
    add("--batch-size", type=int, default=batch_size, help=f"images at a time (default: {batch_size})")
    add("--seed", type=int, default=0, help="of every draw (default: 0)")


def cells(run: StudyRun) -> list[Cell]:
    _check(run)
    return cells_of(run)


def cells_of(run: StudyRun) -> list[Cell]:
    """Cells of a run's checkpoints and bins."""
    options = run.options
    bins = gns_cells.bins(run)
    return [
        {
            "model": checkpoint_name(run, step), "checkpoint": checkpoint_digest(run.folder, step), "data": run.config.data.name,
            "step": step, "bin": number, "t_min": where[0], "t_max": where[1], "bin_unit": where[2],
            "batches": " ".join(map(str, options.batches)), "samples": options.samples, "replicates": options.replicates,
            "held": options.held, "dtype": options.dtype, "seed": options.seed,
        }
        for step in run.steps for number, where in enumerate(bins)
    ]  # fmt: skip


def _check(run: StudyRun) -> None:
    """Refuse what has no answer, as runs without Adam's second moment of each weight, or one step size. Raises StudyError."""
    options, optimizer = run.options, run.config.optimizer
    require_at_least(options, {"samples": 2 * GROUP * BLOCKS, "replicates": 4, "held": 1, "batch_size": 1})
    if options.samples % (GROUP * BLOCKS):
        raise StudyError(f"--samples: must be a multiple of {GROUP * BLOCKS}, is {options.samples}")
    if options.replicates % 2:
        raise StudyError(f"--replicates: must be even, is {options.replicates}")
    batches = options.batches
    if batches != sorted(set(batches)) or batches[0] < 1 or batches[-1] >= options.samples:
        raise StudyError(f"--batches: must rise from 1 or more to less than --samples ({options.samples})")
    require_seed(options)
    if run.track != "none":
        raise StudyError(f"--weights: {run.track!r} is an average, without second moments of Adam (leave it out)")
    if not optimizer.rule.is_adams or optimizer.rule.quantised:
        raise StudyError(f"{run.folder}: optimizer.name = {optimizer.name} has no second moment of each weight (AdamW only)")
    if any(group.lr_scale != 1.0 for group in optimizer.param_groups):
        raise StudyError(f"{run.folder}: optimizer.param_groups gives weights different learning rates (remove lr_scale)")
    if run.config.lora.enable:
        raise StudyError(f"{run.folder}: trains adapters of frozen weights (whole networks only)")


def cost(cell: Cell) -> int:
    """Cost of a cell: gradients of single samples; losses after steps, which are cheaper, are left out."""
    batches = [int(batch) for batch in cell["batches"].split()]
    return cell["samples"] + cell["replicates"] * (cell["held"] + sum(batches))


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Measure a cell: the other columns of its row."""
    loss, gradients, where = loss_of_cell(run, cell)
    adam = adam_scale(run, cell["step"], gradients)
    try:
        return _measure(cell, loss, adam, run.config.optimizer.lr, advance) | {"mass": where.mass, "machine": machine(run)}
    finally:
        loss.restore()


def loss_of_cell(run: StudyRun, cell: Cell) -> tuple[WeightsLoss, Gradients, TimestepBin]:
    """Loss of a cell's bin around its checkpoint, with samples of the cell alone."""
    trained = run.model(cell["step"])
    where = timestep_bin(trained.objective, cell["t_min"], cell["t_max"], cell["bin_unit"])
    gradients = Gradients(
        trained.model, trained.objective, run.dataset("train"), label_dropout=trained.config.model.label_dropout,
        horizontal_flip=trained.config.data.horizontal_flip, seed=cell["seed"], device=run.device, dtype=cell["dtype"],
        batch_size=run.options.batch_size,
    )  # fmt: skip
    stream = zlib.crc32("|".join(as_text(cell[name]) for name in KEY).encode()) & 0xFFFFFF
    return WeightsLoss(gradients, where, stream), gradients, where


def _measure(cell: Cell, loss: WeightsLoss, adam: Tensor, rate: float, advance: Advance) -> dict[str, Any]:
    """Measure a cell on the loss of its bin: noise scales, then the progress of steps, and its fits."""
    numbers, batches = SampleNumbers(), [int(batch) for batch in cell["batches"].split()]
    scales, blocks = noise_scales(loss, adam, cell["samples"], numbers, advance)
    half = cell["replicates"] // 2
    tuning, evaluation = ([Replicate(loss, numbers.take(cell["held"])) for _ in range(half)] for _ in range(2))
    advance(2 * half * cell["held"])
    full = torch.stack(blocks).mean(0)
    # A step of Adam's length with the run's learning rate is where tuning starts, in both geometries.
    length = rate * (adam * full).norm().item()
    geometries = [
        UpdateGeometry(scale, scales[name].signal, tuning, evaluation, length / (scale * full).norm().item())
        for scale, name in ((torch.ones_like(adam), "b_g"), (adam, "b_g_v14"))
    ]
    found = measure_progress(loss, geometries, blocks, batches, numbers, advance)
    row: dict[str, Any] = {"loss": sum(replicate.before for replicate in evaluation) / half}
    for name, scale in scales.items():
        estimate = Interval(scale.noise / scale.signal, scale.lower, scale.upper)
        row |= interval_cells(name, estimate)
    for update, progress in zip(UPDATES, found, strict=True):
        fitted = half_progress(batches, cell["samples"], progress, cell["seed"])
        row |= interval_cells(f"{update}_half", fitted.hyperbola)
        row |= interval_cells(f"{update}_interpolated", fitted.interpolated)
        row |= {
            f"{update}_best": fitted.best, f"{update}_progress": numbers_text(progress.values.mean(0).tolist()),
            f"{update}_progress_se": numbers_text((progress.values.std(0) / half**0.5).tolist()),
            f"{update}_step_sizes": numbers_text(progress.step_sizes),
        }  # fmt: skip
    return row


def noise_scales(
    loss: WeightsLoss, adam: Tensor, samples: int, numbers: SampleNumbers, advance: Advance
) -> tuple[dict[str, NoiseScale], list[Tensor]]:
    """Noise scale in each geometry, from the same gradients.

    Returns:
        geometry -> estimate, and the mean gradients of the blocks.

    Raises:
        GradientError: every gradient is zero.
    """
    groups = samples // GROUP // BLOCKS
    roots: dict[str, Tensor | None] = {"b_g": None, "b_g_v14": adam.sqrt(), "b_g_v12": adam}
    found: dict[str, list[GroupNorms]] = {name: [] for name in roots}
    blocks = []
    for _ in range(BLOCKS):
        mean = torch.zeros_like(adam)
        norms: dict[str, list[float]] = {name: [] for name in roots}
        for _ in range(groups):
            gradient = loss.gradient(numbers.take(GROUP))
            mean += gradient / groups
            for name, root in roots.items():
                norms[name].append(_square_norm(gradient, root))
            advance(GROUP)
        for name, root in roots.items():
            sizes, squares = torch.full((groups,), GROUP), torch.tensor(norms[name], dtype=torch.float64)
            found[name].append(GroupNorms(sizes, squares, _square_norm(mean, root)))
        blocks.append(mean)
    if not any(block.mean_square_norm for block in found["b_g"]):
        raise GradientError("every gradient is zero")
    return {name: noise_scale(of_geometry) for name, of_geometry in found.items()}, blocks


def adam_scale(run: StudyRun, step: int, gradients: Gradients) -> Tensor:
    """Adam's preconditioner 1 / (sqrt(v) + epsilon) at a checkpoint, v its bias-corrected second moment, [P].

    Raises:
        CheckpointError: the checkpoint has no such state.
    """
    named = [(name, parameter) for name, parameter in gradients.model.named_parameters() if parameter.requires_grad]
    moments = {f"optimizer.{name}.exp_avg_sq": torch.zeros_like(parameter) for name, parameter in named}
    steps = {f"optimizer.{name}.step": torch.zeros(()) for name, _ in named}
    read_tensors(checkpoint_path(run_checkpoints(run.folder), step), moments | steps)
    beta2, epsilon = run.config.optimizer.beta2, run.config.optimizer.eps
    corrected = [
        (v / (1.0 - beta2 ** taken.item())).sqrt().add_(epsilon).reciprocal_().flatten()
        for v, taken in zip(moments.values(), steps.values(), strict=True)
    ]
    return torch.cat(corrected)


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    return report_text(rows, folder)


def _square_norm(gradient: Tensor, root: Tensor | None) -> float:
    return square_norm([gradient if root is None else gradient * root])


def interval_cells(name: str, interval: Interval) -> dict[str, float]:
    return dict(zip(interval_columns(name), (interval.value, interval.lower, interval.upper), strict=True))


def numbers_text(values: Sequence[float]) -> str:
    """Format numbers for one column of a record, separated by spaces."""
    return " ".join(f"{value:.6g}" for value in values)


def machine(run: StudyRun) -> str:
    """Describe the machine of a measurement: processor or device, torch and threads."""
    name = cpu_name() if run.device.type == "cpu" else device_name(run.device)
    return f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads"
