"""Hardware and number of devices compared, of runs of one configuration: seconds a step, speed-up, seconds a picture, loss."""

from collections.abc import Sequence

from torchtitan.distributed.degrees import DEGREE_KEYS
from torchtitan.pictures.number_text import ends_text
from torchtitan.runs.compare.lines import cost, held_out
from torchtitan.runs.compare.tables import Rows, Table
from torchtitan.runs.compare.text import as_number, interval_text
from torchtitan.runs.record import HELD_OUT_LOSS, TRAINING_LOSS, RunGroup, RunRecord, differing_settings, hardware_name
from torchtitan.statistics.interval import Interval, positive_interval
from torchtitan.training.metric_points import timed_since

_RATE, _STEP = "throughput(img/s)", "time_metrics/end_to_end(s)"
# What hardware may change: where a run lies, its peak, the number of devices and how they share a batch.
_PLACE = ("job.", "comm.", "checkpoint.folder", "metrics.peak_tflops")
_FREE = (*_PLACE, "training.local_batch_size", *DEGREE_KEYS)
_SEED = "debug.seed"


def compared_hardware(runs: Sequence[RunRecord]) -> tuple[Table, str] | None:
    """Table with a row for each hardware, the first one the reference, and a note; None for runs of one hardware."""
    groups = by_hardware(runs)
    if len({group.name for group in groups}) < 2:
        return None
    columns = ["hardware", "runs", "s/step", "images/s", "speed-up", "training alone, s", "s a picture", "training loss",
               "held-out loss"]  # fmt: skip
    rows: Rows = []
    for group in groups:
        rates = [cost(run, _RATE) for run in group.runs]
        rows.append([
            group.name, ", ".join(run.name for run in group.runs),
            interval_text(group.rate_interval(cost(run, _STEP) for run in group.runs)), interval_text(group.rate_interval(rates)),
            "1 (reference)" if group is groups[0] else ends_text(speed_up(groups[0], group)),
            interval_text(group.rate_interval(_train_seconds(run) for run in group.runs)),
            interval_text(group.rate_interval(_of_summary(run, "seconds_per_picture") for run in group.runs)),
            interval_text(group.interval(run.series(TRAINING_LOSS).tail_median() for run in group.runs if _ended(run))),
            interval_text(group.interval(_held_out(run) for run in group.runs)),
        ])  # fmt: skip
    return (columns, rows), _note(runs)


def by_hardware(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Gather runs of equal settings by devices and their number, in the order of their first runs; only of known ones."""
    settings = [key for key in differing_settings(runs)[0] if key != _SEED and not key.startswith(_PLACE)]
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        if name := hardware_name(run):
            groups.setdefault((name, *(repr(run.compared.get(key)) for key in settings)), []).append(run)
    return [RunGroup(name, tuple(members)) for (name, *_), members in groups.items()]


def one_machine(runs: Sequence[RunRecord]) -> str:
    """Sentence that names the hardware of all runs; "" where they ran on several, or none is recorded."""
    name, *others = {hardware_name(run) for run in runs}
    return f"All of it was measured on {name}; other hardware gives other numbers." if name and not others else ""


def speed_up(reference: RunGroup, other: RunGroup) -> Interval | None:
    """Images/s over those of the reference.

    Of two or more seeds that both have, the geometric mean of their ratios with Student's interval of the logarithms; else the
    ratio of the geometric means, without an interval.
    """
    rates = [{run.seed: rate for run in group.runs if (rate := cost(run, _RATE))} for group in (reference, other)]
    if not all(rates):
        return None
    pairs = [rates[1][seed] / rates[0][seed] for seed in rates[0] if seed in rates[1]]
    if len(pairs) > 1:
        return positive_interval(pairs)
    one, two = (positive_interval(list(found.values())).value for found in rates)
    return Interval(two / one)


def _note(runs: Sequence[RunRecord]) -> str:
    """Say what the numbers are, and which settings differ beside the hardware."""
    note = (
        "Medians over the last half of the logged points of each run (of those since its batch grew or its layout changed, where "
        "they did), so without start-up, saving and sampling; geometric means over the runs of a row, ± half of the 95 % "
        "interval over them (its ends where that would reach zero; none for a run alone). Speed-up: images/s over the first "
        "hardware's, by pairs of equal seeds where there are two. Seconds a picture: of the last grid, decoding included."
    )
    differing = [key for key in differing_settings(runs)[0] if key != _SEED and not key.startswith(_FREE)]
    for run in runs:
        if not hardware_name(run):
            note += f" {run.name} is left out: no hardware is recorded of it."
            continue
        if not _ended(run):
            note += f" {run.name} has not reached its last step: its seconds of training and its losses are left out."
        if run.resumed_after:
            note += f" {run.name} {timed_since(run.resumed_after)}."
    if differing:
        note += f" The runs also differ in {', '.join(differing)}: the table compares these settings as well as the hardware."
    return note


def _ended(run: RunRecord) -> bool:
    """Whether a run has completed, also if a later start failed before a step."""
    return run.status in ("completed", f"completed at step {run.last_step}, failed since")


def _held_out(run: RunRecord) -> float | None:
    return held_out(run, "none").final() if HELD_OUT_LOSS in run.tags and _ended(run) else None


def _train_seconds(run: RunRecord) -> float | None:
    if run.resumed_after or not _ended(run):  # the clock is of several layouts, or of fewer steps
        return None
    return as_number((run.summary or {}).get("clock", {}).get("train_seconds")) or None


def _of_summary(run: RunRecord, key: str) -> float | None:
    return as_number((run.summary or {}).get(key)) or None
