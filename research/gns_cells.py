"""Cell of every study of the gradient noise scale: one estimate of one checkpoint, bin and setting."""

import argparse
import math
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from research.cells import Cell, Row
from research.frame import StudyRun, checkpoint_name, number, require_seed
from research.offline_gradients import (
    WHOLE,
    GradientError,
    Gradients,
    equal_mass_edges,
    noise_scale,
    sub_batch_sizes,
    timestep_bin,
)
from research.published_estimator import COLUMNS as PUBLISHED_COLUMNS
from research.published_estimator import published_estimate
from research.result_table import as_text
from torchtitan.diffusion.objectives import build_objective
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError

COLUMNS = (
    *PUBLISHED_COLUMNS,
    "signal", "noise", "lower", "upper", "unbounded", "estimator", "weights", "status", "reason",
    "bin_unit", "mass", "split", "dtype", "seed", "repeat",
)  # fmt: skip
KEY = (
    "model", "weights", "estimator", "true_portion", "b", "B", "reps", "t_min", "t_max", "bin_unit", "split", "dtype",
    "seed", "repeat",
)  # fmt: skip
UNIT = "gradient"

# (b, B, reps) where the options say nothing: the published ones, and blocks of eight groups for the right estimator.
DEFAULTS = {"published": (50, 5000, 2), "correct": (32, 256, 16)}
PUBLISHED_PORTION = 0.1
_BINS = 10

Bin = tuple[float | None, float | None, str]
WHOLE_BIN: Bin = (None, None, "")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every study of the noise scale."""
    add = parser.add_argument
    add("--estimator", choices=("correct", "published"), default="correct",
        help="published: with its two errors, for comparison only (default: correct)")  # fmt: skip
    add("--split", choices=("train", "validation"), default="train", help="images (default: train)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of compute (default: float32)")
    add("--batch-size", type=int, default=32, help="images at a time (default: 32)")
    add("--seed", type=int, default=0, help="of every draw (default: 0)")


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Add the options of the studies that measure every cell with one setting (b, B, reps)."""
    add = parser.add_argument
    add("--small", type=int, metavar="b", help="samples in a group (correct, 32) or small batch (published, 50)")
    add("--large", type=int, metavar="B",
        help="samples in a block of groups (correct, 256) or large batch (published, 5000)")  # fmt: skip
    add("--reps", type=int, help="blocks (correct, 16), or pairs of batches for |G|^2 (published, 2)")
    add("--true-portion", type=float, metavar="SHARE",
        help="published only: share of the data behind the logged gradient norm (default: 0.1)")  # fmt: skip


def add_bins(parser: argparse.ArgumentParser) -> None:
    """Add the options of the studies by timestep bins."""
    add = parser.add_argument
    add("--bins", type=int, metavar="K", help="bins that training visits equally often (default: 10)")
    add("--edges", type=float, nargs="+", metavar="EDGE", help="edges of the bins instead, rising")
    add("--unit", choices=("t", "sigma", "index"), help="unit of the edges (default: t); index: of DDPM")


def setting(options: argparse.Namespace) -> tuple[int, int, int]:
    """Setting (b, B, reps) of the options. Raises StudyError."""
    given = (options.small, options.large, options.reps)
    b, big_b, reps = (
        default if value is None else value for value, default in zip(given, DEFAULTS[options.estimator], strict=True)
    )
    check_setting(options, b, big_b, reps)
    return b, big_b, reps


def portion(options: argparse.Namespace) -> float:
    """Share of the data behind the logged gradient norm. Raises StudyError."""
    given = options.true_portion
    if given is None:
        return PUBLISHED_PORTION
    if options.estimator == "correct":
        raise StudyError("--true-portion: the correct estimator has none (remove it, or set --estimator published)")
    if not 0 < given < math.inf:
        raise StudyError(f"--true-portion: {given:g} is not positive")
    return given


def check_setting(options: argparse.Namespace, b: int, big_b: int, reps: int) -> None:
    """Check that a setting can be measured. Raises StudyError."""
    if not 1 <= b < big_b:
        raise StudyError(f"b = {b}, B = {big_b}: b must be at least 1 and less than B")
    least = 2 if options.estimator == "correct" else 1
    if reps < least:
        raise StudyError(f"reps = {reps}: the {options.estimator} estimator needs {least} at least")
    if options.batch_size < 1:
        raise StudyError(f"--batch-size: must be at least 1, is {options.batch_size}")
    require_seed(options)


def bins(run: StudyRun) -> list[Bin]:
    """Timestep bins of the options, in order. Raises StudyError."""
    objective = build_objective(run.config.objective, run.config.debug.seed)
    edges, unit, count = run.options.edges, run.options.unit or "t", run.options.bins
    if edges is not None and count is not None:
        raise StudyError("--bins: has no effect with --edges (remove one of them)")
    if edges is None and run.options.unit is not None:
        raise StudyError("--unit: has no effect without --edges (remove it)")
    if edges is None:
        count = _BINS if count is None else count
        if count < 1:
            raise StudyError(f"--bins: must be at least 1, is {count}")
        edges, unit = equal_mass_edges(objective, count)
    if len(edges) < 2:
        raise StudyError("--edges: needs two at least")
    found = []
    for low, high in pairwise(edges):
        try:
            timestep_bin(objective, low, high, unit)
        except ValueError as error:
            raise StudyError(f"--edges: {error}") from error
        found.append((low, high, unit))
    return found


def description(options: argparse.Namespace) -> str:
    """Describe the measurement, for a summary."""
    if options.estimator == "published":
        how = "Published estimator, with its two errors: for comparison only. It has no intervals"
    else:
        how = "Noise scale S / |G|^2 with 95 % intervals (Fieller's, from the variance between blocks)"
    return f"{how}. Images of the {options.split} split, labels dropped as in training, computed in {options.dtype}."


def make_cell(
    run: StudyRun, step: int, where: Bin, b: int, big_b: int, reps: int, portion: float | None = None, repeat: int = 0
) -> Cell:
    """Make a cell of the grid.

    Args:
        run: the study's.
        step: of the checkpoint.
        where: the bin.
        b, big_b, reps: the setting.
        portion: share of the data for the logged gradient norm (published); the correct estimator has none of its own,
            and its column gives the share used.
        repeat: number of the repetition, each with separate draws.
    """
    options = run.options
    images = len(run.dataset(options.split))
    b_true = big_b
    if options.estimator == "correct":
        portion = reps * big_b / images
    elif portion is not None:
        b_true = max(1, round(portion * images))
    return {
        "model": checkpoint_name(run, step), "weights": run.track, "estimator": options.estimator, "step": step,
        "true_portion": portion, "b": b, "B": big_b, "reps": reps, "t_min": where[0], "t_max": where[1],
        "bin_unit": where[2], "split": options.split, "dtype": options.dtype, "seed": options.seed, "repeat": repeat,
        "b_true": b_true,
    }  # fmt: skip


def cost(cell: Cell) -> int:
    """Cost of a cell: gradients of single samples."""
    if cell["estimator"] == "correct":
        return cell["reps"] * cell["B"]
    return (cell["reps"] + 1) * (cell["b"] + cell["B"]) + cell["b_true"]


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Measure a cell: the other columns of its row."""
    trained = run.model(cell["step"])
    objective = trained.objective
    where = WHOLE
    if cell["t_min"] is not None:
        where = timestep_bin(objective, cell["t_min"], cell["t_max"], cell["bin_unit"])
    gradients = Gradients(
        trained.model,
        objective,
        run.dataset(cell["split"]),
        label_dropout=trained.config.model.label_dropout,
        horizontal_flip=trained.config.data.horizontal_flip,
        seed=cell["seed"],
        device=run.device,
        dtype=cell["dtype"],
        batch_size=run.options.batch_size,
    )
    # A separate stream of samples for every cell, whatever else the grid holds.
    stream = zlib.crc32("|".join(as_text(cell[name]) for name in KEY).encode()) & 0xFFFFFF
    estimate = _measure_correct if cell["estimator"] == "correct" else _measure_published
    return {
        "diff_steps": objective.path.num_indices or None, "mass": where.mass, "accumulate": True,
        "epoch": False, "verbose": False, "no_seed": False, "no_warnings": False, "ckpt_dir": "checkpoint",
        "save_fig": False, **estimate(gradients, where, cell, stream, advance),
    }  # fmt: skip


def _measure_correct(gradients: Gradients, where, cell: Cell, stream: int, advance: Advance) -> dict[str, Any]:
    sizes = sub_batch_sizes(cell["B"], cell["b"])
    blocks = [
        gradients.group_norms(where, sizes, stream, block * cell["B"], advance) for block in range(cell["reps"])
    ]
    if not any(block.mean_square_norm for block in blocks):
        raise GradientError("every gradient is zero")
    found = noise_scale(blocks)
    mean_square = sum(block.mean_square_norm for block in blocks) / len(blocks)
    return {
        "gns_est": found.noise / found.signal, "g_norm": math.sqrt(mean_square), "signal": found.signal,
        "noise": found.noise, "lower": found.lower, "upper": found.upper, "unbounded": found.unbounded,
    }  # fmt: skip


def _measure_published(gradients: Gradients, where, cell: Cell, stream: int, advance: Advance) -> dict[str, Any]:
    next_sample = 0

    def square(size: int) -> float:
        nonlocal next_sample
        first, next_sample = next_sample, next_sample + size
        return gradients.published_square_norm(where, size, stream, first, advance)

    pairs = [(square(cell["b"]), square(cell["B"])) for _ in range(cell["reps"] + 1)]
    grad_norm = math.sqrt(square(cell["b_true"]))
    signal, noise = published_estimate(cell["b"], cell["B"], pairs[0], pairs[1:])
    if signal == 0:
        raise GradientError("|G|^2 is zero")
    return {"gns_est": noise / signal, "g_norm": grad_norm, "signal": signal, "noise": noise}


# ---------------------------------------------------------------------- reading rows


def is_unbounded(row: Row) -> bool:
    """Check whether the row's noise scale has no upper end."""
    return row["unbounded"] == "True"


def good(rows: Sequence[Row]) -> list[Row]:
    """Rows with an estimate."""
    return [row for row in rows if row["status"] == "ok"]


def interval_text(row: Row) -> str:
    """Format a noise scale for tables: `12.3 [10.1, 15.2]`, `> 40` where it is unbounded, `12.3` without an interval.
    """
    if row["status"] != "ok":
        return "failed"
    if is_unbounded(row):
        return f"> {number(row, 'lower'):.3g}" if number(row, "lower") > 0 else "unbounded"
    text = f"{number(row, 'gns_est'):.3g}"
    return text + f" [{number(row, 'lower'):.3g}, {number(row, 'upper'):.3g}]" if row["lower"] else text


def bin_label(row: Row) -> str:
    """Label a bin for legends and tables."""
    if not row["t_min"]:
        return "all timesteps"
    name = {"t": "t", "sigma": "σ", "index": "k"}[row["bin_unit"]]
    digits = 4 if row["bin_unit"] == "index" else 3
    return f"{name} in [{float(row['t_min']):.{digits}g}, {float(row['t_max']):.{digits}g})"
