"""Record of a search on disk, so that no batch size is tried twice on the same device."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from torchtitan.experiments.autotune.probe import Probe
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_regular


class RecordError(Exception):
    """Record that cannot be read or written; the message is one line."""


class SearchRecord:
    """Record `<folder>/<hash>.json`: the question, every probe and, at the end, the batch size found."""

    def __init__(self, folder: Path, question: dict[str, Any]) -> None:
        """question: all that the probes and the answer depend on, as JSON has it."""
        text = json.dumps(question, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self.probes: list[Probe] = []
        self.batch_size: int | None = None
        self._question = question

    @property
    def log(self) -> Path:
        """Path of the latest probe's output."""
        return self.path.with_suffix(".log")

    def read(self) -> None:
        """Read the record of an earlier search of the same question. Raises RecordError."""
        try:
            content = json.loads(read_regular(self.path))
            self.probes = [Probe(**probe) for probe in content["probes"]]
            self.batch_size = content["batch_size"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{self.path}: damaged (--fresh replaces it)") from error

    def find(self, batch_size: int) -> Probe | None:
        """Find the probe of a batch size, if it was made."""
        return next((probe for probe in self.probes if probe.batch_size == batch_size), None)

    def make_folder(self) -> None:
        """Make the folder of the record and its log. Raises RecordError."""
        try:
            make_folder(self.path.parent)
        except OSError as error:
            raise RecordError(f"{self.path.parent}: cannot be written: {error.strerror}") from error

    def write(self) -> None:
        """Replace the file atomically. Raises RecordError."""
        probes = [dataclasses.asdict(probe) for probe in self.probes]
        content = {"batch_size": self.batch_size, "probes": probes, "question": self._question}
        try:
            replace_file(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be written: {error.strerror}") from error
