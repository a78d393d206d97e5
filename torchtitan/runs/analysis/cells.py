"""Cells: repeats joined, and the arms that they are in."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtitan.runs.analysis.axes import BATCH, Axes, values_in_order
from torchtitan.runs.analysis.collect import Run
from torchtitan.runs.analysis.measures import IMAGES, METRICS, MFU, Metric
from torchtitan.statistics.interval import Interval, positive_interval

# What a cell without an ok run is called, the first that one of its runs is.
_WORST = (
    "oom", "timeout", "failed", "killed", "damaged", "short", "interrupted", "unfinished", "refused", "skipped",
)  # fmt: skip


@dataclass(eq=False)
class Cell:
    """Cell: runs that are equal in all axes.

    Attributes:
        measures: metric's name -> mean over the ok repeats with Student's interval; of one repeat alone its own value
            and interval. A metric that an ok repeat lacks is left out.
    """

    axes: Axes
    runs: list[Run]
    measures: dict[str, Interval]

    @property
    def ok(self) -> bool:
        return bool(self.measures)

    @property
    def good_runs(self) -> list[Run]:
        return [run for run in self.runs if run.ok]

    @property
    def single(self) -> bool:
        """True if its interval comes from one run's points alone, without the variation between runs."""
        return len(self.good_runs) == 1

    @property
    def status(self) -> str:
        """Status `ok` if a repeat is, else the worst of them."""
        if self.ok:
            return "ok"
        found = [run.status for run in self.runs]
        return min(found, key=lambda status: _WORST.index(status) if status in _WORST else len(_WORST))

    @property
    def not_ok(self) -> str:
        """Count of the repeats that are not ok, as `1 oom, 2 failed`."""
        counts = Counter(run.status for run in self.runs if not run.ok)
        return ", ".join(f"{n} {status}" for status, n in counts.items())

    def shown(self, metric: Metric) -> Interval | None:
        """Measurement as reports show it: the interval of an MFU ends at 100 %."""
        found = self.measures.get(metric.name)
        return replace(found, upper=max(found.value, min(found.upper, 100.0))) if found and metric is MFU else found

    def value(self, metric: str) -> float | None:
        return self.measures[metric].value if metric in self.measures else None


def join_repeats(runs: Sequence[Run]) -> list[Cell]:
    """Join repeated runs into cells, ordered by their axes. Runs of unknown models are not joined."""
    names = list(dict.fromkeys(name for run in runs for name in run.axes))
    groups: dict[tuple, list[Run]] = {}
    for number, run in enumerate(runs):
        key = (None if run.axes.get("model") is not None else number, *(run.axes.get(name) for name in names))
        groups.setdefault(key, []).append(run)
    cells = [_cell(members) for members in groups.values()]
    places = {
        name: {value: n for n, value in enumerate(values_in_order(name, [cell.axes.get(name) for cell in cells]))}
        for name in names
    }
    return sorted(cells, key=lambda cell: [places[name].get(cell.axes.get(name), -1) for name in names])


def _cell(runs: list[Run]) -> Cell:
    good = sorted((run for run in runs if run.ok), key=lambda run: (run.repeat is None, run.repeat or 0, run.name))
    measures = {}
    for metric in METRICS:
        present = [run.measures[metric.name] for run in good if metric.name in run.measures]
        if len(present) < len(good):
            continue
        if len(present) == 1:
            measures[metric.name] = present[0]
        elif present:
            measures[metric.name] = positive_interval([estimate.value for estimate in present])
    return Cell(runs[0].axes, runs, measures)


def arms(cells: Sequence[Cell]) -> dict[tuple, list[Cell]]:
    """Arms: all axes except the batch -> their cells, batches rising."""
    found: dict[tuple, list[Cell]] = {}
    for cell in cells:
        key = tuple((name, value) for name, value in cell.axes.items() if name not in BATCH)
        found.setdefault(key, []).append(cell)
    for members in found.values():
        members.sort(key=lambda cell: (cell.axes["local_batch"] or 0, cell.axes["global_batch"] or 0))
    return found


def best_cell(arm: Sequence[Cell]) -> Cell | None:
    """Best cell of an arm: the one with the highest images/s."""
    measured = [cell for cell in arm if cell.value(IMAGES.name) is not None]
    return max(measured, key=lambda cell: cell.measures[IMAGES.name].value, default=None)


def what_limits(arm: Sequence[Cell], best: Cell) -> str:
    """Limit of an arm's best batch: not faster beyond, out of memory, or nothing larger was tried."""
    beyond = [cell for cell in arm if (cell.axes["local_batch"] or 0) > (best.axes["local_batch"] or 0)]
    if any(cell.ok for cell in beyond):
        return "larger ones are no faster"
    if not beyond:
        return "largest tried"
    return "the next is out of memory" if beyond[0].status == "oom" else f"the next: {beyond[0].status}"
