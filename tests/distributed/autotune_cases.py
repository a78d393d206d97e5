"""What the ranks of the test of peak memory run; see tests.launcher."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.cases import make_trainer, remove, shared_folder
from torchtitan.training.hardware import peak_resident_gib


def train_with_ballast(ballast_gib: float) -> dict:
    """Train five steps while the second rank holds memory of its own; each rank's peak, and what the summary says."""
    folder = shared_folder()
    ballast = torch.ones(int(ballast_gib * 2**30 / 4)) if dist.get_rank() == 1 else None
    trainer = make_trainer(
        folder, "ballast", steps=5, replicas=2, shards=1, accumulation=1, overrides=("--data.name=synthetic",)
    )
    before = peak_resident_gib()
    trainer.train()
    trainer.close()
    del ballast
    dist.barrier()
    summary = json.loads((Path(folder) / "ballast" / "summary.json").read_text())
    dist.barrier()
    remove(folder)
    return {"before": before, "after": peak_resident_gib(), "summary": summary["peak_memory_GiB"]}
