"""Noise scales of checkpoints at frozen weights beside those that the run logged while it trained.

They are two quantities. While training, |G|^2 and tr Sigma are averaged over the steps of a window, and with them over
the swings of the mean gradient; at one checkpoint both are of one phase of the swing, and of weights at the window's end.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from research import gns_plots
from research.cells import Row
from research.frame import StudyRun, number, step_of
from research.gns_cells import bin_label, interval_text, is_unbounded
from research.offline_gradients import timestep_bin
from research.pictures import legend_outside, save
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import has_indices
from torchtitan.gns.config import bin_edges, of_bins
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note
from torchtitan.training.metric_points import iter_points
from torchtitan.training.metrics import METRICS_FILE

_PREFIX = "gns/plain/composite"


def against_trajectory(run: StudyRun, rows: list[Row], path: Path) -> str:
    """Draw and tabulate both; empty where the run logged no noise scales of these bins at these checkpoints."""
    if not rows or rows[0]["estimator"] != "correct" or not same_bins(run, rows):
        return ""
    logged = {step: found for step in sorted({step_of(row) for row in rows}) if (found := _logged(run, step))}
    if not logged:
        return ""
    figure, axes = new_figure(
        f"Noise scale at frozen weights and while training, {run.weights}", 1, len(logged), (4.6 * len(logged) + 2.4, 4.6),
        sharey=True,
    )  # fmt: skip
    lines = []
    for axis, (step, estimates) in zip(axes[0], logged.items(), strict=True):
        offline = [row for row in rows if step_of(row) == step]
        for place, (row, online) in enumerate(zip(offline, estimates, strict=True)):
            _draw(axis, place - 0.12, row, COLOURS[0])
            _draw(axis, place + 0.12, online, COLOURS[1])
            lines.append([str(step), bin_label(row), interval_text(row), interval_text(online), _ratio(row, online)])
        axis.set_xlim(-0.5, len(offline) - 0.5)  # arrows alone would not widen it
        axis.set_title(f"step {step}", fontsize=10)
        axis.set_xticks(range(len(offline)), [f"{float(row['t_min']):.2f}" for row in offline], rotation=60)
        axis.set_xlabel(f"lower edge of the bin, {bin_label(offline[0]).split()[0]}")
    online_rows = [online for estimates in logged.values() for online in estimates]
    gns_plots.set_scale(axes[0, 0], [*rows, *online_rows], "log")
    axes[0, 0].set_ylabel(gns_plots.NOISE_SCALE)
    for color, label in zip(COLOURS, ("at frozen weights", "while training (composite)"), strict=False):
        axes[0, -1].plot([], [], color=color, marker="o", markersize=4, label=label)
    legend_outside(axes[0, -1])
    note(figure, f"plain geometry, 95 % intervals; {gns_plots.ARROW}")
    text = "## Against the values logged while training\n\nPlain geometry; while training: the composite, with its window.\n\n"
    text += markdown_table(["step", "bin", "at frozen weights", "while training", "ratio"], lines)
    return text + save(figure, path)


def same_bins(run: StudyRun, rows: Sequence[Row]) -> bool:
    """True if the run logged noise scales of the timestep bins of these rows."""
    config = run.config
    if not (config.gns.enable and config.gns.single_pass) or not rows[0]["t_min"]:
        return False
    objective = build_objective(config.objective, config.debug.seed)
    of_step = [row for row in rows if step_of(row) == step_of(rows[0])]
    bins = [timestep_bin(objective, number(row, "t_min"), number(row, "t_max"), row["bin_unit"]) for row in of_step]
    wanted = torch.tensor([0.0, *bin_edges(config.gns, config.objective).tolist(), 1.0], dtype=torch.float64)
    found = torch.tensor([bins[0].t_low, *(one.t_high for one in bins)], dtype=torch.float64)
    if has_indices(path := objective.path) and path.discrete:  # between two indices, or at the upper one: the bins are the same
        times = path.index_to_t(torch.arange(path.num_indices))
        wanted, found = (torch.searchsorted(times, edges - 1e-9).double() for edges in (wanted, found))
    return found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-4)


def _logged(run: StudyRun, step: int) -> list[Row]:
    """Estimates of every bin last logged before the checkpoint was written, as rows; empty without any, or of other bins."""
    latest, inner = {}, bin_edges(run.config.gns, run.config.objective).tolist()
    try:
        for point in iter_points(run.folder / METRICS_FILE, '"gns/'):
            if point["step"] <= step and f"{_PREFIX}/0/b_simple" in point:
                latest = point
    except OSError:
        return []
    return [_as_row(latest, k) for k in range(len(inner) + 1)] if latest and of_bins(latest, inner) else []


def _as_row(point: dict, k: int) -> Row:
    value, lower, upper = (point.get(f"{_PREFIX}/{k}/{name}") for name in ("b_simple", "lower", "upper"))
    known = {"gns_est": value, "lower": lower, "upper": upper}
    texts = {name: "" if number is None else str(number) for name, number in known.items()}
    unbounded = str(upper is None)  # an infinite end is not logged
    return {"status": "failed" if lower is None else "ok", "unbounded": unbounded, **texts}


def _draw(axis, x: float, row: Row, color: str) -> None:
    if row["status"] != "ok":
        return
    if is_unbounded(row):
        if number(row, "lower") > 0:
            gns_plots.draw_arrow(axis, x, number(row, "lower"), color)
        return
    axis.vlines(x, number(row, "lower"), number(row, "upper"), color=color, linewidth=1.2)
    axis.plot([x], [number(row, "gns_est")], color=color, marker="o", markersize=4)


def _ratio(row: Row, online: Row) -> str:
    if any(one["status"] != "ok" or is_unbounded(one) for one in (row, online)):
        return ""
    return f"{number(row, 'gns_est') / number(online, 'gns_est'):.2f}"
