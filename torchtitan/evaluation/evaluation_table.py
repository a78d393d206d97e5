"""Table of an evaluation for the terminal."""

import math
from collections.abc import Iterator

from torchtitan.evaluation.evaluation_file import spread
from torchtitan.evaluation.measuring import Compared, Request, Result
from torchtitan.fidelity.metrics import METRICS
from torchtitan.pictures.number_text import significant
from torchtitan.statistics.interval import Interval

_TITLES = ("metric", "value", "interval", "images", "features of", "reference")


def result_lines(request: Request, compared: Compared, results: list[Result]) -> Iterator[str]:
    """Lines of the table, one per value, those over disjoint sets below them, and the notes behind it."""
    rows = [_TITLES]
    for result in results:
        metric = METRICS[result.metric]
        reference = compared.reference.name if metric.reference and compared.reference else ""
        extractor = request.extractor_of(result.metric)
        means = spread(result)
        for name, interval in result.measurement.values.items():
            title = f"{name}{' ↓' if metric.better.get(name) == 'lower' else ' ↑' if metric.better.get(name) else ''}"
            rows.append((title, _value(interval), _ends(interval), f"{len(compared.samples):,}", extractor, reference))
            if name in means:
                images = f"{len(result.sets)} x {result.set_images:,}"
                rows.append(("  mean of sets", _value(means[name]), _ends(means[name]), images, extractor, reference))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for note in dict.fromkeys(note for result in results for note in result.measurement.notes):
        yield f"note: {note}"


def _value(interval: Interval) -> str:
    return significant(interval.value, 5) if math.isfinite(interval.value) else str(interval.value)


def _ends(interval: Interval) -> str:
    if not interval.bounded:
        return ""
    share = f" ({interval.coverage:.0%})" if interval.coverage else ""
    return f"{significant(interval.lower)} to {significant(interval.upper)}{share}"
