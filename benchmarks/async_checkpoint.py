"""Cost of synchronous and asynchronous saves: python benchmarks/async_checkpoint.py [--rounds N]

Trains DiT-B/2 (130 M parameters, Adam, one average: 2.1 GB a checkpoint) on synthetic images. A round takes steps
without a save, then one save and as many steps as its write lasts; their time beyond that of as many ordinary steps is
the save's cost. Modes take turns. On a machine with CUDA pinned memory is measured too. On a CPU training has
OMP_NUM_THREADS cores: with all of them the concurrent write takes its time from the steps, with one less it does not,
as on a machine that computes steps on a GPU. Adds to benchmarks/results/async_checkpoint.json.
"""

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from benchmarks import shared
from torchtitan.checkpoint.checkpointer import Checkpointer
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.distributed.mesh import compute_device
from torchtitan.state.resume import checkpointed_state
from torchtitan.trainer import Trainer


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="ordinary steps measured before each save")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--flavor", default="DiT-B/2")
    parser.add_argument("--folder", default=None, help="where to save (default: a temporary folder)")
    arguments = parser.parse_args()
    device = compute_device()
    modes: list[Any] = ["disabled", "async"] + (["async_with_pinned_mem"] if device.type == "cuda" else [])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        trainer = shared.build_trainer(shared.SYNTHETIC | {
            "job.dump_folder": folder, "model.flavor": arguments.flavor, "data.shape": [4, 32, 32], "data.num_classes": 1000,
            "training.local_batch_size": arguments.batch, "ema.tracks": [{"name": "ema"}],
        })  # fmt: skip
        keepers = {
            mode: Checkpointer(Path(folder) / mode, CheckpointConfig(async_mode=mode, keep_latest_k=1), rank=0)
            for mode in modes
        }
        step = functools.partial(step_seconds, trainer)
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
        "modes": {mode: summary([r[mode] for r in rounds]) for mode in modes},
        "cost_over_disabled": {
            mode: statistics.median(r[mode]["cost_seconds"] / r["disabled"]["cost_seconds"] for r in rounds)
            for mode in modes[1:]
        },
        **shared.conditions(device),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    found = shared.read_results("async_checkpoint")
    found[f"{result['device']}, {result['threads']} of {os.cpu_count()} cores"] = result
    shared.write_results("async_checkpoint", found)


def step_seconds(trainer: Trainer) -> float:
    """Run one step, to its end on the device; wall time, since the write runs in other threads."""
    start = time.perf_counter()
    shared.train_step(trainer)
    if trainer.state.layout.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


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
