"""What benchmarks share: a command line, trainers on synthetic images, steps timed in turns, results with their hardware."""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan.config.job import load_config
from torchtitan.distributed.mesh import compute_device
from torchtitan.experiments.command_lines import words_of
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.runs.folder import versions
from torchtitan.statistics.interval import binomial_interval, median_interval
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import device_name, peak_resident_gib

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHAPE, CLASSES = (3, 32, 32), 10
WARM_UP = 3  # rounds

Settings = dict[str, Any]  # dotted key -> value
UNATTENDED: Settings = {
    "training.steps": 1_000_000, "checkpoint.enable": False, "sampling.enable": False, "metrics.enable_tensorboard": False,
}  # fmt: skip
SYNTHETIC: Settings = {"data.name": "synthetic", "data.kind": "noise", "data.shape": SHAPE, "data.num_classes": CLASSES}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


# ---------------------------------------------------------------------- results


def result_path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def read_results(name: str) -> dict[str, Any]:
    """Results on record; empty where there are none."""
    path = result_path(name)
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(name: str, results: Mapping[str, Any]) -> None:
    path = result_path(name)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def conditions(device: torch.device | None = None) -> dict[str, Any]:
    """Hardware, date and versions of a measurement; the device is that of this process unless it is given."""
    return {
        "threads": torch.get_num_threads(), "device": device_name(device or compute_device()),
        "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip


def figures(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Median and its 95 % interval between two order statistics; of fewer than six values their range, which covers less."""
    found = median_interval(values)
    return {name: found.value, f"{name}_95_percent": [found.lower, found.upper]}


def proportion(right: np.ndarray) -> dict[str, float]:
    """Share with Wilson's 95 % interval."""
    found = binomial_interval(int(right.sum()), len(right))
    return {"value": found.value, "lower": found.lower, "upper": found.upper}


def recognised_classes(images: np.ndarray, extractor: str) -> np.ndarray:
    """Class [N] that the logits of an extractor name for each image [N, H, W, 3] uint8."""
    network = open_extractor(extractor)
    batches = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).split(200)
    return torch.cat([network.extract(batch)["logits"].argmax(1) for batch in batches]).numpy()


# ---------------------------------------------------------------------- trainers


def build_trainer(settings: Mapping[str, Any]) -> Trainer:
    """Trainer of one process in a temporary folder, without checkpoints and pictures unless the settings say otherwise."""
    return Trainer(load_config(words_of({"job.dump_folder": tempfile.mkdtemp(), **UNATTENDED, **settings}), 1))


def train_step(trainer: Trainer) -> None:
    trainer.state.step += 1
    trainer.train_step()


def train_to(trainer: Trainer, step: int) -> None:
    while trainer.state.step < step:
        train_step(trainer)


# ---------------------------------------------------------------------- time and memory


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of one step: processor time on the CPU, where other programs share it; wall time on CUDA."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def time_in_turns(
    steps: Sequence[Callable[[], object]], rounds: int, device: torch.device
) -> list[tuple[float, ...]]:
    """Time each step once in a round, in an order drawn anew in every round; seconds, after three rounds of warm-up."""
    order, found = random.Random(0), []
    for _ in range(WARM_UP + rounds):
        seconds = {number: timed(steps[number], device) for number in order.sample(range(len(steps)), len(steps))}
        found.append(tuple(seconds[number] for number in range(len(steps))))
    return found[WARM_UP:]


def medians(rounds: Sequence[tuple[float, ...]]) -> list[float]:
    """Median of each step over the rounds."""
    return [statistics.median(of_step) for of_step in zip(*rounds, strict=True)]


def peak_gib(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Peak GiB of this process, of the device on CUDA, after some steps."""
    for _ in range(steps):
        step()
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else peak_resident_gib()


def in_own_process(file: str, *words: object) -> float:
    """Number that a benchmark prints last when it is run on these words."""
    command = [sys.executable, file, *map(str, words)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
