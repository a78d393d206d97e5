"""Picture of a run's gradient noise scale: by timestep bin, over training, and agreement of the bins' gradients."""

import itertools
import math
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from torchtitan.gns.decayed import BinEstimates
from torchtitan.gns.statistics import cosines

PICTURE_FILE = "noise_scale.png"

_DRAWN = ("b_simple", "lower", "upper")
GEOMETRY_NAMES = {"adam": "Adam's geometry", "plain": "plain geometry"}


def draw_noise_scale(
    points: Sequence[dict], edges: Tensor, estimates: dict[str, BinEstimates], batch_size: int,
    names: dict[str, str],
) -> Image.Image:
    """Draw four panels for each geometry, legible at 900 pixels' width; a panel without values says so.

    Args:
        points: logged points in the order of their steps, with the tags of GNSMonitor.metrics.
        edges: inner edges of the K bins in t.
        estimates: geometry -> estimates of the bins at the end, the headline first.
        batch_size: samples per step, drawn for comparison.
        names: geometry -> name of the estimator that these are of.

    Returns:
        an RGB picture.
    """
    from torchtitan.pictures import style  # matplotlib: a run that draws nothing does not wait for it

    figure, grid = style.new_figure("Gradient noise scale by timestep", 2 * len(estimates), 2, (11.25, 9 * len(estimates)))
    rows = grid.reshape(len(estimates), 4)
    bounds = [0.0, *edges.tolist(), 1.0]
    for axes, (geometry, found) in zip(rows, estimates.items(), strict=True):
        name = GEOMETRY_NAMES[geometry]
        _draw_bins(axes[0], bounds, found, _last(points, geometry, len(bounds) - 1), batch_size, names[geometry])
        axes[0].set_title(f"{name}: each bin at the end ({names[geometry]})")
        _draw_lines(axes[1], points, geometry, bounds, batch_size)
        _draw_map(axes[2], figure, points, geometry, bounds)
        _draw_cosines(axes[3], figure, found, bounds)
        for panel in axes:
            panel.title.set_fontsize(12)
    return style.as_image(figure)


def is_drawn(tag: str) -> bool:
    """Check whether a logged value is drawn."""
    parts = tag.split("/")
    return len(parts) == 5 and parts[0] == "gns" and parts[2] == "composite" and parts[3] != "all" and parts[4] in _DRAWN


def _say_too_early(axes) -> None:
    """Say in an empty panel why it is empty."""
    axes.set(xticks=[], yticks=[])
    axes.minorticks_off()
    axes.set_facecolor("0.96")
    axes.text(0.5, 0.5, "too early to say", transform=axes.transAxes, ha="center", va="center", fontsize=14, color="0.4")


def _draw_bins(axes, bounds: list[float], found: BinEstimates, composite: list, batch_size: int, estimator: str) -> None:
    from torchtitan.pictures import style

    middles = [0.5 * (low + high) for low, high in itertools.pairwise(bounds)]
    for middle, low, high, value, lower, upper in zip(
        middles, bounds, bounds[1:], found.b_simple.tolist(), found.lower.tolist(), found.upper.tolist(), strict=False
    ):
        if math.isfinite(upper):
            axes.plot([low, high], [value, value], color=style.COLOURS[0], lw=2)
            axes.plot([middle, middle], [max(lower, 1e-1), upper], color=style.COLOURS[0], lw=1)
        elif lower > 0:  # greater than, how much greater is not known
            arrow = {"arrowstyle": "->", "color": style.COLOURS[0]}
            axes.annotate("", (middle, 3 * lower), (middle, lower), arrowprops=arrow)
            axes.update_datalim([(middle, 3.2 * lower)])  # an arrow that ends outside is not drawn
            axes.plot([low, high], [lower, lower], color=style.COLOURS[0], lw=1, ls=":")
    known = [(m, c) for m, c in zip(middles, composite, strict=True) if c is not None and c > 0]
    if known and estimator != "composite":
        axes.plot(*zip(*known, strict=True), "o", ms=4, color=style.COLOURS[1], label="composite, every step")
    if not axes.lines and not axes.texts:
        _say_too_early(axes)
        return
    axes.plot([], [], color=style.COLOURS[0], label=f"{estimator}, 95 % interval (arrow: more than)")
    axes.axhline(batch_size, color="0.5", ls="--", lw=1, label=f"global batch, {batch_size}")
    axes.set(yscale="log", xlabel="timestep t (0: clean data, 1: noise)", ylabel="B_simple [samples]")
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.35, high)  # room for the legend
    axes.legend(fontsize=9, loc="lower center")


def _draw_lines(axes, points: Sequence[dict], geometry: str, bounds: list[float], batch_size: int) -> None:
    from torchtitan.pictures import style

    colours = style.ordered_colours(len(bounds) - 1)
    for k, colour in enumerate(colours):
        series = _series(points, geometry, "composite", k)
        if not series:
            continue
        steps, values, lower, upper = zip(*series, strict=True)
        axes.plot(steps, values, color=colour, lw=1.3, label=f"t {bounds[k]:.2f} to {bounds[k + 1]:.2f}")
        axes.fill_between(steps, lower, upper, color=colour, alpha=0.15, lw=0)
    axes.set_title("over training (composite, 95 % bands)")
    if not axes.lines:
        _say_too_early(axes)
        return
    axes.axhline(batch_size, color="0.5", ls="--", lw=1)
    axes.set(yscale="log", xlabel="step", ylabel="B_simple [samples]")
    axes.legend(fontsize=8, ncols=2)


def _draw_map(axes, figure, points: Sequence[dict], geometry: str, bounds: list[float]) -> None:
    from matplotlib.colors import LogNorm

    prefix = f"gns/{geometry}/composite"
    steps = [point["step"] for point in points]
    grid = [[point.get(f"{prefix}/{k}/b_simple", math.nan) for point in points] for k in range(len(bounds) - 1)]
    values = torch.tensor(grid, dtype=torch.float64)
    values[values <= 0] = math.nan
    axes.set(xlabel="step", ylabel="timestep t")
    axes.set_title("over training (grey: not known)")
    axes.grid(visible=False)
    known = values[values.isfinite()]
    if len(steps) < 2 or not len(known):
        _say_too_early(axes)
        return
    axes.set_facecolor("0.8")
    borders = [steps[0] - (steps[1] - steps[0]), *steps]
    norm = LogNorm(known.min().item(), max(known.max().item(), 1.01 * known.min().item()))
    mesh = axes.pcolormesh(borders, bounds, values.numpy(), norm=norm, cmap="viridis")
    figure.colorbar(mesh, ax=axes, label="B_simple [samples]")


def _draw_cosines(axes, figure, found: BinEstimates, bounds: list[float]) -> None:
    axes.grid(visible=False)
    diagonal = found.matrix_stderr.diagonal()
    values = cosines(found.matrix, diagonal).clamp(-1, 1)
    axes.set_title("agreement of bins (grey: too little signal)")
    if not values.isfinite().any():
        _say_too_early(axes)
        return
    axes.set_facecolor("0.8")
    mesh = axes.imshow(values.numpy(), vmin=-1, vmax=1, cmap="RdBu", origin="lower")
    figure.colorbar(mesh, ax=axes, label="cosine of mean gradients, noise taken out")
    labels = [f"{low:.2f}" for low in bounds[:-1]]
    axes.set_xticks(range(len(labels)), labels, fontsize=9, rotation=60)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    for row in range(len(labels)):
        for column in range(len(labels)):
            value = values[row, column].item()
            if math.isfinite(value):
                colour = "white" if abs(value) > 0.6 else "black"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set(xlabel="bin from t", ylabel="bin from t")


def _series(points: Sequence[dict], geometry: str, estimator: str, k: int) -> list[tuple[float, ...]]:
    """Series (step, value, lower, upper) where the noise scale is known."""
    prefix = f"gns/{geometry}/{estimator}/{k}"
    wanted = [f"{prefix}/{name}" for name in _DRAWN]
    found = [(point["step"], *(point[tag] for tag in wanted)) for point in points if all(tag in point for tag in wanted)]
    return [(step, value, max(lower, 0.1), upper) for step, value, lower, upper in found if value > 0]


def _last(points: Sequence[dict], geometry: str, bins: int) -> list[float | None]:
    last = points[-1] if points else {}
    return [last.get(f"gns/{geometry}/composite/{k}/b_simple") for k in range(bins)]
