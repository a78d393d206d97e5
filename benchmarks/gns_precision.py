"""Gradient noise scale under bfloat16 compute against float32: python benchmarks/gns_precision.py [--ages STEP ...] [--steps N]

The digits model trains in float32. At each age its weights and Adam's state are held, and the same measured steps (the same
images, noise, timesteps and sketches) are computed in both precisions: |G|^2, the signal, and tr Sigma, the noise, of the whole
objective in both geometries, as ratios, with the signal's 95 % interval over steps. Writes benchmarks/results/gns_precision.json.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from scipy import stats

from benchmarks import shared
from torchtitan.gns.step_sums import GEOMETRIES, StepSums
from torchtitan.state.resume import materialise_state
from torchtitan.trainer import Trainer

PRECISIONS = ("float32", "bfloat16")


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--ages", type=int, nargs="+", default=[100, 400, 800], help="steps of training")
    parser.add_argument("--steps", type=int, default=64, help="measured steps at each age")
    arguments = parser.parse_args()
    trained = build("float32")
    found = {}
    for age in arguments.ages:
        shared.train_to(trained, age)
        found[str(age)] = at_age(trained, arguments.steps)
        print(age, json.dumps(found[str(age)], indent=1), flush=True)
    result = {"ages": found, "steps": arguments.steps, **shared.conditions(trained.state.layout.device)}
    shared.write_results("gns_precision", result)


def build(precision: str) -> Trainer:
    """Build a trainer of the digits model that measures every step."""
    return shared.build_trainer({
        "job.config_file": str(shared.ROOT / "train_configs" / "digits.toml"), "training.steps": 900,
        "training.mixed_precision_param": precision, "gns.interval": 1, "evaluation.enable": False,
        "validation.enable": False,
    })  # fmt: skip


def at_age(trained: Trainer, steps: int) -> dict[str, dict[str, float | list[float]]]:
    """Compare both precisions on the weights of a trainer."""
    sums = {precision: measure(trained, precision, steps) for precision in PRECISIONS}
    found: dict[str, dict[str, float | list[float]]] = {}
    for number, geometry in enumerate(GEOMETRIES):
        signals, noises = ([[part[number] for part in sums[p][which]] for p in PRECISIONS] for which in range(2))
        mean, half = statistics.mean(signals[0]), stats.t.ppf(0.975, steps - 1) * statistics.stdev(signals[0]) / steps**0.5
        found[geometry] = {
            "signal": mean, "signal_95_percent": [mean - half, mean + half],
            "signal_ratio": statistics.mean(signals[1]) / mean,
            "noise_ratio": statistics.mean(noises[1]) / statistics.mean(noises[0]),
        }  # fmt: skip
    return found


def measure(trained: Trainer, precision: str, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Signal and noise of each step in each geometry, with weights and Adam's state that stay as they are."""
    trainer = build(precision)
    materialise_state(trainer.state.optimizer, trainer.config.optimizer.lr)
    there = trainer.state.tensors()
    for name, tensor in trained.state.tensors().items():
        there[name].copy_(tensor)
    trainer.state.step, trainer.state.data.next_sample = trained.state.step, trained.state.data.next_sample
    monitor = trainer.state.gns
    assert monitor and monitor._taps
    end, measured = monitor._taps.end_step, []

    def recorded(*arguments: Any) -> StepSums:
        measured.append(end(*arguments))
        return measured[-1]

    with patch.object(monitor._taps, "end_step", recorded), patch.object(trainer.state.optimizer, "step"):
        for _ in range(steps):
            shared.train_step(trainer)
    trainer.close()
    estimates = [_signal_and_noise(sums) for sums in measured]
    return [signal.tolist() for signal, _ in estimates], [noise.tolist() for _, noise in estimates]


def _signal_and_noise(sums: StepSums) -> tuple[torch.Tensor, torch.Tensor]:
    """Unbiased |G|^2 and tr Sigma [G] of all parts and bins, from the sums of a step's n gradients."""
    n = sums.count.sum()
    squares, products = sums.squares.sum((0, 2)), sums.all_products.sum((0, 2, 3))
    signal = (products - squares) / (n * (n - 1))
    return signal, squares / n - signal


if __name__ == "__main__":
    main()
