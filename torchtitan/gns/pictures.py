"""Picture of a run's gradient noise scale: by timestep bin, and where known over training and between the bins' gradients."""

import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
from PIL import Image
from torch import Tensor

from torchtitan.gns.batch_size import HalfProgress
from torchtitan.gns.config import DRAWN
from torchtitan.gns.decayed import BinEstimates
from torchtitan.gns.pool import finest_known, wider_bins
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.style import label_log_axis

_UNBOUNDED = "0.8"
GEOMETRY_NAMES = {"adam": "Adam's geometry", "plain": "plain geometry"}


def draw_noise_scale(
    points: Sequence[dict], edges: Tensor, estimates: dict[str, list[BinEstimates]], batch_size: int,
    names: dict[str, str], masses: Tensor, half: HalfProgress | None = None,
) -> Image.Image | None:
    """Draw how large a batch each timestep bin takes, and below what else is known; legible at 900 pixels' width.

    A noise scale whose interval has no upper end is nowhere drawn as a value.

    Args:
        points: logged points in the order of their steps, with the tags of GNSMonitor.metrics.
        edges: inner edges of the K bins in t.
        estimates: geometry -> estimates of the bins at the end, then those in fewer and fewer bins (see Agreement); the
            headline geometry first.
        batch_size: samples per step.
        names: geometry -> name of the estimator that these are of.
        masses: share of each bin in the present draws, [K].
        half: half-progress batches of the bins, drawn with the headline geometry's noise scales.

    Returns:
        an RGB picture; None where no bin has a noise scale yet.
    """
    from torchtitan.pictures import style  # matplotlib: a run that draws nothing does not wait for it

    bounds = [0.0, *edges.tolist(), 1.0]
    first, *others = estimates
    if not _known(estimates[first][0]):
        return None
    panels, now = [], masses * batch_size
    for geometry, levels in estimates.items():
        name = GEOMETRY_NAMES[geometry]
        if geometry in others and _known(levels[0]):
            lacking = int((~levels[0].upper.isfinite() & (levels[0].lower <= 0)).sum())
            title = f"{name} ({names[geometry]})" + f", {lacking} of {len(bounds) - 1} without a bound yet" * (lacking > 0)
            panels.append(partial(_draw_bins, bounds=bounds, found=levels[0], estimator=names[geometry], now=now, title=title))
        if _over_training(points, geometry, bounds) is not None:
            panels.append(partial(_draw_map, points=points, geometry=geometry, bounds=bounds, title=f"{name}, over training"))
        if finest_known(levels) is not None:
            panels.append(partial(_draw_agreement, levels=levels, bounds=bounds, title=f"{name}, agreement of bins"))
    rows = (len(panels) + 1) // 2
    figure = style.new_plain_figure("Gradient noise scale: how large a batch each noise level takes", (11.25, 5.0 + 4.3 * rows))
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=[5.0, *[4.3] * rows])
    top = style.add_panel(figure, grid[0, :])
    _draw_bins(top, figure, bounds, estimates[first][0], names[first], now, _in_words(estimates[first][0]), half)
    low, high = top.get_ylim()
    top.set_ylim(low * (low / high) ** 0.3, high)  # room for the legend
    top.legend(fontsize=9, loc="lower center")
    for number, draw in enumerate(panels):
        alone = number == len(panels) - 1 and number % 2 == 0
        place = grid[1 + number // 2, :] if alone else grid[1 + number // 2, number % 2]
        draw(style.add_panel(figure, place), figure)
    for panel in figure.axes:
        panel.title.set_fontsize(12)
        panel.tick_params(labelsize=10)
        for label in (panel.xaxis.label, panel.yaxis.label):
            label.set_fontsize(11)
    return style.as_image(figure)


def _known(found: BinEstimates) -> bool:
    return bool((found.upper.isfinite() | (found.lower > 0)).any())


def _in_words(found: BinEstimates) -> str:
    """Count in words of the bins with a value, with a lower end alone, and without either."""
    bins, valued = len(found.upper), int(found.upper.isfinite().sum())
    above = int((~found.upper.isfinite() & (found.lower > 0)).sum())
    counts = {"with a value": valued, "with only a lower end (arrows)": above, "without a bound yet": bins - valued - above}
    words = [f"{count} {text}" for text, count in counts.items() if count]
    return f"{bins} noise levels: " + ", ".join(words)


def _draw_bins(
    axes, figure, bounds: list[float], found: BinEstimates, estimator: str, now: Tensor, title: str,
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
    axes.plot([], [], color=COLOURS[0], label=f"noise scale ({estimator}) with its 95 % interval; arrow: more than")
    if half is not None and half.batch.isfinite().any():
        ends = torch.stack((half.batch - half.lower, half.upper - half.batch))
        # Beside the noise scale's bar in the middle of the bin.
        places = [low + 0.7 * (high - low) for low, high in itertools.pairwise(bounds)]
        axes.errorbar(
            places, half.batch.numpy(), ends.where(half.batch.isfinite(), torch.nan).numpy(), fmt="s", ms=4, lw=1,
            color=COLOURS[2], label="batch at which one step makes half of its best progress",
        )  # fmt: skip
    axes.stairs(now.tolist(), bounds, baseline=None, color="0.5", ls="--", label="samples of a step now")
    axes.set(xlim=(0.0, 1.0), yscale="log", xlabel="timestep t (0: clean data, 1: noise)", ylabel="samples of the noise level")
    axes.set_title(title)


def _over_training(points: Sequence[dict], geometry: str, bounds: list[float]) -> Tensor | None:
    """Noise scales [K, points] of which some are known; None where none is, or the points are too few."""
    values = torch.tensor([_series(points, geometry, k)[1] for k in range(len(bounds) - 1)], dtype=torch.float64)
    return values if len(points) > 1 and values.isfinite().any() else None


def _draw_map(axes, figure, points: Sequence[dict], geometry: str, bounds: list[float], title: str) -> None:
    from matplotlib.colors import ListedColormap, LogNorm

    steps, values = [point["step"] for point in points], _over_training(points, geometry, bounds)
    assert values is not None
    prefix = f"gns/{geometry}/composite"
    measured = torch.tensor([[f"{prefix}/{k}/lower" in point for point in points] for k in range(len(values))])
    known = values[values.isfinite()]
    axes.set_title(f"{title} (grey: no upper end)")
    axes.grid(visible=False)
    axes.set(xlabel="step", ylabel="timestep t")
    borders = [steps[0] - (steps[1] - steps[0]), *steps]
    unbounded = torch.where(measured & ~values.isfinite(), 1.0, torch.nan)
    axes.pcolormesh(borders, bounds, unbounded.numpy(), cmap=ListedColormap([_UNBOUNDED]))
    low, high = known.min().item(), known.max().item()
    wider = max(2 * low / high, 1.0) ** 0.5  # a factor of less than two is no contrast of colours
    mesh = axes.pcolormesh(borders, bounds, values.numpy(), norm=LogNorm(low / wider, high * wider), cmap="viridis")
    label_log_axis(figure.colorbar(mesh, ax=axes, label="noise scale (composite) [samples]").ax.yaxis)


def _draw_agreement(axes, figure, levels: Sequence[BinEstimates], bounds: list[float], title: str) -> None:
    axes.grid(visible=False)
    values = finest_known(levels)
    assert values is not None
    count, num_bins = len(values), len(bounds) - 1
    axes.set_title(title if count == num_bins else f"{title}, pooled to {count}")
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
                shown = min(max(value, -1.0), 1.0)  # an estimate of a cosine may lie beyond
                axes.text(column, row, f"{shown:.1f}".replace("-0.0", "0.0"), ha="center", va="center", fontsize=10, color=colour)
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
