"""A grid of runs, trained one after the other in processes of their own: what is finished is not trained again.

    <study folder>/training.csv          a row per run that has ended, failed ones too; of two rows, the later counts
                   runs/<name>.toml      what a run is asked to train
                   runs/<name>.log       what its processes said
                   runs/<name>/          its folder, with every checkpoint
"""

import json
import math
import sys
import tempfile
import threading
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tqdm import tqdm

from studies.branch_training import samples_seen
from torchtitan.checkpoint.checkpointer import checkpoint_steps
from torchtitan.config.job import ConfigError, JobConfig, config_differences, dump_config, load_config
from torchtitan.config.places import place_problems
from torchtitan.experiments.folder import STUDY_MARKS, ResultsFolder, StudyError
from torchtitan.experiments.process import Outcome, Stopped, run_processes
from torchtitan.experiments.record import ResultTable
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_text

COLUMNS = ("run", "status", "reason", "samples", "date", "runtime")
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class GridRun:
    """One run of a grid.

    Attributes:
        name: of the run and of its folder.
        overrides: dotted key -> value, over the grid's base.
    """

    name: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class TrainingGrid:
    """Runs that differ from one base.

    Attributes:
        folder: of the study.
        configs: name of a run -> its whole configuration, in the order of training.
        processes: of each run.
    """

    folder: Path
    configs: dict[str, JobConfig]
    processes: int

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name


def plan_grid(base: JobConfig, runs: Sequence[GridRun], folder: Path, processes: int) -> TrainingGrid:
    """Check every run; nothing is written.

    Args:
        base: configuration that all runs share but for their overrides.
        runs: of different names.
        folder: of the study.
        processes: of each run; torchrun starts more than one.

    Raises:
        StudyError: the folder is somebody else's; or a run cannot be trained as configured, would write outside of the
            folder, or its folder holds another one; the first reason.
    """
    ResultsFolder(folder, STUDY_MARKS).refuse_foreign()
    configs = {}
    for run in runs:
        configs[run.name] = configure(base, run.overrides | _place(folder, run.name), processes, run.name)
        _refuse_other_places(configs[run.name], folder, run.name)
        _refuse_other_run(folder / "runs" / run.name, configs[run.name])
    return TrainingGrid(folder, configs, processes)


def configure(base: JobConfig, overrides: dict[str, Any], processes: int, name: str) -> JobConfig:
    """The base with some keys of other values, checked as any configuration is.

    Args:
        base: resolved.
        overrides: dotted key -> value, or its text as a command line has it.
        processes: that it is for.
        name: said before the reason where it is refused.

    Raises:
        StudyError: with the first reason.
    """
    with tempfile.TemporaryDirectory() as place:  # the loader reads files
        path = Path(place) / "base.toml"
        path.write_text(dump_config(base), encoding="utf-8")
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in overrides.items()}
        words = [f"--{key}={text}" for key, text in texts.items()]
        try:
            return load_config(["--job.config_file", str(path), *words], processes)
        except ConfigError as error:
            raise StudyError(f"{name}: {error.problems[0].removeprefix(f'{path}: ')}") from None


def train_grid(grid: TrainingGrid, retry_failed: bool = False) -> dict[str, str]:
    """Train what is not trained yet, each run from its newest checkpoint.

    A run is trained when its last checkpoint is in its folder; one that failed counts as that as long as the same is
    asked of it.

    Args:
        grid: as `plan_grid` returns it.
        retry_failed: train again what failed.

    Returns:
        name of a run -> why it failed, of those that did.

    Raises:
        Busy: another process is at work in the folder.
        StudyError: it cannot be written.
        KeyboardInterrupt: asked to stop; the run that was training goes on from its newest checkpoint.
    """
    with ResultsFolder(grid.folder, STUDY_MARKS).held():
        make_folder(grid.folder / "runs")
        table = ResultTable(grid.folder / "training.csv", COLUMNS, ("run",))
        table.begin()
        _train_missing(grid, table, retry_failed)
    rows = {name: table.find({"run": name}) for name in grid.configs}
    return {name: row["reason"] for name, row in rows.items() if row and row["status"] != "ok"}


def samples_of(config: JobConfig) -> int:
    """Images that a run sees."""
    return config.training.steps * config.training.global_batch_size


def _train_missing(grid: TrainingGrid, table: ResultTable, retry_failed: bool) -> None:
    missing = [name for name in grid.configs if _is_missing(grid, table, name, retry_failed)]
    total = sum(map(samples_of, grid.configs.values()))
    left = sum(samples_of(grid.configs[name]) for name in missing)
    with tqdm(
        total=total, initial=total - left, unit="sample", unit_scale=True, mininterval=0.5, file=sys.stderr
    ) as bar:
        for number, name in enumerate(missing, len(grid.configs) - len(missing) + 1):
            bar.set_description(f"run {number} of {len(grid.configs)}, {name}")
            end = bar.n + samples_of(grid.configs[name])
            outcome = _train(grid, name, bar)
            bar.update(end - bar.n)
            table.add(_row(name, samples_of(grid.configs[name]), outcome))


def _row(name: str, samples: int, outcome: Outcome) -> dict[str, Any]:
    kind = "" if outcome.status in ("ok", "failed") else f"{outcome.status}: "
    return {
        "run": name, "status": "ok" if outcome.status == "ok" else "failed", "reason": kind + outcome.reason,
        "samples": samples, "date": datetime.now().isoformat(" ", "seconds"),
        "runtime": str(timedelta(seconds=outcome.seconds)),
    }  # fmt: skip


def _is_missing(grid: TrainingGrid, table: ResultTable, name: str, retry_failed: bool) -> bool:
    row, config = table.find({"run": name}), grid.configs[name]
    if row is None:
        return True
    if row["status"] == "ok":  # plan_grid has compared the folder's configuration
        return config.training.steps not in checkpoint_steps(grid.run_folder(name) / "checkpoint")
    try:
        asked = tomllib.loads(read_text(_request(grid.folder, name)))
    except (OSError, ValueError):
        return True
    return retry_failed or bool(_differences(asked, config))


def _train(grid: TrainingGrid, name: str, bar: tqdm) -> Outcome:
    """Train one run to its end; a stop ends its processes, and another start resumes from its checkpoints."""
    path, folder = _request(grid.folder, name), grid.run_folder(name)
    replace_file(path, dump_config(grid.configs[name]))
    before, stop = bar.n, threading.Event()
    found: list[Outcome | BaseException] = []

    def work() -> None:
        try:
            found.append(run_processes(
                ["--job.config_file", str(path)], processes=grid.processes, timeout_s=math.inf,
                log=path.with_suffix(".log"), stop=stop,
            ))  # fmt: skip
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again in the thread that waits)
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            bar.update(max(before + samples_seen(folder) - bar.n, 0))
    finally:
        stop.set()
        thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _request(folder: Path, name: str) -> Path:
    return folder / "runs" / f"{name}.toml"


def _place(folder: Path, name: str) -> dict[str, str]:
    return {"job.dump_folder": str(_dump_folder(folder)), "job.name": name}


def _dump_folder(folder: Path) -> Path:
    return (folder / "runs").absolute()


def _refuse_other_places(config: JobConfig, folder: Path, name: str) -> None:
    for key, text in place_problems(config, folder, _dump_folder(folder), name):
        raise StudyError(f"{name}: {key}: {text}")


def _refuse_other_run(path: Path, config: JobConfig) -> None:
    folder = ResultsFolder(path, {})
    old = folder.read("config.toml", tomllib.loads)
    if old is None:
        if checkpoint_steps(path / "checkpoint"):
            folder.refuse("checkpoints without a config.toml")
    elif differences := _differences(old, config):
        folder.refuse(f"another run, {differences[0]}")


def _differences(old: dict[str, Any], config: JobConfig) -> list[str]:
    found = config_differences(old, config)
    interval = old.get("checkpoint", {}).get("interval")
    if interval != config.checkpoint.interval:
        found.append(f"checkpoint.interval: {interval} -> {config.checkpoint.interval}")
    return found
