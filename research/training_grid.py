"""Grid of runs, trained in separate processes; finished runs are not trained again.

    <study folder>/training.csv          a row per run that has ended, failed ones too; of two rows, the later counts
                   runs/<name>.toml      configuration of a run
                   runs/<name>.log       output of its processes
                   runs/<name>/          its folder, with every checkpoint, or none where the row has all that is to be known
"""

import json
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.branch_training import remove_checkpoints
from research.cells import Cell, measure_cells
from research.result_table import ResultTable
from research.study_folder import STUDY_MARKS
from torchtitan.checkpoint.checkpointer import CheckpointError, checkpoint_path, checkpoint_steps, read_state
from torchtitan.config.job import ConfigError, JobConfig, load_config
from torchtitan.config.places import place_problems
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.experiments.training import train
from torchtitan.files.durable import make_folder
from torchtitan.files.regular import read_toml
from torchtitan.settings.record import config_differences, dump_config
from torchtitan.training.schedules import largest_growth

TABLE = "training.csv"
COLUMNS = ("run", "status", "reason", "samples", "date", "runtime")


@dataclass(frozen=True)
class GridRun:
    """Run of a grid.

    Attributes:
        name: of the run and of its folder.
        overrides: dotted key -> value, over the grid's base.
    """

    name: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class TrainingGrid:
    """Grid of runs that differ from one base.

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


@dataclass(frozen=True)
class RunRecord:
    """Record of a grid's runs in its table, where the runs are not measured by their checkpoints.

    Attributes:
        columns: of each run's row, besides `COLUMNS`.
        of_run: name of a run that has ended -> their values. Raises TrainingFailed where there are none.
    """

    columns: tuple[str, ...]
    of_run: Callable[[str], dict[str, Any]]


def plan_grid(base: JobConfig, runs: Sequence[GridRun], folder: Path, processes: int) -> TrainingGrid:
    """Plan a grid: check every run; nothing is written.

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
    """Configure the base with other values of some keys, checked as any configuration.

    Args:
        base: resolved.
        overrides: dotted key -> value, or its text as a command line has it.
        processes: of the run.
        name: prefix of the reason if it is refused.

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


def train_grid(grid: TrainingGrid, retry_failed: bool = False, record: RunRecord | None = None) -> dict[str, str]:
    """Train the missing runs, each from its newest checkpoint.

    A run is trained when its last checkpoint is in its folder, or its row in the table of a grid with a record, whose
    checkpoints are removed then; a failed one counts as trained while its configuration is unchanged.

    Args:
        grid: as `plan_grid` returns it.
        retry_failed: train failed runs again.
        record: of the runs, if their rows replace their checkpoints.

    Returns:
        name of a run -> reason, of the failed ones.

    Raises:
        Busy: another process is at work in the folder.
        StudyError: it cannot be written.
        KeyboardInterrupt: a request to stop; the interrupted runs resume from their newest checkpoints.
    """
    with ResultsFolder(grid.folder, STUDY_MARKS).held():
        make_folder(grid.folder / "runs")
        table = ResultTable(grid.folder / TABLE, (*COLUMNS, *(record.columns if record else ())), ("run",))
        table.begin()
        cells: list[Cell] = [{"run": name, "samples": samples_of(config)} for name, config in grid.configs.items()]
        missing = [cell for cell in cells if _is_missing(grid, table, cell["run"], retry_failed, record is not None)]

        def train_cell(cell: Cell, advance: Advance) -> dict[str, Any]:
            request = _request(grid.folder, cell["run"])
            log = request.with_suffix(".log")
            train(grid.configs[cell["run"]], grid.processes, request, log, advance)
            return record.of_run(cell["run"]) if record else {}

        def recorded(cell: Cell) -> None:
            if record:
                remove_checkpoints(grid.run_folder(cell["run"]) / "checkpoint")

        measure_cells(
            table, cells, missing, train_cell, cost=lambda cell: cell["samples"], unit="sample", recorded=recorded,
            name=lambda cell: cell["run"],
        )  # fmt: skip
    rows = {name: table.find({"run": name}) for name in grid.configs}
    return {name: row["reason"] for name, row in rows.items() if row and row["status"] != "ok"}


def samples_of(config: JobConfig) -> int:
    """Number of images that a run sees."""
    return config.training.steps * config.training.global_batch_size


def _is_missing(grid: TrainingGrid, table: ResultTable, name: str, retry_failed: bool, on_record: bool) -> bool:
    row, config = table.find({"run": name}), grid.configs[name]
    if row is None:
        return True
    if row["status"] == "ok" and not on_record:  # plan_grid has compared the folder's configuration
        return not _has_last_checkpoint(grid.run_folder(name) / "checkpoint", config)
    try:
        asked = read_toml(_request(grid.folder, name))
    except (OSError, ValueError):
        return True
    return (retry_failed and row["status"] != "ok") or bool(_differences(asked, config))


def _has_last_checkpoint(checkpoints: Path, config: JobConfig) -> bool:
    """Check whether a run's last checkpoint is there; a step of a batch that has grown counts as several."""
    steps = checkpoint_steps(checkpoints)
    if not steps or largest_growth(config) == 1:
        return config.training.steps in steps
    try:
        return read_state(checkpoint_path(checkpoints, max(steps)))["progress"] >= config.training.steps
    except (CheckpointError, KeyError):
        return False


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
        if checkpoint_steps(path / "checkpoint") and not config.job.allow_config_change:  # which a branch is allowed
            folder.refuse("checkpoints without a config.toml")
    elif differences := _differences(old, config):
        folder.refuse(f"another run, {differences[0]}")


def _differences(old: dict[str, Any], config: JobConfig) -> list[str]:
    found = config_differences(old, config)
    interval = old.get("checkpoint", {}).get("interval")
    if interval != config.checkpoint.interval:
        found.append(f"checkpoint.interval: {interval} -> {config.checkpoint.interval}")
    return found
