"""Report of the matrix of errors after a training over those before, in words and pictures."""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from research.by_image import cosine, from_text, log_ratio
from research.cells import Row
from research.frame import StudyRun, number
from research.pictures import save, write_cells
from research.slot_training import Slot
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note
from torchtitan.statistics.interval import Interval

# Kinds of rows: errors of the checkpoint, errors after a training, products of gradients.
BEFORE, AFTER, PRODUCT = "before", "after", "product"
NOTHING, ALL = "none", "all"
# The darkest colour of the matrix is a factor of 2 at least.
_LEAST_SCALE = math.log(2.0)

Matrix = dict[tuple[str, str], Interval]


@dataclass(frozen=True)
class Grid:
    """Grid of trainings and measurements.

    Attributes:
        slots: in order.
        groups: numbers of slots that are trained together.
        draws: trainings of each.
        repeats: independent estimates of the products of gradients.
    """

    slots: list[Slot]
    groups: list[tuple[int, ...]]
    draws: int
    repeats: int

    @property
    def trained(self) -> list[str]:
        """Trained slots and groups, as in the column `trained`."""
        together = ["+".join(self.slots[number - 1].range for number in group) for group in self.groups]
        return [slot.range for slot in self.slots] + together

    def trainings(self) -> Iterator[tuple[str, str, int | None]]:
        """Trainings (kind, trained, draw), first the untrained checkpoint, then the control."""
        yield BEFORE, NOTHING, None
        for trained in (ALL, *self.trained):
            for draw in range(self.draws):
                yield AFTER, trained, draw

    def pairs(self) -> list[tuple[Slot, Slot]]:
        """Pairs of slots, each with itself included."""
        return [(one, other) for place, one in enumerate(self.slots) for other in self.slots[place:]]

    def slots_of(self, trained: str) -> list[Slot]:
        """Slots of a training; none for all timesteps."""
        ranges = trained.split("+")
        return [slot for slot in self.slots if slot.range in ranges]

    def place(self, range: str) -> int:
        """Place of a slot among all, from 0."""
        return next(place for place, slot in enumerate(self.slots) if slot.range == range)

    def label(self, trained: str) -> str:
        """Label of a training in words."""
        numbers = [slot.number for slot in self.slots_of(trained)]
        if not numbers:
            return "all timesteps"
        return f"slot {numbers[0]}" if len(numbers) == 1 else f"slots {','.join(map(str, numbers))}"


def report(run: StudyRun, grid: Grid, rows: list[Row], folder: Path) -> str:
    """Write matrix.csv and the pictures; return the text of summary.md."""
    errors = _errors(grid, rows)
    before = errors.get((NOTHING, 0))
    text = _description(run, grid)
    if before is None:
        return text + "The checkpoint's own errors could not be measured.\n\n"
    factors = _matrix(grid, errors, lambda draw: before)
    controlled = _matrix(grid, errors, lambda draw: errors.get((ALL, draw)))
    _write_matrix(grid, before, factors, controlled, folder / "matrix.csv")
    text += _slots_table(grid, before, factors)
    text += _findings(grid, factors, controlled)
    text += _draw_factors(run, grid, factors, folder / "forgetting.png")
    products = _product_tensor(grid, rows)
    if len(products) > 1:
        text += _cosines(run, grid, products, folder)
    return text


def _errors(grid: Grid, rows: list[Row]) -> dict[tuple[str, int], Tensor]:
    """Errors [S, K] by (trained, draw), of trainings with all rows."""
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    for row in rows:
        if row["kind"] != PRODUCT and row["status"] == "ok":
            found.setdefault((row["trained"], int(row["draw"] or 0)), {})[row["measured"]] = from_text(row["errors"])
    whole = {key: by_slot for key, by_slot in found.items() if len(by_slot) == len(grid.slots)}
    return {key: torch.stack([by_slot[slot.range] for slot in grid.slots]) for key, by_slot in whole.items()}


def _matrix(grid: Grid, errors: dict[tuple[str, int], Tensor], against) -> Matrix:
    """Matrix (trained, measured) -> ln of the errors after a training over those of `against(draw)`, [S, K] or None."""
    matrix = {}
    for trained in (ALL, *grid.trained):
        pairs = [
            (after, other)
            for draw in range(grid.draws)
            if (after := errors.get((trained, draw))) is not None and (other := against(draw)) is not None
        ]
        for place, slot in enumerate(grid.slots):
            if pairs:
                after, other = (torch.stack([one[place] for one in side]) for side in zip(*pairs, strict=True))
                matrix[trained, slot.range] = log_ratio(after, other)
    return matrix


def _product_tensor(grid: Grid, rows: list[Row]) -> Tensor:
    """Tensor [R, S, S] of products, of the repetitions with all rows."""
    size = len(grid.slots)
    found = torch.full((grid.repeats, size, size), math.nan, dtype=torch.float64)
    for row in rows:
        if row["kind"] == PRODUCT and row["status"] == "ok":
            i, j, repeat = grid.place(row["trained"]), grid.place(row["measured"]), int(row["draw"])
            found[repeat, i, j] = found[repeat, j, i] = number(row, "product")
    return found[found.isfinite().all((1, 2))] if grid.repeats else found


# ---------------------------------------------------------------------- words


def _description(run: StudyRun, grid: Grid) -> str:
    options = run.options
    lr = run.config.optimizer.lr if options.lr is None else options.lr
    trainings = "1 training" if grid.draws == 1 else f"{grid.draws} trainings"
    over = "over images alone (no variation between trainings)" if grid.draws == 1 else "over trainings and images"
    return (
        f"{trainings} of {options.finetune_steps} steps x {options.batch} samples on each slot alone, from the "
        f"checkpoint, with a fresh optimizer ({run.config.optimizer.name}) at a constant learning rate of {lr:g}; the "
        "control trains as many samples of all timesteps, as the run does. F is the mean error after over the one "
        f"before, on {options.images} {options.split} images with fixed noise at up to {options.nodes} timesteps of a "
        f"slot; intervals are of 95 %, {over}.\n\n"
    )


def _slots_table(grid: Grid, before: Tensor, factors: Matrix) -> str:
    lines = [
        [str(slot.number), slot.range, f"{before[place].mean():.4g}", _text(factors.get((slot.range, slot.range))),
         _text(factors.get((ALL, slot.range)))]
        for place, slot in enumerate(grid.slots)
    ]  # fmt: skip
    unit = "timesteps (indices)" if grid.slots[0].unit == "index" else "timesteps (t)"
    return markdown_table(["slot", unit, "error before", "F of its own training", "F of the control"], lines)


def _findings(grid: Grid, factors: Matrix, controlled: Matrix) -> str:
    single = [slot.range for slot in grid.slots]

    def entries(matrix: Matrix, trained: list[str], own: bool) -> list[Interval]:
        return [
            value for (by, measured), value in matrix.items() if by in trained and (measured in by.split("+")) == own
        ]  # fmt: skip

    own, others = (entries(factors, single, own) for own in (True, False))
    text = f"Training one slot alone, on the other slots: {_count(others, 'F')}.\n\n"
    text += f"On the slot itself: {_count(own, 'F')}.\n\n"
    text += f"The control, on every slot: {_count(entries(factors, [ALL], False), 'F')}.\n\n"
    against = entries(controlled, single, False)
    text += "Against the control with the same images and noise, on the other slots: "
    text += f"{_count(against, 'F / F(control)')}.\n\n"
    for trained in grid.trained[len(single) :]:
        own, others = (entries(factors, [trained], own) for own in (True, False))
        text += f"Training {grid.label(trained)} together, on the others: {_count(others, 'F')}; "
        text += f"on themselves: {_count(own, 'F')}.\n\n"
    far = {near: _by_distance(grid, factors, near) for near in (True, False)}
    if all(far.values()):
        text += (
            f"Geometric mean of F on the neighbours of the trained slot: {_geometric(far[True]):.3g}; on slots further "
            f"away: {_geometric(far[False]):.3g} (no interval).\n\n"
        )
    return text + "Intervals are of one entry each: of 20 entries at 1, about one excludes it by chance.\n\n"


def _by_distance(grid: Grid, factors: Matrix, near: bool) -> list[float]:
    numbers = {slot.range: slot.number for slot in grid.slots}
    return [
        value.value
        for (by, measured), value in factors.items()
        if by in numbers and by != measured and (abs(numbers[by] - numbers[measured]) == 1) == near
    ]


def _geometric(logs: list[float]) -> float:
    return math.exp(sum(logs) / len(logs))


def _count(entries: list[Interval], name: str) -> str:
    if not entries:
        return "nothing was measured"
    above, below = sum(entry.lower > 0 for entry in entries), sum(entry.upper < 0 for entry in entries)
    mean = _geometric([entry.value for entry in entries])
    return (
        f"{above} of {len(entries)} entries have {name} above 1 with an interval that excludes 1, {below} below, "
        f"{len(entries) - above - below} undecided; geometric mean of {name} {mean:.3g}"
    )


def _text(ln: Interval | None) -> str:
    return f"{math.exp(ln.value):.3g} [{math.exp(ln.lower):.3g}, {_exp(ln.upper):.3g}]" if ln else "no answer"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _write_matrix(grid: Grid, before: Tensor, factors: Matrix, controlled: Matrix, path: Path) -> None:
    header = [
        "trained", "trained_timesteps", "measured", "measured_timesteps", "error_before", "factor", "lower", "upper",
        "over_control", "over_control_lower", "over_control_upper",
    ]  # fmt: skip
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for (trained, measured), factor in factors.items():
            place = grid.place(measured)
            ratios = [factor, controlled.get((trained, measured))]
            values = [f"{_exp(end):.8g}" for ln in ratios for end in ((ln.value, ln.lower, ln.upper) if ln else ())]
            names = [grid.label(trained), trained, grid.slots[place].number, measured]
            writer.writerow([*names, f"{before[place].mean():.8g}", *values])


def _cosines(run: StudyRun, grid: Grid, products: Tensor, folder: Path) -> str:
    size = len(grid.slots)
    found = {(i, j): cosine(products, i, j) for i in range(size) for j in range(i + 1)}
    with open(folder / "cosines.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["slot", "other_slot", "timesteps", "other_timesteps", "cosine", "lower", "upper"])
        for (i, j), value in found.items():
            ends = [f"{end:.6g}" for end in (value.value, value.lower, value.upper)] if value else ["", "", ""]
            one, other = grid.slots[i], grid.slots[j]
            writer.writerow([one.number, other.number, one.range, other.range, *ends])
    known = [value for (i, j), value in found.items() if i != j and value]
    missing = size * (size - 1) // 2 - len(known)
    positive, negative = sum(value.lower > 0 for value in known), sum(value.upper < 0 for value in known)
    text = (
        "Cosines between the slots' expected gradients at the checkpoint "
        f"({run.options.gradient_samples} samples each, freed of the samples' noise, intervals over {len(products)} "
        f"independent parts): of {len(known)} pairs of slots {positive} are above 0 with an interval that excludes 0, "
        f"{negative} below, {len(known) - positive - negative} undecided"
    )
    text += f"; {missing} pairs have no answer, as a gradient is lost in noise.\n\n" if missing else ".\n\n"
    return text + _draw_cosines(run, grid, found, folder / "cosines.png")


# ---------------------------------------------------------------------- pictures


def _draw_factors(run: StudyRun, grid: Grid, factors: Matrix, path: Path) -> str:
    trained = [*grid.trained, ALL]
    values = [[factors.get((by, slot.range)) for slot in grid.slots] for by in trained]
    known = [abs(entry.value) for line in values for entry in line if entry]
    scale = max([*known, _LEAST_SCALE])
    size = (2.6 + 0.82 * len(grid.slots), 2.0 + 0.42 * len(trained))
    figure, axes = new_figure(
        f"Error after fine-tuning over error before, F; {run.weights}, step {run.steps[0]}", size=size
    )
    texts = [
        [f"{math.exp(e.value):.3g}" + ("*" if e.excludes(0.0) else "") if e else "" for e in row] for row in values
    ]
    picture = _heat_map(axes[0, 0], [[e.value if e else math.nan for e in row] for row in values], texts, scale)
    for place, by in enumerate(trained):  # what was trained itself
        for slot in grid.slots_of(by):
            corner = (grid.place(slot.range) - 0.5, place - 0.5)
            axes[0, 0].add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=1.4))
    axes[0, 0].axhline(len(trained) - 1.5, color="black", linewidth=2.0)
    axes[0, 0].set_yticks(range(len(trained)), [_row_label(grid, by) for by in trained], fontsize=8)
    axes[0, 0].set_ylabel("trained")
    _slot_ticks(axes[0, 0], grid)
    axes[0, 0].set_xlabel("measured slot")
    figure.colorbar(picture, ax=axes[0, 0], label="ln F (red: error grew)", shrink=0.9)
    marks = "numbers: F; *: 95 % interval excludes 1\nframed: slots that were trained; below the line: the control"
    note(figure, marks)
    return save(figure, path)


def _draw_cosines(run: StudyRun, grid: Grid, found: dict[tuple[int, int], Interval | None], path: Path) -> str:
    size = range(len(grid.slots))
    values = [[found[max(i, j), min(i, j)] for j in size] for i in size]
    figure, axes = new_figure(
        f"Cosine between gradients of slots; {run.weights}, step {run.steps[0]}",
        size=(2.8 + 0.82 * len(size), 2.0 + 0.42 * len(size)),
    )
    texts = [
        [f"{e.value:.2f}" + ("*" if e.excludes(0.0) and i != j else "") if e else "?" for j, e in enumerate(row)]
        for i, row in enumerate(values)
    ]
    numbers = [[max(-1.0, min(1.0, e.value)) if e else math.nan for e in row] for row in values]
    picture = _heat_map(axes[0, 0], numbers, texts, 1.0)
    axes[0, 0].set_yticks(size, [_row_label(grid, slot.range) for slot in grid.slots], fontsize=8)
    _slot_ticks(axes[0, 0], grid)
    figure.colorbar(picture, ax=axes[0, 0], label="cosine", shrink=0.9)
    marks = "freed of sampling noise; *: 95 % interval excludes 0\n?: a gradient is not distinguished from noise"
    note(figure, marks)
    return save(figure, path)


def _heat_map(axes: Axes, values: list[list[float]], texts: list[list[str]], scale: float):
    axes.grid(visible=False)
    picture = axes.imshow(values, cmap="RdBu_r", vmin=-scale, vmax=scale, aspect="auto")
    write_cells(axes, np.array(values), texts, lambda value: abs(value) > 0.65 * scale)
    return picture


def _slot_ticks(axes: Axes, grid: Grid) -> None:
    labels = [f"{slot.number}\n{slot.range}" for slot in grid.slots]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)


def _row_label(grid: Grid, trained: str) -> str:
    slots = grid.slots_of(trained)
    return f"{slots[0].number}: {trained}" if len(slots) == 1 else grid.label(trained)
