"""Tables and pictures of a linear probe: accuracy by block and noise level, against the baseline."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from research.cells import Row
from research.frame import number
from research.pictures import save, write_cells
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note

PIXELS = "pixels"  # block of the baseline's row
_LEAST_SPAN = 0.02  # of colours on either side of the baseline


def report(run_name: str, weights: str, rows: list[Row], folder: Path) -> str:
    """Write a heat map and a table of each checkpoint; return their text."""
    found = [row for row in rows if row["status"] == "ok"]
    baseline = next((row for row in found if row["block"] == PIXELS), None)
    text = ""
    if baseline is not None:
        text += f"The same classifier on the {baseline['features']} values of clean images: {_percent(baseline)} %.\n\n"
    for step in dict.fromkeys(row["model"] for row in found if row["block"] != PIXELS):
        of_step = [row for row in found if row["model"] == step and row["block"] != PIXELS]
        text += f"## {step}\n\n" + _comparison(of_step, baseline) + _table(of_step)
        text += _draw(f"{run_name}, {step}: linear probe", weights, of_step, baseline, folder / f"{step}.png")
    left_out = max((int(row["left_out"]) for row in found), default=0)
    if left_out:
        text += f"{left_out} test images cannot be read and are left out.\n\n"
    return text


def _comparison(rows: list[Row], baseline: Row | None) -> str:
    best = max(rows, key=lambda row: number(row, "accuracy"))
    text = f"Best: {best['block']} at sigma {best['sigma']}, {_percent(best)} %. "
    if baseline is not None:
        above = sum(number(row, "lower") > number(baseline, "upper") for row in rows)
        below = sum(number(row, "upper") < number(baseline, "lower") for row in rows)
        text += (
            f"Of {len(rows)} classifiers {above} are above the baseline and {below} below it with their whole intervals, "
            f"{len(rows) - above - below} overlap. "
        )
    return text + (
        f"Intervals are Wilson's of 95 %, over test images, each classifier's alone; the best of {len(rows)} is the best on "
        "these images, and a little worse on others.\n\n"
    )


def _table(rows: list[Row]) -> str:
    """Accuracy of each block, a column per noise level."""
    levels, blocks = _unique(rows, "sigma"), _unique(rows, "block")
    by_place = {(row["block"], row["sigma"]): row for row in rows}
    of_level = {row["sigma"]: row for row in rows}
    header = ["block", "features", *(_level_text(of_level[level], ", ") for level in levels)]
    lines = []
    for block in blocks:
        places = [by_place.get((block, level)) for level in levels]
        features = next(row["features"] for row in places if row is not None)
        lines.append([block, features, *("" if row is None else _percent(row) for row in places)])
    return markdown_table(header, lines)


def _draw(title: str, weights: str, rows: list[Row], baseline: Row | None, path: Path) -> str:
    levels, blocks = _unique(rows, "sigma"), _unique(rows, "block")
    values = np.full((len(blocks), len(levels)), np.nan)
    for row in rows:
        values[blocks.index(row["block"]), levels.index(row["sigma"])] = number(row, "accuracy")
    of_level = {row["sigma"]: row for row in rows}
    figure, panels = new_figure(title, size=(2.6 + 1.35 * len(levels), 1.9 + 0.3 * len(blocks)))
    panel = panels[0][0]
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    middle = number(baseline, "accuracy") if baseline is not None else (low + high) / 2
    span = max(middle - low, high - middle, _LEAST_SPAN)  # alike on both sides, so that white is the baseline
    picture = panel.imshow(values, cmap="RdBu", vmin=middle - span, vmax=middle + span, aspect="auto")
    texts = [[f"{100 * value:.1f}" if np.isfinite(value) else "" for value in line] for line in values]
    write_cells(panel, values, texts, lambda value: abs(value - middle) > 0.65 * span)
    panel.grid(False)
    panel.set_xticks(range(len(levels)), [_level_text(of_level[level], "\n") for level in levels])
    panel.set_yticks(range(len(blocks)), blocks)
    panel.set_xlabel("noise level")
    bar = figure.colorbar(picture, ax=panel, format=lambda value, _: f"{100 * value:.0f} %")
    bar.ax.set_ylim(min(low, middle), max(high, middle))
    bar.set_label("top-1 accuracy" + (f"; white: raw pixels, {100 * middle:.1f} %" if baseline is not None else ""), fontsize=8)
    note(figure, f"{weights}; {rows[0]['train_images']} training, {rows[0]['tested']} test images")
    return save(figure, path)


def _unique(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def _level_text(row: Row, separator: str) -> str:
    return f"sigma {number(row, 'sigma'):.3g}{separator}ln SNR {number(row, 'log_snr'):.2f}"


def _percent(row: Row) -> str:
    value, lower, upper = (100 * number(row, name) for name in ("accuracy", "lower", "upper"))
    return f"{value:.1f} [{lower:.1f}, {upper:.1f}]"
