"""Calibration of the noise scale in Muon's norm: the batch at which one step of Muon on a bin makes half of the best progress.

The step changes Muon's matrices by - eta s_i U_i V_i' of a batch's mean gradient, eta tuned, without momentum; the other weights
stay. Noise scales are those of torchtitan/gns/nuclear.py for each batch size b, and the Euclidean one of the same matrices.
Protocol: docs/research/critical_batch.md.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor, nn

from research import gns_calibration
from research.cells import Cell, Row
from research.frame import StudyRun, number, require_at_least, require_seed
from research.gns_calibration import loss_of_cell, machine, numbers_text
from research.gns_calibration_statistics import Finding, finding, interval_columns, resampled
from research.half_progress import Progress, Replicate, SampleNumbers, best_step_size
from research.half_progress_fit import half_progress
from research.offline_gradients import EstimateFailed
from research.pictures import interval_text, save
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import StudyError
from torchtitan.gns.nuclear import nuclear_norm
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, ordered_colours
from torchtitan.training.muon import orthogonalise
from torchtitan.training.optimizer import build_optimizer

KEY = gns_calibration.KEY
COLUMNS = (
    "model", "data", "step", "bin", *KEY[1:], "mass", "nuclear", "frobenius", *interval_columns("half"),
    *interval_columns("interpolated"), "best", "progress", "progress_se", "step_sizes", "loss", "machine", "status", "reason",
    "date", "runtime",
)  # fmt: skip
UNIT = "gradient"
BLOCKS = 16  # of the full gradient
JUDGED = 64  # b of the noise scale that is judged
SCALES = {"nuclear": f"Muon's norm, b = {JUDGED}", "frobenius": "Euclidean"}

cost = gns_calibration.cost


def add_options(parser: argparse.ArgumentParser) -> None:
    gns_calibration.add_step_options(parser, [4, 16, 64, 256], samples=4096, unit=BLOCKS, replicates=32, batch_size=64)


def cells(run: StudyRun) -> list[Cell]:
    options = run.options
    if run.config.optimizer.name != "Muon" or run.track != "none":
        raise StudyError(f"{run.folder}: is no training by optimizer.name = Muon, or its average (give one, without --weights)")
    require_at_least(options, {"samples": BLOCKS, "replicates": 4, "held": 1, "batch_size": 1})
    if options.samples % BLOCKS or options.replicates % 2 or JUDGED not in options.batches:
        raise StudyError(f"--samples: a multiple of {BLOCKS}, --replicates: even, --batches: with {JUDGED} among them")
    require_seed(options)
    return gns_calibration.cells_of(run)


class MuonStep:
    """Direction and dual norm of Muon's step, of gradients of all trained parameters as one vector [P]."""

    def __init__(self, parameters: Sequence[nn.Parameter], sizes: dict[nn.Parameter, float]) -> None:
        self._parameters, self._sizes = parameters, sizes

    def matrices(self, gradient: Tensor) -> list[tuple[Tensor, float]]:
        """Muon's matrices of a vector, views, each with its s."""
        parts = gradient.split([parameter.numel() for parameter in self._parameters])
        pairs = zip(self._parameters, parts, strict=True)
        return [(part.view_as(each), self._sizes[each]) for each, part in pairs if each in self._sizes]

    def direction(self, gradient: Tensor) -> Tensor:
        found = torch.zeros_like(gradient)
        for (place, size), (matrix, _) in zip(self.matrices(found), self.matrices(gradient), strict=True):
            place.copy_(size * orthogonalise(matrix))
        return found

    def norm(self, gradient: Tensor) -> float:
        return sum(size * nuclear_norm(matrix).item() for matrix, size in self.matrices(gradient))

    def product(self, one: Tensor, other: Tensor) -> float:
        pairs = zip(self.matrices(one), self.matrices(other), strict=True)
        return sum((a * b).sum().item() for (a, _), (b, _) in pairs)


def measure(run: StudyRun, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Measure a cell: the other columns of its row."""
    loss, gradients, where = loss_of_cell(run, cell)
    model = gradients.model
    optimizer = build_optimizer(
        dict(model.named_parameters()), run.config.optimizer, model.blocks(), fan_in_ratios=model.fan_in_ratios()
    )
    step = MuonStep(gradients.parameters, optimizer.matrices())
    try:
        return _measure(cell, loss, step, advance) | {"mass": where.mass, "machine": machine(run)}
    finally:
        loss.restore()


def _measure(cell: Cell, loss: Any, step: MuonStep, advance: Advance) -> dict[str, Any]:
    numbers, batches, half = SampleNumbers(), [int(batch) for batch in cell["batches"].split()], cell["replicates"] // 2

    def drawn(count: int) -> Tensor:
        advance(count)
        return loss.gradient(numbers.take(count))

    means = [torch.stack([drawn(cell["samples"] // BLOCKS) for _ in range(BLOCKS // 2)]).mean(0) for _ in range(2)]
    full = torch.stack(means).mean(0)
    signal = 2 * step.norm(full) ** 2 - sum(step.norm(mean) ** 2 for mean in means) / 2
    if not signal > 0:
        raise EstimateFailed("the mean gradient is not distinguished from zero (more samples needed)")
    replicates = [Replicate(loss, numbers.take(cell["held"])) for _ in range(2 * half)]
    advance(2 * half * cell["held"])
    values, step_sizes = torch.zeros(half, len(batches) + 1, dtype=torch.float64), [0.0] * (len(batches) + 1)
    nuclear, squares, start = {}, [], 1e-2

    def measured(column: int, gradient: Callable[[], Tensor]) -> list[Tensor]:
        nonlocal start
        used = [gradient() for _ in replicates]
        directions = [step.direction(each) for each in used]
        slopes = [torch.dot(full, each).item() for each in directions]
        three = list(zip(replicates, directions, slopes, strict=True))

        def mean_progress(size: float) -> float:
            return sum(one.progress(direction, size, slope) for one, direction, slope in three[:half]) / half

        start = step_sizes[column] = best_step_size(mean_progress, start)
        values[:, column] = torch.tensor([one.progress(direction, start, slope) for one, direction, slope in three[half:]])
        return used

    measured(len(batches), lambda: full)
    for column, batch in reversed(list(enumerate(batches))):
        found = measured(column, partial(drawn, batch))
        apart = [(one - other) / 2**0.5 for one, other in zip(found[::2], found[1::2], strict=True)]
        nuclear[batch] = batch * (sum(map(step.norm, apart)) / len(apart)) ** 2 / signal
        squares.append(batch * sum(step.product(each, each) for each in apart) / len(apart))
    if not values.isfinite().all():
        raise EstimateFailed("the loss is not finite after a step of the tuned size")
    fitted = half_progress(batches, cell["samples"], Progress(values, torch.zeros(BLOCKS).double(), step_sizes), cell["seed"])
    return {
        "loss": sum(replicate.before for replicate in replicates) / len(replicates),
        "nuclear": numbers_text([nuclear[batch] for batch in batches]),
        "frobenius": sum(squares) / len(squares) / step.product(*means),
        **gns_calibration.interval_cells("half", fitted.hyperbola),
        **gns_calibration.interval_cells("interpolated", fitted.interpolated),
        "best": fitted.best, "progress": numbers_text(values.mean(0).tolist()),
        "progress_se": numbers_text((values.std(0) / half**0.5).tolist()), "step_sizes": numbers_text(step_sizes),
    }  # fmt: skip


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    used = [row for row in rows if row["status"] == "ok" and 0 < number(row, "half_lower") < number(row, "half_upper") < np.inf]
    if len(used) < 3:
        return f"{len(used)} of {len(rows)} cells have a bounded half-progress batch; three are needed."
    counts = np.concatenate((np.ones((1, len(used))), resampled(used, 0)))
    half = np.log([number(row, "half") for row in used])
    title = "Half-progress batch of Muon's step against noise scales"
    figure, axes = new_figure(title, 1, len(SCALES), (10, 5), sharex=True, sharey=True)
    table = []
    ages = sorted({int(row["step"]) for row in used})
    for axis, (column, name) in zip(axes[0], SCALES.items(), strict=True):
        scale = np.array([scale_of(row, column) for row in used])
        found: Finding = finding(np.log(scale), half, counts)
        table.append([name, *(interval_text(each, ".2f") for each in (found.rank, found.slope, found.ratio))])
        for color, age in zip(ordered_colours(len(ages)), ages, strict=True):
            chosen = [place for place, row in enumerate(used) if int(row["step"]) == age]
            axis.plot(scale[chosen], np.exp(half[chosen]), "o", color=color, label=f"step {age}")
        axis.axline((10, 10), (100, 100), color="grey", linestyle="--")
        axis.set(xscale="log", yscale="log", xlabel=f"B, {name}")
        for ticked in (axis.xaxis, axis.yaxis):
            ticked.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ticked.set_major_formatter("{x:g}")
            ticked.set_minor_formatter(NullFormatter())
    axes[0, 0].set_ylabel("half-progress batch (samples)")
    axes[0, 0].legend()
    picture = save(figure, folder / "muon_calibration.png")
    head = f"{len(used)} of {len(rows)} cells have a bounded half-progress batch."
    return f"{head}\n\n{markdown_table(['B', 'rank', 'slope', 'B_half / B'], table)}{picture}"


def scale_of(row: Row, column: str) -> float:
    """Noise scale of a row: the Euclidean one, or Muon's of batches of JUDGED samples."""
    if column == "frobenius":
        return number(row, column)
    return float(row[column].split()[row["batches"].split().index(str(JUDGED))])
