"""Results of evaluations: their file, evaluation.json, in which earlier ones stay, and their table for the terminal."""

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.manifest import read_json
from torchtitan.errors import DamagedFile, EvaluationError
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.images import ImageSet
from torchtitan.fidelity.measurement import Measurement
from torchtitan.fidelity.measuring import Request
from torchtitan.fidelity.metrics import METRICS
from torchtitan.fidelity.references import Reference
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.regular import LARGEST_RECORD
from torchtitan.files.run_lock import RunLock
from torchtitan.pictures.number_text import significant
from torchtitan.statistics.interval import Interval

EVALUATION_FILE = "evaluation.json"
_START = b'{\n "evaluation": 1,'
_TITLES = ("metric", "value", "interval", "images", "features of", "reference")


class EvaluationFile:
    """File of evaluations, written by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Check that the file may be written. Raises EvaluationError: it is another's, or damaged."""
        try:
            refuse_foreign_file(self.path, _START)
        except OSError as error:
            raise EvaluationError(f"{self.path}: {error.strerror or error}") from error
        self._read()

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry of `describe`; metrics of the same measurement join those that are there, or replace their own.

        Raises:
            EvaluationError: as in `check`, or it cannot be written.
        """
        lock = RunLock(self.path.parent, f".{self.path.name}.lock")
        try:
            make_folder(self.path.parent)
            lock.wait()
            self.check()
            results, kept = dict(entry["results"]), []
            for old in self._read():
                if _measured(old) == _measured(entry):
                    results = old["results"] | results
                else:
                    kept.append(old)
            replace_file(self.path, _content([*kept, {**entry, "results": results}]))
        except OSError as error:
            advice = "make room, or give another --output"
            raise EvaluationError(f"{self.path}: cannot be written: {error.strerror or error} ({advice})") from error
        finally:
            lock.release()

    def set_aside_after(self, step: int) -> None:
        """Keep the entries up to a step that a run goes back to; all stay in a file beside. Raises EvaluationError."""
        entries = self._read()
        kept = [entry for entry in entries if ((entry.get("samples", {}).get("source") or {}).get("step") or 0) <= step]
        if len(kept) == len(entries):
            return
        try:
            shutil.copy2(self.path, self.path.with_name(f"set-aside-{time.time_ns()}-{self.path.name}"))
            replace_file(self.path, _content(kept))
        except OSError as error:
            raise EvaluationError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        try:
            entries = read_json(self.path, dict, LARGEST_RECORD)["evaluations"]
            if not all(isinstance(entry["results"], dict) for entry in entries):
                raise DamagedFile("entries are missing")
        except (DamagedFile, KeyError, TypeError) as error:
            raise EvaluationError(f"{self.path}: is damaged ({error}; move it away, or give another --output)") from error
        return entries


def _content(entries: list[dict[str, Any]]) -> str:
    return json.dumps({"evaluation": 1, "evaluations": entries}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def describe(
    request: Request, extractors: Mapping[str, FeatureExtractor], samples: ImageSet, reference: Reference | None,
    held_out: Reference | None, measured: Mapping[str, Measurement], versions: Mapping[str, Any], source: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Entry of evaluation.json: every fact that the results depend on.

    Args:
        source: of the samples where they were drawn from a run: its folder, step and EMA track.
    """
    made = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"), "device": request.device,
        "versions": dict(versions),
    }  # fmt: skip
    results = {
        name: {
            "title": METRICS[name].title, "extractor": request.extractor_of(name), "output": METRICS[name].output,
            "values": {value: _described(interval, METRICS[name].better.get(value)) for value, interval in found.values.items()},
            "notes": list(found.notes), **made,
        }
        for name, found in measured.items()
    }  # fmt: skip
    images = samples.record() | {"count": len(samples), "size": list(samples.size)}
    return {
        "samples": images | ({"source": dict(source)} if source else {}),
        "reference": reference and reference.record(), "held_out": held_out and held_out.record(),
        "extractors": {name: extractor.record() for name, extractor in extractors.items()},
        "settings": request.settings(), "results": results,
    }  # fmt: skip


def table_lines(
    request: Request, count: int, reference: Reference | None, measured: Mapping[str, Measurement]
) -> Iterator[str]:
    """Lines of a table for the terminal, one per value, and the notes behind it."""
    rows = [_TITLES]
    for name, found in measured.items():
        metric = METRICS[name]
        compared = reference.name if metric.reference and reference else ""
        for value, interval in found.values.items():
            title = f"{value}{' ↓' if metric.better.get(value) == 'lower' else ' ↑' if metric.better.get(value) else ''}"
            rows.append((title, _value(interval), _ends(interval), f"{count:,}", request.extractor_of(name), compared))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for note in dict.fromkeys(note for found in measured.values() for note in found.notes):
        yield f"note: {note}"


def _measured(entry: Mapping[str, Any]) -> str:
    """Everything of an entry but its results, as JSON."""
    return json.dumps({name: value for name, value in entry.items() if name != "results"}, sort_keys=True)


def _described(interval: Interval, better: str | None) -> dict[str, Any]:
    ends = {"lower": _number(interval.lower), "upper": _number(interval.upper), "coverage": interval.coverage}
    return {"value": _number(interval.value), **ends, "better": better}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON has no infinity


def _value(interval: Interval) -> str:
    return significant(interval.value, 5) if math.isfinite(interval.value) else str(interval.value)


def _ends(interval: Interval) -> str:
    if not interval.bounded:
        return ""
    share = f" ({interval.coverage:.0%})" if interval.coverage else ""
    return f"{significant(interval.lower)} to {significant(interval.upper)}{share}"
