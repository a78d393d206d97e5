"""Out of steps that must not count: back to a checkpoint, or to an end that says where the fault is."""

import logging
from typing import TYPE_CHECKING

from torchtitan.distributed.parallelize import accumulate_locally, release_unsharded
from torchtitan.training.faults import TrainingError
from torchtitan.training.non_finite import Watch, over_ranks, watched
from torchtitan.training.numerical_guard import StepSamples

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

logger = logging.getLogger(__name__)


def go_back(trainer: "Trainer") -> None:
    """Resume from the newest good checkpoint, with other draws than before; collective.

    Raises:
        TrainingError: there is none, or the run has gone back to it before; says where the fault is.
    """
    guard, fault = trainer.guard, trainer.guard.last_skipped
    step = trainer.checkpointer.newest() if trainer.config.checkpoint.enable else None
    if step is None or not guard.may_roll_back_to(step):
        before = "there is no checkpoint to go back to" if step is None else f"step {step} was gone back to before"
        raise TrainingError(
            f"step {fault.step}: {guard.reason}, as in too many steps before, and {before}; {locate(trainer, fault)} (a "
            "lower optimizer.lr, a longer lr_scheduler.warmup_steps or model.qk_norm = true may help)"
        )
    if trainer.layout.rank == 0:
        logger.warning(f"step {fault.step}: {guard.reason}; back to the checkpoint of step {step}, on with other draws")
    attempt = trainer.data.attempt + 1
    trainer.resume(step)
    trainer.data.attempt = attempt
    release_unsharded(trainer.model)
    guard.rolled_back(step)
    trainer.reports.rewind()


def locate(trainer: "Trainer", fault: StepSamples) -> str:
    """Repeat a step with every module watched: the first value on each rank that is not finite; collective."""
    watch, gradients = Watch(), Watch()
    watch.see_all(trainer.parameters.items(), "parameter {}")
    samples = fault.samples
    for batch in trainer.data.again(samples.first_sample, samples.attempt, fault.microbatches):
        first, last = batch["samples"][0].item(), batch["samples"][-1].item()
        watch.see(batch["images"], f"images among samples {first} .. {last}")
        # Where weights are whole, a rank's own gradient is seen, before it is reduced.
        with watched(trainer.model, watch), accumulate_locally(trainer.train_module, last=trainer.layout.sharded):
            loss = trainer.loss_terms(trainer.to_device(batch), samples).loss
            watch.see(loss, f"the loss of samples {first} .. {last}")
            loss.mean().backward()
        gradients.see_all(((name, p.grad) for name, p in trainer.parameters.items()), "the gradient of {}")
        trainer.optimizer.zero_grad(set_to_none=True)
    if found := over_ranks(watch.found) or over_ranks(gradients.found):
        return f"the first value that is not finite: {found}"
    return "all values are finite when the step is repeated: a fault of the hardware, or a loss that leaps"
