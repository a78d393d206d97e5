"""Charts of runs and their groups: curves over steps and images, loss by timestep."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from torchtitan.pictures.page_charts import Step, bin_chart, line_chart, spans_much
from torchtitan.runs.compare.lines import Tag, group_lines, held_out, held_out_tag, reach, series_of
from torchtitan.runs.compare.text import track_name
from torchtitan.runs.record import TRAINING_LOSS, WEIGHTED_ERROR, RunGroup, RunRecord, coinciding
from torchtitan.statistics.interval import mean_interval, percentile

# Title, tag and whether its values are positive, of losses that only some methods have; of several tags the last is drawn.
_OF_METHODS = (
    ("Held-out loss of equal times (flow matching)", r"validation_metrics/equal_times_loss", True),
    ("Held-out loss of two times (mean flow)", r"validation_metrics/two_times_loss", True),
    ("Alignment loss of the noisiest timesteps (-1: aligned)", r"alignment_loss/\d+", False),
)


@dataclass(frozen=True)
class Panel:
    """Figure with the chart over images and the one over steps, of which the page shows one; None: not known."""

    title: str
    note: str | None
    charts: dict[str, Markup | None]


class Charts:
    """Charts of groups of runs.

    Args:
        smoothing: steps of the running mean; 0: none; None: 3 % of the longest run.
    """

    def __init__(self, runs: Sequence[RunRecord], groups: list[RunGroup], smoothing: float | None) -> None:
        self.runs, self.groups = runs, groups
        width = round(0.03 * max(run.last_step for run in runs)) if smoothing is None else smoothing
        losses = [run.series(TRAINING_LOSS) for run in runs]
        self.smoothing = width * any(loss != loss.smoothed(width) for loss in losses)

    def curves(self, tracks: Sequence[str]) -> list[Panel]:
        alone = any(len(group.runs) == 1 for group in self.groups)
        smoothed = f"Centred running mean over {self.smoothing:,} steps" if self.smoothing else "Not smoothed"
        smoothed += "; the logged points of single runs are faint behind." if self.smoothing and alone else "."
        held_out_values = [y for run in self.runs for track in tracks for y in held_out(run, track).values]
        panels = [self._panel("Training loss", TRAINING_LOSS, "loss", smoothed, self.smoothing, log=True)]
        if any(WEIGHTED_ERROR in run.tags for run in self.runs):
            alike = "comparable where path, prediction, weighting, timesteps and data are the same"
            note = f"Without further terms of a loss, and undivided: {alike}. {smoothed}"
            weighted = self._panel(
                "Training error", lambda run: run.weighted_error_tag, "weighted error", note, self.smoothing, log=True
            )
            panels.append(weighted)
        panels += [
            self._panel(
                f"Held-out loss, {track_name(track)}", held_out_tag(track), "loss",
                "Not smoothed; every point is one measurement. All held-out charts share one axis.",
                log=True, y_values=held_out_values, marked=True,
            )
            for track in tracks
        ]  # fmt: skip
        panels += [
            self._panel(title, _last_tag(pattern), "loss", "Not smoothed.", log=log, marked=log)
            for title, pattern, log in _OF_METHODS
        ]
        panels += [
            self._panel("Gradient norm", "grad_norm", "norm before clipping", smoothed, self.smoothing, log=True),
            self._panel("Learning rate", "lr", "learning rate", "Not smoothed."),
        ]
        return [panel for panel in panels if panel]

    def _panel(
        self, title: str, tag: Tag, y_label: str, note: str | None, smoothing: float = 0, *, log: bool = False,
        y_values: Sequence[float] | None = None, marked: bool = False, small: bool = False,
    ) -> Panel | None:
        if not any(series_of(run, tag) for run in self.runs):
            return None
        charts: dict[str, Markup | None] = {}
        for axis, label in (("images", "images seen"), ("steps", "step")):
            over_images, charts[axis] = axis == "images", None
            lines = [
                line for n, group in enumerate(self.groups)
                for line in group_lines(n, group, tag, smoothing, marked, over_images, faint_raw=not small)
            ]  # fmt: skip
            if lines:
                values = y_values or [y for line in lines for _, y in line.points]
                logarithmic = log and spans_much(values)
                extent = max(run.images_at(run.last_step) if over_images else run.last_step for run in self.runs)
                charts[axis] = line_chart(
                    lines, x_label=label, y_label=y_label, log=logarithmic, x_values=(0, extent),
                    y_values=reach(values, lines, logarithmic), small=small,
                )  # fmt: skip
        said = coinciding({run.name: series_of(run, tag) for run in self.runs})
        return Panel(title, note and f"{note} {said}".rstrip(), charts)

    def bins(self) -> dict[str, Any] | None:
        """Loss by timestep at the end and over training; None where it was not logged."""
        numbers = sorted({number for run in self.runs for number in run.bin_tags()})
        if not numbers:
            return None
        binned = [run for run in self.runs if run.bin_tags()]
        edges = [of_run for run in binned if (of_run := run.bin_edges)]
        in_t = len(edges) == len(binned)
        same = in_t and all(one == edges[0] for one in edges)
        series = [(group.name, n, self._steps(group, numbers, in_t)) for n, group in enumerate(self.groups)]
        series = [one for one in series if one[2]]
        note = (
            "Plain squared error of each run's own prediction by timestep, median of the last half of the logged points. "
            "Bars are as wide as the bin. Whiskers: of a group, the 95 % interval of the mean over its seeds; of a single "
            "run, the 10th to 90th percentile of its logged points, which is not an interval of the mean."
        )
        smoothed = f"centred running mean over {self.smoothing:,} steps" if self.smoothing else "not smoothed"
        each = f"Each chart has its own vertical axis, logarithmic where it spans a factor of five; {smoothed}."
        if not in_t:
            note += " Where the bins' edges lie is not known for all runs: bins of one number may be other timesteps."
        elif not same:
            note += " The runs have different bins (each holds an equal share of its run's timesteps)."
        if not same:
            are = "are not" if in_t else "may not be"
            each += f" Bins are numbered from the data to the noise; they {are} the same timesteps in all runs."
        panels = [
            self._panel(
                f"t in {edges[0][number]:.2f}–{edges[0][number + 1]:.2f}" if same else f"bin {number}",
                f"loss_by_bin/{number}", "squared error", None, self.smoothing, log=True, small=True,
            )
            for number in numbers
        ]  # fmt: skip
        chart = bin_chart(
            series, x_label="timestep t (0 is clean data, 1 is noise)" if in_t else "bin (0 is next to the data)",
            y_label="squared error",
            log=spans_much(y for _, _, found in series for one in found for y in (one.value, one.low, one.high)),
        )  # fmt: skip
        return {
            "note": note, "at_the_end": chart, "note_over_training": each,
            "over_training": [panel for panel in panels if panel],
        }  # fmt: skip

    def _steps(self, group: RunGroup, numbers: Sequence[int], in_t: bool) -> list[Step]:
        places = (group.runs[0].bin_edges if in_t else None) or [*range(max(numbers) + 2)]
        found = []
        for number in numbers:
            tails = [one for run in group.runs if (one := run.series(f"loss_by_bin/{number}"))]
            if tails and number + 1 < len(places):
                mean = mean_interval([statistics.median(one.tail()) for one in tails])
                low, high = mean.lower, mean.upper
                if not mean.bounded:
                    low, high = percentile(tails[0].tail(), 0.1), percentile(tails[0].tail(), 0.9)
                found.append(Step(places[number], places[number + 1], mean.value, low, high))
        return found


def _last_tag(pattern: str) -> Tag:
    """Tag of a run that matches a pattern, the last logged of several."""
    return lambda run: next((tag for tag in reversed(run.tags) if re.fullmatch(pattern, tag)), None)
