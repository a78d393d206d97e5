"""The critical batch size of a checkpoint, measured by branches of the training at several batch sizes.

All branches train on as many samples; then their losses on the same held-out (image, timestep, noise) triples are
compared. Every finished branch is a row of results.csv, so that a test that is started again goes on where it was.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from data import DATASETS
from data.base import Dataset, DatasetError
from studies.branch_training import (
    BRANCH_MARKS,
    TRACK,
    BatchPlan,
    BranchFailed,
    Diverged,
    begin_branch,
    branch_config,
    plan_batches,
    remove_checkpoints,
    run_lr,
    train_branch,
    write_config,
    write_start,
)
from torchtitan.checkpoint.checkpointer import (
    CheckpointError,
    checkpoint_path,
    checkpoint_steps,
    newest_good,
    read_state,
    verify,
)
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.config.job import JobConfig
from torchtitan.distributed.mesh import compute_device
from torchtitan.errors import unwrapped
from torchtitan.evaluation.validation import validation_loss
from torchtitan.experiments.cells import Row
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.experiments.record import ResultTable
from torchtitan.files.durable import make_folder, replace_file
from torchtitan.files.remote_path import AnyPath
from torchtitan.runs.folder import RunFolder
from torchtitan.runs.trained_model import WeightsError, load_run, read_config
from torchtitan.settings.schema import quoted
from torchtitan.training.data_loading import validation_batches

KEY = ("batch_size", "seed")
START = "start"  # in place of a seed: the checkpoint itself, before any branch
FAILURES = (BranchFailed, CheckpointError, WeightsError, DatasetError, torch.OutOfMemoryError)


@dataclass
class BranchTest:
    """A test as it was asked for, checked.

    Attributes:
        run: the run's folder.
        config: its configuration.
        step: of the checkpoint.
        plans: of each batch size, rising.
        samples: of every branch.
        seeds: branches of each batch size.
        folder: of the results.
        options: what else was asked for.
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
        """What all rows of a folder must share."""
        manifest = (self.checkpoint / "manifest.json").read_bytes()
        return {
            "samples": self.samples,
            "lr at factor 1": self.options.lr,
            "lr_rule": self.options.lr_rule,
            "schedule": self.options.schedule,
            "held_out": self.options.held_out,
            "processes": self.options.nproc,
            "checkpoint": hashlib.sha256(manifest).hexdigest()[:16],
        }


@dataclass(frozen=True)
class HeldOut:
    """What all branches are measured on: each image `rounds` times, with other timesteps and noise each time."""

    dataset: Dataset
    images: int
    rounds: int

    @property
    def triples(self) -> int:
        return self.images * self.rounds

    def batches(self, config: JobConfig, batch_size: int = 256) -> Iterator[dict[str, Tensor]]:
        """Batches of triples, as `validation_loss` takes them."""
        info = DATASETS[config.data.name].info(config.data)
        for number in range(self.rounds):
            for batch in validation_batches(self.dataset, info, self.images, batch_size, 0, 1):
                yield batch | {"indices": batch["indices"] + number * self.images}


def open_test(options: argparse.Namespace) -> BranchTest:
    """Check what was asked for; nothing is written.

    Raises:
        StudyError, ConfigError: it cannot be tested.
    """
    run = options.run
    if not (run / "config.toml").is_file():
        raise StudyError(f"{run}: is no run folder (it has no config.toml)")
    for name in ("seeds", "held_out", "nproc"):
        if getattr(options, name) < 1:
            raise StudyError(f"--{name.replace('_', '-')}: must be at least 1, is {getattr(options, name)}")
    if not 0 < options.tolerance < 1:
        raise StudyError(f"--tolerance: must be between 0 and 1, is {options.tolerance:g}")
    if len(set(options.factors)) < 2:
        raise StudyError("--factors: there is nothing to compare with one batch size (give two or more)")
    config = read_config(run / "config.toml")
    step = _choose_step(run, options.step)
    options.lr = options.lr if options.lr is not None else run_lr(config, _progress(run, step))
    if not options.lr > 0:
        raise StudyError(f"--lr: the run's rate is {options.lr:g} at step {step} (choose another step, or give --lr)")
    plans, samples = plan_batches(config, options.factors, options.lr_rule, options.lr, options.samples, options.nproc)
    folder = options.output or run / "critical_batch" / checkpoint_path(run, step).name
    test = BranchTest(run, config, step, plans, samples, options.seeds, folder.resolve(), options)
    test.results.refuse_foreign()
    with tempfile.TemporaryDirectory() as nowhere:  # what cannot run is refused before anything is trained
        for plan in plans:
            write_config(_config(test, plan, 0), Path(nowhere) / f"batch-{plan.batch_size}.toml", options.nproc)
    return test


def _choose_step(run: Path, step: int | None) -> int:
    checkpoints = run_checkpoints(run)
    there = sorted(checkpoint_steps(checkpoints))
    if not there:
        raise StudyError(f"{checkpoints}: holds no checkpoint (train with checkpoint.enable = true)")
    if step is None:
        step = newest_good(checkpoints)[0]
        if step is None:
            raise StudyError(f"{checkpoints}: holds no good checkpoint")
    elif step not in there:
        raise StudyError(f"--step: {step} is no checkpoint of the run (there are: {', '.join(map(str, there))})")
    elif problem := verify(checkpoint_path(checkpoints, step)):
        raise StudyError(f"--step: {step}: {problem}")
    return step


def _config(test: BranchTest, plan: BatchPlan, seed: int) -> JobConfig:
    return branch_config(
        test.config, plan, seed, test.options.schedule, test.options.nproc, test.branch(plan, seed)
    )


# ---------------------------------------------------------------------- measuring


def run_test(test: BranchTest) -> list[Row]:
    """Train and measure the branches that are missing.

    Returns:
        the rows of this test: the start, then by batch size and seed.

    Raises:
        StudyError: the folder holds another test, or cannot be written.
        Busy: another process is at work in it.
        KeyboardInterrupt: asked to stop; the same test goes on from here.
    """
    with test.results.held():
        return _run_locked(test)


def _run_locked(test: BranchTest) -> list[Row]:
    _hold_to_settings(test)
    dataset = DATASETS[test.config.data.name](test.config.data, "validation")
    images = min(test.options.held_out, len(dataset))
    held_out = HeldOut(dataset, images, -(-test.options.held_out // images))
    table = ResultTable(test.folder / "results.csv", _columns(test.config), KEY)
    cells = [(plan, seed) for seed in range(test.seeds) for plan in test.plans]  # whole comparisons first
    missing = [cell for cell in cells if _is_missing(table, *cell, test.options.retry_failed)]
    _measure_start(test, table, held_out)
    if missing:
        start = write_start(test.checkpoint, test.folder / START)
        total, left = (test.samples * len(some) for some in (cells, missing))
        # The time that is left is estimated from this process's own work: `initial` does not count in the rate.
        progress = {"total": total, "initial": total - left, "unit": "sample", "unit_scale": True, "file": sys.stderr}
        with tqdm(**progress, mininterval=0.5, dynamic_ncols=True) as bar:
            for plan, seed in missing:
                bar.set_description(f"batch {plan.batch_size}, seed {seed}")
                _run_branch(test, table, held_out, start, plan, seed, bar)
        if not test.options.keep_checkpoints:
            remove_checkpoints(test.folder / START)
    rows = [table.find({"batch_size": test.config.training.global_batch_size, "seed": START})]
    for plan in test.plans:
        rows += [table.find({"batch_size": plan.batch_size, "seed": seed}) for seed in range(test.seeds)]
    return [row for row in rows if row]


def _progress(run: Path, step: int) -> int:
    """Steps of the run's first batch size up to a checkpoint; one that is damaged is refused elsewhere."""
    try:
        return read_state(checkpoint_path(run_checkpoints(run), step)).get("progress", step)
    except (OSError, ValueError):
        return step


def _hold_to_settings(test: BranchTest) -> None:
    asked, there = test.settings(), test.results.read("settings.json", lambda text: dict(json.loads(text)))
    if there is None:
        replace_file(test.folder / "settings.json", json.dumps(asked, indent=1) + "\n")
        return
    differing = [name for name, value in asked.items() if there.get(name) != value]
    if differing:
        changes = "; ".join(f"{name}: {quoted(there.get(name))} -> {quoted(asked[name])}" for name in differing)
        test.results.refuse(f"a measurement with other settings, {changes}")


def _columns(config: JobConfig) -> list[str]:
    columns = [*KEY, "factor", "local_batch_size", "lr", "steps", "samples", "status", "reason", "date", "runtime"]
    names = ["loss", "loss_stderr", *(f"loss_by_bin/{k}" for k in range(config.metrics.loss_bins))]
    return [*columns, *names, *(f"ema/{name}" for name in names)]


def _is_missing(table: ResultTable, plan: BatchPlan, seed: int, retry_failed: bool) -> bool:
    row = table.find({"batch_size": plan.batch_size, "seed": seed})
    return row is None or (retry_failed and row["status"] != "ok")


def _measure_start(test: BranchTest, table: ResultTable, held_out: HeldOut) -> None:
    """The checkpoint's own losses; as average, the best of the run's tracks or the trained weights."""
    cell = {"batch_size": test.config.training.global_batch_size, "seed": START}
    if table.find(cell):
        return
    tracks = ("none", *(track.name for track in test.config.ema.tracks))
    losses = [_losses(test, test.run, track, test.step, held_out) for track in tracks]
    best = min(losses, key=lambda found: found["loss"])
    row = cell | {"status": "ok", "steps": 0, "samples": 0, "date": _now()}
    table.add(row | losses[0] | {f"ema/{name}": value for name, value in best.items()})


def _run_branch(
    test: BranchTest, table: ResultTable, held_out: HeldOut, start: Path, plan: BatchPlan, seed: int, bar: tqdm,
) -> None:  # fmt: skip
    begun, before = time.perf_counter(), bar.n
    row = {**dataclasses.asdict(plan), "seed": seed, "samples": test.samples, "status": "ok", "date": _now()}
    try:
        row |= _measure_branch(test, held_out, start, plan, seed, lambda seen: bar.update(before + seen - bar.n))
    except FAILURES as error:
        status = "diverged" if isinstance(error, Diverged) else "failed"
        row |= {"status": status, "reason": unwrapped(error)[:300]}
    bar.update(before + test.samples - bar.n)
    table.add(row | {"runtime": str(timedelta(seconds=time.perf_counter() - begun))})
    if row["status"] == "ok" and not test.options.keep_checkpoints:
        remove_checkpoints(test.branch(plan, seed) / "checkpoint")


def _measure_branch(
    test: BranchTest, held_out: HeldOut, start: Path, plan: BatchPlan, seed: int,
    progress: Callable[[int], None],
) -> dict[str, float]:  # fmt: skip
    branch = test.branch(plan, seed)
    ResultsFolder(branch, BRANCH_MARKS).refuse_foreign()
    make_folder(branch)
    config = _config(test, plan, seed)
    write_config(config, branch / "branch.toml", test.options.nproc)
    if not RunFolder(config).is_finished() or not checkpoint_steps(branch / "checkpoint"):
        (branch / "summary.json").unlink(missing_ok=True)  # what an earlier attempt left must not speak for this one
        begin_branch(start, branch)
        train_branch(branch, test.options.nproc, progress)
    found = _losses(test, branch, "none", plan.steps, held_out)
    averaged = _losses(test, branch, TRACK.name, plan.steps, held_out)
    return found | {f"ema/{name}": value for name, value in averaged.items()}


def _losses(test: BranchTest, run: Path, track: str, step: int, held_out: HeldOut) -> dict[str, float]:
    device = compute_device()
    trained = load_run(run, track, step, device)
    # Triples and bins are those of the run, whatever the branch's seed.
    objective = type(trained.objective)(test.config.objective, test.config.debug.seed)
    bins = test.config.metrics.loss_bins
    edges = objective.timestep_sampler.density.quantile(torch.arange(1, bins, dtype=torch.float64) / bins)
    try:
        found = validation_loss(
            trained.model, objective, held_out.batches(test.config),
            count=held_out.triples, seed=test.config.debug.seed, bin_edges=edges.to(torch.float32).to(device),
            param_dtype=test.config.training.mixed_precision_param, device=device, sharded=False,
        )  # fmt: skip
    finally:
        del trained
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the next branch is another process
    return {name: value for name, value in found.items() if not name.startswith("loss_stderr_by_bin")}


def _now() -> str:
    return datetime.now().isoformat(" ", "seconds")
