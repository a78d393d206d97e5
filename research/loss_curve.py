"""Loss curve: the error at every timestep, of trained and EMA weights, on the same images with the same noise."""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from research import curve_plots
from research.by_image import LEAST_RESAMPLED, log_ratio, resampled_shares
from research.cells import Cell, Row
from research.curve_table import ERRORS, LossCurve, curve_of, write_curves, write_errors
from research.frame import StudyRun, checkpoint_name, require_at_least, require_images, results_folder, step_of
from research.offline_gradients import GradientError
from research.timestep_errors import TimestepNodes, timestep_errors, timestep_nodes
from torchtitan.data.synthetic import SyntheticConfig, mode_variances
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.files.durable import make_folder, replacing
from torchtitan.pictures.markdown import markdown_table
from torchtitan.statistics.interval import mean_interval
from torchtitan.statistics.student import student_quantile

KEY = ("model", "weights", "split", "seed", "nodes", "first_image", "last_image")
COLUMNS = (*KEY, "error", "status", "reason", "date", "runtime")
UNIT = "error"

ERRORS_PER_CELL = 4096  # what a kill can lose
_RESAMPLES = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nodes", type=int, metavar="N",
        help="timesteps, 2 at least (default: every index of a discrete path, else 128)")  # fmt: skip
    add("--images", type=int, default=64, metavar="K", help="images, each with its own noise (default: 64)")
    add("--split", choices=("train", "validation"), default="validation", help="images (default: validation)")
    add("--seed", type=int, default=0, help="seed of images and noise (default: 0)")
    add("--batch-size", type=int, default=256, help="images at a time (default: 256)")


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    require_at_least(options, {"images": 2, "batch_size": 1, "seed": 0})
    require_images(run)
    try:
        count = len(_nodes(run).t)
    except ValueError as error:
        raise StudyError(f"--nodes: {error}") from error
    chunk = max(1, ERRORS_PER_CELL // count)
    return [
        {
            "model": checkpoint_name(run, step), "weights": track, "split": options.split, "seed": options.seed,
            "nodes": count, "first_image": first, "last_image": min(first + chunk, options.images) - 1,
        }
        for step in run.steps for track in run.tracks for first in range(0, options.images, chunk)
    ]  # fmt: skip


def cost(cell: Cell) -> int:
    return cell["nodes"] * (cell["last_image"] - cell["first_image"] + 1)


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    trained = run.model(step_of(cell), cell["weights"])
    samples = run.samples(cell["split"], run.options.images, cell["seed"])
    part = slice(cell["first_image"], cell["last_image"] + 1)
    errors = timestep_errors(
        trained.model, trained.objective, samples[part], _nodes(run),
        batch_size=run.options.batch_size, device=run.device, advance=advance,
    )  # fmt: skip
    if not errors.isfinite().all():
        raise GradientError("an error of the model is not finite")
    path = _cell_file(run, cell)
    make_folder(path.parent)
    with replacing(path) as unfinished:
        save_file({"errors": errors.to(torch.float32)}, unfinished)
    return {"error": errors.mean().item()}


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    errors = _errors(run, rows)
    if not errors:
        return "No cell has an answer.\n\n"
    objective, nodes = build_objective(run.config.objective, run.config.debug.seed), _nodes(run)
    optimal = _optimal_noise(run, nodes)
    curves = [curve_of(values, objective, nodes, *key, optimal) for key, values in errors.items()]
    write_errors(folder / ERRORS, errors)
    write_curves(folder / "curve.csv", curves)
    text = _description(run, objective, nodes)
    text += _table(run, curves, errors)
    if optimal is not None:
        text += "Ratio to the smallest possible error, which is known for this data:\n\n" + _ratios(curves)
    text += _pairs(curves, errors)
    return text + curve_plots.loss_curves(curves, objective.prediction, folder / "curve.png")


# ---------------------------------------------------------------------- parts


def _nodes(run: StudyRun) -> TimestepNodes:
    return timestep_nodes(build_objective(run.config.objective, run.config.debug.seed), run.options.nodes)


def _cell_file(run: StudyRun, cell: Cell | Row) -> Path:
    name = "-".join(str(cell[column]) for column in KEY)
    return results_folder("loss_curve", run) / "cells" / f"{name}.safetensors"


def _errors(run: StudyRun, rows: list[Row]) -> dict[tuple[str, int], Tensor]:
    """Errors [K, N] of every (weights, step), of the cells with an answer."""
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for row in rows:
        if row["status"] != "ok":
            continue
        path = _cell_file(run, row)
        try:
            parts.setdefault((row["weights"], step_of(row)), []).append(load_file(path)["errors"])
        except (OSError, SafetensorError, KeyError) as error:
            raise StudyError(f"{path}: is missing or damaged (remove {path.parent.parent} to measure anew)") from error
    return {key: torch.cat(found).to(torch.float64) for key, found in parts.items()}


def _optimal_noise(run: StudyRun, nodes: TimestepNodes) -> Tensor | None:
    data = run.config.data
    if isinstance(data, SyntheticConfig) and data.kind != "constant":
        return optimal_noise_loss(data, nodes.log_sigma)
    return None


def optimal_noise_loss(config: SyntheticConfig, log_sigma: Tensor) -> Tensor:
    """Smallest mean squared error per pixel of any prediction of the noise of Gaussian images, on any path, float64 [N].

    A mode of x_t / a = x0 + sigma noise has variance s + sigma^2, where s is the data's, so the best prediction of the noise
    is linear and leaves 1 - sigma^2 / (s + sigma^2) = s / (s + sigma^2). The loss is the mean over modes.
    """
    variances = mode_variances(config)[0].flatten()  # channels are alike
    return (variances / (variances + torch.exp(2 * log_sigma.to(torch.float64))[:, None])).mean(dim=1)


def _description(run: StudyRun, objective: Objective, nodes: TimestepNodes) -> str:
    indexed = "" if nodes.index is None else f", DDPM indices {nodes.index[0]} to {nodes.index[-1]}"
    return (
        f"Squared error of the prediction {objective.prediction!r} (mean over values) at {len(nodes.t)} timesteps, "
        f"t from {nodes.t[0]:.4g} to {nodes.t[-1]:.4g}{indexed}; the first {run.options.images} images of the "
        f"{run.options.split} split in the order of seed {run.options.seed}, each with its own noise, the same at "
        "every timestep and for every model. Weights of the loss do not count. Intervals are of 95 %, over images: "
        f"2.5 to 97.5 % of resampled images for spans (given {LEAST_RESAMPLED} at least), by Student's t elsewhere; "
        "the interval at the largest ratio does not account for its selection as the largest.\n\n"
        "curve.csv has the curves, errors.safetensors the error of every image.\n\n"
    )


def _table(run: StudyRun, curves: list[LossCurve], errors: dict[tuple[str, int], Tensor]) -> str:
    lines = []
    for curve in curves:
        values = errors[curve.weights, curve.step]
        mean = mean_interval(values.mean(1).tolist())
        lines.append([
            str(curve.step), _weights(curve), str(curve.images), f"{mean.value:.4g} ± {mean.half_width:.2g}",
            _span(values), _span(values * curve.noise_factor),
        ])  # fmt: skip
    return markdown_table(
        ["step", "weights", "images", "mean over timesteps", "span (largest / smallest)", "span as error of the noise"],
        lines,
    )


def _ratios(curves: list[LossCurve]) -> str:
    lines = []
    for curve in curves:
        if curve.optimum is None:
            continue
        quantile = student_quantile(0.975, curve.images - 1.0)
        ratio, half = curve.error / curve.optimum, quantile * curve.stderr / curve.optimum
        place = int(ratio.argmax())
        lines.append([
            str(curve.step), _weights(curve), f"{curve.error.sum() / curve.optimum.sum():.4g}", f"{ratio.median():.4g}",
            f"{ratio.max():.4g} ± {half[place]:.2g} at {_where(curve, place)}",
            str(int((ratio + half < 1).sum())),
        ])  # fmt: skip
    header = ["step", "weights", "of sums", "median", "largest", "timesteps whose interval is below 1"]
    return markdown_table(header, lines)


def _pairs(curves: list[LossCurve], errors: dict[tuple[str, int], Tensor]) -> str:
    """Pairs of every EMA track and the trained weights of the same checkpoint, on the same images and noise."""
    lines = []
    for curve in curves:
        trained, averaged = errors.get(("none", curve.step)), errors[curve.weights, curve.step]
        if curve.weights == "none" or trained is None or trained.shape != averaged.shape:
            continue
        change = log_ratio(averaged.mean(1)[None], trained.mean(1)[None])
        mean, lower, upper = (100 * math.expm1(ln) for ln in (change.value, change.lower, change.upper))
        by_node = (averaged - trained).mean(0)
        quantile = student_quantile(0.975, len(trained) - 1.0)
        sure = by_node.abs() > quantile * (averaged - trained).std(0) / len(trained) ** 0.5
        lines.append([
            str(curve.step), curve.weights, f"{mean:+.2f} % [{lower:+.2f}, {upper:+.2f}]",
            f"{int((sure & (by_node < 0)).sum())}", f"{int((sure & (by_node > 0)).sum())}", str(len(by_node)),
        ])  # fmt: skip
    if not lines:
        return ""
    header = ["step", "EMA", "its mean error against the trained", "timesteps lower", "higher", "of"]
    return (
        "EMA against trained weights, paired by image and noise (lower and higher: the 95 % interval of that timestep "
        "alone leaves 0 out, so one in twenty of equal ones would be counted):\n\n" + markdown_table(header, lines)
    )


def _weights(curve: LossCurve) -> str:
    return "trained" if curve.weights == "none" else f"EMA {curve.weights}"


def _where(curve: LossCurve, place: int) -> str:
    return f"t = {curve.t[place]:.4g}" if curve.index is None else f"index {curve.index[place]:.4g}"


def _span(errors: Tensor) -> str:
    """Span: largest over smallest mean error, with the interval over images resampled where these are enough."""
    mean = errors.mean(0)
    span = f"{mean.max() / mean.min():.4g}"
    if len(errors) < LEAST_RESAMPLED:
        return span
    means = resampled_shares(len(errors), _RESAMPLES) @ errors
    spans = means.amax(1) / means.amin(1)
    low, high = torch.quantile(spans, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return f"{span} ({low:.3g} to {high:.3g})"
