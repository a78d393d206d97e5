"""What the processes of test_gns run; see tests.launcher."""

import os
import signal
import time

import torch.distributed as dist

from tests.distributed.cases import make_trainer
from torchtitan.trainer import Trainer

STEPS, CHECKPOINT_INTERVAL, ABANDONED_AT = 25, 16, 20
# Neither checkpoint, after steps 16 and 25, is of a measured step, and a step without sketches follows the first.
MEASURED_EVERY = 3

GNS = (
    "--gns.enable", "true", "--gns.num_bins", "4", "--gns.interval", str(MEASURED_EVERY), "--gns.sketch_size", "2",
    "--gns.log_interval", "1",
)  # fmt: skip
SAVED = ("--checkpoint.enable", "true", "--checkpoint.interval", str(CHECKPOINT_INTERVAL), "--checkpoint.keep_latest_k", "0")


class Abandoned(Exception):
    """Ends a run in the middle."""


def complete(folder: str, runs: list[dict]) -> None:
    """Train each run to its end, from its newest checkpoint where there is one."""
    for run in runs:
        trainer = _trainer(folder, **run)
        assert trainer.train() == 0
        trainer.close()


def abandon(folder: str, runs: list[dict]) -> None:
    """Begin each run, leave it after some steps as it is, and at last die as by kill -9."""
    left = []
    for run in runs:
        trainer = _trainer(folder, **run)
        _leave_after(trainer, ABANDONED_AT)
        try:
            trainer.train()
        except Abandoned:
            left.append(trainer)  # open files stay open: nothing more is written
    assert len(left) == len(runs)
    if dist.is_initialized():
        dist.barrier()
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _trainer(folder: str, name: str, overrides: list[str], steps: int = STEPS, **layout) -> Trainer:
    return make_trainer(folder, name, steps=steps, overrides=(*SAVED, "--model.num_layers", "2", *overrides), **layout)


def _leave_after(trainer: Trainer, step: int) -> None:
    advance = trainer.reports.advance

    def leave() -> None:
        advance()
        if trainer.state.step == step:
            raise Abandoned

    trainer.reports.advance = leave
