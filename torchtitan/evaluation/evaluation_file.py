"""Results of evaluations in evaluation.json: earlier ones stay, the same measurement replaces its own."""

import hashlib
import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan.checkpoint.manifest import read_json
from torchtitan.errors import DamagedFile, EvaluationError
from torchtitan.evaluation.feature_files import HashedImages
from torchtitan.evaluation.measuring import Compared, Request, Result
from torchtitan.evaluation.references import Reference
from torchtitan.features.base import FeatureExtractor
from torchtitan.fidelity.metrics import METRICS
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.regular import LARGEST_RECORD
from torchtitan.files.run_lock import RunLock
from torchtitan.statistics.interval import Interval, mean_interval

EVALUATION_FILE = "evaluation.json"
_START = b'{\n "evaluation": 1,'


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
        """Add an entry of `describe`; metrics of a measurement that is there already join it, or replace their own.

        Raises:
            EvaluationError: as in `check`, or it cannot be written.
        """
        lock = RunLock(self.path.parent, f".{self.path.name}.lock")
        try:
            make_folder(self.path.parent)
            lock.wait()
            self.check()
            entries = self._read()
            same = [old for old in entries if old.get("key") == entry["key"]]
            results = {name: result for old in same for name, result in old["results"].items()} | entry["results"]
            kept = [old for old in entries if old.get("key") != entry["key"]]
            content = {"evaluation": 1, "evaluations": [*kept, {**entry, "results": results}]}
            replace_file(self.path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            advice = "make room, or give another --output"
            raise EvaluationError(f"{self.path}: cannot be written: {error.strerror or error} ({advice})") from error
        finally:
            lock.release()

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        try:
            entries = read_json(self.path, dict, LARGEST_RECORD)["evaluations"]
            if not all(isinstance(entry["key"], str) and isinstance(entry["results"], dict) for entry in entries):
                raise DamagedFile("entries are missing")
        except (DamagedFile, KeyError, TypeError) as error:
            raise EvaluationError(f"{self.path}: is damaged ({error}; move it away, or give another --output)") from error
        return entries


def describe(
    request: Request, extractors: Mapping[str, FeatureExtractor], compared: Compared, results: list[Result],
    versions: Mapping[str, Any], source: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Entry of evaluation.json: every fact that the results depend on.

    Args:
        request, extractors, compared, results: of the measurement.
        versions: of what computed it.
        source: of the samples where they were drawn from a run: its folder, step and EMA track.
    """
    entry: dict[str, Any] = {
        "samples": _described_images(compared.hashed["samples"]) | ({"source": source} if source else {}),
        "reference": _described_reference(compared, "reference", compared.reference, extractors),
        "held_out": _described_reference(compared, "held-out images", compared.held_out, extractors),
        "extractors": {name: extractor.record() for name, extractor in extractors.items()},
        "settings": {"sets": request.sets, **request.settings()},
    }
    identity = json.dumps(_without_places(entry), sort_keys=True)
    made = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"), "device": request.device,
        "versions": dict(versions),
    }  # fmt: skip
    return {
        "key": hashlib.sha256(identity.encode()).hexdigest()[:16],
        **entry,
        "results": {result.metric: _described_result(result, request) | made for result in results},
    }


def scalars(results: list[Result]) -> dict[str, float]:
    """Values of results by name, for TensorBoard."""
    return {
        name: interval.value for result in results for name, interval in result.measurement.values.items()
        if math.isfinite(interval.value)
    }  # fmt: skip


def spread(result: Result) -> dict[str, Interval]:
    """Mean of each value over the disjoint sets, with Student's interval; only of values that all sets have."""
    return {
        name: mean_interval([each.values[name].value for each in result.sets]) for name in result.measurement.values
        if result.sets and all(name in each.values for each in result.sets)
    }  # fmt: skip


def _without_places(record: Any) -> Any:
    """Record without paths: moved images are the same ones."""
    if isinstance(record, Mapping):
        return {key: _without_places(value) for key, value in record.items() if key != "place"}
    return record


def _described_result(result: Result, request: Request) -> dict[str, Any]:
    better = METRICS[result.metric].better
    values = {
        name: _described_interval(interval) | {"better": better.get(name)}
        for name, interval in result.measurement.values.items()
    }
    described: dict[str, Any] = {
        "title": METRICS[result.metric].title, "extractor": request.extractor_of(result.metric),
        "output": METRICS[result.metric].output, "values": values, "notes": list(result.measurement.notes),
    }  # fmt: skip
    if result.sets:
        described["sets"] = {
            "sets": len(result.sets), "images": result.set_images,
            "values": {
                name: _described_interval(mean) | {"each": [_number(each.values[name].value) for each in result.sets]}
                for name, mean in spread(result).items()
            },
        }  # fmt: skip
    return described


def _described_interval(interval: Interval) -> dict[str, Any]:
    ends = {"lower": _number(interval.lower), "upper": _number(interval.upper), "coverage": interval.coverage}
    return {"value": _number(interval.value), **ends}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None  # JSON has no infinity


def _described_images(hashed: HashedImages) -> dict[str, Any]:
    images = hashed.images
    return images.record() | {"count": len(images), "size": list(images.size), "sha256": hashed.sha256}


def _described_reference(
    compared: Compared, role: str, reference: Reference | None, extractors: Mapping[str, FeatureExtractor]
) -> dict[str, Any] | None:
    if reference is None:
        return None
    described = reference.record(extractors)
    if role in compared.hashed:
        described["images"] = _described_images(compared.hashed[role])
    return described
