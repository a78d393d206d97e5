"""Forgetting: effect of training on one slot of timesteps on the others, as error ratios and gradient cosines."""

import argparse
import dataclasses
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from research import forgetting_report
from research.by_image import to_text
from research.cells import CELL_FAILURES, Cell, Row
from research.forgetting_report import AFTER, PRODUCT, Grid
from research.frame import StudyRun, checkpoint_name, require_at_least, require_images, require_one_checkpoint
from research.offline_gradients import WHOLE, GradientError, Gradients, TimestepBin, equal_mass_edges
from research.slot_training import (
    Slot,
    curve_nodes,
    edges_of_curve,
    finetune,
    gradient_products,
    make_slots,
    restored,
    slot_nodes,
)
from research.study_folder import claim
from research.timestep_errors import timestep_errors
from torchtitan.data.base import DatasetError
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import indexed
from torchtitan.diffusion.timesteps.slot_edges import read_slot_edges, write_slot_edges
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.files.durable import replacing
from torchtitan.training.optimizer import build_optimizer

COLUMNS = (
    "model", "weights", "kind", "trained", "measured", "draw", "finetune_steps", "batch", "lr", "samples", "images",
    "nodes", "split", "seed", "error", "product", "errors", "status", "reason", "date", "runtime",
)  # fmt: skip
KEY = COLUMNS[:14]
UNIT = "image"

# Slots of the published experiment, of ten.
PUBLISHED_GROUP = "3,5,7,9"
_CURVE_NODES = 40
_CURVE_IMAGES = 32
# Forward and backward of an image, in forwards.
_TRAINING_COST = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--slots", type=int, default=10, metavar="K",
        help="slots of equal loss, cut by a quick curve; of equal mass without indices (default: 10)")  # fmt: skip
    add("--groups", nargs="*", metavar="SLOTS", help='slots trained together, by number from 1, as "3,5,7,9" '
        "(default: these of ten slots, else none)")  # fmt: skip
    add("--finetune-steps", type=int, default=100, metavar="N", help="optimizer steps of each training (default: 100)")
    add("--batch", type=int, default=64, help="samples of a step (default: 64)")
    add("--lr", type=float, help="learning rate, constant (default: the run's peak)")
    add("--seeds", type=int, default=3, metavar="R", help="trainings of each, with separate draws (default: 3)")
    add("--images", type=int, default=64, metavar="K", help="images for measuring errors (default: 64)")
    add("--nodes", type=int, default=8, metavar="N", help="maximum of timesteps that represent a slot (default: 8)")
    add("--split", choices=("validation", "train"), default="validation", help="of these images (default: validation)")
    add("--gradient-samples", type=int, default=512, metavar="N",
        help="samples per slot for the cosines of gradients, which hold two gradients per slot in memory; 0: no "
        "cosines (default: 512)")  # fmt: skip
    add("--gradient-repeats", type=int, default=8, metavar="R",
        help="independent parts of these, for intervals (default: 8)")  # fmt: skip
    add("--seed", type=int, default=0, help="of every draw (default: 0)")


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    _check(run)
    groups = _groups(options)
    slots = _slots(run)
    for group in groups:
        for number in group:
            if not 1 <= number <= len(slots):
                raise StudyError(f"--groups: there is no slot {number} (there are: 1 to {len(slots)})")
    grid = run.kept["grid"] = Grid(slots, groups, options.seeds, options.gradient_repeats)
    whose = {"model": checkpoint_name(run, run.steps[0]), "weights": run.track, "seed": options.seed}
    held_out = {"images": options.images, "nodes": options.nodes, "split": options.split}
    tuned = {"finetune_steps": options.finetune_steps, "batch": options.batch, "lr": _lr(run)}
    measuring = options.images * options.nodes * len(slots)
    training = options.finetune_steps * options.batch * _TRAINING_COST
    found = []
    for kind, trained, draw in grid.trainings():
        settings = tuned if kind == AFTER else {}
        for place, slot in enumerate(slots):
            work = 0 if place else measuring + (training if kind == AFTER else 0)
            cell = {"kind": kind, "trained": trained, "measured": slot.range, "draw": draw, "work": work}
            found.append(whose | held_out | settings | cell)
    part = options.gradient_samples // options.gradient_repeats
    for draw in range(options.gradient_repeats if part else 0):
        for place, (one, other) in enumerate(grid.pairs()):
            work = 0 if place else len(slots) * part * _TRAINING_COST
            cell = {"kind": PRODUCT, "trained": one.range, "measured": other.range, "draw": draw, "work": work}
            found.append(whose | cell | {"samples": part})
    return found


def cost(cell: Cell) -> int:
    """Cost in forwards of single images, a training step's counting three; all of it in a training's first row."""
    return cell["work"]


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Measure one number of a training, or of a repetition of products; repeated unless it was the last one made."""
    grid: Grid = run.kept["grid"]
    made = (cell["kind"], cell["trained"] if cell["kind"] != PRODUCT else "", cell["draw"])
    if run.kept.get("made") != made:
        run.kept["made"] = made
        try:
            make = _products if cell["kind"] == PRODUCT else _errors
            run.kept["numbers"] = make(run, cell, advance)
        except CELL_FAILURES as error:
            run.kept["numbers"] = error  # of all rows of this training
    numbers: Tensor | Exception = run.kept["numbers"]
    if isinstance(numbers, Exception):
        raise numbers
    measured = grid.place(cell["measured"])
    if cell["kind"] == PRODUCT:
        return {"product": numbers[grid.place(cell["trained"]), measured].item()}
    return {"error": numbers[measured].mean().item(), "errors": to_text(numbers[measured])}


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    return forgetting_report.report(run, run.kept["grid"], rows, folder)


# ---------------------------------------------------------------------- options


def _check(run: StudyRun) -> None:
    options = run.options
    require_one_checkpoint(run)
    least = {
        "slots": 2, "finetune_steps": 0, "batch": 1, "seeds": 1, "images": 2, "nodes": 1, "gradient_samples": 0,
        "gradient_repeats": 2, "seed": 0,
    }  # fmt: skip
    require_at_least(options, least)
    if not 0 < _lr(run) < float("inf"):
        raise StudyError(f"--lr: must be positive, is {_lr(run):g}")
    if options.gradient_samples % (2 * options.gradient_repeats):
        parts = f"2 x {options.gradient_repeats} (--gradient-repeats)"
        raise StudyError(f"--gradient-samples: {options.gradient_samples} is no multiple of {parts}")
    require_images(run)


def _lr(run: StudyRun) -> float:
    return run.config.optimizer.lr if run.options.lr is None else run.options.lr


def _groups(options: argparse.Namespace) -> list[tuple[int, ...]]:
    words = options.groups
    if words is None:
        words = [PUBLISHED_GROUP] if options.slots == 10 else []
    try:
        groups = [tuple(int(number) for number in word.split(",")) for word in words]
    except ValueError as error:
        raise StudyError(f'--groups: {" ".join(words)!r} are no slot numbers (as "3,5,7,9")') from error
    for group in groups:
        if len(set(group)) < max(len(group), 2):
            raise StudyError(f"--groups: {','.join(map(str, group))} is not two different slots or more")
    return list(dict.fromkeys(tuple(sorted(group)) for group in groups))


def _slots(run: StudyRun) -> list[Slot]:
    options = run.options
    objective = build_objective(run.config.objective, run.config.debug.seed)
    path = objective.path
    try:
        if path.discrete:
            if options.slots > path.num_indices:
                raise ValueError(f"{options.slots} slots of {path.num_indices} timesteps: give 2 to {path.num_indices}")
            return make_slots(objective, _equal_loss_edges(run, objective), "index")
        return make_slots(objective, *equal_mass_edges(objective, options.slots))
    except (ValueError, DatasetError) as error:
        raise StudyError(f"--slots: {error}") from error


def _equal_loss_edges(run: StudyRun, objective: Objective) -> Sequence[float]:
    """Edges of equal loss by a quick curve of the same weights; kept with the results, for a study that resumes."""
    options = run.options
    step = run.steps[0]
    folder = options.output or run.folder / "studies" / "forgetting"
    name = f"slots-{checkpoint_name(run, step)}-{run.track}-{options.split}-{options.seed}-{options.slots}.json"
    path = folder / name
    if path.exists():
        return read_slot_edges(path, "index")
    images = min(_CURVE_IMAGES, len(run.dataset(options.split)))
    samples = run.samples(options.split, images, options.seed)
    nodes = curve_nodes(indexed(objective.path), _CURVE_NODES)
    work = len(samples.images) * len(nodes.t)
    with tqdm(total=work, desc="curve for the slots", unit=UNIT, file=sys.stderr, mininterval=0.5) as bar:
        errors = timestep_errors(
            run.model(step).model, objective, samples, nodes, device=run.device, advance=bar.update
        )  # fmt: skip
    edges = edges_of_curve(objective, nodes, errors.mean(0), options.slots)
    try:
        claim(folder, run.folder, run.config)
        with replacing(path) as unfinished:
            write_slot_edges(unfinished, edges, "index")
    except OSError as error:
        raise StudyError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return edges


# ---------------------------------------------------------------------- measuring


def _errors(run: StudyRun, cell: Cell, advance: Advance) -> Tensor:
    """Mean error of each image on each slot [S, K], after a cell's training or before all. Raises GradientError."""
    model = run.model(run.steps[0]).model
    with restored(model):
        if cell["kind"] == AFTER:
            _finetune(run, cell, lambda images: advance(_TRAINING_COST * images))
        errors = _slot_errors(run, advance)
    if not errors.isfinite().all():  # the last step of a training that diverges has a gradient that is finite
        raise GradientError("an error of the model is not finite")
    return errors


def _finetune(run: StudyRun, cell: Cell, advance: Advance) -> None:
    trained, grid = run.model(run.steps[0]), run.kept["grid"]
    gradients = _gradients(run)
    settings = dataclasses.replace(run.config.optimizer, lr=cell["lr"])
    optimizer = build_optimizer(dict(trained.model.named_parameters()), settings, trained.model.blocks())
    slots: list[TimestepBin] = [slot.where for slot in grid.slots_of(cell["trained"])] or [WHOLE]
    finetune(
        gradients, optimizer, slots, steps=cell["finetune_steps"], batch_size=cell["batch"],
        stream=_stream("training", cell["draw"]), max_norm=run.config.training.max_norm, advance=advance,
    )  # fmt: skip


def _slot_errors(run: StudyRun, advance: Advance) -> Tensor:
    trained, grid, options = run.model(run.steps[0]), run.kept["grid"], run.options
    samples = run.samples(options.split, options.images, options.seed)
    errors = []
    for slot in grid.slots:
        nodes = slot_nodes(trained.objective, slot.where, options.nodes)
        found = timestep_errors(
            trained.model, trained.objective, samples, nodes, device=run.device, advance=advance
        )  # fmt: skip
        errors.append(found.mean(1))
    return torch.stack(errors)


def _products(run: StudyRun, cell: Cell, advance: Advance) -> Tensor:
    numbers = torch.arange(cell["draw"] * cell["samples"], (cell["draw"] + 1) * cell["samples"])
    slots = [(slot.where, _stream("products", slot.range)) for slot in run.kept["grid"].slots]
    with restored(run.model(run.steps[0]).model):
        return gradient_products(_gradients(run), slots, numbers, lambda images: advance(_TRAINING_COST * images))


def _gradients(run: StudyRun) -> Gradients:
    trained = run.model(run.steps[0])
    config = trained.config
    return Gradients(
        trained.model, trained.objective, run.dataset("train"), label_dropout=config.model.label_dropout,
        horizontal_flip=config.data.horizontal_flip, seed=run.options.seed, device=run.device,
        dtype=config.training.mixed_precision_param, batch_size=config.training.local_batch_size,
    )  # fmt: skip


def _stream(*names: object) -> int:
    """Stream of samples, separate whatever else the study holds."""
    return zlib.crc32("|".join(map(str, names)).encode()) & 0xFFFFFF


__all__ = ["COLUMNS", "KEY", "UNIT", "add_options", "cells", "cost", "measure", "report"]
