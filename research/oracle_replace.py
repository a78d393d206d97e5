"""Oracle replacement: sampling with the true image instead of some predictions, without it there, and with added
errors.
"""

import argparse
import math
from typing import Any

import torch
from torch import Tensor

from research import oracle_replace_report
from research.by_image import to_text
from research.cells import Cell
from research.frame import StudyRun, checkpoint_name, require_at_least, require_images, require_one_checkpoint
from research.oracle_replace_report import EXCEPT, INJECT, NONE, REPLACE
from research.oracle_replacement import ancestral_chain, unit_errors, visited_indices
from research.timestep_errors import FixedSamples
from torchtitan import philox
from torchtitan.conditions import each_tensor
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import indexed
from torchtitan.distributed.precision import compute_context
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError

COLUMNS = (
    "model", "weights", "variant", "low", "high", "num_steps", "first_image", "images", "error_size",
    "split", "seed", "replaced", "rmse", "squared_errors", "status", "reason", "date", "runtime",
)  # fmt: skip
KEY = COLUMNS[:11]
UNIT = "image"
report = oracle_replace_report.report

# Both ends are visited indices where they can be; those of the published experiment count from 1.
DEFAULT_RANGES = "500-999,100-499,10-99,1-9,0-9,0-0,0-499"
# Numbers of the steps' noise begin here, apart from that of the starting images.
_STEP_NOISE = 1 << 42
_ERROR_NOISE = 1 << 52


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranges", metavar="LOW-HIGH,...", help="ranges of indices from 0, both ends included (default: those of "
        f"{DEFAULT_RANGES} that hold an index of the chain)")
    add("--images", type=int, default=64, metavar="K", help="images (default: 64)")
    add("--num-steps", type=int, metavar="N", help="steps of the chain, quadratically spaced (default: every index)")
    add("--error-size", type=float, default=0.1, metavar="RMS", help="error put in, by which channels are lighter or darker as a "
        "whole, the same at every step; results are per unit (default: 0.1)")
    add("--split", choices=("validation", "train"), default="validation", help="of the images (default: validation)")
    add("--batch-size", type=int, default=64, help="images at a time; a kill loses one such batch (default: 64)")
    add("--seed", type=int, default=0, help="of every draw (default: 0)")


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    _check(run)
    indices = _indices(run)
    whose = {
        "model": checkpoint_name(run, run.steps[0]), "weights": run.track, "num_steps": len(indices),
        "split": options.split, "seed": options.seed,
    }  # fmt: skip
    chains: list[dict[str, Any]] = [{"variant": NONE, "work": len(indices), "replaced": 0}]
    for variant in (REPLACE, EXCEPT, INJECT):
        for low, high in _ranges(options, indices):
            inside = sum(low <= index <= high for index in indices)
            work = {REPLACE: len(indices) - inside, EXCEPT: inside, INJECT: len(indices)}[variant]
            error = {"error_size": options.error_size} if variant == INJECT else {}
            chains.append({"variant": variant, "low": low, "high": high, "work": work, "replaced": inside} | error)
    found = []
    for first in range(0, options.images, options.batch_size):
        images = min(options.batch_size, options.images - first)
        found += [
            whose | {"first_image": first, "images": images} | chain | {"work": chain["work"] * images}
            for chain in chains
        ]  # fmt: skip
    return found


def cost(cell: Cell) -> int:
    """Cost in estimates of x0 of single images by the model."""
    return cell["work"]


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Squared errors of one batch of images at the end of one chain."""
    batch = _batch(run, cell)
    if cell["variant"] == INJECT:
        size = cell["error_size"]
        error = size * unit_errors(_noise(run, cell, _ERROR_NOISE))
        squared = ((_chain(run, cell, batch, advance, error) - _untouched(run, cell)) / size).square()
    else:
        final = _chain(run, cell, batch, advance)
        if cell["variant"] == NONE:
            run.kept["untouched"] = (cell["first_image"], final)
        squared = (final - batch.images.to(run.device)).square()
    errors = squared.to("cpu", torch.float64).mean((1, 2, 3))
    return {"rmse": math.sqrt(errors.mean().item()), "squared_errors": to_text(errors)}


# ---------------------------------------------------------------------- options


def _check(run: StudyRun) -> None:
    options = run.options
    path = build_objective(run.config.objective, run.config.debug.seed).path
    if not path.num_indices:
        raise StudyError(f"objective.path = {run.config.objective.path!r} has no indices; the study needs a DDPM path")
    require_one_checkpoint(run)
    require_at_least(options, {"images": 2, "batch_size": 1, "seed": 0})
    if not 0 < options.error_size < math.inf:
        raise StudyError(f"--error-size: must be positive, is {options.error_size:g}")
    require_images(run)


def _indices(run: StudyRun) -> list[int]:
    path = build_objective(run.config.objective, run.config.debug.seed).path
    try:
        return visited_indices(path.num_indices, run.options.num_steps or path.num_indices)
    except ValueError as error:
        raise StudyError(f"--num-steps: {error}") from error


def _ranges(options: argparse.Namespace, indices: list[int]) -> list[tuple[int, int]]:
    found = []
    for word in (options.ranges or DEFAULT_RANGES).split(","):
        try:
            low, high = (int(end) for end in word.split("-"))
        except ValueError as error:
            raise StudyError(f'--ranges: {word!r} is no range of indices (as "0-9,10-99")') from error
        if high > indices[-1] and options.ranges:
            raise StudyError(f"--ranges: {word} goes beyond the path's last index, {indices[-1]}")
        if low > high:
            raise StudyError(f"--ranges: {word} is reversed (try {high}-{low})")
        if any(low <= index <= high for index in indices):
            found.append((low, high))
        elif options.ranges:
            near = min(indices, key=lambda index: abs(index - low))
            raise StudyError(f"--ranges: {word} holds no index of the chain, the nearest is {near} (more --num-steps?)")
    return list(dict.fromkeys(found))


# ---------------------------------------------------------------------- measuring


def _chain(run: StudyRun, cell: Cell, batch: FixedSamples, advance: Advance, error: Tensor | None = None) -> Tensor:
    """Final images [B, C, H, W] of one chain."""
    trained, indices = run.model(run.steps[0]), _indices(run)
    path, variant = indexed(trained.objective.path), cell["variant"]
    inside = {index for index in indices if variant != NONE and cell["low"] <= index <= cell["high"]}
    truth = {REPLACE: inside, EXCEPT: set(indices) - inside}.get(variant, set())
    x0 = batch.images.to(run.device)
    condition = each_tensor(trained.model.condition_kind.of(batch.batch), lambda value: value.to(run.device))

    def predict(x: Tensor, index: int) -> Tensor:
        t = path.index_to_t(torch.full((len(x),), index)).to(run.device, torch.float32)
        with compute_context(run.config.training.mixed_precision_param, run.device, False):
            estimate, _ = trained.objective.predict(trained.model, x, t, condition)
        advance(len(x))
        return estimate

    alpha_bar = path.alphas_cumprod[indices[-1]].item()
    start = math.sqrt(alpha_bar) * x0 + math.sqrt(1.0 - alpha_bar) * batch.noise.to(run.device)
    with torch.no_grad():
        return ancestral_chain(
            path, predict, x0, start, lambda index: _noise(run, cell, _STEP_NOISE + (index << 32)), indices,
            truth_at=truth, error=error, error_at=inside if error is not None else (),
        )  # fmt: skip


def _untouched(run: StudyRun, cell: Cell) -> Tensor:
    """Final images without any change; recomputed where the study resumed after them."""
    first, final = run.kept.get("untouched", (None, None))
    if first != cell["first_image"]:
        plain = cell | {"variant": NONE}
        final = _chain(run, plain, _batch(run, cell), lambda images: None)
        run.kept["untouched"] = (cell["first_image"], final)
    return final


def _batch(run: StudyRun, cell: Cell) -> FixedSamples:
    options = run.options
    samples = run.samples(options.split, options.images, options.seed)
    part = slice(cell["first_image"], cell["first_image"] + cell["images"])
    return samples[part]


def _noise(run: StudyRun, cell: Cell, purpose: int) -> Tensor:
    """Noise of a batch's images [B, C, H, W], standard normal, the same in every chain."""
    numbers = torch.arange(cell["first_image"], cell["first_image"] + cell["images"], device=run.device) + purpose
    return philox.normal(run.options.seed, "evaluation", numbers, _batch(run, cell).images.shape[1:])
