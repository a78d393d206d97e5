"""What the ranks of the tests of snapshots run; see tests.launcher."""

import os
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

from tests.distributed.cases import make_trainer, remove
from tests.end_to_end.tools import load_tool
from tests.extractions import content

TRACKS = (
    '[{"name": "short", "kind": "power", "sigma_rel": 0.05}, {"name": "long", "kind": "power", "sigma_rel": 0.1}]'
)
SWEEP = ("--stds", "0.05", "0.075", "--images", "50")


def train_with_snapshots(folder: str, name: str, replicas: int = 1, shards: int = 1) -> str:
    """Train 8 steps of 16 images with a snapshot every 32 and a checkpoint after 4 steps; return the run's folder."""
    overrides = (
        "--ema.tracks", TRACKS, "--ema.snapshot_interval", "32", "--checkpoint.enable", "true", "--checkpoint.interval", "4",
    )  # fmt: skip
    trainer = make_trainer(folder, name, steps=8, replicas=replicas, shards=shards, accumulation=1, overrides=overrides)
    try:
        assert trainer.train() == 0
    finally:
        trainer.close()
    return str(Path(folder) / name)


def on_two_ranks(folder: str, output: str) -> list[str]:
    """Train with DDP and with FSDP; lose FSDP's last checkpoint and resume, then sweep its averages.

    Returns:
        files of FSDP's snapshots that have another content after the resume.
    """
    train_with_snapshots(folder, "DDP x 2", replicas=2)
    run = Path(train_with_snapshots(folder, "FSDP x 2", shards=2))
    before = _content(run)
    remove(str(run / "checkpoint" / "step-00000008"))
    train_with_snapshots(folder, "FSDP x 2", shards=2)
    after = _content(run)
    assert len(after) >= 12
    tool = load_tool("ema")
    tool.FIRST = os.environ["RANK"] == "0"
    with open(output if tool.FIRST else os.devnull, "w", encoding="utf-8") as file, redirect_stdout(file):
        assert tool.main(["sweep", str(run), *SWEEP]) == 0
    return [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]


def _content(run: Path) -> dict[str, bytes]:
    dist.barrier()
    return content(run / "ema" / "snapshots")
