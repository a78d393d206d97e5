"""What a checkpoint holds of a run besides its tensors, and how the run resumes from it."""

import logging

from torchtitan.checkpoint.checkpointer import BRANCHED_FROM, checkpoint_path, read_state, read_tensors_together
from torchtitan.config.job import JobConfig
from torchtitan.distributed.parallelize import release_unsharded
from torchtitan.errors import CheckpointError
from torchtitan.files.remote_path import AnyPath
from torchtitan.settings.record import effective
from torchtitan.state.run_state import RunState
from torchtitan.training.clock import ClockTotals
from torchtitan.training.optimizer import materialise_state
from torchtitan.training.schedules import schedule_changes
from torchtitan.weights.data_changes import IMAGES, data_changes
from torchtitan.weights.model_record import RECORD
from torchtitan.weights.network import BASE_SHA256, check_base

logger = logging.getLogger(__name__)


def open_run(config: JobConfig) -> RunState:
    """Build a run, and resume it from its newest good checkpoint if it has one; collective.

    Raises:
        as RunState does, and CheckpointError; on every rank, before anything is overwritten.
    """
    state = RunState(config)
    if state.resumed_step is None:
        state.snapshots.load_state_dict([], 0)
        if state.gns:
            state.gns.load_state_dict({}, 0)  # cuts what a process that was killed before its first checkpoint has written
    else:
        resume(state, state.resumed_step)
    state.choose_kernels()
    return state


def checkpointed_state(state: RunState, reports: dict) -> dict:
    """What a checkpoint holds besides tensors; called by all ranks, and equal on them except `reports`.

    Args:
        reports: state of the first rank's reports.
    """
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
        RECORD: state.data_record,
        IMAGES: state.images_per_epoch,
        "gns": state.gns.state_dict() if state.gns else {},
    } | ({BASE_SHA256: state.network.base_sha256} if state.config.lora.enable else {})


def resume(state: RunState, step: int) -> None:
    """Resume the state after a step from its checkpoint; collective. Raises CheckpointError."""
    config, checkpoint = state.config, checkpoint_path(state.folder.checkpoints, step)
    logger.info(f"reading {checkpoint}")
    materialise_state(state.optimizer)
    saved, tensors = read_state(checkpoint), state.tensors()
    changes = data_changes(
        saved, str(checkpoint), state.info, state.images_per_epoch, tolerated=config.job.allow_config_change,
        record=state.data_record,
    )  # fmt: skip
    for change in changes + schedule_changes(config, saved):
        if state.layout.rank == 0:
            logger.warning(change)
    if config.lora.enable:
        check_base(saved, state.network.base_sha256, str(checkpoint), config.checkpoint.initial_weights)
    if state.gns and not state.gns.fits(saved["gns"]):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("gns.")}
    read_tensors_together(checkpoint, tensors)
    release_unsharded(state.model)
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
    state.data.load_state_dict(saved["data"], (training.steps - state.progress) * training.global_batch_size)
    state.corrupt_images.load_state_dict(saved["corrupt_images"])
    gns_state = dict(saved["gns"])
    try:
        state.objective.timestep_sampler.load_state_dict(saved["timestep_sampler"])
    except ValueError as other:  # the sampler or its bins are others now
        logger.warning(f"ignoring the state of the timestep sampler in {checkpoint}: {other}")
        gns_state.pop("schedule", None)
    state.window.load_state_dict(saved["loss_window"])
    state.guard.load_state_dict(saved["guard"])
    state.snapshots.load_state_dict(saved["ema_snapshots"], state.step)
    state.reported = _checked_reports(saved["reports"])
    if state.gns:
        state.gns.load_state_dict(gns_state, state.step)


def _checked_reports(state: dict) -> dict:
    """Check the state of reports in a checkpoint. Raises ValueError, TypeError: it is no such state."""
    results = state.get("results", {})
    if not _are_numbers(dict(results)):
        raise ValueError("the results are no numbers")
    clock = ClockTotals.from_state(state.get("clock", {}))
    return {"results": dict(results), "clock": clock}


def _are_numbers(results: dict) -> bool:
    """Check whether results are numbers by name, or tables of them, as of a measurement."""
    return all(_are_numbers(value) if isinstance(value, dict) else isinstance(value, int | float) for value in results.values())
