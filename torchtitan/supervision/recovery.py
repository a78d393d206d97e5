"""Out of steps that must not count: back to a checkpoint, or to an end that says where the fault is."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchtitan.distributed.parallelize import accumulate_locally, local, release_unsharded
from torchtitan.errors import TrainingError
from torchtitan.training.non_finite import Watch, not_finite, over_ranks, watched
from torchtitan.training.numerical_guard import StepSamples, describe_image, is_sane

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger(__name__)

_ADVICE = "a lower optimizer.lr, a longer lr_scheduler.warmup_steps or model.qk_norm = true may help"


@dataclass(frozen=True)
class Fault:
    """Why a run cannot go on, or be saved, from where it is.

    Attributes:
        step: where it was found.
        reason: in a few words.
        samples: of the step that shows where it comes from when it is repeated; None: the reason says so already.
    """

    step: int
    reason: str
    samples: StepSamples | None = None


def gone_back(trainer: "Trainer", saving: bool) -> bool:
    """Whether the run had to go back to a checkpoint instead of going on from its latest step; collective.

    Args:
        trainer: between two steps.
        saving: a checkpoint, or the end of the run, is due: the verdict on the latest step is waited for, and every
            weight, average and optimizer state must be finite.

    Raises:
        TrainingError: it had to, and could not.
    """
    if saving:
        trainer.guard.settle()
    fault = _find_fault(trainer, saving)
    if fault is not None:
        with trainer.phases("checkpoint"):
            go_back(trainer, fault)
    return fault is not None


def _find_fault(trainer: "Trainer", saving: bool) -> Fault | None:
    guard, skipped = trainer.guard, trainer.guard.last_skipped
    if guard.exhausted:
        return Fault(skipped.step, f"{guard.reason}, as in too many steps before", skipped)
    if not saving:
        return None
    if found := state_fault(trainer):
        return Fault(trainer.step, found)
    if trainer.last_step and guard.in_doubt and not _weights_are_sound(trainer):
        return Fault(skipped.step, f"{guard.reason} in the last step", skipped)
    return None


def state_fault(trainer: "Trainer") -> str:
    """What of the weights, averages and optimizer states is not finite, in words, "" if all are; collective."""
    measured = "gns."  # only looked at, never trained by
    return not_finite({name: tensor for name, tensor in trainer.tensors().items() if not name.startswith(measured)})


def require_finite_start(trainer: "Trainer") -> None:
    """Refuse to train from a state that is not finite; collective. Raises TrainingError."""
    if found := state_fault(trainer):
        raise TrainingError(f"before step {trainer.step + 1}: {found}: the run cannot start from it")


def _weights_are_sound(trainer: "Trainer") -> bool:
    """Whether the latest step that counted can be repeated: the fault of a skipped last step lies in its samples then."""
    healthy = trainer.guard.last_healthy
    return healthy is not None and not _repeat(trainer, healthy)[0]


def go_back(trainer: "Trainer", fault: Fault) -> None:
    """Resume from the newest good checkpoint, with other draws than before; collective.

    Raises:
        TrainingError: there is none, or the run has gone back to it before; says where the fault is.
    """
    guard = trainer.guard
    step = trainer.checkpointer.newest() if trainer.config.checkpoint.enable else None
    if step is None or not guard.may_roll_back_to(step):
        before = "there is no checkpoint to go back to" if step is None else f"step {step} was gone back to before"
        where = f"; {locate(trainer, fault.samples)}" if fault.samples else ""
        raise TrainingError(f"step {fault.step}: {fault.reason}, and {before}{where} ({_ADVICE})")
    if trainer.layout.rank == 0:
        logger.warning(f"step {fault.step}: {fault.reason}; back to the checkpoint of step {step}, on with other draws")
    attempt = trainer.data.attempt + 1
    trainer.resume(step)
    trainer.data.attempt = attempt
    release_unsharded(trainer.model)
    guard.rolled_back(step)
    trainer.reports.rewind()


def locate(trainer: "Trainer", samples: StepSamples) -> str:
    """Repeat a step with every module watched: what is wrong on each rank, in words; collective."""
    found, image = _repeat(trainer, samples)
    if found:
        return f"the first value that is not finite: {found}" + (f"; {image}" if image else "")
    return image or "all values are finite when the step is repeated: a fault of the hardware, or a loss that leaps"


def _repeat(trainer: "Trainer", step: StepSamples) -> tuple[str, str]:
    """The first value that is not finite, and the first image with an absurd value; "": there is none. Collective."""
    watch, gradients, image = Watch(), Watch(), ""
    parameters = trainer.parameters | trainer.objective.parameters()
    watch.see_all(parameters.items(), "parameter {}")
    samples = step.samples
    for batch in trainer.data.again(samples.first_sample, samples.attempt, step.microbatches):
        first, last = batch["samples"][0].item(), batch["samples"][-1].item()
        image = image or _absurd_image(trainer, batch, samples.attempt)
        watch.see(batch["images"], f"images among samples {first} .. {last}")
        # Where weights are whole, a rank's own gradient is seen, before it is reduced.
        with watched(trainer.model, watch), accumulate_locally(trainer.train_module, last=trainer.layout.sharded):
            loss = trainer.loss_terms(trainer.to_device(batch), samples).loss
            watch.see(loss, f"the loss of samples {first} .. {last}")
            loss.mean().backward()
        found = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
        gradients.see_all(found.items(), "the gradient of {}")
        gradients.see_all(((name, grad.square()) for name, grad in found.items()), "the squared gradient of {}")
        trainer.optimizer.zero_grad(set_to_none=True)
    return over_ranks(watch.found) or over_ranks(gradients.found), over_ranks(image)


def _absurd_image(trainer: "Trainer", batch: dict[str, torch.Tensor], attempt: int) -> str:
    largest, place = batch["images"].abs().flatten(1).amax(1).max(0)
    if is_sane(largest.item()):
        return ""
    number = batch["samples"][place].item()
    return describe_image(number, trainer.data.image_of(number, attempt), largest.item())
