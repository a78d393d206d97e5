"""Summary of the study of metrics' responses: the table, and whether each metric moved as it must."""

from collections.abc import Mapping, Sequence

from torchtitan.experiments.cells import Row
from torchtitan.pictures.markdown import Markdown, inline, markdown_table
from torchtitan.pictures.number_text import significant
from torchtitan.statistics.interval import Interval
from torchtitan_dit.studies.frame import number

# Value -> heading.
VALUES: Mapping[str, str] = {
    "fd": "FD", "fd_inf": "FD∞", "kid": "KID x 1000", "is": "IS", "precision": "precision", "recall": "recall",
    "density": "density", "coverage": "coverage", "memorised": "memorised, %",
}  # fmt: skip
SCALES = {"kid": 1000.0, "memorised": 100.0}
PLAIN = "held out"
# Set of samples -> value -> direction from that of plain held-out images.
MUST: Mapping[str, Mapping[str, int]] = {
    "blurred": {"fd": 1, "fd_inf": 1, "kid": 1, "precision": -1, "density": -1, "coverage": -1},
    "noised": {"fd": 1, "fd_inf": 1, "kid": 1, "precision": -1, "density": -1, "coverage": -1},
    "other proportions": {"fd": 1, "fd_inf": 1, "kid": 1, "is": -1},
    "repeated": {"fd": 1, "fd_inf": 1, "recall": -1, "coverage": -1},
    "half copied": {"memorised": 1},
}


def bounds(value: str) -> tuple[str, str, str]:
    """Columns of a value: itself, and the ends of its interval."""
    return value, f"{value}_lower", f"{value}_upper"


def summary(rows: Sequence[Row]) -> str:
    """Table of all values, and a line for each that did not move as it must."""
    found = {row["samples"]: {value: interval_of(row, value) for value in VALUES if row[value]} for row in rows}
    plain = found.get(PLAIN, {})
    table = [
        [samples, *(shown(value, values.get(value), plain.get(value)) for value in VALUES)]
        for samples, values in found.items()
    ]
    checked, failed = 0, []
    for samples, moves in MUST.items():
        for value, direction in moves.items():
            if samples in found and value in found[samples] and value in plain:
                checked += 1
                if moved(found[samples][value], plain[value]) != direction:
                    failed.append(f"{VALUES[value]} of {samples}")
    verdict = f"{checked - len(failed)} of {checked} values that must move did so"
    return (
        "With 95 % intervals; in bold where the interval is apart from that of plain held-out images.\n\n"
        + markdown_table(["samples", *VALUES.values()], table)
        + f"{verdict}{'; not so: ' + inline(', '.join(failed)) if failed else ''}.\n\n"
    )


def interval_of(row: Row, value: str) -> Interval:
    middle, lower, upper = (number(row, column) for column in bounds(value))
    return Interval(middle, lower, upper)


def moved(interval: Interval, plain: Interval) -> int:
    """Direction from another interval, 0 where they overlap."""
    return int(interval.lower > plain.upper) - int(interval.upper < plain.lower)


def shown(value: str, interval: Interval | None, plain: Interval | None) -> Markdown:
    if interval is None:
        return Markdown("-")
    scaled = interval.scaled(SCALES.get(value, 1.0))
    text = f"{significant(scaled.value, 3)} [{significant(scaled.lower, 3)}, {significant(scaled.upper, 3)}]"
    return Markdown(f"**{text}**" if plain is not None and moved(interval, plain) else text)
