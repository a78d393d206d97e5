"""Report of errors at the end of chains with inserted truths or errors: in words and a picture."""

import csv
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from research.by_image import from_text, root_mean
from research.cells import Row
from research.frame import StudyRun
from research.pictures import interval_text, save
from torchtitan.pictures.colours import COLOURS
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, note
from torchtitan.statistics.interval import Interval, mean_interval

NONE, REPLACE, EXCEPT, INJECT = "none", "replace", "except", "inject"
TITLES = {
    REPLACE: "truth in the range",
    EXCEPT: "truth everywhere else",
    INJECT: "error added in the range",
}
# What errors are of, where it is not pixels.
_VALUES = {"latents": "values of latents, normalised as for training", "synthetic": "values as generated"}
# What a picture on a logarithmic axis cannot show.
_NOUGHT = 1e-6

Key = tuple[str, str, str]


def report(run: StudyRun, rows: list[Row], folder: Path) -> str:
    """Write ranges.csv and the picture; return the text of summary.md."""
    errors = _errors(rows)
    replaced = {_key(row): int(row["replaced"]) for row in rows}
    found = {key: root_mean(values) for key, values in errors.items()}
    text = _description(run)
    if not found:
        return text + "No chain could be measured.\n\n"
    _write(found, replaced, errors, folder / "ranges.csv")
    if plain := found.get((NONE, "", "")):
        text += f"Nothing replaced: root mean squared error {interval_text(plain)} against the true images.\n\n"
    variants = [variant for variant in TITLES if any(key[0] == variant for key in found)]
    for variant in variants:
        text += _table(variant, found, replaced)
    text += _findings(errors)
    return text + (_draw(run, variants, found, folder / "ranges.png") if variants else "")


def _key(row: Row) -> Key:
    return row["variant"], row["low"], row["high"]


def _errors(rows: list[Row]) -> dict[Key, Tensor]:
    """Squared errors [K] of all batches, of the chains with all batches."""
    parts: dict[Key, list[Tensor]] = {}
    failed = {_key(row) for row in rows if row["status"] != "ok"}
    for row in rows:
        if _key(row) not in failed:
            parts.setdefault(_key(row), []).append(from_text(row["squared_errors"]))
    return {key: torch.cat(of_key) for key, of_key in parts.items()}


def _description(run: StudyRun) -> str:
    options = run.options
    steps = "every index" if options.num_steps is None else f"{options.num_steps} indices, quadratically spaced"
    text = (
        f"Ancestral sampling with the posterior's variance over {steps}, from {options.images} {options.split} images "
        "noised to the last index, with the true labels, without guidance or clipping; all chains have the same noise. "
        "Ranges are of indices from 0, both ends included; errors are root mean squares over images and "
        f"{_VALUES.get(run.config.data.name, 'pixels, scaled to [-1, 1]')}, with 95 % intervals over images.\n\n"
        "The last step returns its estimate unchanged: the truth in a range that holds index 0 gives the truth, "
        "whatever the model, and the truth everywhere but in a range without index 0 gives it too. So the first kind "
        "says something of the model for ranges without index 0, the second for ranges with it; the change by an "
        "error put in does for all.\n\n"
    )
    return text + (
        f"Errors put in: each channel lighter or darker as a whole, by {options.error_size:g}, the same at every step of the "
        "range; the change of the final image is divided by that size.\n\n"
    )


def _table(variant: str, found: dict[Key, Interval], replaced: dict[Key, int]) -> str:
    name = "change per unit of error" if variant == INJECT else "error"
    lines = [
        [f"{low}-{high}", str(replaced[key]), interval_text(found[key])]
        for key in found
        for (of, low, high) in [key]
        if of == variant
    ]
    title = TITLES[variant]
    return f"{title[0].upper()}{title[1:]}:\n\n" + markdown_table(["indices", "steps in the range", name], lines)


def _findings(errors: dict[Key, Tensor]) -> str:
    """Findings: paired comparisons with nothing replaced, range by range."""
    plain = errors.get((NONE, "", ""))
    if plain is None:
        return ""
    verdicts = []
    for (variant, low, high), values in errors.items():
        if variant == REPLACE and low != "0":
            found = mean_interval((values - plain).tolist())
            word = "lowers" if found.upper < 0 else "raises" if found.lower > 0 else "does not significantly change"
            verdicts.append(
                f"- the truth in {low}-{high} {word} the mean squared error (by {found.value:+.3g} "
                f"[{found.lower:+.3g}, {found.upper:+.3g}])"
            )
    return "Against nothing replaced, paired by image:\n\n" + "\n".join(verdicts) + "\n\n" if verdicts else ""


def _write(found: dict[Key, Interval], replaced: dict[Key, int], errors: dict[Key, Tensor], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "low", "high", "steps_in_range", "images", "rmse", "lower", "upper"])
        for key, value in found.items():
            ends = [f"{end:.8g}" for end in (value.value, value.lower, value.upper)]
            writer.writerow([*key, replaced[key], len(errors[key]), *ends])


def _draw(run: StudyRun, variants: list[str], found: dict[Key, Interval], path: Path) -> str:
    most = max(sum(key[0] == variant for key in found) for variant in variants)
    figure, axes = new_figure(
        f"Truth or errors at some indices of the sampling chain; {run.weights}, step {run.steps[0]}",
        columns=len(variants), size=(4.4 * len(variants) + 0.6, 1.9 + 0.42 * most),
    )  # fmt: skip
    plain = found.get((NONE, "", ""))
    for axis, variant in zip(axes[0], variants, strict=True):
        _draw_variant(axis, variant, found, plain)
    note(
        figure, f"bars: 95 % intervals over {run.options.images} images; dashed: nothing replaced; "
        "0: below the axis, as the last step returns its estimate",
    )  # fmt: skip
    return save(figure, path)


def _draw_variant(axes: Axes, variant: str, found: dict[Key, Interval], plain: Interval | None) -> None:
    shown = [(key, value) for key, value in found.items() if key[0] == variant]
    seen = [value for _, value in shown if value.value > _NOUGHT]
    if plain and variant in (REPLACE, EXCEPT):
        axes.axvline(plain.value, color="0.4", linestyle="--", linewidth=1)
        seen.append(plain)
    least = 0.0
    if seen and max(value.value for value in seen) > 8 * min(value.value for value in seen):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        least = min(value.value for value in seen) / 3  # where an interval down to 0 leaves the picture
    for place, (_, value) in enumerate(shown):
        if value.value > _NOUGHT:
            axes.hlines(place, max(value.lower, least), value.upper, color=COLOURS[0], linewidth=2)
            axes.plot([value.value], [place], "o", color=COLOURS[0], markersize=5)
            axes.annotate(f"{value.value:.3g}", (value.value, place), (0, 6), textcoords="offset points",
                          ha="center", fontsize=8)  # fmt: skip
        else:
            axes.text(0.02, place, "0", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.margins(x=0.15)
    if least:
        axes.set_xlim(left=least)
    axes.set_yticks(range(len(shown)), [f"{low}-{high}" for (_, low, high), _ in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.8)
    axes.set_ylabel("indices of the range")
    axes.set_title(TITLES[variant], fontsize=10)
    per_unit = variant == INJECT
    axes.set_xlabel("change of the image per unit of error" if per_unit else "error of the image (RMS)")
    axes.grid(axis="y", visible=False)
