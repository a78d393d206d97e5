"""Frame of the studies of a run: checkpoints, samples, the command line, a table that survives a kill, a summary.

A study is a grid of cells. Every finished cell is a row appended to results.csv, a failed one too (status and reason),
so that a study that is started again resumes.
"""

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from research.cells import Cell, Row, measure_cells, missing_cells
from research.result_table import ResultTable
from research.study_folder import STUDY_MARKS, claim, refuse_other_run
from research.timestep_errors import FixedSamples, fixed_samples
from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.config.job import JobConfig
from torchtitan.data import DATASETS
from torchtitan.data.base import Dataset, DatasetError, Split
from torchtitan.distributed.mesh import compute_device
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.pictures.markdown import inline, markdown_table
from torchtitan.pictures.number_text import counted
from torchtitan.programs import program
from torchtitan.weights.trained_model import TrainedModel, load_run, read_config

logger = logging.getLogger(__name__)


class CellsFailed(Exception):
    """All cells of a study failed; the message is one line."""


@dataclass
class StudyRun:
    """Run of a study, and the study's options.

    Attributes:
        folder: the run's folder.
        config: its configuration.
        steps: checkpoints to look at, rising.
        track: EMA track, "none" for the trained weights, "both" for these and every track.
        options: the study's own.
        device: where models are put.
        kept: a study's objects kept between cells, by name.
    """

    folder: Path
    config: JobConfig
    steps: list[int]
    track: str
    options: argparse.Namespace
    device: torch.device
    kept: dict[str, Any] = field(default_factory=dict, repr=False)
    _opened: tuple[tuple[int, str], TrainedModel] | None = field(default=None, repr=False)
    _datasets: dict[tuple[str, bool], Dataset] = field(default_factory=dict, repr=False)
    _samples: tuple[tuple[str, int, int], FixedSamples] | None = field(default=None, repr=False)

    @property
    def tracks(self) -> list[str]:
        """Tracks to measure: "none" and names of EMA tracks."""
        return ["none", *(track.name for track in self.config.ema.tracks)] if self.track == "both" else [self.track]

    @property
    def weights(self) -> str:
        """Measured weights, in words for tables and pictures."""
        if self.track == "both":
            return " and ".join(["trained weights", *(f"EMA weights ({track})" for track in self.tracks[1:])])
        return "trained weights" if self.track == "none" else f"EMA weights ({self.track})"

    @property
    def results(self) -> Path:
        """Folder of all studies of the run."""
        return self.folder / "studies"

    @property
    def description(self) -> str:
        """Description of the study, for the first line of the summary."""
        name, steps = inline(self.folder.resolve().name), ", ".join(map(str, self.steps))
        return f"Run {name}, {inline(self.weights)}, checkpoints at steps {steps}."

    def model(self, step: int, track: str | None = None) -> TrainedModel:
        """Model of a checkpoint, of the run's track or another; kept until the next one. Raises CheckpointError."""
        wanted = (step, track or self.track)
        if self._opened is None or self._opened[0] != wanted:
            self._opened = None  # frees the memory first
            self._opened = (wanted, load_run(self.folder, wanted[1], step, self.device))
        return self._opened[1]

    def dataset(self, split: Split, labels: bool = False) -> Dataset:
        """Split of the run's dataset, with labels even if the run leaves them aside. Raises DatasetError, StudyError."""
        refuse_encoding(self.folder, self.config)
        data = dataclasses.replace(self.config.data, labels=labels or self.config.data.labels)
        if (split, data.labels) not in self._datasets:
            self._datasets[split, data.labels] = DATASETS[data.name](data, split)
        return self._datasets[split, data.labels]

    def samples(self, split: Split, count: int, seed: int) -> FixedSamples:
        """Samples of one split by `fixed_samples`; kept until others are requested. Raises DatasetError."""
        wanted = (split, count, seed)
        if self._samples is None or self._samples[0] != wanted:
            self._samples = (wanted, fixed_samples(self.dataset(split), count, seed))
        return self._samples[1]


class Study(Protocol):
    """Study module, of a run or of anything else with `options`, `results` and `description`.

    Attributes:
        COLUMNS: of results.csv, `status`, `reason`, `date` and `runtime` among them.
        KEY: columns that a cell is known by.
        UNIT: what `cost` counts, in the singular.
    """

    COLUMNS: Any
    KEY: Any
    UNIT: str

    def cells(self, run: Any) -> list[Cell]:
        """Cells to measure, in order; each with the columns of KEY. Raises StudyError for bad options."""

    def cost(self, cell: Cell) -> int:
        """Cost of a cell, in UNIT."""

    def measure(self, run: Any, cell: Cell, advance: Advance) -> dict[str, Any]:
        """Measure one cell: further columns of its row. Raises one of CELL_FAILURES if there is no answer."""

    def report(self, run: Any, rows: list[Row], folder: Path) -> str:
        """Write the pictures of the rows of this grid, in its order; return the text of summary.md."""


def number(row: Row, name: str) -> float:
    """Number in a column; nan where it is empty."""
    return float(row[name]) if row[name] else float("nan")


# ---------------------------------------------------------------------- running


def add_run_options(parser: argparse.ArgumentParser, several_weights: bool = False) -> None:
    """Add the options of every study of a run; several_weights: the study takes `--weights both`, its default."""
    add = parser.add_argument
    add("run", metavar="RUN_FOLDER", type=Path, help="a run's folder, as outputs/digits")
    if several_weights:
        add("--weights", default="both", metavar="none|TRACK|both", help="none: the trained weights; "
            "TRACK: an EMA track; both: these and every track (default: both)")
    else:
        add("--weights", default="none", metavar="none|TRACK", help="none: the trained weights; else an EMA "
            "track (default: none)")
    add("--steps", type=int, nargs="+", metavar="STEP", help="checkpoints to look at (default: all)")
    add("--retry-failed", action="store_true", help="measure again the cells whose row says failed")
    add("--output", type=Path, help="folder of the results (default: RUN_FOLDER/studies/NAME)")


def config_and_steps(folder: Path) -> tuple[JobConfig, list[int]]:
    """Configuration of a run and the steps of its checkpoints, rising. Raises StudyError, ConfigError: there are none."""
    if not (folder / "config.toml").is_file():
        raise StudyError(f"{folder}: is no run folder (it has no config.toml)")
    config, checkpoints = read_config(folder / "config.toml"), run_checkpoints(folder)
    steps = sorted(checkpoint_steps(checkpoints))
    if not steps:
        raise StudyError(f"{checkpoints}: holds no checkpoint (train with checkpoint.enable = true)")
    return config, steps


def refuse_encoding(folder: Path, config: JobConfig) -> None:
    """Raise StudyError if a run encodes its images while it trains: a study reads them as they are stored."""
    if config.autoencoder.encode:
        advice = f"train on a store, which {program('extract_latents')} makes"
        raise StudyError(f"{folder}: encodes its images while it trains (autoencoder.encode), which this study cannot ({advice})")


def refuse_other_step(step: int, there: list[int], option: str) -> None:
    """Raise StudyError if a step is none of those with a checkpoint."""
    if step not in there:
        raise StudyError(f"{option}: {step} is no checkpoint of the run (there are: {', '.join(map(str, there))})")


def open_run(arguments: argparse.Namespace, several_weights: bool = False) -> StudyRun:
    """Open the run of the options; several_weights as in add_run_options.

    Raises:
        StudyError, ConfigError, CheckpointError: no such run, EMA track or checkpoint.
    """
    config, there = config_and_steps(arguments.run)
    tracks = ["none", *(track.name for track in config.ema.tracks)]
    if arguments.weights not in [*tracks, *(["both"] if several_weights else [])]:
        raise StudyError(f"--weights: {arguments.weights!r} is no EMA track (there are: {', '.join(tracks)})")
    steps = sorted(set(arguments.steps)) if arguments.steps else there
    for step in steps:
        refuse_other_step(step, there, "--steps")
    return StudyRun(arguments.run, config, steps, arguments.weights, arguments, compute_device())


def run_study(name: str, study: Study, run: Any) -> Path:
    """Measure the missing cells, then write pictures and summary.

    Returns:
        summary.md.

    Raises:
        StudyError: bad options, or a folder that cannot be written or holds results of another run.
        CellsFailed: every cell of a run's checkpoints failed; the summary is written.
        Busy: another process is at work in the folder.
    """
    folder = ResultsFolder(results_folder(name, run), STUDY_MARKS)
    folder.refuse_foreign()
    of_one_run = isinstance(run, StudyRun)  # else what is measured names its runs itself
    if of_one_run:
        refuse_other_run(folder, run.folder, run.config)
    cells = study.cells(run)
    with folder.held():
        if of_one_run:
            claim(folder.path, run.folder, run.config)
        table = ResultTable(folder.path / "results.csv", study.COLUMNS, study.KEY)
        table.begin()
        missing = missing_cells(table, cells, run.options.retry_failed)
        measure_cells(table, cells, missing, partial(study.measure, run), cost=study.cost, unit=study.UNIT)
        rows = [row for cell in cells if (row := table.find(cell))]
        reports = _reports_folder(folder.path, run.options)
        summary = reports / "summary.md"
        text = _header(name, run, rows, len(table) - len(rows)) + study.report(run, rows, reports) + _failures(rows, study.KEY)
        replace_file(summary, text)
    failed = [row for row in rows if row["status"] != "ok"]
    if failed and of_one_run:
        text = (
            f"{len(failed)} of {counted(len(rows), 'cell')} failed, the first with: {failed[0]['reason']}"
            f" ({summary} has all; --retry-failed measures them again)"
        )
        if len(failed) == len(rows):
            raise CellsFailed(text)
        logger.warning(text)
    return summary


def results_folder(name: str, run: StudyRun) -> Path:
    """Folder of a study's results on this run."""
    return run.options.output or run.results / name


def _reports_folder(results: Path, options: argparse.Namespace) -> Path:
    """Folder of pictures and summary: the published estimator's are apart from those of the correct one."""
    if getattr(options, "estimator", "correct") != "published":
        return results
    reports = results / "published"
    make_folder(reports)
    return reports


def require_at_least(options: argparse.Namespace, least: dict[str, int]) -> None:
    """Refuse options below their lower bounds. Raises StudyError."""
    for name, low in least.items():
        if getattr(options, name) < low:
            raise StudyError(f"--{name.replace('_', '-')}: must be at least {low}, is {getattr(options, name)}")


def require_seed(options: argparse.Namespace) -> None:
    """Refuse a `--seed` that is no unsigned number of 64 bits. Raises StudyError."""
    if not 0 <= options.seed < 2**64:
        raise StudyError(f"--seed: must be in 0..2^64 - 1, is {options.seed}")


def require_one_checkpoint(run: StudyRun) -> None:
    """Take the last checkpoint if none is given; refuse several. Raises StudyError."""
    if run.options.steps is None:
        run.steps = run.steps[-1:]
    if len(run.steps) != 1:
        raise StudyError(f"--steps: one checkpoint at a time, {len(run.steps)} are given")


def require_images(run: StudyRun) -> None:
    """Refuse `--split` and `--images` beyond the data. Raises StudyError."""
    options = run.options
    try:
        images = len(run.dataset(options.split))
    except DatasetError as error:
        raise StudyError(f"--split: {error}") from error
    if options.images > images:
        raise StudyError(f"--images: the {options.split} split has {images} (try --split or fewer)")


def checkpoint_name(run: StudyRun, step: int) -> str:
    """Name of a checkpoint's folder in tables."""
    return checkpoint_path(run.folder, step).name


def step_of(row: Row) -> int:
    """Training steps of a row's checkpoint."""
    return int(row["model"].removeprefix("step-"))


def run_seconds(row: Row) -> float:
    """Seconds of a row's run time, written h:mm:ss.µs (a long one: `1 day, 0:00:00`)."""
    days, _, clock = row["runtime"].rpartition(", ")
    hours, minutes, seconds = clock.split(":")
    return 86400 * int(days.split()[0] if days else 0) + 3600 * int(hours) + 60 * int(minutes) + float(seconds)


def _header(name: str, run: StudyRun, rows: list[Row], others: int) -> str:
    failed = sum(row["status"] != "ok" for row in rows)
    not_shown = f", which has {others} more, of other options" if others else ""
    return (
        f"# {name}\n\n{run.description} {counted(len(rows), 'cell')}, {failed} failed; every cell is a row of "
        f"results.csv{not_shown}.\n\n"
    )


def _failures(rows: list[Row], key: Sequence[str]) -> str:
    """Failed cells by the columns that distinguish the study's cells."""
    failed = [row for row in rows if row["status"] != "ok"]
    if not failed:
        return ""
    names = [name for name in key if len({row[name] for row in rows}) > 1] or list(key[:1])
    described = ([*(row[name] for name in names), row["reason"]] for row in failed)
    return "## Failed cells\n\n" + markdown_table([*names, "reason"], described)
