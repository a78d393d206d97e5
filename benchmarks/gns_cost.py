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
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import shared
from torchtitan.gns.config import GNSConfig
from torchtitan.trainer import Trainer

ARMS = ("off", "free", "measured")
DEFAULT_INTERVAL = GNSConfig().interval
DIGITS, DIGITS_BATCH = "digits", 128
PLAIN = f"{DIGITS}-plain"  # in plain geometry alone


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--flavors", nargs="+", default=[DIGITS, PLAIN, "DiT-S/2", "DiT-B/2"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="images per step, of all but digits")
    parser.add_argument("--memory-of", choices=("on", "off"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        trainer = build_trainer(arguments.flavors[0], arguments.batch, arguments.memory_of == "on")
        step = functools.partial(shared.train_step, trainer)
        print(shared.peak_gib(step, 2 * DEFAULT_INTERVAL + 4, trainer.state.layout.device))
        return
    results = shared.read_results("gns_cost")
    for flavor in arguments.flavors:
        batch = DIGITS_BATCH if flavor in (DIGITS, PLAIN) else arguments.batch
        results[flavor] = measure(flavor, batch, arguments.rounds)
        print(flavor, json.dumps(results[flavor], indent=1))
        shared.write_results("gns_cost", results)


def measure(flavor: str, batch: int, rounds: int) -> dict:
    """Measure the costs of one flavor as ratios to a step without measurement, medians with 95 % intervals."""
    times = in_turns(build_trainer(flavor, batch, True), rounds)
    result: dict[str, Any] = {"batch": batch, "rounds": rounds, "step_seconds": shared.medians(times)[0]}
    ratios = {
        "free": [free / off for off, free, _ in times],
        "measured": [measured / off for off, _, measured in times],
        f"default_1_in_{DEFAULT_INTERVAL}": [
            ((DEFAULT_INTERVAL - 1) * free + measured) / DEFAULT_INTERVAL / off for off, free, measured in times
        ],
    }
    for name, values in ratios.items():
        result |= shared.figures(name, values)
    words = ("--flavors", flavor, "--batch", batch)
    on, off = (shared.in_own_process(__file__, "--memory-of", kind, *words) for kind in ("on", "off"))
    return result | {"memory_GiB": on, "memory_without_GiB": off, "memory_ratio": on / off, **shared.conditions()}


def build_trainer(flavor: str, batch: int, enable: bool) -> Trainer:
    synthetic = shared.SYNTHETIC | {"model.flavor": flavor, "training.local_batch_size": batch}
    digits = {
        "job.config_file": str(shared.ROOT / "train_configs" / "digits.toml"), "evaluation.enable": False,
        "validation.enable": False,
    }  # fmt: skip
    settings = (digits if flavor in (DIGITS, PLAIN) else synthetic) | {"gns.enable": enable}
    if enable:
        settings["gns.num_bins"] = min(10, batch // 2)  # fewer than by default: a bin needs two samples of a batch
    if enable and flavor == PLAIN:
        settings["gns.adam_geometry"] = False
    return shared.build_trainer(settings)


def in_turns(trainer: Trainer, rounds: int) -> list[tuple[float, ...]]:
    """Time a step of each arm in turns, see `shared.time_in_turns`."""
    monitor: Any = trainer.state.gns

    def step(arm: str) -> None:
        trainer.state.gns = None if arm == "off" else monitor
        monitor._config.interval = 1 if arm == "measured" else 1_000_000_000
        shared.train_step(trainer)
        if arm != "off":
            monitor.pool_kept_steps()  # the host's part, which is otherwise left to a later step

    return shared.time_in_turns([functools.partial(step, arm) for arm in ARMS], rounds, trainer.state.layout.device)


if __name__ == "__main__":
    main()
