"""Page that compares runs: one self-contained HTML file of tables, charts and sample grids."""

import base64
import functools
import io
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.image_decoding import open_image
from torchtitan.files.regular import read_regular
from torchtitan.pictures.svg_charts import (
    Bar,
    Markup,
    bar_chart,
    bin_chart,
    element,
    group_class,
    line_chart,
    spans_much,
)
from torchtitan.runs.compare.lines import Tag, after_warm_up, group_lines, held_out, reach, series_of
from torchtitan.runs.compare.style import SCRIPT, STYLE, group_rules
from torchtitan.runs.compare.text import (
    MISSING,
    as_number,
    count_text,
    interval_text,
    lowest_text,
    setting_text,
    settings_text,
    track_name,
    value_text,
)
from torchtitan.runs.record import (
    TRAINING_LOSS,
    RunRecord,
    differing_settings,
    group_by_seed,
)
from torchtitan.statistics.interval import percentile

MOST_GRIDS = 40  # steps of sample grids on the page, per run
WIDEST_GRID = 800  # pixels; larger ones are made smaller
_LARGEST_GRID = 1 << 26  # bytes of a file

_COSTS = {
    "throughput(img/s)": ("Throughput", "images per second, all processes"),
    "time_metrics/end_to_end(s)": ("Step time", "seconds per step"),
    "time_metrics/data_loading(%)": ("Waiting for data", "% of the step's time"),
    "mfu(%)": ("Model FLOPs utilisation", "% of the device's peak"),
    "memory/max_active(GiB)": ("Memory, active", "GiB of the device, peak since the last point"),
    "memory/max_reserved(GiB)": ("Memory, reserved", "GiB of the device, peak since the last point"),
    "memory/max_resident(GiB)": ("Memory, resident", "GiB of the process, peak so far"),
}


# What every page begins with, by which one that was written before is known.
PAGE_START = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Comparison of '


def compare_page(runs: Sequence[RunRecord], smoothing: float | None = None) -> str:
    """Write the page.

    Args:
        runs: at least one.
        smoothing: steps of the running mean of training loss and gradient norm; 0 is none; default: 3 % of the longest
            run.
    """
    page = _Page(runs, smoothing)
    sections = [
        page.summary(), page.curves(), page.bins(), page.costs(), page.samples(), page.configuration(),
    ]
    title = "Comparison of " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    style = STYLE + group_rules(len(page.groups))
    head = element(
        "head", element("meta", charset="utf-8"), element("title", title),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("style", Markup(style)),
    )
    body = element("body", page.header(title), element("main", *sections), element("script", Markup(SCRIPT)))
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


class _Page:
    def __init__(self, runs: Sequence[RunRecord], smoothing: float | None) -> None:
        self.runs = runs
        self.groups = group_by_seed(runs)
        longest = max(run.last_step for run in runs)
        self.smoothing = round(0.03 * longest) if smoothing is None else smoothing
        smooth = any(run.series(TRAINING_LOSS) != run.series(TRAINING_LOSS).smoothed(self.smoothing) for run in runs)
        self.smoothing *= smooth
        self.several_seeds = any(len(group.runs) > 1 for group in self.groups)
        self.differing, self.common = differing_settings(runs)
        self.tracks = list(dict.fromkeys(track for run in runs for track in run.held_out_tags()))

    # ------------------------------------------------------------------ top

    def header(self, title: str) -> Markup:
        entries = [
            element(
                "button", _swatch(n), " ", group.name, type="button", class_="entry", data_group=n, aria_pressed="true",
                title="show or hide in the curves",
            )
            for n, group in enumerate(self.groups)
        ]
        axis = [
            element("label", element("input", type="radio", name="axis", id=f"by-{name}", checked=name == "images"),
                    " ", text)
            for name, text in (("images", "images seen"), ("steps", "steps"))
        ]
        return element(
            "header", element("h1", title),
            element("div", *entries, element("span", "curves over ", *axis, class_="axis-choice"), class_="legend"),
        )

    def summary(self) -> Markup:
        parts = [self._notes()]
        if self.several_seeds:
            parts += [
                element("h3", "Over seeds"),
                element("p", "Mean over the seeds ± half of the 95 % interval (Student's t over seeds). A run alone "
                        "has none. Training: median of the last half of the logged points; held-out: last measurement.",
                        class_="note"),
                self._group_table(),
            ]
        parts += [element("h3", "Results"), self._result_table(), self._quality_table()]
        parts += [element("h3", "Hardware and versions"), self._cost_table()]
        return element("section", element("h2", "Runs"), *parts, id="runs")

    def _notes(self) -> Markup | None:
        notes = []
        for run in self.runs:
            if run.damaged_lines:
                lines = "1 line" if run.damaged_lines == 1 else f"{run.damaged_lines} lines"
                notes.append(f"{run.name}: {lines} of metrics.jsonl could not be read and left out")
            if run.stride > 1:
                notes.append(f"{run.name}: metrics.jsonl is very large: every {run.stride}th of its points counts")
            if lost := run.not_finite(TRAINING_LOSS):
                notes.append(f"{run.name}: training loss not finite at {lost} logged points, which are left out")
            notes += [f"{run.name}: {problem}" for problem in run.problems]
            if not run.points and not any("metrics.jsonl" in problem for problem in run.problems):
                notes.append(f"{run.name}: nothing logged yet")
            if run.summary and run.summary.get("reason"):
                notes.append(f"{run.name}: {run.status}: {run.summary['reason']}")
        if changed := [key for key in self.differing if key.startswith(("objective.", "data."))]:
            notes.append(
                f"The runs differ in {', '.join(changed)}: their losses are means over other timesteps, weights or "
                "images and do not rank them; the loss by timestep and the samples say more."
            )
        return element("ul", *(element("li", note) for note in notes), class_="notes") if notes else None

    # ------------------------------------------------------------------ tables

    def _group_table(self) -> Markup:
        columns: list[tuple[str, Callable[[RunRecord], float | None]]] = [
            ("training loss", lambda run: run.series(TRAINING_LOSS).tail_median())
        ]
        for track in self.tracks:
            of_track = functools.partial(_final_held_out, track)
            columns.append((f"held-out, {track_name(track)}", of_track))
        columns.append(("images/s", lambda run: run.series("throughput(img/s)").tail_median()))
        rows = []
        for n, group in enumerate(self.groups):
            cells = [interval_text(group.interval(map(value, group.runs))) for _, value in columns]
            rows.append([_named(n, group.name), str(len(group.runs)), *cells])
        return _table(["group", "runs", *(name for name, _ in columns)], rows)

    def _result_table(self) -> Markup:
        heads = ["run", "seed", "status", "steps", "images seen", "training loss (tail median)", "lowest logged"]
        for track in self.tracks:
            heads += [f"held-out, {track_name(track)}", "its lowest"]
        rows = []
        for run in self.runs:
            loss = run.series(TRAINING_LOSS)
            images = run.last_step * run.images_per_step if run.images_per_step else None
            row = [
                self._run_name(run), setting_text(run.seed), run.status, self._steps(run), count_text(images),
                value_text(loss.tail_median()), lowest_text(loss),
            ]
            for track in self.tracks:
                row += [value_text(held_out(run, track).final()), lowest_text(held_out(run, track))]
            rows.append(row)
        return _table(heads, rows)

    def _cost_table(self) -> Markup:
        memory = [tag for tag in _COSTS if tag.startswith("memory/") and any(tag in run.tags for run in self.runs)]
        heads = ["run", "layout", "device", "parameters", "images/s", "s/step", "MFU %"]
        heads += [_COSTS[tag][0].lower() + ", GiB" for tag in memory] + ["commit", "torch"]
        rows = []
        for run in self.runs:
            summary = run.summary or {}
            versions: Any = summary.get("versions")
            versions = versions if isinstance(versions, dict) else {}
            tags = ("throughput(img/s)", "time_metrics/end_to_end(s)", "mfu(%)")
            peaks = [max(run.series(tag).values, default=None) for tag in memory]
            rows.append([
                self._run_name(run), setting_text(summary.get("layout")), setting_text(summary.get("device")),
                count_text(as_number(summary.get("num_parameters"))),
                *(value_text(run.series(tag).tail_median(), 3) for tag in tags), *(value_text(peak, 3) for peak in peaks),
                setting_text(versions.get("git_commit")), setting_text(versions.get("torch")),
            ])
        return _table(heads, rows)

    def _quality_table(self) -> Markup | None:
        """Table of sample quality from the summaries: one column per judged run, before a group's runs its mean."""
        summaries = {id(run): run.summary or {} for run in self.runs}
        keys = dict.fromkeys(key for one in summaries.values() for key in one if key.startswith("sample_"))
        if not keys:
            return None
        heads, columns = ["sample quality"], []
        for n, group in enumerate(self.groups):
            values = {run.name: [as_number(summaries[id(run)].get(key)) for key in keys] for run in group.runs}
            if not any(value is not None for column in values.values() for value in column):
                continue
            if len(group.runs) > 1:
                heads.append(_named(n, group.name))
                columns.append([interval_text(group.interval(row)) for row in zip(*values.values(), strict=True)])
            for name, column in values.items():
                heads.append(_named(n, name))
                columns.append([value_text(value) for value in column])
        names = (key.removeprefix("sample_").replace("_", " ") for key in keys)
        return _table(heads, list(zip(names, *columns, strict=True)))

    def _number_of(self, run: RunRecord) -> int:
        return next(n for n, group in enumerate(self.groups) if run in group.runs)

    def _run_name(self, run: RunRecord) -> Markup:
        return _named(self._number_of(run), run.name)

    def _steps(self, run: RunRecord) -> str:
        planned = as_number(run.settings.get("training.steps"))
        same = planned is None or planned == (run.summary or {}).get("progress", run.last_step)
        return f"{run.last_step:,}" + ("" if same else f" of {planned:,}")

    # ------------------------------------------------------------------ curves

    def curves(self) -> Markup:
        smoothed = f"Centred running mean over {self.smoothing:,} steps" if self.smoothing else "Not smoothed"
        alone = any(len(group.runs) == 1 for group in self.groups)
        behind = "; the logged points of single runs are faint behind" if self.smoothing and alone else ""
        panels = [self._panel("Training loss", TRAINING_LOSS, "loss", f"{smoothed}{behind}.", self.smoothing, log=True)]
        measured = [y for run in self.runs for track in self.tracks for y in held_out(run, track).values]
        for track in self.tracks:
            panels.append(self._panel(
                f"Held-out loss, {track_name(track)}", functools.partial(_held_out_tag, track), "loss",
                "Not smoothed; every point is one measurement. All held-out charts share one axis.",
                log=True, y_values=measured, marked=True,
            ))
        panels.append(self._panel("Gradient norm", "grad_norm", "norm before clipping", f"{smoothed}{behind}.",
                                  self.smoothing, log=True))
        panels.append(self._panel("Learning rate", "lr", "learning rate", "Not smoothed."))
        explained = None
        if self.several_seeds:
            explained = element(
                "p", "Runs that differ in their seed only are one group: thick, the mean over the seeds, as far as all "
                "of them reach; band, its 95 % interval (Student's t over seeds, each point); thin, the runs.",
                class_="note")
        present = [panel for panel in panels if panel]
        return element(
            "section", element("h2", "Curves"), explained,
            element("div", *present, class_="panels") if present else element("p", "Nothing logged.", class_="missing"),
            id="curves",
        )

    def _panel(
        self, title: str, tag: Tag, y_label: str, note: str | None,
        smoothing: float = 0, *, log: bool = False, y_values: Sequence[float] | None = None, marked: bool = False,
        small: bool = False,
    ) -> Markup | None:
        """Panel with the chart over images and the one over steps, of which the page shows one."""
        charts = []
        for axis, label in (("images", "images seen"), ("steps", "step")):
            lines = [
                line for n, group in enumerate(self.groups)
                for line in group_lines(n, group, tag, smoothing, marked, axis == "images", faint_raw=not small)
            ]
            if not lines:
                if axis == "images" and any(series_of(run, tag) for run in self.runs):
                    unknown = "Images seen are not known for these runs."
                    charts.append(element("p", unknown, class_="missing over-images"))
                continue
            values = y_values or [y for line in lines for _, y in line.points]
            logarithmic = log and spans_much(values)
            span: dict[str, Any] = {"width": 270, "height": 170, "small": True} if small else {}
            chart = line_chart(
                lines, x_label=label, y_label=y_label, log=logarithmic, x_values=(0, self._extent(axis == "images")),
                y_values=reach(values, lines, logarithmic), **span,
            )
            charts.append(element("div", chart, class_=f"over-{axis}"))
        if not charts:
            return None
        caption = element("figcaption", element("b", title), element("small", note) if note else None)
        return element("figure", caption, *charts)

    def _extent(self, over_images: bool) -> float:
        return max(run.last_step * ((run.images_per_step or 0) if over_images else 1) for run in self.runs)

    # ------------------------------------------------------------------ timesteps

    def bins(self) -> Markup:
        numbers = sorted({number for run in self.runs for number in run.bin_tags()})
        heading = element("h2", "Loss by timestep")
        if not numbers:
            return element("section", heading, element("p", "Not logged.", class_="missing"), id="bins")
        binned = [run for run in self.runs if run.bin_tags()]
        edges = [of_run for run in binned if (of_run := run.bin_edges)]
        in_t = len(edges) == len(binned)
        same = in_t and all(one == edges[0] for one in edges)
        series = []
        for n, group in enumerate(self.groups):
            found = []
            for number in numbers:
                tails = [one for run in group.runs if (one := run.series(f"loss_by_bin/{number}"))]
                if not tails:
                    continue
                interval = group.interval(one.tail_median() for one in tails)
                if interval is None:
                    continue
                if interval.bounded:
                    ends = interval.lower, interval.upper
                else:
                    ends = percentile(tails[0].tail(), 0.1), percentile(tails[0].tail(), 0.9)
                place = (in_t and group.runs[0].bin_edges) or [*range(max(numbers) + 2)]
                if number + 1 < len(place):
                    found.append((place[number], place[number + 1], interval.value, ends))
            if found:
                series.append((group.name, n, found))
        x_label = "timestep t (0 is clean data, 1 is noise)" if in_t else "bin (0 is next to the data)"
        values = [y for _, _, found in series for one in found for y in (one[2], *one[3])]
        note = (
            "Plain squared error by timestep, median of the last half of the logged points. Bars are as wide as the "
            "bin. Whiskers: of a group, the 95 % interval of the mean over its seeds; of a single run, the 10th to "
            "90th percentile of its logged points, which is not an interval of the mean."
        )
        if not in_t:
            note += " Where the bins' edges lie is not known for all runs: bins of one number may be other timesteps."
        elif not same:
            note += " The runs have different bins (each holds an equal share of its run's timesteps)."
        final = element(
            "figure", element("figcaption", element("b", "At the end"), element("small", note)),
            bin_chart(series, x_label=x_label, y_label="squared error", log=spans_much(values)), class_="wide",
        )
        small = []
        for number in numbers:
            title = f"bin {number}"
            if same:
                title = f"t in {edges[0][number]:.2f}–{edges[0][number + 1]:.2f}"
            tag = f"loss_by_bin/{number}"
            small.append(self._panel(title, tag, "squared error", None, self.smoothing, log=True, small=True))
        smoothed = f"centred running mean over {self.smoothing:,} steps" if self.smoothing else "not smoothed"
        note = f"Each chart has its own vertical axis, logarithmic where it spans a factor of five; {smoothed}."
        if not same:
            note += " Bins are numbered from the data to the noise; they are not the same timesteps in all runs."
        return element("section", heading, final, element("h3", "Over training"), element("p", note, class_="note"),
                       element("div", *(one for one in small if one), class_="small-panels"), id="bins")

    # ------------------------------------------------------------------ costs

    def costs(self) -> Markup:
        figures = []
        for tag, (title, unit) in _COSTS.items():
            found = [after_warm_up(run.series(tag)) for run in self.runs]
            if not any(found):
                continue
            bars = [
                Bar(run.name, n, statistics.median(one), percentile(one, 0.1), percentile(one, 0.9))
                if one else Bar(run.name, n, None)
                for run, one, n in zip(self.runs, found, map(self._number_of, self.runs), strict=True)
            ]
            figures.append(element("figure", element("figcaption", element("b", title)), bar_chart(bars, unit=unit)))
        note = "Bars: median over the logged points without the first (warm-up). Whiskers: 10th to 90th percentile."
        return element(
            "section", element("h2", "Speed and memory"), element("p", note, class_="note"),
            element("div", *figures, class_="panels") if figures else element("p", "Not logged.", class_="missing"),
            id="costs",
        )

    # ------------------------------------------------------------------ samples

    def samples(self) -> Markup:
        heading = element("h2", "Samples")
        steps = sorted({step for run in self.runs for step in run.samples})
        if not steps:
            return element("section", heading, element("p", "No run has sample grids.", class_="missing"), id="samples")
        shown = steps
        if len(steps) > MOST_GRIDS:
            shown = sorted({steps[round(i * (len(steps) - 1) / (MOST_GRIDS - 1))] for i in range(MOST_GRIDS)})
        first = max(shown, key=lambda step: (sum(step in run.samples for run in self.runs), step))
        frames = []
        for step in shown:
            grids = [
                element("figure", element("figcaption", self._run_name(run)), _grid(run, step)) for run in self.runs
            ]
            frames.append(element("div", *grids, class_="frame", hidden=step != first, data_step=step))
        note = f"Grids of {len(shown)} steps" + (f", evenly chosen of {len(steps)}" if len(shown) < len(steps) else "")
        slider = element(
            "label", "step ", element("input", type="range", id="sample-step", min=0, max=len(shown) - 1,
                                      value=shown.index(first), step=1), " ", element("output", f"{first:,}"),
        )
        return element("section", heading, element("p", note + ". ", slider, class_="note"), *frames, id="samples")

    # ------------------------------------------------------------------ configuration

    def configuration(self) -> Markup:
        known = [(n, group) for n, group in enumerate(self.groups) if group.runs[0].settings]
        heading = element("h2", "Configuration")
        if not known:
            return element("section", heading, element("p", "No run has a config.toml.", class_="missing"),
                           id="configuration")
        keys = [key for key in self.differing if key != "job.name"]
        parts = []
        if keys:
            rows = [
                [element("code", key)]
                + [settings_text([run.settings.get(key) for run in group.runs]) for _, group in known]
                for key in keys
            ]
            note = f"{MISSING}: the key has no effect in that run. Values of several runs are in the order of seeds."
            heads = ["differing keys", *(_named(n, group.name) for n, group in known)]
            parts = [element("p", note, class_="note"), _table(heads, rows)]
        elif len(self.runs) > 1:
            parts = [element("p", "The runs do not differ.", class_="note")]
        settings = known[0][1].runs[0].settings
        rows = [[element("code", key), settings_text([settings[key]])] for key in self.common]
        parts.append(element(
            "details", element("summary", f"{len(rows)} keys in common" if len(self.runs) > 1 else f"{len(rows)} keys"),
            _table(["key", "value"], rows),
        ))
        return element("section", heading, *parts, id="configuration")


# ---------------------------------------------------------------------- pieces of HTML


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = element("thead", element("tr", *(element("th", one, scope="col") for one in heads)))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", one) for one in row[1:])) for row in rows
    ]
    return element("div", element("table", head, element("tbody", *body)), class_="scroll")


def _swatch(number: int) -> Markup:
    line = element("path", d="M1 6H25", class_="line")
    return element("svg", line, viewBox="0 0 26 12", class_=f"swatch {group_class(number)}", aria_hidden="true")


def _named(number: int, name: str) -> Markup:
    return element("span", _swatch(number), " ", name, class_="named")


def _grid(run: RunRecord, step: int) -> Markup:
    if step not in run.samples:
        return element("p", f"no grid at step {step:,}", class_="missing grid")
    try:
        source = _data_uri(run.samples[step])
    except (OSError, SyntaxError, ValueError):
        return element("p", f"{run.samples[step].name} cannot be read", class_="missing grid")
    return element("img", src=source, alt=f"samples of {run.name} at step {step}", loading="lazy")


def _final_held_out(track: str, run: RunRecord) -> float | None:
    return held_out(run, track).final()


def _held_out_tag(track: str, run: RunRecord) -> str | None:
    return run.held_out_tags().get(track)


def _data_uri(path: Path) -> str:
    content = read_regular(path, _LARGEST_GRID)
    with open_image(content) as picture:
        picture.load()
        if picture.width > WIDEST_GRID:
            height = round(picture.height * WIDEST_GRID / picture.width)
            smaller, stream = picture.convert("RGB").resize((WIDEST_GRID, max(height, 1))), io.BytesIO()
            smaller.save(stream, "PNG", optimize=True)
            content = stream.getvalue()
    return "data:image/png;base64," + base64.b64encode(content).decode()
