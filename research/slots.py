"""Slots of timesteps with equal summed losses, cut from a measured curve, with intervals over images."""

import argparse
import csv
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from research import curve_plots
from research.by_image import LEAST_RESAMPLED, resampled_shares
from research.curve_table import ERRORS, LossCurve, read_curves, read_errors
from research.equal_loss import equal_loss_edges, interpolate_loss
from research.frame import require_at_least
from research.result_table import as_text
from research.slot_nodes import PUBLISHED_EDGES
from torchtitan.diffusion.paths import NUM_INDICES
from torchtitan.diffusion.timesteps.slot_edges import write_slot_edges
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import replace_file, replacing
from torchtitan.pictures.markdown import markdown_table

# First and last index of each slot as published; they are 1001 indices.
PAPER_SLOTS = (*((low, high - 1) for low, high in pairwise(PUBLISHED_EDGES[:-1])), (PUBLISHED_EDGES[-2], NUM_INDICES))
COLUMNS = (
    "slot", "unit", "first", "end", "end_lower", "end_upper", "width", "uniform_loss_share", "paper_first",
    "paper_last", "paper_width", "paper_uniform_loss_share",
)  # fmt: skip
_RESAMPLES = 1000
_MARKS = {"slots.json": b'{"unit": '}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="RUN_FOLDER|CURVE.csv", type=Path,
        help="a run's folder with studies/loss_curve, or the curve.csv of a loss_curve")  # fmt: skip
    add("--slots", type=int, default=10, metavar="K", help="number of slots (default: 10)")
    add("--weights", metavar="none|TRACK",
        help="weights of the curve (default: none, the trained weights, if there are any)")
    add("--step", type=int, help="step of the checkpoint (default: the last)")
    add("--compare-paper", action="store_true", help="compare with the paper's ten slots of 1000 indices")
    add("--output", type=Path,
        help="folder of the results (default: RUN_FOLDER/studies/slots, or slots in the curve's folder)")  # fmt: skip


def run_alone(arguments: argparse.Namespace) -> Path:
    """Cut the slots; write slots.json, slots.csv, slots.png and summary.md, and return the latter.

    Raises:
        StudyError: no curve, a bad one, or bad options; one line.
    """
    require_at_least(arguments, {"slots": 1})
    source, folder = _places(arguments)
    ResultsFolder(folder, _MARKS).refuse_foreign()
    curve = _choose(read_curves(source), arguments, source)
    like_paper = curve.discrete and _num_indices(curve) == NUM_INDICES and arguments.slots == len(PAPER_SLOTS)
    if arguments.compare_paper and not like_paper:
        raise StudyError(f"--compare-paper: needs --slots 10 and a curve over {NUM_INDICES} integer DDPM indices")
    errors = read_errors(source.with_name(ERRORS), curve.weights, curve.step)
    if errors is not None and errors.shape != (curve.images, len(curve.t)):
        raise StudyError(f"{source.with_name(ERRORS)}: is not of the curve in {source.name} (run loss_curve again)")
    try:
        edges = slot_edges(curve, curve.error, arguments.slots)
        intervals = None
        if errors is not None and len(errors) >= LEAST_RESAMPLED:
            intervals = edge_intervals(curve, errors, arguments.slots)
    except ValueError as error:
        raise StudyError(f"{source}: {error}") from error
    paper = PUBLISHED_EDGES if arguments.compare_paper else None
    rows = _rows(curve, edges, intervals, paper)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "slots.json") as unfinished:
            write_slot_edges(unfinished, edges, _unit(curve))
        with open(folder / "slots.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: as_text(row.get(name)) for name in COLUMNS} for row in rows)
        text = _summary(curve, edges, rows, errors, paper)
        text += curve_plots.slots(curve, edges, paper, folder / "slots.png")
        replace_file(folder / "summary.md", text)
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder / "summary.md"


def slot_edges(curve: LossCurve, error: Tensor, num_slots: int) -> list[float]:
    """Edges of slots with equal loss of a curve.

    Every timestep counts alike, as those within a slot do for the sampler that the edges are for, however the run was
    trained. On integer indices the losses are summed, `interpolate_loss` between nodes. Elsewhere the loss is
    integrated over the real index, or over t, by the trapezoid rule, the end nodes' loss standing for what lies beyond
    them; edges lie where the running integral, linear between nodes, reaches k / K.

    Args:
        curve: the timesteps.
        error: the error at each, [N].
        num_slots: K, from 1 to the number of timesteps.

    Returns:
        [K + 1], from 0 to the number of indices, or to 1 in t; whole numbers on integer indices.

    Raises:
        ValueError: K is otherwise, no loss is positive, or one that others are interpolated from is not.
    """
    if curve.discrete:
        return [*equal_loss_edges(_of_indices(curve, error), num_slots)]
    if not 1 <= num_slots <= len(error):
        raise ValueError(f"{num_slots} slots of {len(error)} timesteps: give 1 to {len(error)}")
    position, running = _running_integral(curve, error)
    if not running[-1] > 0:
        raise ValueError("all losses are zero")
    inner = np.interp(running[-1] * np.arange(1, num_slots) / num_slots, running, position)
    return [0.0, *inner.tolist(), 1.0 if curve.index is None else float(NUM_INDICES)]


def edge_intervals(curve: LossCurve, errors: Tensor, num_slots: int) -> Tensor:
    """Intervals (95 %) of each edge: 2.5 and 97.5 % of those of images resampled with replacement, [2, K + 1].

    Args:
        curve: the timesteps.
        errors: of every image at every timestep, [images, N].
        num_slots: K.
    """
    means = resampled_shares(len(errors), _RESAMPLES) @ errors
    edges = torch.tensor([slot_edges(curve, error, num_slots) for error in means], dtype=torch.float64)
    return torch.quantile(edges, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)


# ---------------------------------------------------------------------- parts


def _places(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Places of the curve, and of the results."""
    source = arguments.source
    if not source.exists():
        raise StudyError(f"{source}: no such run folder or curve")
    if not source.is_dir():
        return source, arguments.output or source.parent / "slots"
    curve = source / "studies" / "loss_curve" / "curve.csv"
    if not curve.is_file():
        raise StudyError(f"{curve}: is missing (run python -m research loss_curve {source} first)")
    return curve, arguments.output or source / "studies" / "slots"


def _choose(curves: Sequence[LossCurve], arguments: argparse.Namespace, source: Path) -> LossCurve:
    step = arguments.step if arguments.step is not None else max(curve.step for curve in curves)
    of_step = {curve.weights: curve for curve in curves if curve.step == step}
    if not of_step:
        there = ", ".join(map(str, sorted({curve.step for curve in curves})))
        raise StudyError(f"--step: {step} is not in {source} (there are: {there})")
    weights = arguments.weights or ("none" if "none" in of_step else next(iter(of_step)))
    if weights not in of_step:
        raise StudyError(f"--weights: {weights!r} is not in {source} at step {step} (there are: {', '.join(of_step)})")
    return of_step[weights]


def _unit(curve: LossCurve) -> str:
    return "t" if curve.index is None else "index"


def _num_indices(curve: LossCurve) -> int:
    """Number of indices of a discrete curve."""
    return int(cast(Tensor, curve.index)[-1]) + 1


def _of_indices(curve: LossCurve, error: Tensor) -> Tensor:
    """Error of every index of a discrete curve."""
    return interpolate_loss(cast(Tensor, curve.index), error, _num_indices(curve))


def _running_integral(curve: LossCurve, error: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the range with the nodes between them, in t or index, and the loss's integral up to each, [N + 2]."""
    nodes, end = (curve.t, 1.0) if curve.index is None else (curve.index, NUM_INDICES - 1.0)
    if nodes[-1] > end:
        raise ValueError(f"{_unit(curve)} {nodes[-1]:g} is above {end:g}")
    position = torch.cat((torch.zeros_like(nodes[:1]), nodes, torch.full_like(nodes[:1], end)))
    loss = torch.cat((error[:1], error, error[-1:]))
    return position.numpy(), np.concatenate(([0.0], torch.cumulative_trapezoid(loss, position).numpy()))


def _shares(curve: LossCurve, edges: Sequence[float]) -> list[float]:
    """Shares of the whole loss between edges."""
    if curve.discrete:
        losses = _of_indices(curve, curve.error)
        return [(losses[int(low) : int(high)].sum() / losses.sum()).item() for low, high in pairwise(edges)]
    position, running = _running_integral(curve, curve.error)
    return np.diff(np.interp(edges, position, running / running[-1])).tolist()


def _rows(
    curve: LossCurve, edges: Sequence[float], intervals: Tensor | None, paper: Sequence[int] | None
) -> list[dict[str, float | int | str]]:
    rows = []
    for place, ((low, high), share) in enumerate(zip(pairwise(edges), _shares(curve, edges), strict=True)):
        row: dict[str, float | int | str] = {
            "slot": place + 1, "unit": _unit(curve), "first": low, "end": high, "width": high - low,
            "uniform_loss_share": share,
        }  # fmt: skip
        if intervals is not None:
            row |= {"end_lower": intervals[0, place + 1].item(), "end_upper": intervals[1, place + 1].item()}
        rows.append(row)
    if paper:
        for row, (first, last), share in zip(rows, PAPER_SLOTS, _shares(curve, paper), strict=True):
            width = last - first + 1
            row |= {"paper_first": first, "paper_last": last, "paper_width": width, "paper_uniform_loss_share": share}
    return rows


def _summary(
    curve: LossCurve, edges: Sequence[float], rows: list[dict], errors: Tensor | None, paper: Sequence[int] | None
) -> str:
    if curve.discrete:
        counted = f"the sum of the losses of {_num_indices(curve)} indices, each counting alike"
        if _num_indices(curve) > len(curve.t):
            counted += (
                f"; {len(curve.t)} of them were measured, ln(loss) is linear in ln(1 + index) between them, and what "
                "that errs is not in the intervals"
            )
    else:
        position, _ = _running_integral(curve, curve.error)
        first, last = position[[1, -2]]
        beyond = 1.0 - (last - first) / position[-1]
        counted = (
            f"the integral of the loss over {_unit(curve)}, every {_unit(curve)} counting alike however often training "
            f"drew it, by the trapezoid rule; measured from {first:.4g} to {last:.4g}, beyond which ({beyond:.1%} of "
            "the range) the loss at the end stands"
        )
    text = (
        f"# slots\n\n{len(rows)} slots of equal loss, {curve.name}. Loss: the mean squared error of the "
        f"run's prediction over {curve.images} images, without weights. What is equal: {counted}. A slot is "
        "[first, end). "
    )
    if errors is None:
        text += "No intervals: the errors of every image (errors.safetensors in the curve's folder) are missing.\n\n"
    elif "end_lower" not in rows[0]:
        text += f"No intervals: resampling needs {LEAST_RESAMPLED} images at least.\n\n"
    else:
        text += f"Intervals of ends: 95 %, {_RESAMPLES} times the images drawn anew.\n\n"
    text += markdown_table(["slot", "first", "end", "interval", "width", "share of the loss"], map(_cells, rows))
    if paper:
        text += _beside_paper(rows, edges)
    return text + "`slots.json` can be named by `objective.timesteps.edges_path`.\n\n"


def _cells(row: dict) -> list[str]:
    interval = f"{row['end_lower']:.4g} to {row['end_upper']:.4g}" if "end_lower" in row else "–"
    numbers = [f"{row[name]:.4g}" for name in ("first", "end", "width")]
    return [str(row["slot"]), *numbers[:2], interval, numbers[2], f"{row['uniform_loss_share']:.4f}"]


def _beside_paper(rows: list[dict], edges: Sequence[float]) -> str:
    outside = [row["end"] for row, edge in zip(rows[:-1], PUBLISHED_EDGES[1:-1], strict=True)
               if "end_lower" in row and not row["end_lower"] <= edge <= row["end_upper"]]  # fmt: skip
    text = "Compared with the paper's table (its last slot ends at 1000, which is cut to the last index, 999):\n\n"
    text += markdown_table(
        ["slot", "this run", "the paper", "width", "paper's width", "share of this run's loss in the paper's slot"],
        ([
            str(row["slot"]), f"{row['first']} to {row['end'] - 1}", f"{row['paper_first']} to {row['paper_last']}",
            str(row["width"]), str(row["paper_width"]), f"{row['paper_uniform_loss_share']:.4f}",
        ] for row in rows),
    )  # fmt: skip
    ratio, paper_ratio = rows[-1]["width"] / rows[0]["width"], rows[-1]["paper_width"] / rows[0]["paper_width"]
    text += f"Mean loss of the first slot against the last, from the widths: {ratio:.1f}"
    text += f" (the paper's: {paper_ratio:.1f}). "
    if "end_lower" in rows[0]:
        text += f"{len(outside)} of the {len(edges) - 2} inner edges have an interval that leaves the paper's edge out "
        text += "(for this one model; training and seed are not in the interval)."
    return text + "\n\n"
