"""Pictures of losses by timestep, and of slots cut in them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from research.curve_table import LossCurve
from research.pictures import legend_outside, save
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.style import new_figure, note, ordered_colours
from torchtitan.statistics.student import student_quantile

_LOWEST_BAND = 0.02  # of its value: the lower end of a band that would reach 0 on a logarithmic axis
_INDEX = "DDPM index + 1 (left is clean data)"


def loss_curves(curves: Sequence[LossCurve], prediction: str, path: Path) -> str:
    """Plot every curve in the run's own prediction over the timestep, and in that of the noise over sigma."""
    figure, axes = new_figure("Mean squared error by timestep", columns=2, size=(14, 5.4))
    steps = sorted({curve.step for curve in curves})
    colors = dict(zip(steps, ordered_colours(len(steps)), strict=True))
    tracks = sorted({curve.weights for curve in curves if curve.weights != "none"})
    lines = {"none": "-", **{track: ("--", ":", "-.")[place % 3] for place, track in enumerate(tracks)}}
    left, right = axes[0]
    for curve in curves:
        style = {"color": colors[curve.step], "linestyle": lines[curve.weights], "label": curve.name}
        _draw(left, curve, _position(curve), curve.error, curve.stderr, **style)
        _draw(right, curve, curve.log_sigma.exp(), curve.noise_error, curve.noise_stderr, **style)
    first = curves[0]
    if first.optimum is not None:
        style = {"color": "black", "linewidth": 1.0, "label": "smallest possible"}
        left.plot(_position(first), first.optimum, **style)
        right.plot(first.log_sigma.exp(), first.optimum * first.noise_factor, **style)
    _set_timestep_axis(left, first)
    left.set_ylabel(f"squared error of {prediction} (mean over values)")
    left.set_title(f"of the prediction trained: {prediction}", fontsize=10)
    right.set_xscale("log")
    right.set_xlabel("sigma = b / a (left is clean data)")
    right.set_ylabel("squared error of the noise (mean over values)")
    right.set_title("in the parametrisation of the noise", fontsize=10)
    for axis in (left, right):
        axis.set_yscale("log")
    legend_outside(right)
    note(figure, f"bands: 95 % intervals over {first.images} images")
    return save(figure, path)


def slots(curve: LossCurve, edges: Sequence[float], paper: Sequence[int] | None, path: Path) -> str:
    """Plot a curve with the inner edges of its slots, and the paper's if given."""
    figure, axes = new_figure(f"Slots of equal loss, {curve.name}", size=(11, 5.4))
    axis = axes[0, 0]
    _draw(axis, curve, _position(curve), curve.error, curve.stderr, color=COLOURS[0], label="squared error")
    offset = 0 if curve.index is None else 1
    for place, edge in enumerate(edges[1:-1]):
        axis.axvline(edge + offset, color=COLOURS[1], linewidth=1.1, label="edges, this run" if place == 0 else None)
    for place, edge in enumerate(paper[1:-1] if paper else ()):
        axis.axvline(edge + offset, color="0.3", linewidth=1.1, linestyle=":",
                     label="edges, the paper's" if place == 0 else None)  # fmt: skip
    _set_timestep_axis(axis, curve)
    axis.set_yscale("log")
    axis.set_ylabel("squared error of the prediction (mean over values)")
    legend_outside(axis)
    note(figure, f"band: 95 % interval over {curve.images} images")
    return save(figure, path)


def _draw(axis: Axes, curve: LossCurve, x: Tensor, value: Tensor, stderr: Tensor, **style) -> None:
    axis.plot(x, value, linewidth=1.4, **style)
    half = student_quantile(0.975, curve.images - 1.0) * stderr
    lower = torch.maximum(value - half, _LOWEST_BAND * value)
    axis.fill_between(x, lower, value + half, color=style["color"], alpha=0.15, linewidth=0)


def _position(curve: LossCurve) -> Tensor:
    return curve.t if curve.index is None else curve.index + 1


def _set_timestep_axis(axis: Axes, curve: LossCurve) -> None:
    """Set the timestep axis: indices logarithmically; t by its logit, which shows both ends."""
    axis.set_xscale("logit" if curve.index is None else "log")
    axis.set_xlabel("t = sigma / (1 + sigma) (left is clean data)" if curve.index is None else _INDEX)
