"""Branches of a training: separate runs from one checkpoint with another batch size, learning rate and seed.

A branch is an ordinary run whose folder begins with a checkpoint of step 0: weights and optimizer state are those of
the run, the counters begin anew, and so does its one average of the weights.
"""

import dataclasses
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from research.equal_samples import BatchPlan, layout_on
from torchtitan.checkpoint.checkpointer import Checkpointer, checkpoint_path, checkpoint_steps
from torchtitan.checkpoint.comparison import open_checkpoint
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.finding import BRANCHED_FROM
from torchtitan.checkpoint.reading import read_state
from torchtitan.checkpoint.store import store_of
from torchtitan.config.job import JobConfig, load_config
from torchtitan.files.durable import make_folder, replace_file, sync
from torchtitan.files.remote_path import AnyPath
from torchtitan.settings.record import dump_config
from torchtitan.training.clock import ClockTotals
from torchtitan.training.config import EMAConfig, EMATrackConfig, LRSchedulerConfig
from torchtitan.training.schedules import lr_factor

# Its profile is relative to the branch, so at equal samples it averages over the same samples at any batch size, and
# its first update forgets the weights that the branch began with.
TRACK = EMATrackConfig(name="branch", kind="power", sigma_rel=0.1)

# The file by which a branch's folder is known.
BRANCH_MARKS = {"branch.toml": b"# The resolved configuration of this run"}

_SAVES = 4  # checkpoints of a branch, to resume from after a stop


def run_lr(config: JobConfig, progress: int) -> float:
    """Learning rate of a run at its first batch size, after so many steps of that size."""
    training = config.training
    factor = lr_factor(config.lr_scheduler, max(progress, 1), training.steps, training.global_batch_size)
    return config.optimizer.lr * factor


def branch_config(
    config: JobConfig, plan: BatchPlan, seed: int, processes: int, folder: Path, progress: int
) -> JobConfig:
    """Configuration of one branch.

    Args:
        config: the run's.
        plan: of its batch size.
        seed: number of the branch, from 0; determines samples, timesteps and noise, all new to the run.
        processes: of the branch.
        folder: of the branch.
        progress: of the run at the checkpoint, in steps of its first batch size. What acts in a first part of the run acts
            throughout the branch, or not at all, as it does there.
    """
    place: dict[str, Any] = {"dump_folder": str(folder.parent), "name": folder.name, "allow_config_change": False}
    training: dict[str, Any] = {
        "steps": plan.steps,
        "global_batch_size": plan.batch_size,
        "local_batch_size": plan.local_batch_size,
        "double_batch_after": [],  # a branch has one batch size
        "max_skipped_steps": 0,  # a branch that skips is no answer
    }
    saving = CheckpointConfig(interval=max(-(-plan.steps // _SAVES), 1), keep_latest_k=1)
    if config.lora.enable:  # the frozen network is read again
        base = {key: getattr(config.checkpoint, key) for key in ("initial_weights", "initial_weights_strict")}
        saving = dataclasses.replace(saving, **base)
    model, alignment, of_run = config.model, config.alignment, config.training.steps
    if finish := getattr(getattr(model, "routing", None), "finish_steps", 0):
        finish = plan.steps if progress >= of_run - finish else 0
        model = dataclasses.replace(model, routing=dataclasses.replace(model.routing, finish_steps=finish))
    aligned = alignment.steps(of_run, config.training.global_batch_size)
    ended = progress >= aligned < of_run
    weight, stop = (0.0, 1) if ended else (alignment.weight, 0)  # its weights are in the checkpoint, and need a step
    return dataclasses.replace(
        config,
        model=model,
        alignment=dataclasses.replace(alignment, stop_steps=stop, stop_images=0, weight=weight),
        profiling=type(config.profiling)(),
        job=dataclasses.replace(config.job, **place),
        optimizer=dataclasses.replace(config.optimizer, lr=plan.lr),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        training=dataclasses.replace(config.training, **training),
        parallelism=layout_on(config, processes),
        ema=EMAConfig(tracks=[TRACK]),
        gns=type(config.gns)(),
        checkpoint=saving,
        metrics=dataclasses.replace(
            config.metrics, log_freq=max(plan.steps // 64, 1), enable_tensorboard=False, enable_wandb=False
        ),
        sampling=dataclasses.replace(config.sampling, enable=False),
        evaluation=dataclasses.replace(config.evaluation, enable=False),
        validation=dataclasses.replace(config.validation, enable=False),
        debug=dataclasses.replace(config.debug, seed=config.debug.seed + 1 + seed),
    )


def has_phases(config: JobConfig) -> bool:
    """Whether something acts in a first part of the run alone."""
    finish = getattr(getattr(config.model, "routing", None), "finish_steps", 0)
    return bool(finish or config.alignment.stop_steps or config.alignment.stop_images)


def write_config(config: JobConfig, path: Path, processes: int) -> None:
    """Write a branch's configuration. Raises ConfigError: it cannot run."""
    replace_file(path, dump_config(config))
    load_config(["--job.config_file", str(path)], processes)


def write_start(checkpoint: AnyPath, folder: Path) -> Path:
    """Write the initial checkpoint of every branch, if missing; return its folder.

    Args:
        checkpoint: of the run.
        folder: of the branches.

    Raises:
        CheckpointError: damaged, or it cannot be written.
    """
    if 0 in checkpoint_steps(folder):
        return checkpoint_path(folder, 0)
    source = open_checkpoint(checkpoint)
    tensors = source.read([name for name in source.shapes if not name.startswith("ema.")])
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    tensors |= {f"ema.{TRACK.name}.{name}": tensor.clone() for name, tensor in weights.items()}
    saved = read_state(checkpoint)
    del saved["config"]  # the branch has another
    state = saved | {
        "step": 0,
        "progress": 0,
        "data": {"next_sample": 0, "attempt": 0},
        "corrupt_images": {},
        "timestep_sampler": _learned(saved["timestep_sampler"]),
        "loss_window": {"sums": []},
        "guard": {"skipped": 0, "rollbacks": 0},
        "ema_snapshots": [],
        "reports": {"results": {}, "clock": ClockTotals().state_dict()},
        BRANCHED_FROM: None,
        "gns": {},
    }
    keeper = Checkpointer(folder, CheckpointConfig(), rank=0)
    keeper.save(0, tensors, state)
    keeper.require_saved()
    return checkpoint_path(folder, 0)


def _learned(state: dict) -> dict:
    """State of a learning sampler, which is part of the run's objective; shares are the branch's own."""
    return state if "sampler" in state else {}


def begin_branch(start: Path, branch: Path) -> None:
    """Begin a branch: put the start into its folder, unless it has checkpoints; as hard links if possible."""
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
    """Remove the checkpoints in a folder of an experiment, and the folder if nothing else is in it. Raises OSError."""
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
