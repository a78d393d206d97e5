"""Folder of a study's results: of one run."""

import json
import os
from pathlib import Path
from typing import Any

from torchtitan.config.job import JobConfig
from torchtitan.experiments.folder import ResultsFolder
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.settings.record import config_differences, effective

# Files by which the folder is known, and what they begin with; a table's columns are compared when it is read.
STUDY_MARKS = {"run.json": b"{", "results.csv": b"model,", "training.csv": b"run,"}
_RUN_FILE = "run.json"


def refuse_other_run(folder: ResultsFolder, run: Path, config: JobConfig) -> None:
    """Compare a run with that of the folder's results; a folder without a record is accepted.

    Compared are the relative path from the folder to the run, so that a run may be moved with its studies; and the keys
    of its configuration that determine the training, so that a run trained anew in the same place is another one.

    Raises:
        ExperimentError: it is another run, or run.json is damaged or cannot be read.
    """
    kept = folder.read(_RUN_FILE, _parse_run)
    if kept is None:
        return
    other, config_of_other = kept
    if other != _way(folder.path, run):
        folder.refuse(f"results of another run, {os.path.normpath(folder.path.resolve() / other)}")
    if differences := config_differences(config_of_other, config):
        folder.refuse(f"results of this run with an earlier configuration, {differences[0]}")


def claim(folder: Path, run: Path, config: JobConfig) -> None:
    """Claim the folder for a run's results, if it has no record of one. Raises OSError."""
    make_folder(folder)
    path = folder / _RUN_FILE
    if not path.exists():
        kept: dict[str, Any] = {"run": _way(folder, run), "config": effective(config)}
        replace_file(path, json.dumps(kept, indent=1) + "\n")


def _parse_run(text: str) -> tuple[str, dict[str, Any]]:
    kept = json.loads(text)
    other, config = kept["run"], kept["config"]
    if not (isinstance(other, str) and isinstance(config, dict)):
        raise ValueError("no run and its configuration")
    return other, config


def _way(folder: Path, run: Path) -> str:
    return Path(os.path.relpath(run.resolve(), folder.resolve())).as_posix()
