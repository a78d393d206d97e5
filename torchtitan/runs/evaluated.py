"""Metrics of a run's samples, as the command evaluate has recorded them."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.manifest import read_json
from torchtitan.evaluation.config import method_text
from torchtitan.evaluation.sample_plans import classes_text
from torchtitan.statistics.interval import Interval


def is_number(value: Any) -> bool:
    """Check whether a value of JSON or TOML is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def measured_interval(value: Mapping[str, Any]) -> Interval | None:
    """Interval of a metric of samples, as JSON has it; None without a finite value. Raises KeyError, TypeError."""
    if not is_number(value["value"]):
        return None
    lower, upper = value.get("lower"), value.get("upper")
    return Interval(value["value"], -math.inf if lower is None else lower, math.inf if upper is None else upper)


def evaluated(path: Path, last_step: int) -> dict[str, Interval | None]:
    """Values that the command evaluate has written, by metric and what it depends on: the step where it is not the last.

    Raises:
        DamagedFile, KeyError, TypeError, ValueError, AttributeError: it cannot be read.
    """
    found: dict[str, Interval | None] = {}
    for entry in read_json(path, dict)["evaluations"] if path.exists() else ():
        for how, values in measured_so(entry):
            how += at_step((entry["samples"].get("source") or {}).get("step"), last_step)
            place = Path(entry["samples"]["place"]).name[:8]  # by the classes of a set, not by what else it was measured with
            further = ("", f", {place}", *(f", {place}, {number}" for number in range(2, len(found) + 3)))
            how += next(more for more in further if not any(f"{name} ({how}{more})" in found for name in values))
            found |= {f"{name} ({how})": measured_interval(value) for name, value in values.items()}
    return found


def measured_so(entry: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Values by name of each result of an entry of evaluation.json, behind how they were measured. Raises as `evaluated`."""
    drawn, against = _drawn(entry["samples"]), _against(entry["reference"]) if entry["reference"] else ""
    for result in entry["results"].values():
        yield f"{result['extractor']}, {drawn}{against}", result["values"]


def _against(reference: dict[str, Any]) -> str:
    """A reference by its name and time, as another may be made under its name."""
    written = f", written {reference['written'][:19].replace('T', ' ')}" if "written" in reference else ""
    return f" against {reference['name']}{written}"


def _drawn(samples: dict[str, Any]) -> str:
    """Number of samples and, of a set, how it was drawn, in words."""
    text = f"{samples['count']:,} samples"
    if (drawn := samples.get("set")) is None:
        return text
    first, *others = drawn.get("prompts") or [""]
    prompts = f' of "{first}"' + (f" and {len(others)} others" if others else "") if first else ""
    step, _, track = drawn["weights"]["label"].partition(", ")  # and adapters
    of_track = f" of {track}" if track and track != "ema" else ""
    first_seed, *_ = re.findall(r"\d+", drawn["seeds"])
    seeds = f", seeds {drawn['seeds']}" if int(first_seed) else ""
    elsewhere, guide = (samples.get("source") or {}).get("guide"), (drawn["guide"] or {}).get("label", "")
    guide = f"{Path(elsewhere).name}, {guide}" if elsewhere else guide.removeprefix(f"{step}, ")  # of the same step: the track
    return f"{text}{prompts}{of_track}{method_text(drawn, guide)}{classes_text(drawn)}{seeds}"


def at_step(step: int | None, last_step: int) -> str:
    """Step of a measurement, where it is not the run's last; "" where it is, or one of them is not known."""
    return f", at step {step:,}" if last_step and step not in (None, last_step) else ""
