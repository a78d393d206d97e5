"""Guidance scales, weight averages and numbers of solver steps compared on samples, by the metrics of scripts/evaluate.py.

Every combination draws the same sets of images: same classes, same starting noise.
"""

import argparse
import dataclasses
import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.colors import LogNorm, Normalize
from torch import Tensor

from research.cells import Cell, Row
from research.frame import StudyRun, checkpoint_name, number, require_at_least
from research.offline_gradients import EstimateFailed
from research.pictures import interval_text, save, write_cells
from torchtitan.config.latent_cache import has_latents, store_of_latents
from torchtitan.config.sampling_checks import data_text
from torchtitan.errors import EvaluationError
from torchtitan.evaluation.decoding import LatentDecoder, run_decoder
from torchtitan.evaluation.sampling import ImageSampler, balanced_choices
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.fidelity.measuring import Request, check_classes, check_request, known_metrics, reference_features
from torchtitan.fidelity.metrics import METRICS
from torchtitan.fidelity.references import open_reference
from torchtitan.files.regular import user_path
from torchtitan.pictures.grids import to_rgb
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note
from torchtitan.programs import program
from torchtitan.sampling.guides import open_guide
from torchtitan.statistics.interval import Interval, mean_interval
from torchtitan.weights.trained_model import TrainedModel

# What a sweep ranks by: values that have a better direction. Memorisation has a protocol of its own.
VALUES = {
    value: better for name, metric in METRICS.items() if not metric.needs_held_out
    for value, better in metric.better.items() if better
}  # fmt: skip
COLUMNS = (
    "model", "weights", "guide", "method", "scale", "num_steps", "metrics", "extractor", "reference", "first_image", "images",
    "seed", *VALUES, "status", "reason", "date", "runtime",
)  # fmt: skip
KEY = COLUMNS[:12]
UNIT = "image"


class Setting(NamedTuple):
    """Setting of a sweep: the weights' name, the guidance scale, the solver's steps."""

    weights: str
    scale: float
    num_steps: int


class Judging(NamedTuple):
    """What the samples of a sweep are judged by."""

    request: Request
    extractor: FeatureExtractor
    reference: FeatureSet | None
    reference_name: str  # with its time: another may be made under its name
    decoder: LatentDecoder | None


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--lengths", nargs="+", type=float, default=[], metavar="STD", help="beside the tracks of --weights, averages of "
        "these relative lengths from the run's snapshots (as 0.05 0.1)")
    add("--scales", nargs="+", type=float, metavar="SCALE", help="guidance scales, 1 for none (default: the run's and 1)")
    add("--guide", metavar="[RUN][@STEP][:TRACK]", help=f"weights to guide away from, as --guide of {program('sample')} (default:"
        " the run's guide_track, else the null condition)")
    add("--num-steps", nargs="+", type=int, metavar="N", help="solver steps (default: the run's)")
    add("--metrics", default="fd", help=f"with commas between, as those of {program('evaluate')} (default: fd)")
    add("--extractor", default="inception", metavar="NAME", help="network of the features (default: inception)")
    add("--extractor-weights", metavar="FILE", help=f"its weights, if not where {program('download')} puts them")
    add("--reference", metavar="REF", help=f"made by {program('evaluate')} reference, with features of the extractor")
    add("--images", type=int, default=1000, metavar="N", help="images of a set, all classes alike (default: 1000)")
    add("--sets", type=int, default=3, metavar="K", help="sets with separate noise, over which intervals are taken "
        "(default: 3)")
    add("--batch-size", type=int, default=250, help="images at a time (default: 250)")
    add("--seed", type=int, default=0, help="of the noise (default: 0)")
    add("--allow-small", action="store_true", help="measure covariances of fewer images than features")


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    require_at_least(options, {"images": 2, "sets": 1, "batch_size": 1})
    sampling = run.config.sampling
    scales = options.scales or list(dict.fromkeys([1.0, sampling.guidance_scale]))
    steps = options.num_steps or [sampling.num_steps]
    for name, values, least in (("--scales", scales, 0.0), ("--num-steps", steps, 1), ("--lengths", options.lengths, 0.0)):
        if any(not least <= value < 1e6 for value in values):
            raise StudyError(f"{name}: {min(values):g} to {max(values):g} are not all in {least:g}..1e6")
    if options.guide and all(scale == 1.0 for scale in scales):
        raise StudyError("--guide: has no effect at a guidance scale of 1 (give --scales, as 1 2)")
    itself, guided = _guided_by_itself(run), [scale for scale in scales if scale != 1.0]
    if guided and (tracks := [track for track in run.tracks if track != itself]):  # before hours of drawing
        open_guide(options.guide, run.folder, None, run.model(run.steps[-1], tracks[0]), guided[0], run.device)
    if itself in run.tracks and len(guided) == len(scales) and len(run.tracks) == 1 and not options.lengths:
        raise StudyError(f"--scales: {itself} is the guide of the run, or of --guide, and would guide itself (give 1 beside)")
    judging = _judging(run)
    judged = {
        "metrics": ",".join(judging.request.metrics), "extractor": judging.extractor.name,
        "reference": judging.reference_name,
    }  # fmt: skip
    return [
        {
            "model": checkpoint_name(run, step), "step": step, "weights": track, "guide": options.guide or "",
            "method": _method(run), "scale": float(scale), "num_steps": num_steps, "first_image": first, "images": options.images,
            "seed": options.seed, **judged,
        }
        for step in run.steps for track in [*run.tracks, *(f"std={length:g}" for length in options.lengths)]
        for num_steps in dict.fromkeys(steps) for scale in dict.fromkeys(scales) if scale == 1.0 or track != itself
        for first in range(0, options.sets * options.images, options.images)
    ]  # fmt: skip


def _guided_by_itself(run: StudyRun) -> str:
    """Track that the guide is, which is drawn without guidance alone; "" where it is another checkpoint's or condition."""
    guide = run.options.guide or f":{run.config.sampling.guide_track}"
    return guide[1:] if guide.startswith(":") else ""


def _method(run: StudyRun) -> str:
    """Method that is not a setting of the sweep, by solver and hash: a run may be resumed with another."""
    sampling = dataclasses.replace(run.config.sampling, num_steps=1, guidance_scale=1.0)
    text = repr((sampling.method(), run.options.guide or sampling.guide_track, run.config.autoencoder))
    return f"{sampling.solver.name} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def cost(cell: Cell) -> int:
    """Cost in images."""
    return cell["images"]


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Values of one set. Raises EstimateFailed: a metric cannot be computed."""
    judging = _judging(run)
    trained = run.model(cell["step"], cell["weights"])
    parts: dict[str, list[np.ndarray]] = {METRICS[name].output: [] for name in judging.request.metrics}
    choices = balanced_choices(cell["images"], trained.model.condition_kind.choices)
    for pixels in _draw(run, cell, trained, choices, judging.decoder):
        features = judging.extractor.extract(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
        for output, found in parts.items():
            found.append(features[output].cpu().numpy())
        advance(len(pixels))
    rows = {output: np.concatenate(found) for output, found in parts.items()}
    samples = FeatureSet("samples", judging.request.extractor, rows, classes=choices.numpy())
    values: dict[str, Interval] = {}
    for name in judging.request.metrics:
        try:
            values |= METRICS[name].measure(samples, judging.reference, judging.request.options()).values
        except EvaluationError as error:
            raise EstimateFailed(f"{name}: {error}") from error
    return {name: value.value for name, value in values.items() if name in VALUES}


def _draw(
    run: StudyRun, cell: Cell, trained: TrainedModel, choices: Tensor, decoder: LatentDecoder | None
) -> Iterator[np.ndarray]:
    """Draw a set batch by batch: pixels uint8 [B, H, W, 3]."""
    sampling = run.config.sampling
    numbers = torch.arange(cell["images"]) + cell["first_image"]
    sampler = ImageSampler(trained.model, trained.objective, "float32", run.device)
    scale = cell["scale"]
    guide = open_guide(run.options.guide if scale != 1.0 else None, run.folder, None, trained, scale, run.device)
    method = sampling.method() | {
        "num_steps": cell["num_steps"], "guidance": dataclasses.replace(sampling.guidance, scale=scale),
        "guide": guide.guide if guide else None,
    }  # fmt: skip
    with sampler.drawing(cell["seed"], **method) as draw:
        for chunk in torch.arange(cell["images"]).split(run.options.batch_size):
            images = draw(choices[chunk], numbers[chunk])
            if decoder:
                with decoder.on_device():
                    images = decoder.decode_alone(images)
            yield to_rgb(images.float().cpu().numpy())


def _judging(run: StudyRun) -> Judging:
    """Extractor, reference and decoder, opened once. Raises StudyError: they do not serve the metrics."""
    if "judging" not in run.kept:
        try:
            run.kept["judging"] = _open_judging(run)
        except EvaluationError as error:
            raise StudyError(str(error)) from error
    return run.kept["judging"]


def _open_judging(run: StudyRun) -> Judging:
    options = run.options
    metrics = known_metrics(options.metrics.replace(" ", "").split(","))
    for name in metrics:
        if METRICS[name].needs_held_out:
            raise StudyError(f"--metrics: {name} is not of a sweep ({program('evaluate')} measures it)")
        if METRICS[name].extractor not in (None, options.extractor):
            raise StudyError(f"--metrics: {name} is of {METRICS[name].extractor} features (give it as --extractor)")
    request = Request(metrics, options.extractor, allow_small=options.allow_small, seed=options.seed, device=str(run.device))
    weights = user_path(options.extractor_weights) if options.extractor_weights else None
    extractor = open_extractor(options.extractor, weights, run.device)
    reference = None if options.reference is None else open_reference(options.reference)
    data, decoder = run.config.data, None
    if has_latents(run.config):
        decoder = run_decoder(run.config.autoencoder, store_of_latents(run.config))
        if decoder is None:
            raise StudyError(f"{data_text(data)}: metrics are of images (the run's autoencoder.name is none)")
    trained = run.model(run.steps[-1], run.tracks[0])
    _, height, width = trained.model.image_shape
    size = None if decoder else (height, width)
    extractors = {options.extractor: extractor}
    check_request(request, extractors, options.images, size, reference, None)
    check_classes(request, extractors, trained.info.num_classes)
    features = None if reference is None else reference_features(request, extractors, reference)[options.extractor]
    name = "" if reference is None else " ".join(filter(None, (options.reference, reference.record().get("written"))))
    return Judging(request, extractor, features, name, decoder)


# ---------------------------------------------------------------------- report


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    """Write the heat maps; return the text of summary.md."""
    options = run.options
    judged_by = f", against {_judging(run).reference_name}" if options.reference else ""
    guided = any(float(row["scale"]) != 1 for row in rows)
    guided_by, itself = guided and (options.guide or run.config.sampling.guide_track), guided and _guided_by_itself(run)
    guide = f" Guided by {'the trained weights' if guided_by == 'none' else guided_by}." if guided_by else ""
    guide += " That guide's own samples are drawn without guidance alone." if itself in run.tracks else ""
    text = (
        f"{options.sets} sets of {options.images} images of all classes, the same starting noise for every setting; features "
        f"of {options.extractor}{judged_by}; solver {run.config.sampling.solver.name}.{guide} 95 % intervals by Student's t over "
        "the sets. The best of many settings is better than another set of its images would be: draw it again with another "
        "--seed before quoting it.\n\n"
    )
    values = [name for name in VALUES if any(row[name] for row in rows if row["status"] == "ok")]
    for model in dict.fromkeys(row["model"] for row in rows):
        for name in values:
            found = _by_setting([row for row in rows if row["model"] == model and row["status"] == "ok"], name)
            if found:
                text += f"## {model}, {name}\n\n{_best(found, name)}\n\n{_table(found, name)}"
                text += _draw_map(run, model, name, found, folder / f"{model}-{name}.png")
    return text


def _by_setting(rows: list[Row], name: str) -> dict[Setting, Interval]:
    values: dict[Setting, list[float]] = {}
    for row in rows:
        setting = Setting(row["weights"], float(row["scale"]), int(row["num_steps"]))
        values.setdefault(setting, []).append(number(row, name))
    return {setting: mean_interval(found) for setting, found in values.items()}


def _ranked(found: dict[Setting, Interval], name: str) -> list[Setting]:
    """Settings from the best to the worst."""
    return sorted(found, key=lambda setting: found[setting].value, reverse=VALUES[name] == "higher")


def _best(found: dict[Setting, Interval], name: str) -> str:
    best = _ranked(found, name)[0]
    return f"Best mean: {best.weights}, guidance {best.scale:g}, {best.num_steps} steps: {interval_text(found[best])}."


def _table(found: dict[Setting, Interval], name: str) -> str:
    header = ["weights", "guidance", "steps", f"{name} ({VALUES[name]} is better)"]
    lines = [
        [setting.weights, f"{setting.scale:g}", str(setting.num_steps), interval_text(found[setting])]
        for setting in _ranked(found, name)
    ]
    return markdown_table(header, lines)


def _draw_map(run: StudyRun, model: str, name: str, found: dict[Setting, Interval], path: Path) -> str:
    """Draw a panel per number of steps: guidance scale across, weights upwards, the mean as colour and number."""
    steps, weights, scales = (list(dict.fromkeys(each)) for each in zip(*(
        (setting.num_steps, setting.weights, setting.scale) for setting in found
    ), strict=True))  # fmt: skip
    steps, scales = sorted(steps), sorted(scales)
    size = (2.2 + len(steps) * max(2.6, 0.85 * len(scales)), 1.8 + 0.5 * max(len(weights), 3))
    figure, panels = new_figure(f"{run.folder.resolve().name}, {model}: {name}", 1, len(steps), size, sharey=True)
    values = {setting: each.value for setting, each in found.items()}
    low, high = min(values.values()), max(values.values())
    norm = (LogNorm if 0 < 10 * low < high else Normalize)(low, high)
    best = _ranked(found, name)[0]
    for panel, count in zip(panels[0], steps, strict=True):
        table = np.array([[values.get(Setting(track, scale, count), np.nan) for scale in scales] for track in weights])
        shown = panel.imshow(table, norm=norm, cmap="viridis" if VALUES[name] == "higher" else "viridis_r", aspect="auto")
        texts = [[f"{value:.3g}" if np.isfinite(value) else "" for value in line] for line in table]
        write_cells(panel, table, texts, partial(_is_dark, norm, VALUES[name] == "higher"))
        panel.set_xticks(range(len(scales)), [f"{scale:g}" for scale in scales])
        panel.set_yticks(range(len(weights)), ["trained weights" if track == "none" else track for track in weights])
        panel.set_xlabel(f"guidance scale\n{count} steps")
        panel.grid(visible=False)
        if count == best.num_steps:
            place = scales.index(best.scale), weights.index(best.weights)
            panel.plot(*place, marker="s", markersize=26, markerfacecolor="none", markeredgecolor="#d55e00", markeredgewidth=2)
    figure.colorbar(shown, ax=panels[0].tolist(), label=f"{name}: {VALUES[name]} is better")
    note(figure, f"means over {run.options.sets} sets of {run.options.images} images; square: the best mean")
    return save(figure, path)


def _is_dark(norm: Normalize, bright: bool, value: float) -> bool:
    return (float(norm(value)) < 0.5) == bright
