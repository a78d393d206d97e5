"""Picture of the training loss over what it cost: images, FLOPs, hours."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import EngFormatter

from torchtitan.pictures.style import PRINT_DPI, colour, folded, label_log_axis, new_figure, save
from torchtitan.runs.analysis.axes import DATA, Axes, word
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.drawing import divided
from torchtitan.runs.record import Series, coinciding

_COSTS = {"images": "images", "flops": "FLOPs", "hours": "hours of training"}
_SHORT = 0.1  # hours; training of less has an axis of seconds
_MOST = 8  # runs of one picture


def draw_loss(runs: Sequence[Run], folder: Path) -> list[tuple[str, Path]]:
    """Draw the loss over images, FLOPs and hours; runs of different objectives or data have separate pictures.

    Returns:
        title and file of each.
    """
    shown = [run for run in runs if len(run.losses) > 1 and run.losses[-1]["images"]]
    drawn = []
    for where, ending, members in divided(shown, [_kind(run) for run in shown]):
        members.sort(key=lambda run: run.losses[-1]["loss"])
        repeats: Counter[str] = Counter()
        of_cells = []
        for run in members:
            of_cells.append((repeats[cell := repr(run.axes)], run))
            repeats[cell] += 1
        members = [run for _, run in sorted(of_cells, key=lambda each: each[0])]  # one of each cell before a repeat
        most = f"{_MOST} of {len(members)} runs, the lowest of each cell first"
        which = most if len(members) > _MOST else "all runs that logged it"
        title = f"Training loss, {which}" + (f": {where}" if where else "")
        alike = coinciding({run.name: _over_images(run) for run in members[:_MOST]})
        drawn.append((title, _draw(members[:_MOST], title, alike, folder / f"loss_over_cost{ending}.png")))
    return drawn


def _kind(run: Run) -> Axes:
    """Settings by which losses are comparable."""
    kind = {key: word(value) for key, value in run.settings.items() if key.startswith("objective.")}
    return {DATA: word(run.settings.get("data.name"))} | kind


def _over_images(run: Run) -> Series:
    return Series(tuple(int(one["images"]) for one in run.losses), tuple(one["loss"] for one in run.losses))


def _draw(runs: list[Run], title: str, alike: str, path: Path) -> Path:
    costs = [cost for cost in _COSTS if any(point[cost] for run in runs for point in run.losses)]
    width = 0.6 + 3.8 * len(costs)
    beside = max(int(width / (0.7 + 0.07 * max(len(run.name) for run in runs))), 1)  # names in a row of the legend
    figure, (panels,) = new_figure(title, 1, len(costs), (width, 3.6 + 0.2 * len(runs) / beside), sharey=True)
    seconds = max(point["hours"] for run in runs for point in run.losses) < _SHORT
    for panel, cost in zip(panels, costs, strict=True):
        in_seconds = cost == "hours" and seconds
        for n, run in enumerate(runs):
            points = [point for point in run.losses if point[cost]]
            spent = [point[cost] * (3600 if in_seconds else 1) for point in points]
            panel.plot(spent, [point["loss"] for point in points], color=colour(n), label=run.name)
        panel.set_xscale("log")
        label_log_axis(panel.xaxis)
        if cost != "hours":
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_xlabel("seconds of training" if in_seconds else _COSTS[cost])
    if all(point["loss"] > 0 for run in runs for point in run.losses):
        panels[0].set_yscale("log")
        label_log_axis(panels[0].yaxis)
    panels[0].set_ylabel("training loss")
    lines = panels[0].get_legend_handles_labels()
    note = f"Means over 3 % of the steps, without further terms of the loss. {alike}"
    figure.legend(
        *lines, loc="outside lower left", ncols=beside, fontsize=7.5, frameon=False,
        title=folded(figure, note), title_fontsize=7.5, alignment="left",
    )  # fmt: skip
    return save(figure, path, PRINT_DPI)
