"""What the ranks of test_flux_layouts.py run."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.distributed.cases import compiler, make_trainer, remove, shared_folder, whole
from torchtitan.models.flux.config import FLAVORS
from torchtitan.training.metrics import METRICS_FILE

DEBUG = FLAVORS["debug"]
TEXTS = (
    "--model.name=flux", "--model.flavor=debug", "--data.name=synthetic", "--data.shape=[2,8,8]", "--data.text_length=5",
    f"--data.text_dim={DEBUG.text_dim}", f"--data.pooled_dim={DEBUG.pooled_dim}", "--model.label_dropout=0.3",
)  # fmt: skip
HELD_OUT = (
    "--validation.enable=true", "--validation.num_images=21", "--validation.batch_size=4",
    "--validation.timesteps=[0.0,0.25,0.5,0.75]",
)  # fmt: skip
LAST = "step-00000006"


def train_all(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train each case for 6 steps.

    Returns:
        of each case (loss, gradient norm) of every step, the held-out losses, and whether the steps after the middle, and the
        weights at the end, are the same bits again where a run that lost its last checkpoint is resumed; None where it is not
        lost. "units" is the number of modules that FSDP2 gathers one at a time.
    """
    folder = shared_folder()
    found = {name: _train(folder, name, **case) for name, case in cases.items()}
    remove(folder)
    return found


def _train(
    folder: str, name: str, replicas: int = 1, shards: int = 1, accumulation: int = 1, backend: str = "inductor",
    overrides: tuple[str, ...] = (), resumed: bool = False, held_out: bool = True,
) -> dict[str, Any]:  # fmt: skip
    validation = HELD_OUT if held_out else ()
    saving = ("--checkpoint.enable=true", "--checkpoint.interval=3") if resumed else ()

    def run() -> tuple[list[dict[str, float]], dict[str, torch.Tensor], int]:
        with compiler(backend):
            trainer = make_trainer(
                folder, name, steps=6, replicas=replicas, shards=shards, accumulation=accumulation,
                overrides=(*TEXTS, *validation, *saving, *overrides),
            )  # fmt: skip
        assert trainer.train() == 0
        weights = {key: whole(value).clone() for key, value in trainer.state.parameters.items()}
        units = sum(isinstance(module, FSDPModule) for module in trainer.state.model.modules())
        trainer.close()
        lines = (Path(folder) / name / METRICS_FILE).read_text().splitlines()
        return [json.loads(line) for line in lines], weights, units

    points, weights, units = run()
    again = None
    if resumed:
        first = not dist.is_initialized() or dist.get_rank() == 0
        if first:
            shutil.rmtree(Path(folder) / name / "checkpoint" / LAST)
            (Path(folder) / name / "summary.json").unlink()
        if dist.is_initialized():
            dist.barrier()
        repeated, weights_again, _ = run()
        alike = [_values(point) for point in repeated] == [_values(point) for point in points]
        again = alike and all(torch.equal(weights_again[key], value) for key, value in weights.items())
    steps = [point for point in points if "grad_norm" in point]
    tags = ("loss", "loss_by_time/0", "loss_by_time/3")
    return {
        "curve": [[point["loss_metrics/global_avg_loss"], point["grad_norm"]] for point in steps],
        "held out": [points[-1][f"validation_metrics/{tag}"] for tag in tags if held_out], "resumed alike": again,
        "units": units,
    }  # fmt: skip


def _values(point: dict[str, float]) -> dict[str, float]:
    return {tag: value for tag, value in point.items() if tag.startswith(("step", "loss", "grad_norm", "validation_metrics"))}
