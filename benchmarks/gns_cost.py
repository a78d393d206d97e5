"""Cost of measuring the gradient noise scale: python benchmarks/gns_cost.py [--flavors digits digits-plain ...] [--rounds N]

Train steps of one trainer on 3x32x32 images (256 tokens), or of `digits`, the model of train_configs/digits.toml at its
batch of 128 (16 tokens; `digits-plain`: without Adam's geometry), in turns: without measurement, with the free tier, with a
measured step (sketches of every layer, Adam's factors, pooling), in an order drawn anew in every round, each as a ratio
to the round's step without. The default setting measures one step in eight. Peak memory is that of a separate process,
with measurement at the default setting and without, logging included. Adds to benchmarks/results/gns_cost.json.
"""

import argparse
import functools
import json
import random
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.trainer_overhead import CLASSES, SHAPE, median_interval, timed
from torchtitan.config.job import load_config
from torchtitan.gns.config import GNSConfig
from torchtitan.runs.folder import versions
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import device_name, peak_resident_gib

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("off", "free", "measured")
DEFAULT_INTERVAL = GNSConfig().interval
DIGITS, DIGITS_BATCH = "digits", 128
PLAIN = f"{DIGITS}-plain"  # in plain geometry alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavors", nargs="+", default=[DIGITS, PLAIN, "DiT-S/2", "DiT-B/2"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="images per step, of all but digits")
    parser.add_argument("--memory-of", choices=("on", "off"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(peak_memory(arguments.flavors[0], arguments.batch, arguments.memory_of == "on"))
        return
    path = ROOT / "benchmarks" / "results" / "gns_cost.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for flavor in arguments.flavors:
        batch = DIGITS_BATCH if flavor in (DIGITS, PLAIN) else arguments.batch
        results[flavor] = measure(flavor, batch, arguments.rounds)
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(flavor, json.dumps(results[flavor], indent=1))


def measure(flavor: str, batch: int, rounds: int) -> dict:
    """Measure the costs of one flavor as ratios to a step without measurement, medians with 95 % intervals."""
    times = in_turns(build_trainer(flavor, batch, True), rounds)
    result: dict[str, Any] = {"batch": batch, "rounds": rounds, "step_seconds": statistics.median(off for off, _, _ in times)}
    amortised = []
    for off, free, measured in times:
        amortised.append(((DEFAULT_INTERVAL - 1) * free + measured) / DEFAULT_INTERVAL / off)
    ratios = {
        "free": [free / off for off, free, _ in times],
        "measured": [measured / off for off, _, measured in times],
        f"default_1_in_{DEFAULT_INTERVAL}": amortised,
    }
    for name, values in ratios.items():
        result[name] = statistics.median(values)
        result[f"{name}_95_percent"] = list(median_interval(values))
    memory = {kind: memory_in_own_process(flavor, batch, kind) for kind in ("on", "off")}
    return result | {
        "memory_GiB": memory["on"], "memory_without_GiB": memory["off"], "memory_ratio": memory["on"] / memory["off"],
        "threads": torch.get_num_threads(), "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip


def build_trainer(flavor: str, batch: int, enable: bool) -> Trainer:
    synthetic = {
        "--model.flavor": flavor, "--data.name": "synthetic", "--data.kind": "noise", "--data.shape": json.dumps(SHAPE),
        "--data.num_classes": str(CLASSES), "--training.local_batch_size": str(batch),
    }  # fmt: skip
    digits = {
        "--job.config_file": str(ROOT / "train_configs" / "digits.toml"), "--evaluation.enable": "false",
        "--validation.enable": "false",
    }  # fmt: skip
    options = {
        **(digits if flavor in (DIGITS, PLAIN) else synthetic), "--job.dump_folder": tempfile.mkdtemp(),
        "--training.steps": "1000000", "--checkpoint.enable": "false",
        "--sampling.enable": "false", "--gns.enable": str(enable).lower(),
        # Fewer bins than by default: a bin needs two samples of a batch.
        **({"--gns.num_bins": str(min(10, batch // 2))} if enable else {}),
        **({"--gns.adam_geometry": "false"} if enable and flavor == PLAIN else {}),
    }  # fmt: skip
    return Trainer(load_config([word for option in options.items() for word in option], 1))


def in_turns(trainer: Trainer, rounds: int) -> list[tuple[float, ...]]:
    """Time a step of each arm in turns, round by round, after three rounds of warm-up; seconds."""
    monitor: Any = trainer.state.gns
    order, found = random.Random(0), []

    def step(arm: str) -> None:
        trainer.state.step += 1
        trainer.state.gns = None if arm == "off" else monitor
        monitor._config.interval = 1 if arm == "measured" else 1_000_000_000
        trainer.train_step()
        if arm != "off":
            monitor.pool_kept_steps()  # the host's part, which is otherwise left to a later step

    for _ in range(rounds + 3):
        seconds = {}
        for arm in order.sample(ARMS, len(ARMS)):
            seconds[arm] = timed(functools.partial(step, arm), trainer.state.layout.device)
        found.append(tuple(seconds[arm] for arm in ARMS))
    return found[3:]


def peak_memory(flavor: str, batch: int, enable: bool) -> float:
    """Peak GiB of this process (of the device on CUDA) after twenty steps."""
    trainer = build_trainer(flavor, batch, enable)
    for _ in range(2 * DEFAULT_INTERVAL + 4):
        trainer.state.step += 1
        trainer.train_step()
    if trainer.state.layout.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return peak_resident_gib()


def memory_in_own_process(flavor: str, batch: int, kind: str) -> float:
    command = [sys.executable, __file__, "--memory-of", kind, "--flavors", flavor, "--batch", str(batch)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
