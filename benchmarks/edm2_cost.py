"""Cost of magnitude preservation: python benchmarks/edm2_cost.py [--pairs N] [--batch B] [--channels W]

Train steps of the magnitude-preserving DiT-S/2 beside the plain one, and of EDM2's networks E and G beside C at CIFAR's
settings, all on 3x32x32 images. Steps are interleaved in one process and the ratio is taken pair by pair. Of the networks
with normalised weights also the share of the normalisation: in place before the step, and that of the forward and backward,
as a step with it beside one without. Writes benchmarks/results/edm2_cost.json.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.trainer_overhead import CLASSES, SHAPE, interleaved, median_interval, timed
from torchtitan.config.job import load_config
from torchtitan.models.magnitude import NormalizedWeight
from torchtitan.runs.folder import versions
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import device_name

ROOT = Path(__file__).resolve().parent.parent
DIT = ("--model.flavor", "DiT-S/2")
EDM2 = ("--model.name", "edm2", "--model.flavor", "cifar", "--objective.path", "edm", "--objective.prediction", "edm",
        "--objective.preconditioning", "edm", "--objective.timesteps.name", "lognormal_sigma")  # fmt: skip
NETWORKS = {
    "DiT": DIT, "MP-DiT": (*DIT, "--model.magnitude_preserving", "true"),
    **{config: (*EDM2, "--model.config", config) for config in "CEG"},
}  # fmt: skip
PAIRS = (("MP-DiT", "DiT"), ("E", "C"), ("G", "C"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="of steps (default: 15)")
    parser.add_argument("--batch", type=int, default=8, help="images in a step (default: 8)")
    parser.add_argument("--channels", type=int, default=128, help="width of the U-Nets (default: 128, CIFAR's)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [compared(one, other, arguments, device) for one, other in PAIRS]
    result = {
        "images": "3x32x32, float32", "batch": arguments.batch, "pairs": arguments.pairs, "channels": arguments.channels,
        "threads": torch.get_num_threads(), "rows": rows,
        "device": device_name(device), "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / "edm2_cost.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def compared(one: str, other: str, arguments: argparse.Namespace, device: torch.device) -> dict:
    """Ratio of the steps of two networks, and what the first's normalisation costs."""
    trainer, reference = build(one, arguments), build(other, arguments)
    step = stepper(trainer)
    times = interleaved(step, stepper(reference), arguments.pairs, device)
    in_place = [timed(trainer.state.network.normalize_weights, device) / ours for ours, _ in times]

    def without() -> None:
        with no_normalization():
            step()

    within = [ours / bare - 1.0 for ours, bare in interleaved(step, without, arguments.pairs, device)]
    return {
        "network": one, "parameters": trainer.state.num_parameters, "reference": other,
        "reference_parameters": reference.state.num_parameters,
        "step_seconds": statistics.median(ours for ours, _ in times),
        **figures("step_ratio", [ours / theirs for ours, theirs in times]),
        **figures("in_place_share", in_place), **figures("whole_normalization_share", within),
    }  # fmt: skip


def figures(name: str, values: list[float]) -> dict:
    return {name: statistics.median(values), f"{name}_95_percent": list(median_interval(values))}


def build(network: str, arguments: argparse.Namespace) -> Trainer:
    width = ("--model.channels", str(arguments.channels)) if network in "CEG" else ()
    return Trainer(load_config([
        "--job.dump_folder", tempfile.mkdtemp(), *NETWORKS[network], *width, "--data.name", "synthetic", "--data.kind",
        "noise", "--data.shape", json.dumps(SHAPE), "--data.num_classes", str(CLASSES), "--training.local_batch_size",
        str(arguments.batch), "--training.steps", "1000000", "--checkpoint.enable", "false", "--sampling.enable", "false",
    ], 1))  # fmt: skip


def stepper(trainer: Trainer) -> Callable[[], None]:
    def step() -> None:
        trainer.state.step += 1
        trainer.train_step()

    return step


@contextmanager
def no_normalization() -> Iterator[None]:
    """Raw weights scaled alone, and none normalised in place; they stay nearly normalised for a few steps."""

    def scaled(layer: NormalizedWeight, dtype: torch.dtype) -> Tensor:
        return (layer.weight / math.sqrt(layer.weight[0].numel())).to(dtype)

    with (
        patch.object(NormalizedWeight, "scaled_weight", scaled),
        patch("torchtitan.state.network.normalize_rows", lambda weights: None),
    ):
        yield


if __name__ == "__main__":
    main()
