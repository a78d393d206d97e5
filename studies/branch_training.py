"""Branches of a training: from one checkpoint, runs of their own with another batch size, learning rate and seed.

A branch is an ordinary run whose folder begins with a checkpoint of step 0: weights and optimizer state are those of
the run, the counters begin anew, and so does its one average of the weights.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torchtitan.checkpoint.checkpointer import Checkpointer, checkpoint_path, checkpoint_steps
from torchtitan.checkpoint.comparison import open_checkpoint
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.reading import read_state
from torchtitan.checkpoint.store import store_of
from torchtitan.config.job import JobConfig, dump_config, load_config
from torchtitan.distributed.collectives import StopRequest
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.experiments.cells import StudyError
from torchtitan.files.durable import make_folder, replace_file, sync
from torchtitan.files.regular import open_regular, read_regular
from torchtitan.files.remote_path import AnyPath
from torchtitan.processes import parent_death
from torchtitan.training.config import EMAConfig, EMATrackConfig, LRSchedulerConfig
from torchtitan.training.lr_scheduler import lr_factor
from torchtitan.training.metrics import METRICS_FILE

# Its profile is relative to the branch, so at equal samples it averages over the same samples at any batch size, and
# its first update forgets the weights that the branch began with.
TRACK = EMATrackConfig(name="branch", kind="power", sigma_rel=0.1)

LR_RULES: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "linear": float, "none": lambda factor: 1.0}
SCHEDULES = ("constant", "linear", "cosine")

# The file by which a branch's folder is known.
BRANCH_MARKS = {"branch.toml": b"# The resolved configuration of this run"}

_TRAIN = Path(__file__).resolve().parents[1] / "train.py"
_POLL_SECONDS = 0.2
_SAVES = 4  # checkpoints of a branch, to go on from after a stop
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class BranchFailed(Exception):
    """A branch that did not finish; the message is one line."""


class Diverged(BranchFailed):
    """A branch whose gradients became infinite or no numbers."""


@dataclass(frozen=True)
class BatchPlan:
    """How one batch size is trained.

    Attributes:
        factor: times the run's global batch size.
        batch_size: global.
        local_batch_size: images per rank in one forward.
        steps: of each branch.
        lr: learning rate, at its peak.
    """

    factor: float
    batch_size: int
    local_batch_size: int
    steps: int
    lr: float


def run_lr(config: JobConfig, progress: int) -> float:
    """Learning rate of a run with the batch size that it began with, after so many steps of that size."""
    return config.optimizer.lr * lr_factor(config.lr_scheduler, max(progress, 1), config.training.steps)


def plan_batches(
    config: JobConfig, factors: list[float], lr_rule: str, lr: float, samples: int | None, processes: int
) -> tuple[list[BatchPlan], int]:
    """Plan the branches, batch sizes rising.

    The microbatch of the run is kept and accumulation grows, so that only the batch size differs.

    Args:
        config: the run's.
        factors: times its global batch size.
        lr_rule: key of LR_RULES.
        lr: learning rate at factor 1.
        samples: of every branch; None for 32 steps of the largest batch, or the next number that all batches divide.
        processes: of each branch.

    Returns:
        the plans, and the samples of every branch.

    Raises:
        StudyError: a batch size or the samples do not divide.
    """
    base = config.training.global_batch_size
    microbatch = largest_divisor(_share(base, processes, 1.0), config.training.local_batch_size)
    sizes = []
    for factor in sorted(set(factors)):
        size = base * factor
        if not (size > 0 and float(size).is_integer()):
            raise StudyError(f"--factors: {factor:g} x {base} images is no whole batch")
        share = _share(int(size), processes, factor)
        local = largest_divisor(share, microbatch) if factor < 1 else microbatch
        if share % local:
            raise StudyError(
                f"--factors: {factor:g} x {base} = {size:g} images are no multiple of {processes} processes x {local} "
                "images, the run's microbatch"
            )
        sizes.append((factor, int(size), local))
    common = math.lcm(*(size for _, size, _ in sizes))
    largest = sizes[-1][1]
    if samples is None:
        samples = -(-32 * largest // common) * common
    if samples < largest:
        raise StudyError(f"--samples: {samples} are too few for one step of {largest} images")
    if samples % common:
        below = samples // common * common
        near = f"{below}, {below + common}" if below else str(common)
        raise StudyError(f"--samples: {samples} are no whole number of steps of every batch size (try {near})")
    rule = LR_RULES[lr_rule]
    plans = [BatchPlan(factor, size, local, samples // size, lr * rule(factor)) for factor, size, local in sizes]
    return plans, samples


def _share(batch_size: int, processes: int, factor: float) -> int:
    share, rest = divmod(batch_size, processes)
    if rest or not share:
        raise StudyError(f"--factors: {factor:g}: {batch_size} images cannot be divided among {processes} processes")
    return share


def largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def branch_config(
    config: JobConfig, plan: BatchPlan, seed: int, schedule: str, processes: int, folder: Path
) -> JobConfig:
    """The configuration of one branch.

    Args:
        config: the run's.
        plan: of its batch size.
        seed: number of the branch, from 0; decides samples, timesteps and noise, which the run has not seen.
        schedule: of the learning rate over the branch, one of SCHEDULES.
        processes: that it will run on.
        folder: of the branch.
    """
    of_run = config.parallelism.data_parallel_replicate_degree * config.parallelism.data_parallel_shard_degree
    replicas = ParallelismConfig(data_parallel_replicate_degree=processes, data_parallel_shard_degree=1)
    place: dict[str, Any] = {"dump_folder": str(folder.parent), "name": folder.name, "allow_config_change": False}
    training: dict[str, Any] = {
        "steps": plan.steps,
        "global_batch_size": plan.batch_size,
        "local_batch_size": plan.local_batch_size,
        "max_skipped_steps": 0,  # a branch that skips is no answer
    }
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, **place),
        optimizer=dataclasses.replace(config.optimizer, lr=plan.lr),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type=cast(Any, schedule)),
        training=dataclasses.replace(config.training, **training),
        parallelism=config.parallelism if of_run == processes else replicas,
        ema=EMAConfig(tracks=[TRACK]),
        gns=type(config.gns)(),
        checkpoint=CheckpointConfig(interval=max(-(-plan.steps // _SAVES), 1), keep_latest_k=1),
        metrics=dataclasses.replace(
            config.metrics, log_freq=max(plan.steps // 64, 1), enable_tensorboard=False, enable_wandb=False
        ),
        sampling=dataclasses.replace(config.sampling, enable=False),
        validation=dataclasses.replace(config.validation, enable=False),
        debug=dataclasses.replace(config.debug, seed=config.debug.seed + 1 + seed),
    )


def write_config(config: JobConfig, path: Path, processes: int) -> None:
    """Write a branch's configuration. Raises ConfigError where it cannot run."""
    replace_file(path, dump_config(config))
    load_config(["--job.config_file", str(path)], processes)


def write_start(checkpoint: AnyPath, folder: Path) -> Path:
    """Write the checkpoint that every branch begins with, unless it is there; returns its folder.

    Args:
        checkpoint: of the run.
        folder: to put it into.

    Raises:
        CheckpointError: damaged, or it cannot be written.
    """
    if 0 in checkpoint_steps(folder):
        return checkpoint_path(folder, 0)
    source = open_checkpoint(checkpoint)
    tensors = source.read([name for name in source.shapes if not name.startswith("ema.")])
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    tensors |= {f"ema.{TRACK.name}.{name}": tensor.clone() for name, tensor in weights.items()}
    state = {
        "step": 0,
        "data": {"next_sample": 0, "attempt": 0},
        "corrupt_images": {},
        "timestep_sampler": _learned(read_state(checkpoint).get("timestep_sampler", {})),
        "loss_window": {"sums": []},
        "gns": {},
    }
    keeper = Checkpointer(folder, CheckpointConfig(), rank=0)
    keeper.save(0, tensors, state)
    keeper.require_saved()
    return checkpoint_path(folder, 0)


def _learned(state: dict) -> dict:
    """A sampler's state if it is one that learns, which is part of what the run minimises; shares are the branch's own."""
    return state if "sampler" in state else {}


def begin_branch(start: Path, branch: Path) -> None:
    """Put the start into a branch's folder, unless it has checkpoints already; links where the disk can."""
    checkpoints = branch / "checkpoint"
    if checkpoint_steps(checkpoints):
        return
    make_folder(checkpoints)
    store_of(checkpoints).prepare()  # what a copy that was cut off has left
    partial = checkpoints / f".{start.name}"
    shutil.copytree(start, partial, copy_function=_link_or_copy)
    sync(partial)
    partial.rename(checkpoints / start.name)
    sync(checkpoints)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints in a folder of a branch test, and the folder if nothing else is in it. Raises OSError."""
    for step in checkpoint_steps(folder):
        store_of(folder).delete(step)
    with suppress(OSError):  # there is something else in it
        folder.rmdir()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync(Path(target))


def train_branch(branch: Path, processes: int, progress: Callable[[int], None]) -> None:
    """Train a branch to its end in processes of its own, from where it is.

    Args:
        branch: its folder, with branch.toml and a checkpoint.
        processes: how many; torchrun starts more than one.
        progress: told the samples seen so far, now and then.

    Raises:
        BranchFailed: with the reason; Diverged if a step had no finite gradient, skipped or not.
        KeyboardInterrupt: this process was asked to stop; the branch has saved what it had.
    """
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    # Where the folder is now, should the run have been moved.
    place = ["--job.dump_folder", str(branch.parent), "--job.name", branch.name]
    command = [sys.executable, "-S", parent_death.__file__, str(os.getpid()), *launcher, str(_TRAIN)]
    command += ["--job.config_file", str(branch / "branch.toml"), *place]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    if processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    # Requests to stop are noted, not raised: one that came while the process starts would leave it behind.
    with StopRequest() as stop, open(branch / "train.log", "ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,  # a Ctrl-C is passed on below, once
        )  # fmt: skip
        try:
            passed_on = False
            while process.poll() is None:
                if stop.poll() and not passed_on:
                    process.send_signal(signal.SIGTERM)
                    passed_on = True
                progress(samples_seen(branch))
                time.sleep(_POLL_SECONDS)
        except BaseException:  # a second request to stop, or this process failed
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        stopped = stop.poll()
    if stopped:
        raise KeyboardInterrupt
    if process.returncode:
        raise _failure(branch, process.returncode)
    if skipped := json.loads(read_regular(branch / "summary.json")).get("skipped_steps"):
        raise Diverged(f"the gradient norm is not finite: {skipped} steps were skipped")


def samples_seen(branch: Path) -> int:
    try:
        with open_regular(branch / METRICS_FILE) as file:
            file.seek(-min(os.fstat(file.fileno()).st_size, 8192), os.SEEK_END)
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["n_images_seen"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def _failure(branch: Path, code: int) -> BranchFailed:
    try:
        summary = json.loads(read_regular(branch / "summary.json"))
    except (OSError, ValueError):
        summary = {}
    if summary.get("status") in ("failed", "oom"):
        kind = Diverged if "gradient norm is" in str(summary.get("reason")) else BranchFailed
        return kind(str(summary.get("reason")))
    lines = (branch / "train.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return BranchFailed(f"{ended}: {lines[-1] if lines else 'no output'}")
