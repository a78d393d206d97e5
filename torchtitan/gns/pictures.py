"""Picture of a run's gradient noise scale: by timestep bin, over training, and agreement of the bins' gradients."""

import itertools
import math
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from torchtitan.gns.batch_size import HalfProgress
from torchtitan.gns.config import DRAWN
from torchtitan.gns.decayed import BinEstimates
from torchtitan.gns.pool import finest_known, wider_bins
from torchtitan.pictures.colours import COLOURS

_UNBOUNDED = "0.8"
GEOMETRY_NAMES = {"adam": "Adam's geometry", "plain": "plain geometry"}


def draw_noise_scale(
    points: Sequence[dict], edges: Tensor, estimates: dict[str, list[BinEstimates]], batch_size: int,
    names: dict[str, str], half: HalfProgress | None = None,
) -> Image.Image:
    """Draw four panels for each geometry, legible at 900 pixels' width; a panel without values says so.

    A noise scale whose interval has no upper end is nowhere drawn as a value.

    Args:
        points: logged points in the order of their steps, with the tags of GNSMonitor.metrics.
        edges: inner edges of the K bins in t.
        estimates: geometry -> estimates of the bins at the end, then those in fewer and fewer bins (see Agreement); the
            headline geometry first.
        names: geometry -> name of the estimator that these are of.
        half: half-progress batches of the bins, drawn with the headline geometry's noise scales.

    Returns:
        an RGB picture.
    """
    from torchtitan.pictures import style  # matplotlib: a run that draws nothing does not wait for it

    figure, grid = style.new_figure("Gradient noise scale by timestep", 2 * len(estimates), 2, (11.25, 9 * len(estimates)))
    rows = grid.reshape(len(estimates), 4)
    bounds = [0.0, *edges.tolist(), 1.0]
    for axes, (geometry, levels) in zip(rows, estimates.items(), strict=True):
        name = GEOMETRY_NAMES[geometry]
        of_headline = half if geometry == next(iter(estimates)) else None
        composite = _last(points, geometry, len(bounds) - 1)
        _draw_bins(axes[0], bounds, levels[0], composite, batch_size, names[geometry], of_headline)
        axes[0].set_title(f"{name}: each bin at the end ({names[geometry]})")
        _draw_lines(axes[1], points, geometry, bounds, batch_size)
        _draw_map(axes[2], figure, points, geometry, bounds)
        _draw_agreement(axes[3], figure, levels, bounds)
    for panel in figure.axes:
        panel.title.set_fontsize(12)
        panel.tick_params(labelsize=10)
        for label in (panel.xaxis.label, panel.yaxis.label):
            label.set_fontsize(11)
    return style.as_image(figure)


def _say_why_empty(axes, reason: str = "too early to say") -> None:
    axes.set(xticks=[], yticks=[])
    axes.minorticks_off()
    axes.set_facecolor("0.96")
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", fontsize=14, color="0.4")


def _draw_bins(
    axes, bounds: list[float], found: BinEstimates, composite: list[float], batch_size: int, estimator: str,
    half: HalfProgress | None = None,
) -> None:
    middles = [0.5 * (low + high) for low, high in itertools.pairwise(bounds)]
    for middle, low, high, value, lower, upper in zip(
        middles, bounds, bounds[1:], found.b_simple.tolist(), found.lower.tolist(), found.upper.tolist(), strict=False
    ):
        if math.isfinite(upper):
            axes.plot([low, high], [value, value], color=COLOURS[0], lw=2)
            axes.plot([middle, middle], [max(lower, 1e-1), upper], color=COLOURS[0], lw=1)
        elif lower > 0:  # greater than, how much greater is not known
            arrow = {"arrowstyle": "->", "color": COLOURS[0]}
            axes.annotate("", (middle, 3 * lower), (middle, lower), arrowprops=arrow)
            axes.update_datalim([(middle, 3.2 * lower)])  # an arrow that ends outside is not drawn
            axes.plot([low, high], [lower, lower], color=COLOURS[0], lw=1, ls=":")
    known = [(m, c) for m, c in zip(middles, composite, strict=True) if math.isfinite(c)]
    if known and estimator != "composite":
        axes.plot(*zip(*known, strict=True), "o", ms=4, color=COLOURS[1], label="composite, every step")
    if half is not None and half.batch.isfinite().any():
        ends = torch.stack((half.batch - half.lower, half.upper - half.batch))
        # Beside the noise scale's bar in the middle of the bin.
        places = [low + 0.7 * (high - low) for low, high in itertools.pairwise(bounds)]
        axes.errorbar(
            places, half.batch.numpy(), ends.where(half.batch.isfinite(), torch.nan).numpy(), fmt="s", ms=4, lw=1,
            color=COLOURS[2], label="half-progress batch of one step, the bin's samples",
        )  # fmt: skip
    if not axes.lines and not axes.texts:
        _say_why_empty(axes)
        return
    axes.plot([], [], color=COLOURS[0], label=f"{estimator}, 95 % interval (arrow: more than)")
    axes.axhline(batch_size, color="0.5", ls="--", lw=1, label=f"global batch, {batch_size}")
    axes.set(xlim=(0.0, 1.0), yscale="log", xlabel="timestep t (0: clean data, 1: noise)", ylabel="B_simple [samples]")
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** 0.35, high)  # room for the legend
    axes.legend(fontsize=9, loc="lower center")


def _draw_lines(axes, points: Sequence[dict], geometry: str, bounds: list[float], batch_size: int) -> None:
    from torchtitan.pictures import style

    colours = style.ordered_colours(len(bounds) - 1)
    drawn = []
    for k, colour in enumerate(colours):
        steps, values, lower, upper = _series(points, geometry, k)
        known = [value for value in values if math.isfinite(value)]
        if not known:
            continue
        drawn += known
        label = f"t {bounds[k]:.2f} to {bounds[k + 1]:.2f}"
        axes.plot(steps, values, color=colour, lw=1.5, marker=".", ms=3, label=label)
        axes.fill_between(steps, lower, upper, color=colour, alpha=0.12, lw=0)
    axes.set_title("over training (composite, 95 % bands)")
    if not drawn:
        _say_why_empty(axes)
        return
    axes.axhline(batch_size, color="0.5", ls="--", lw=1)
    axes.set(yscale="log", xlabel="step", ylabel="B_simple [samples]")
    # Wide bands leave the panel, so that the lines fill it; below them is room for the legend.
    low, high = min([*drawn, batch_size]) / 1.5, 3.0 * max([*drawn, batch_size])
    axes.set_ylim(low * (low / high) ** 0.6, high)
    axes.legend(fontsize=9, ncols=2, loc="lower center", columnspacing=1.2, labelspacing=0.3)


def _draw_map(axes, figure, points: Sequence[dict], geometry: str, bounds: list[float]) -> None:
    from matplotlib.colors import ListedColormap, LogNorm

    steps = [point["step"] for point in points]
    of_bins = [_series(points, geometry, k) for k in range(len(bounds) - 1)]
    values = torch.tensor([of_bin[1] for of_bin in of_bins], dtype=torch.float64)
    prefix = f"gns/{geometry}/composite"
    measured = torch.tensor([[f"{prefix}/{k}/lower" in point for point in points] for k in range(len(of_bins))])
    known = values[values.isfinite()]
    axes.set_title("over training (grey: no upper end)")
    axes.grid(visible=False)
    if len(steps) < 2 or not len(known):
        _say_why_empty(axes)
        return
    axes.set(xlabel="step", ylabel="timestep t")
    borders = [steps[0] - (steps[1] - steps[0]), *steps]
    unbounded = torch.where(measured & ~values.isfinite(), 1.0, torch.nan)
    axes.pcolormesh(borders, bounds, unbounded.numpy(), cmap=ListedColormap([_UNBOUNDED]))
    norm = LogNorm(known.min().item(), max(known.max().item(), 1.01 * known.min().item()))
    mesh = axes.pcolormesh(borders, bounds, values.numpy(), norm=norm, cmap="viridis")
    figure.colorbar(mesh, ax=axes, label="B_simple [samples]")


def _draw_agreement(axes, figure, levels: Sequence[BinEstimates], bounds: list[float]) -> None:
    axes.grid(visible=False)
    values = finest_known(levels)
    if values is None:
        axes.set_title("agreement of bins")
        _say_why_empty(axes, "left out: too little signal")
        return
    count, num_bins = len(values), len(bounds) - 1
    axes.set_title("agreement of bins" if count == num_bins else f"agreement of bins, pooled to {count}")
    axes.set_facecolor("0.8")
    mesh = axes.imshow(values.numpy(), vmin=-1, vmax=1, cmap="RdBu", origin="lower")
    figure.colorbar(mesh, ax=axes, label="cosine of mean gradients (grey: not known)")
    first = torch.searchsorted(wider_bins(num_bins, count), torch.arange(count)).tolist()
    labels = [f"{bounds[k]:.2f}" for k in first]
    axes.set_xticks(range(count), labels, rotation=60)
    axes.set_yticks(range(count), labels)
    for row in range(count):
        for column in range(count):
            value = values[row, column].item()
            if math.isfinite(value):
                colour = "white" if abs(value) > 0.6 else "black"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=10, color=colour)
    axes.set(xlabel="lower edge of the bin, t", ylabel="lower edge of the bin, t")


def _series(points: Sequence[dict], geometry: str, k: int) -> tuple[list[float], ...]:
    """Steps, values, lower and upper ends of a bin; NaN where the noise scale is not known or has no upper end."""
    tags = [f"gns/{geometry}/composite/{k}/{name}" for name in DRAWN]
    found = [_bounded(point, tags) for point in points]
    return [point["step"] for point in points], *([row[place] for row in found] for place in range(len(DRAWN)))


def _bounded(point: dict, tags: list[str]) -> tuple[float, ...]:
    """Value, lower and upper end; an infinite upper end is not logged."""
    if not all(tag in point for tag in tags) or point[tags[0]] <= 0:
        return (math.nan,) * len(tags)
    value, lower, upper = (point[tag] for tag in tags)
    return value, max(lower, 0.1), upper


def _last(points: Sequence[dict], geometry: str, bins: int) -> list[float]:
    return [_series(points[-1:], geometry, k)[1][0] if points else math.nan for k in range(bins)]
