"""Which run the results in a folder are of: kept beside them, so that those of another are not taken for its own."""

import json
import os
from pathlib import Path
from typing import Any, Protocol

from torchtitan.config.job import JobConfig
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_regular
from torchtitan.settings.record import config_differences, effective

_FILE = "run.json"


class Run(Protocol):
    """What results are of."""

    folder: Path
    config: JobConfig


def refuse_other_run(results: Path, run: Run) -> None:
    """Compare the run with the one that the folder's results are of; a folder that does not say is taken as it is.

    The way from the folder to the run is compared, so that a run may be moved with its studies; and of its
    configuration what decides how it learns, so that one trained anew in the same place is told apart.

    Raises:
        ValueError: it is another run, or run.json is damaged or cannot be read; one line.
    """
    path = results / _FILE
    try:
        kept = json.loads(read_regular(path))
        other, config = kept["run"], kept["config"]
        if not (isinstance(other, str) and isinstance(config, dict)):
            raise ValueError("no run and its configuration")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged (give another --output, or remove {results} to measure anew)") from error
    if other != _way(results, run):
        found = f"results of another run, {os.path.normpath(results.resolve() / other)}"
    elif differences := config_differences(config, run.config):
        found = f"results of this run as it was configured before ({differences[0]})"
    else:
        return
    raise ValueError(f"{results}: holds {found} (give another --output, or move the folder away)")


def claim(results: Path, run: Run) -> None:
    """Make the folder, and say in it which run its results will be of, where it does not yet. Raises OSError."""
    make_folder(results)
    path = results / _FILE
    if not path.exists():
        kept: dict[str, Any] = {"run": _way(results, run), "config": effective(run.config)}
        replace_file(path, json.dumps(kept, indent=1) + "\n")


def _way(results: Path, run: Run) -> str:
    return Path(os.path.relpath(run.folder.resolve(), results.resolve())).as_posix()
