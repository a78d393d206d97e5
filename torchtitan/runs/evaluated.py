"""Metrics of a run's samples, as the command evaluate has recorded them."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.manifest import read_json
from torchtitan.pictures.number_text import counted
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
        against = _against(entry["reference"]) if entry["reference"] else ""
        for result in entry["results"].values():
            how = f"{result['extractor']}, {entry['samples']['count']:,} samples{_drawn(entry['samples'])}{against}"
            how += at_step((entry["samples"].get("source") or {}).get("step"), last_step)
            place = Path(entry["samples"]["place"]).name[:8]  # by the classes of a set, not by what else it was measured with
            further = ("", f", {place}", *(f", {place}, {number}" for number in range(2, len(found) + 3)))
            how += next(more for more in further if not any(f"{name} ({how}{more})" in found for name in result["values"]))
            found |= {f"{name} ({how})": measured_interval(value) for name, value in result["values"].items()}
    return found


def _against(reference: dict[str, Any]) -> str:
    """A reference by its name and time, as another may be made under its name."""
    written = f", written {reference['written'][:19].replace('T', ' ')}" if "written" in reference else ""
    return f" against {reference['name']}{written}"


def _drawn(samples: dict[str, Any]) -> str:
    """How a set was drawn, as far as runs are usually compared; "" for images of elsewhere."""
    if (drawn := samples.get("set")) is None:
        return ""
    guidance = drawn["guidance_scale"]
    guided = f", guidance {guidance:g}" + (f" by {drawn['guide']['label']}" if drawn["guide"] else "") if guidance != 1 else ""
    first, *others = drawn.get("prompts") or [""]
    prompts = f' of "{first}"' + (f" and {len(others)} others" if others else "") if first else ""
    _, _, track = drawn["weights"]["label"].rpartition(", ")
    of_track = f" of {track}" if track and track != "ema" else ""
    interval, (first_seed, *_) = drawn["guidance_interval"], re.findall(r"\d+", drawn["seeds"])
    when = f" at t from {interval[0]:g} to {interval[1]:g}" if guided and interval != [0, 1] else ""
    seeds = f", seeds {drawn['seeds']}" if int(first_seed) else ""
    return f"{prompts}{of_track} by {drawn['solver']['name']} in {counted(drawn['num_steps'], 'step')}{guided}{when}{seeds}"


def at_step(step: int | None, last_step: int) -> str:
    """Step of a measurement, where it is not the run's last; "" where it is, or one of them is not known."""
    return f", at step {step:,}" if last_step and step not in (None, last_step) else ""
