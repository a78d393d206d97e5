"""Overhead of the trainer over a bare PyTorch loop: python benchmarks/trainer_overhead.py [--pairs N] [--batch B]

One train step of DiT-S/2 on 3x32x32 images, by the trainer and by the shortest loop that trains the same model
with the same optimizer, clipping and EMA. Steps are interleaved (trainer, loop, trainer, ...) in one process and
the ratio is taken pair by pair; peak memory is that of a separate process for each. Writes
benchmarks/results/trainer_overhead.json.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.models import MODELS
from torchtitan.runs.folder import versions
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import device_name, peak_resident_gib

ROOT = Path(__file__).resolve().parent.parent


SHAPE, CLASSES = (3, 32, 32), 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--memory-of", choices=("trainer", "loop"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(peak_memory(arguments.memory_of, arguments.batch))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = interleaved(trainer_step(arguments.batch), loop_step(arguments.batch, device), arguments.pairs, device)
    ratios = [ours / bare for ours, bare in times]
    memory = {kind: memory_in_own_process(kind, arguments.batch) for kind in ("trainer", "loop")}
    low, high = median_interval(ratios)
    result = {
        "model": "DiT-S/2 on 3x32x32, float32", "batch": arguments.batch, "pairs": arguments.pairs,
        "trainer_seconds": statistics.median(ours for ours, _ in times),
        "loop_seconds": statistics.median(bare for _, bare in times),
        "time_ratio": statistics.median(ratios), "time_ratio_95_percent": [low, high],
        "trainer_peak_GiB": memory["trainer"], "loop_peak_GiB": memory["loop"],
        "memory_ratio": memory["trainer"] / memory["loop"],
        "device": device_name(device), "date": date.today().isoformat(), "versions": versions(),
    }
    path = ROOT / "benchmarks" / "results" / "trainer_overhead.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def trainer_step(batch: int) -> Callable[[], None]:
    """Step of the trainer, logging and finite check included."""
    folder = tempfile.mkdtemp()
    trainer = Trainer(load_config([
        "--job.dump_folder", folder, "--model.flavor", "DiT-S/2", "--data.name", "synthetic", "--data.kind", "noise",
        "--data.shape", json.dumps(SHAPE), "--data.num_classes", str(CLASSES), "--training.local_batch_size", str(batch),
        "--training.steps", "1000000", "--checkpoint.enable", "false", "--sampling.enable", "false",
        "--metrics.log_freq", "10",
    ], 1))

    def step() -> None:
        trainer.state.step += 1
        norm, lr = trainer.train_step()
        if trainer.state.step % 10 == 0:
            trainer.reports.log(norm, lr)

    return step


def loop_step(batch: int, device: torch.device) -> Callable[[], None]:
    """Step of the shortest loop: images in memory, torch's own random numbers, no metrics."""
    family = MODELS["dit"]
    model = family.build(family.flavors["DiT-S/2"], SHAPE, Classes(CLASSES)).to(device)
    model.init_weights()
    parameters = list(model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    data = torch.randn(1024, *SHAPE)
    labels = torch.randint(CLASSES, (1024,))

    def step() -> None:
        chosen = torch.randint(1024, (batch,))
        x0, classes = data[chosen].to(device), labels[chosen].to(device)
        classes = torch.where(torch.rand(batch, device=device) < 0.1, CLASSES, classes)
        noise, t = torch.randn_like(x0), torch.sigmoid(torch.randn(batch, device=device))
        mix = t[:, None, None, None]
        output = model((1 - mix) * x0 + mix * noise, 1000 * t, classes)
        torch.nn.functional.mse_loss(output, noise - x0).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 1e-4)

    return step


def interleaved(
    ours: Callable[[], None], bare: Callable[[], None], pairs: int, device: torch.device
) -> list[tuple[float, float]]:
    """Interleave steps, pair by pair, after three pairs of warm-up, in alternating random order; seconds of each."""
    order = random.Random(0)
    times = []
    for _ in range(pairs + 3):
        first_ours = order.random() < 0.5
        first, second = (timed(step, device) for step in ((ours, bare) if first_ours else (bare, ours)))
        times.append((first, second) if first_ours else (second, first))
    return times[3:]


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one step: processor time on the CPU, where other programs share it; wall time on CUDA."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def median_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median by the bootstrap, 10,000 resamples."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(10_000))
    return medians[250], medians[9749]


def peak_memory(kind: str, batch: int) -> float:
    """Peak GiB of this process (of the device on CUDA) after six steps of one kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = trainer_step(batch) if kind == "trainer" else loop_step(batch, device)
    for _ in range(6):
        step()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return peak_resident_gib()


def memory_in_own_process(kind: str, batch: int) -> float:
    command = [sys.executable, __file__, "--memory-of", kind, "--batch", str(batch)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
