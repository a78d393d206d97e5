"""Cost of synchronous and asynchronous saves: python benchmarks/async_checkpoint.py [--rounds N]

Trains DiT-B/2 (130 M parameters, Adam, one average: 2.1 GB a checkpoint) on synthetic images. A round takes steps
without a save, then one save and as many steps as its write lasts; their time beyond that of as many ordinary steps is
the save's cost. Modes take turns. On a machine with CUDA pinned memory is measured too. On a CPU training has
OMP_NUM_THREADS cores: with all of them the concurrent write takes its time from the steps, with one less it does not,
as on a machine that computes steps on a GPU. Adds to benchmarks/results/async_checkpoint.json.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from torchtitan.checkpoint.checkpointer import Checkpointer
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.config.job import load_config
from torchtitan.runs.folder import versions
from torchtitan.state.resume import checkpointed_state
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import device_name

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="ordinary steps measured before each save")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--flavor", default="DiT-B/2")
    parser.add_argument("--folder", default=None, help="where to save (default: a temporary folder)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    modes: list[Any] = ["disabled", "async"] + (["async_with_pinned_mem"] if device.type == "cuda" else [])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        trainer = build(folder, arguments.flavor, arguments.batch)
        keepers = {
            mode: Checkpointer(Path(folder) / mode, CheckpointConfig(async_mode=mode, keep_latest_k=1), rank=0)
            for mode in modes
        }
        step = timed_step(trainer, device)
        for keeper in keepers.values():  # buffers are made, kernels chosen
            measure(trainer, keeper, step, 3)
        rounds = [
            {mode: measure(trainer, keeper, step, arguments.steps) for mode, keeper in keepers.items()}
            for _ in tqdm(range(arguments.rounds), unit="round")
        ]
        num_bytes = sum(tensor.nbytes for tensor in trainer.state.tensors().values())
        for keeper in keepers.values():
            keeper.close()
        trainer.close()
    result = {
        "model": arguments.flavor, "parameters": sum(p.numel() for p in trainer.state.parameters.values()),
        "checkpoint_bytes": num_bytes, "batch": arguments.batch, "rounds": arguments.rounds,
        "threads": torch.get_num_threads(), "modes": {mode: summary([r[mode] for r in rounds]) for mode in modes},
        "cost_over_disabled": {
            mode: statistics.median(r[mode]["cost_seconds"] / r["disabled"]["cost_seconds"] for r in rounds)
            for mode in modes[1:]
        },
        "device": device_name(device), "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / "async_checkpoint.json"
    path.parent.mkdir(exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    found[f"{result['device']}, {result['threads']} of {os.cpu_count()} cores"] = result
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def build(folder: str, flavor: str, batch: int) -> Trainer:
    """Build a trainer of synthetic latents, with checkpoints saved by hand."""
    return Trainer(load_config([
        "--job.dump_folder", folder, "--model.flavor", flavor, "--data.name", "synthetic", "--data.kind", "noise",
        "--data.shape", "[4, 32, 32]", "--data.num_classes", "1000", "--training.local_batch_size", str(batch),
        "--training.steps", "1000000", "--checkpoint.enable", "false", "--sampling.enable", "false",
        "--metrics.enable_tensorboard", "false", "--ema.tracks", '[{"name": "ema"}]',
    ], 1))  # fmt: skip


def timed_step(trainer: Trainer, device: torch.device) -> Callable[[], float]:
    def step() -> float:
        """Run one step, to its end on the device; seconds."""
        start = time.perf_counter()
        trainer.state.step += 1
        trainer.train_step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def measure(trainer: Trainer, keeper: Checkpointer, step: Callable[[], float], steps: int) -> dict[str, float]:
    """Measure seconds of an ordinary step, of the call that saves, and the total cost of a save."""
    ordinary = statistics.median(step() for _ in range(steps))
    start = time.perf_counter()
    keeper.save(trainer.state.step, trainer.state.tensors(), checkpointed_state(trainer.state, trainer.reports.state_dict()))
    blocked = time.perf_counter() - start
    beside = []
    while keeper.under_way:
        beside.append(step())
    cost = blocked + sum(beside) - len(beside) * ordinary
    if problem := keeper.wait():
        raise SystemExit(problem)
    return {
        "step_seconds": ordinary, "blocked_seconds": blocked, "steps_beside": len(beside), "cost_seconds": cost,
        "write_seconds": blocked + sum(beside),
    }  # fmt: skip


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Summarise the rounds by medians."""
    return {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}


if __name__ == "__main__":
    main()
