"""Critical batch size of a checkpoint, measured by branches of the training at several batch sizes.

All branches train on as many samples; then their losses on the same held-out (image, timestep, noise) triples are
compared. Every finished branch is a row of results.csv, so that a measurement that is started again resumes.
"""

import argparse
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor

from research.branch_training import (
    BRANCH_MARKS,
    TRACK,
    begin_branch,
    branch_config,
    has_phases,
    remove_checkpoints,
    run_lr,
    write_config,
    write_start,
)
from research.cells import Cell, Row, measure_cells, missing_cells
from research.equal_samples import BatchPlan, plan_batches
from research.frame import config_and_steps, refuse_encoding, refuse_other_step, require_at_least
from research.result_table import ResultTable
from torchtitan.checkpoint.checkpointer import (
    checkpoint_path,
    checkpoint_steps,
    newest_good,
    read_state,
    verify,
)
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.config.job import ConfigError, JobConfig
from torchtitan.data import DATASETS, dataset_info
from torchtitan.data.base import Dataset
from torchtitan.distributed.mesh import compute_device
from torchtitan.evaluation.validation import validation_loss
from torchtitan.experiments.engine import Advance
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.experiments.training import Diverged, train
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.regular import read_regular
from torchtitan.files.remote_path import AnyPath
from torchtitan.runs.folder import RunFolder
from torchtitan.settings.schema import quoted
from torchtitan.training.data_loading import validation_batches
from torchtitan.weights.trained_model import load_run

KEY = ("batch_size", "seed")
_LEAST_RATE = 0.01  # of the peak
START = "start"  # instead of a seed: the checkpoint itself, before any branch


@dataclass
class Measurement:
    """Checked settings of a critical-batch measurement.

    Attributes:
        run: the run's folder.
        config: its configuration.
        step: of the checkpoint.
        plans: of each batch size, rising.
        samples: of every branch.
        seeds: branches of each batch size.
        folder: of the results.
        options: other options.
    """

    run: Path
    config: JobConfig
    step: int
    plans: list[BatchPlan]
    samples: int
    seeds: int
    folder: Path
    options: argparse.Namespace

    @property
    def results(self) -> ResultsFolder:
        return ResultsFolder(self.folder, {"settings.json": b"{"}, owner="a critical-batch measurement's")

    @property
    def checkpoint(self) -> AnyPath:
        return checkpoint_path(run_checkpoints(self.run), self.step)

    @property
    def batch_sizes(self) -> list[int]:
        return [plan.batch_size for plan in self.plans]

    def branch(self, plan: BatchPlan, seed: int) -> Path:
        """Folder of a branch."""
        return self.folder / f"batch-{plan.batch_size}-seed-{seed}"

    def settings(self) -> dict:
        """Settings that all rows of a folder must share."""
        manifest = (self.checkpoint / "manifest.json").read_bytes()
        return {
            "samples": self.samples,
            "lr at factor 1": self.options.lr,
            "lr_rule": self.options.lr_rule,
            "held_out": self.options.held_out,
            "processes": self.options.nproc,
            "checkpoint": hashlib.sha256(manifest).hexdigest()[:16],
            **({"phase": "throughout"} if has_phases(self.config) else {}),  # earlier versions ended them in the branches, too
        }


@dataclass(frozen=True)
class HeldOut:
    """Held-out measurement of all branches: each image `rounds` times, with other timesteps and noise each time."""

    dataset: Dataset
    images: int
    rounds: int

    @classmethod
    def of(cls, asked: Measurement) -> "HeldOut":
        """Images of the run's validation split, as often as necessary."""
        dataset = DATASETS[asked.config.data.name](asked.config.data, "validation")
        images = min(asked.options.held_out, len(dataset))
        return cls(dataset, images, -(-asked.options.held_out // images))

    @property
    def triples(self) -> int:
        return self.images * self.rounds

    def batches(self, config: JobConfig, batch_size: int = 256) -> Iterator[dict[str, Tensor]]:
        """Batches of triples for `validation_loss`."""
        info = dataset_info(config.data)
        for number in range(self.rounds):
            for batch in validation_batches(self.dataset, info, self.images, batch_size, 0, 1):
                yield batch | {"indices": batch["indices"] + number * self.images}


def open_measurement(options: argparse.Namespace) -> Measurement:
    """Open a measurement: check its options; nothing is written.

    Raises:
        StudyError, ConfigError: it cannot be made.
    """
    run = options.run
    config, there = config_and_steps(run)
    require_at_least(options, {"seeds": 1, "held_out": 1, "nproc": 1})
    if config.lora.enable and not config.checkpoint.initial_weights:
        text = f"{run}: trains adapters of a network that each branch's seed would draw anew"
        raise StudyError(f"{text} (train it with checkpoint.initial_weights)")
    refuse_encoding(run, config)
    if config.alignment.teacher == "self":
        raise StudyError(f"{run}: aligns with its own average (alignment.teacher = self), which branches have not")
    if not 0 < options.tolerance < 1:
        raise StudyError(f"--tolerance: must be between 0 and 1, is {options.tolerance:g}")
    if len(set(options.factors)) < 2:
        raise StudyError("--factors: there is nothing to compare with one batch size (give two or more)")
    step = _choose_step(run, options.step, there)
    options.lr = options.lr if options.lr is not None else _rate_of_run(run, config, step)
    if not options.lr > 0:
        raise StudyError(f"--lr: must be above 0, is {options.lr:g}")
    plans, samples = plan_batches(config, options.factors, options.lr_rule, options.lr, options.samples, options.nproc)
    folder = options.output or run / "critical_batch" / checkpoint_path(run, step).name
    asked = Measurement(run, config, step, plans, samples, options.seeds, folder.resolve(), options)
    asked.results.refuse_foreign()
    with tempfile.TemporaryDirectory() as nowhere:  # what cannot run is refused before anything is trained
        for plan in plans:
            path = Path(nowhere) / f"batch-{plan.batch_size}.toml"
            try:
                write_config(_config(asked, plan, 0), path, options.nproc)
            except ConfigError as error:
                raise StudyError(f"{run}, at batch {plan.batch_size}: {error.problems[0].removeprefix(f'{path}: ')}") from error
    return asked


def _rate_of_run(run: Path, config: JobConfig, step: int) -> float:
    """Learning rate of the run at a step. Raises StudyError: branches would learn next to nothing at it."""

    def rate(at: int) -> float:
        return run_lr(config, _progress(run, at))

    least = _LEAST_RATE * config.optimizer.lr
    if rate(step) < least:
        others = [at for at in checkpoint_steps(run_checkpoints(run)) if rate(at) >= least]
        steps = f"--step {' or '.join(map(str, others))}, or " if others else ""
        raise StudyError(
            f"--lr: the run's rate is {rate(step):.2g} at step {step}, below {_LEAST_RATE:.0%} of its peak, at which branches"
            f" learn next to nothing (give {steps}--lr)"
        )
    return rate(step)


def _choose_step(run: Path, step: int | None, there: list[int]) -> int:
    checkpoints = run_checkpoints(run)
    if step is None:
        newest = newest_good(checkpoints)[0]
        if newest is None:
            raise StudyError(f"{checkpoints}: holds no good checkpoint")
        return newest
    refuse_other_step(step, there, "--step")
    if problem := verify(checkpoint_path(checkpoints, step)):
        raise StudyError(f"--step: {step}: {problem}")
    return step


def _config(asked: Measurement, plan: BatchPlan, seed: int) -> JobConfig:
    progress = _progress(asked.run, asked.step)
    return branch_config(asked.config, plan, seed, asked.options.nproc, asked.branch(plan, seed), progress)


# ---------------------------------------------------------------------- measuring


def run_measurement(asked: Measurement) -> list[Row]:
    """Run a measurement: train and measure the missing branches.

    Returns:
        the rows of this measurement: the start, then by batch size and seed.

    Raises:
        StudyError: the folder holds another measurement, or cannot be written.
        Busy: another process is at work in it.
        KeyboardInterrupt: asked to stop; the same command resumes.
    """
    with asked.results.held():
        _hold_to_settings(asked)
        table = ResultTable(asked.folder / "results.csv", _columns(asked.config), KEY)
        held_out = HeldOut.of(asked)
        plans = {plan.batch_size: plan for plan in asked.plans}
        # Whole comparisons first.
        cells = [_cell(asked, plan, seed) for seed in range(asked.seeds) for plan in asked.plans]
        missing = missing_cells(table, cells, asked.options.retry_failed)
        _measure_start(asked, table, held_out)
        if missing:
            start = write_start(asked.checkpoint, asked.folder / START)

            def measure(cell: Cell, advance: Advance) -> dict[str, float]:
                return _measure_branch(asked, held_out, start, plans[cell["batch_size"]], cell["seed"], advance)

            def recorded(cell: Cell) -> None:
                remove_checkpoints(asked.branch(plans[cell["batch_size"]], cell["seed"]) / "checkpoint")

            measure_cells(
                table, cells, missing, measure, cost=lambda cell: asked.samples, unit="sample", recorded=recorded,
                name=lambda cell: f"batch {cell['batch_size']}, seed {cell['seed']}",
            )  # fmt: skip
            remove_checkpoints(asked.folder / START)
    rows = [table.find(_start_cell(asked))]
    rows += [table.find(_cell(asked, plan, seed)) for plan in asked.plans for seed in range(asked.seeds)]
    return [row for row in rows if row]


def _cell(asked: Measurement, plan: BatchPlan, seed: int) -> Cell:
    return dataclasses.asdict(plan) | {"seed": seed, "samples": asked.samples}


def _start_cell(asked: Measurement) -> Cell:
    return {"batch_size": asked.config.training.global_batch_size, "seed": START}


def _progress(run: Path, step: int) -> int:
    """Progress in steps of the run's first batch size up to a checkpoint; a damaged one is refused elsewhere."""
    try:
        return read_state(checkpoint_path(run_checkpoints(run), step)).get("progress", step)
    except (OSError, ValueError):
        return step


def _hold_to_settings(asked: Measurement) -> None:
    mine, there = asked.settings(), asked.results.read("settings.json", lambda text: dict(json.loads(text)))
    if there is None:
        replace_file(asked.folder / "settings.json", json.dumps(mine, indent=1) + "\n")
        return
    differing = [name for name, value in mine.items() if there.get(name) != value]
    if differing:
        changes = "; ".join(f"{name}: {quoted(there.get(name))} -> {quoted(mine[name])}" for name in differing)
        asked.results.refuse(f"a measurement with other settings, {changes}")


def _columns(config: JobConfig) -> list[str]:
    columns = [*KEY, "factor", "local_batch_size", "lr", "steps", "samples", "status", "reason", "date", "runtime"]
    names = ["loss", "loss_stderr", *(f"loss_by_bin/{k}" for k in range(config.metrics.loss_bins))]
    return [*columns, *names, *(f"ema/{name}" for name in names)]


def _measure_start(asked: Measurement, table: ResultTable, held_out: HeldOut) -> None:
    """Measure the checkpoint's own losses; as average, the best of the run's tracks or the trained weights."""
    cell = _start_cell(asked)
    if table.find(cell):
        return
    tracks = ("none", *(track.name for track in asked.config.ema.tracks))
    losses = [_losses(asked, asked.run, track, asked.step, held_out) for track in tracks]
    best = min(losses, key=lambda found: found["loss"])
    row = cell | {"status": "ok", "steps": 0, "samples": 0, "date": datetime.now().isoformat(" ", "seconds")}
    table.add(row | losses[0] | {f"ema/{name}": value for name, value in best.items()})


def _measure_branch(
    asked: Measurement, held_out: HeldOut, start: Path, plan: BatchPlan, seed: int, advance: Advance
) -> dict[str, float]:
    branch, config = asked.branch(plan, seed), _config(asked, plan, seed)
    ResultsFolder(branch, BRANCH_MARKS).refuse_foreign()
    make_folder(branch)
    if not RunFolder(config).is_finished() or not checkpoint_steps(branch / "checkpoint"):
        (branch / "summary.json").unlink(missing_ok=True)  # what an earlier attempt left must not speak for this one
        _train(config, asked.options.nproc, branch, advance, start)
    found = _losses(asked, branch, "none", plan.steps, held_out)
    averaged = _losses(asked, branch, TRACK.name, plan.steps, held_out)
    return found | {f"ema/{name}": value for name, value in averaged.items()}


def _train(config: JobConfig, processes: int, branch: Path, advance: Advance, start: Path) -> None:
    begin_branch(start, Path(config.job.dump_folder) / config.job.name)
    train(config, processes, branch / "branch.toml", branch / "train.log", advance)
    if skipped := json.loads(read_regular(branch / "summary.json")).get("skipped_steps"):
        raise Diverged(f"the gradient norm is not finite: {skipped} steps were skipped")


def _losses(asked: Measurement, run: Path, track: str, step: int, held_out: HeldOut) -> dict[str, float]:
    device = compute_device()
    trained = load_run(run, track, step, device)
    # Triples and bins are those of the run, whatever the branch's seed: the draw takes its own.
    objective, bins = trained.objective, asked.config.metrics.loss_bins
    edges = objective.timestep_sampler.density.quantile(torch.arange(1, bins, dtype=torch.float64) / bins)
    try:
        found = validation_loss(
            trained.model, objective, held_out.batches(asked.config),
            count=held_out.triples, seed=asked.config.debug.seed, bin_edges=edges.to(torch.float32).to(device),
            param_dtype=asked.config.training.mixed_precision_param, device=device, sharded=False,
        )  # fmt: skip
    finally:
        del trained
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next branch is another process
    return {name: value for name, value in found.items() if not name.startswith("loss_stderr_by_bin")}
