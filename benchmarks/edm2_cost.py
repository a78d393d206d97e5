"""Cost of magnitude preservation: python benchmarks/edm2_cost.py [--pairs N] [--batch B] [--channels W]

Train steps of the magnitude-preserving DiT-S/2 beside the plain one, and of EDM2's networks E and G beside C at CIFAR's
settings, all on 3x32x32 images. Steps are interleaved in one process and the ratio is taken pair by pair. Of the networks
with normalised weights also the share of the normalisation: in place before the step, and that of the forward and backward,
as a step with it beside one without. Writes benchmarks/results/edm2_cost.json.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks import shared
from torchtitan.distributed.mesh import compute_device
from torchtitan.models.magnitude import NormalizedWeight
from torchtitan.trainer import Trainer

DIT = {"model.flavor": "DiT-S/2"}
EDM2 = {
    "model.name": "edm2", "model.flavor": "cifar", "objective.path": "edm", "objective.prediction": "edm",
    "objective.preconditioning": "edm", "objective.timesteps.name": "lognormal_sigma",
}  # fmt: skip
NETWORKS = {
    "DiT": DIT, "MP-DiT": DIT | {"model.magnitude_preserving": "true"},
    **{config: EDM2 | {"model.config": config} for config in "CEG"},
}  # fmt: skip
PAIRS = (("MP-DiT", "DiT"), ("E", "C"), ("G", "C"))


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="of steps (default: 15)")
    parser.add_argument("--batch", type=int, default=8, help="images in a step (default: 8)")
    parser.add_argument("--channels", type=int, default=128, help="width of the U-Nets (default: 128, CIFAR's)")
    arguments = parser.parse_args()
    device = compute_device()
    result = {
        "images": "3x32x32, float32", "batch": arguments.batch, "pairs": arguments.pairs, "channels": arguments.channels,
        "rows": [compared(one, other, arguments, device) for one, other in PAIRS], **shared.conditions(device),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    shared.write_results("edm2_cost", result)


def compared(one: str, other: str, arguments: argparse.Namespace, device: torch.device) -> dict:
    """Ratio of the steps of two networks, and what the first's normalisation costs."""
    trainer, reference = build(one, arguments), build(other, arguments)
    step, without = functools.partial(shared.train_step, trainer), functools.partial(unnormalized_step, trainer)
    times = shared.time_in_turns((step, functools.partial(shared.train_step, reference)), arguments.pairs, device)
    in_place = [shared.timed(trainer.state.network.normalize_weights, device) / ours for ours, _ in times]
    within = [ours / bare - 1.0 for ours, bare in shared.time_in_turns((step, without), arguments.pairs, device)]
    return {
        "network": one, "parameters": trainer.state.num_parameters, "reference": other,
        "reference_parameters": reference.state.num_parameters, "step_seconds": shared.medians(times)[0],
        **shared.figures("step_ratio", [ours / theirs for ours, theirs in times]),
        **shared.figures("in_place_share", in_place), **shared.figures("whole_normalization_share", within),
    }  # fmt: skip


def build(network: str, arguments: argparse.Namespace) -> Trainer:
    settings = shared.SYNTHETIC | NETWORKS[network] | {"training.local_batch_size": arguments.batch}
    return shared.build_trainer(settings | ({"model.channels": arguments.channels} if network in "CEG" else {}))


def unnormalized_step(trainer: Trainer) -> None:
    with no_normalization():
        shared.train_step(trainer)


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
