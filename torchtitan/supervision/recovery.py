"""Roll back after bad steps, or stop and name the first non-finite layer."""

import logging
from dataclasses import dataclass

import torch

from torchtitan.distributed.parallelize import accumulate_locally, local, release_unsharded
from torchtitan.errors import TrainingError
from torchtitan.state.resume import resume
from torchtitan.state.run_state import RunState
from torchtitan.training.clock import Phases
from torchtitan.training.non_finite import Watch, over_ranks, watched
from torchtitan.training.numerical_guard import LARGEST_VALUE, StepSamples, describe_image

logger = logging.getLogger(__name__)

_ADVICE = "a lower optimizer.lr or a longer warm-up may help"


@dataclass(frozen=True)
class Fault:
    """State that cannot continue or be saved; samples: of the step to repeat for its origin, unless reason has it."""

    step: int
    reason: str
    samples: StepSamples | None = None


def gone_back(state: RunState, phases: Phases, saving: bool) -> bool:
    """Roll back to a checkpoint if the latest steps must not count; return whether that was so; collective.

    Args:
        saving: a checkpoint, or the end of the run, is due: wait for the verdict on the latest step, and require that
            every weight, average and optimizer state is finite.

    Raises:
        TrainingError: a rollback was needed, and there is no checkpoint for it.
    """
    if saving:
        state.guard.settle()
    fault = _find_fault(state, saving)
    if fault is not None:
        with phases("checkpoint"):
            go_back(state, fault)
    return fault is not None


def _find_fault(state: RunState, saving: bool) -> Fault | None:
    guard, skipped = state.guard, state.guard.last_skipped
    if guard.exhausted and skipped:
        return Fault(skipped.step, f"{guard.reason}, as in too many steps before", skipped)
    if not saving:
        return None
    if found := state.fault():
        return Fault(state.step, found)
    if state.last_step and skipped and guard.in_doubt and not _weights_are_sound(state):
        return Fault(skipped.step, f"{guard.reason} in the last step", skipped)
    return None


def require_finite_start(state: RunState) -> None:
    """Refuse to train from a state that is not finite; collective. Raises TrainingError."""
    if found := state.fault():
        raise TrainingError(f"before step {state.step + 1}: {found}: the run cannot start from it")


def _weights_are_sound(state: RunState) -> bool:
    """Check whether the latest step that counted can be repeated: then a skipped last step's samples are at fault."""
    healthy = state.guard.last_healthy
    return healthy is not None and not _repeat(state, healthy)[0]


def go_back(state: RunState, fault: Fault) -> None:
    """Resume from the newest good checkpoint, with other draws than before; collective.

    Raises:
        TrainingError: there is none, or the run has been rolled back to it before; names the fault.
    """
    guard = state.guard
    step = state.checkpointer.newest() if state.config.checkpoint.enable else None
    if step is None or not guard.may_roll_back_to(step):
        missing = "there is no checkpoint to roll back to"
        before = missing if step is None else f"it was already rolled back to step {step}"
        where = f"; {locate(state, fault.samples)}" if fault.samples else ""
        raise TrainingError(f"step {fault.step}: {fault.reason}, and {before}{where} ({_ADVICE})")
    if state.layout.rank == 0:
        logger.warning(f"step {fault.step}: {fault.reason}; rolled back to the checkpoint of step {step}, with other draws")
    attempt = state.data.attempt + 1
    state.data.close()
    resume(state, step)
    state.data.attempt = attempt
    release_unsharded(state.model)
    guard.rolled_back(step)


def locate(state: RunState, samples: StepSamples) -> str:
    """Locate a fault: repeat a step with every module watched; the finding on each rank, in words; collective."""
    found, image = _repeat(state, samples)
    if found:
        return f"the first value that is not finite: {found}" + (f"; {image}" if image else "")
    return image or "all values are finite when the step is repeated: a fault of the hardware"


def _repeat(state: RunState, step: StepSamples) -> tuple[str, str]:
    """Repeat a step: the first non-finite value, and the first implausible image value; "": there is none. Collective.
    """
    watch, gradients, image = Watch(), Watch(), ""
    parameters = state.parameters | state.objective.parameters()
    watch.see_all(parameters.items(), "parameter {}")
    samples = step.samples
    for batch in state.data.again(samples.first_sample, samples.attempt, step.microbatches):
        first, last = batch["samples"][0].item(), batch["samples"][-1].item()
        image = image or _absurd_image(state, batch, samples.attempt)
        watch.see(batch["images"], f"images among samples {first} .. {last}")
        # Where weights are whole, a rank's own gradient is seen, before it is reduced.
        with watched(state.model, watch), accumulate_locally(state.train_module, last=state.layout.sharded):
            loss = state.loss_terms(state.to_device(batch), samples).minimised
            watch.see(loss, f"the loss of samples {first} .. {last}")
            loss.mean().backward()
        found = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
        gradients.see_all(found.items(), "the gradient of {}")
        gradients.see_all(((name, grad.square()) for name, grad in found.items()), "the squared gradient of {}")
        state.optimizer.zero_grad()
    return over_ranks(watch.found) or over_ranks(gradients.found), over_ranks(image)


def _absurd_image(state: RunState, batch: dict[str, torch.Tensor], attempt: int) -> str:
    largest, place = batch["images"].abs().flatten(1).amax(1).max(0)
    if largest.item() <= LARGEST_VALUE:
        return ""
    number = int(batch["samples"][place])
    return describe_image(number, state.data.image_of(number, attempt), largest.item())
