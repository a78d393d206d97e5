"""What a checkpoint holds of a run besides its tensors, and how the run resumes from it."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan.checkpoint.checkpointer import checkpoint_path, read_state, read_tensors_together
from torchtitan.checkpoint.finding import BRANCHED_FROM
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import without_moved_caches
from torchtitan.distributed.collectives import from_first_rank
from torchtitan.errors import CheckpointError
from torchtitan.evaluation.config import OF_NO_PICTURE
from torchtitan.files.remote_path import AnyPath
from torchtitan.runs.folder import RunFolder
from torchtitan.settings.plugins import loaded_plugins
from torchtitan.settings.record import config_differences, effective
from torchtitan.state.run_state import RunState
from torchtitan.training.clock import ClockTotals
from torchtitan.training.config import TO_THE_END
from torchtitan.training.data_loading import TrainingData
from torchtitan.training.metrics import LossWindow
from torchtitan.training.numerical_guard import NumericalGuard
from torchtitan.training.optimizer import OptimizerSet, set_lr, state_parts
from torchtitan.training.schedules import lr_factor
from torchtitan.weights.data_changes import IMAGES, LISTING, data_changes, plugin_changes
from torchtitan.weights.model_record import RECORD
from torchtitan.weights.network import BASE_SHA256, check_base

logger = logging.getLogger(__name__)


def open_run(config: JobConfig, folder: RunFolder) -> RunState:
    """Build a run, and resume it from its newest good checkpoint if it has one; collective.

    Raises:
        as RunState does, and CheckpointError; on every rank, before anything is overwritten.
    """
    state = RunState(config, folder)
    if state.resumed_step is None:
        state.snapshots.load_state_dict([], 0)
        if state.gns:
            state.gns.load_state_dict({}, 0)  # cuts what a process that was killed before its first checkpoint has written
    else:
        resume(state, state.resumed_step)
        if state.resumed_step == config.checkpoint.load_step:
            from_first_rank(_set_aside_after, state.folder, state.resumed_step)
        state.checkpointer.branch(state.resumed_step)
        steps = config.training.steps
        done = f", {state.progress / steps:.1%} done" if state.batch_grows else f" of {steps}"
        done = done if state.progress <= steps else f": no step is left of training.steps = {steps}"
        logger.info(f"resumed after step {state.step}{done}")
    from_first_rank(state.folder.record)
    state.choose_kernels()
    return state


def _set_aside_after(folder: RunFolder, step: int) -> None:
    """Set evaluations and pictures of later steps aside, for a run that goes back. Raises EvaluationError, RunFolderError."""
    from torchtitan.fidelity.results import EVALUATION_FILE, EvaluationFile

    EvaluationFile(folder.path / EVALUATION_FILE).set_aside_after(step)
    folder.set_aside_files(step)


def checkpointed_state(state: RunState, reports: dict) -> dict:
    """What a checkpoint holds besides tensors; called by all ranks, and equal on them except `reports`."""
    return {
        "config": effective(state.config),
        "step": state.step,
        "progress": state.progress,
        "data": state.data.state_dict(),
        "corrupt_images": state.corrupt_images.state_dict(),
        "timestep_sampler": state.objective.timestep_sampler.state_dict(),
        "loss_window": state.window.state_dict(),
        "guard": state.guard.state_dict(),
        "ema_snapshots": state.snapshots.state_dict(),
        "reports": reports,
        BRANCHED_FROM: state.branched_from,
        "config_changes": state.config_changes,
        RECORD: state.data_record,
        "teacher": state.teacher,
        IMAGES: state.images_per_epoch,
        LISTING: state.listing,
        "gns": state.gns.state_dict() if state.gns else {},
        "plugins": loaded_plugins(),
    } | ({BASE_SHA256: state.network.base_sha256} if state.config.lora.enable else {})


def _drawn_otherwise(before: dict, config: JobConfig) -> list[str]:
    """Changes of sampler and decoder that show in pictures, as lines of `config_differences`; none where none were drawn."""
    if not (config.sampling.enable and before.get("sampling", {}).get("enable")):
        return []
    of_no_picture = tuple(f"sampling.{key}: " for key in OF_NO_PICTURE)
    lines = config_differences(before, config, also=("sampling", "autoencoder"))
    of_pictures = ("sampling.", "autoencoder.name: ", "autoencoder.path: ")
    return [line for line in lines if line.startswith(of_pictures) and not line.startswith(of_no_picture)]


def resume(state: RunState, step: int) -> None:
    """Resume the state after a step from its checkpoint; collective. Raises CheckpointError.

    Of a run that has made steps, the loader and the guard's verdicts on them are the caller's to end.
    """
    config, checkpoint = state.config, checkpoint_path(state.folder.checkpoints, step)
    logger.info(f"reading {checkpoint}")
    materialise_state(state.optimizer, config.optimizer.lr)
    saved, tensors = read_state(checkpoint), state.tensors()
    keys = without_moved_caches(config_differences(saved["config"], config)) if "config" in saved else []
    same_data = not any(key.startswith("data.") for key in keys)  # of other keys the listing says nothing
    changes = data_changes(
        saved, str(checkpoint), state.info, state.images_per_epoch, tolerated=config.job.allow_config_change,
        record=state.data_record, listing=state.listing if same_data else "",
    )  # fmt: skip
    if saved.get("teacher", state.teacher) != state.teacher:
        text = f"{checkpoint}: was trained on features of another encoder; their store was made anew since (restore it, "
        if not config.job.allow_config_change:
            raise CheckpointError(f"{text}train anew, or allow it by job.allow_config_change)")
        changes.append(f"{text}or train anew)")
    drawn = _drawn_otherwise(saved["config"], config) if "config" in saved else []
    state.config_changes = [*saved.get("config_changes", []), *(f"after step {step}: {key}" for key in keys)]
    changes += [f"{key}: samples are drawn otherwise from here on" for key in drawn]
    changes += [key for key in keys if not key.startswith("training.steps: ")]  # which the schedule's line tells
    for change in changes + schedule_changes(config, saved) + plugin_changes(saved.get("plugins", {})):
        if state.layout.rank == 0:
            logger.warning(change)
    if config.lora.enable:
        check_base(saved, state.network.base_sha256, str(checkpoint), config)
    if state.gns and not state.gns.fits(saved["gns"]):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("gns.")}
    try:
        read_tensors_together(checkpoint, tensors)
    except CheckpointError as error:
        way = "another --job.name trains anew, from exported weights by --checkpoint.initial_weights"
        lenient = "--checkpoint.initial_weights_strict false where layers differ"
        raise CheckpointError(f"{error} ({way}, with {lenient})" if keys else str(error)) from error
    if found := state.fault():
        raise CheckpointError(f"{checkpoint}: {found} (checkpoint.load_step resumes from an earlier one)")
    try:
        _load(state, checkpoint, saved)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint}: state.json does not fit this run: {error!r}") from error


def _load(state: RunState, checkpoint: AnyPath, saved: dict) -> None:
    training, load_step = state.config.training, state.config.checkpoint.load_step
    state.step, state.progress = saved["step"], saved["progress"]
    state.branched_from = load_step if load_step >= 0 else saved[BRANCHED_FROM]
    load_position(state.data, saved["data"])
    state.data.end_sample = state.data.next_sample + (training.steps - state.progress) * training.global_batch_size
    state.corrupt_images.load_state_dict(saved["corrupt_images"])
    sampler, gns_state = state.objective.timestep_sampler, dict(saved["gns"])
    try:
        if saved["timestep_sampler"] != sampler.state_dict():
            sampler.load_state_dict(saved["timestep_sampler"])
    except ValueError as other:  # the sampler or its bins are others now
        logger.warning(f"ignoring the state of the timestep sampler in {checkpoint}: {other}")
        gns_state.pop("schedule", None)
    load_sums(state.window, saved["loss_window"]["sums"], first=state.layout.rank == 0)
    load_counts(state.guard, saved["guard"])
    state.snapshots.load_state_dict(saved["ema_snapshots"], state.step)
    clock = saved["reports"]["clock"]
    state.reported = {"results": saved["reports"]["results"], "clock": ClockTotals(clock["parts_ns"], clock["steps"])}
    if state.gns:
        state.gns.load_state_dict(gns_state, state.step)


# ---------------------------------------------------------------------- parts of the state


def materialise_state(optimizer: OptimizerSet, lr: float) -> None:
    """Materialise the state that an optimizer otherwise creates in its first step, so that a checkpoint can fill it.

    A step with zero gradients and zero learning rate: weights stay as they are. The rates are those of `lr` afterwards.
    """
    set_lr(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for key, value in state.items():
            for _, part in state_parts(key, value):
                part.zero_()
    set_lr(optimizer, lr)


def load_position(data: TrainingData, saved: Mapping[str, int]) -> None:
    """Continue a run's data on any layout, no loader open. Raises CheckpointError: buckets of another global batch."""
    next_sample, size = saved["next_sample"], data.global_batch_size
    if data.in_buckets and next_sample % size:
        raise CheckpointError(
            f"training.global_batch_size: {next_sample} images were read, no multiple of {size}, and a global batch is of "
            "one bucket (set the size that the run had)"
        )
    data.next_sample, data.attempt = next_sample, saved["attempt"]


def load_sums(window: LossWindow, sums: list[float], first: bool) -> None:
    """Continue a window of losses, all of them on the first rank; sums of another number of bins start anew."""
    window.begin()
    if first and len(sums) == len(window.sums):
        window.sums.copy_(torch.tensor(sums, dtype=torch.float64))


def load_counts(guard: NumericalGuard, saved: Mapping[str, int]) -> None:
    """Continue the guard's counts; this process's own stay where they are higher."""
    guard.skipped = max(guard.skipped, saved["skipped"])
    guard.rollbacks = max(guard.rollbacks, saved["rollbacks"])


def schedule_changes(config: JobConfig, saved: Mapping[str, Any]) -> list[str]:
    """Lines on what a changed global batch does to counts of images, and on the learning rate's jump by another length."""
    training, recorded = config.training, saved.get("config")  # none: the checkpoint was put here for a run that begins
    if not recorded:
        return []
    was, size = recorded["training"]["global_batch_size"], training.global_batch_size
    counted_as = f"what counts images (schedules, doublings, averages, snapshots) takes each of its steps as {size}, not {was}"
    counts = [f"the checkpoint has another training.global_batch_size: {counted_as}"] if was != size else []
    return counts + _length_changes(config, saved, recorded)


def _length_changes(config: JobConfig, saved: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    schedule, training, before = config.lr_scheduler, config.training, recorded["training"]["steps"]
    if before == training.steps or schedule.decay_type not in TO_THE_END or schedule.decay_between:
        return []
    if saved["progress"] >= training.steps:
        return []  # no step follows
    change = f"training.steps: {before} -> {training.steps}: the {schedule.decay_type} decay has a new length"
    other = config.optimizer.lr != recorded["optimizer"]["lr"] or effective(config)["lr_scheduler"] != recorded["lr_scheduler"]
    if training.double_batch_after or other:
        return [change]  # the rate then was not of this schedule, or of the batch too
    step, size = max(saved["progress"], 1), training.global_batch_size
    places = (step, before), (min(step + 1, before), before), (step + 1, training.steps)
    was, planned, now = (f"{config.optimizer.lr * lr_factor(schedule, at, steps, size):.2g}" for at, steps in places)
    return [change if planned == now else f"{change}, the rate jumps from {was} to {now}"]
