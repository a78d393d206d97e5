"""A U-Net of EDM2 trains alike on every layout, compiled or recomputed, dropout included."""

from typing import Any

import pytest
import torch

from tests.distributed.cases import AS_TRACED
from tests.launcher import run_on_ranks

COMMON = (
    "--model.name=edm2", "--model.flavor=cifar", "--model.channels=32", "--model.channel_mults=[1,1]",
    "--model.num_blocks=1", "--model.attention_resolutions=[8]", "--model.dropout=0.2", "--objective.path=edm",
    "--objective.prediction=edm", "--objective.preconditioning=edm", "--objective.weighting.name=edm",
    "--objective.timesteps.name=lognormal_sigma", "--objective.learned_uncertainty=true", "--optimizer.lr=1e-3",
    "--lr_scheduler.warmup_steps=0",
)  # fmt: skip
COMPILE = ("--compile.enable=true",)
STEPS = 4


def case(replicas: int = 1, shards: int = 1, *more: str) -> dict[str, Any]:
    return {
        "steps": STEPS, "replicas": replicas, "shards": shards, "accumulation": 1, "backend": AS_TRACED,
        "overrides": (*COMMON, *more),
    }  # fmt: skip


@pytest.fixture(scope="module")
def curves() -> dict[str, list[list[float]]]:
    recomputed = ("--activation_checkpoint.mode=selective",)
    one_level = ("--model.channel_mults=[1]",)
    of_ranks = {
        1: {"one": case(), "one level": case(1, 1, *one_level), "one level, compiled": case(1, 1, *one_level, *COMPILE)},
        2: {"DDP": case(2), "FSDP, recomputed": case(1, 2, *recomputed)},
    }
    found: dict[str, list[list[float]]] = {}
    for ranks, cases in of_ranks.items():
        found |= run_on_ranks("tests.distributed.cases:train_all", ranks, {"cases": cases})[0]
    return found


@pytest.mark.parametrize(
    ("other", "one"), [("DDP", "one"), ("FSDP, recomputed", "one"), ("one level, compiled", "one level")]
)
def test_losses_and_gradient_norms_are_those_of_one_process(curves, other, one):
    found, wanted = (torch.tensor(curves[name], dtype=torch.float64) for name in (other, one))
    assert wanted.shape == (STEPS, 2) and wanted[0, 0] != wanted[1, 0]
    differences = ((found - wanted).abs() / wanted).amax(0)
    assert differences[0] <= 1e-7  # of the loss
    assert differences[1] <= 1e-5  # of the gradient, at first the output gain's alone: a sum in which much cancels
