"""Variance of the targets of mean flows by their two times, of trained runs: python benchmarks/mean_flow_targets.py RUN [RUN ...]

For an image x, noise e and z = (1 - t) x + t e let n = (e - x) - u(z, t, t): the noise of the sample's velocity about the
network's. Both tangents give the mean velocity u(z, r, t) a target with the same mean, and with the noise

    predicted (improved MeanFlow)   n
    sampled (MeanFlow)              n - (t - r) J n,   J = du(z, r, t)/dz, by a forward derivative

Measured: the ratio of their mean squares, sampled over predicted, over every fifth training image, for each run. For Gaussian
data of standard deviation s it is V(r) / V(t), V(t) = (1 - t)^2 s^2 + t^2. Writes benchmarks/results/mean_flow_targets.json and,
under docs/research/images, mean_flow_targets.png.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import shared
from torchtitan import philox
from torchtitan.data import DATASETS
from torchtitan.pictures.style import new_figure, ordered_colours
from torchtitan.statistics.interval import positive_interval
from torchtitan.weights.trained_model import TrainedModel, load_run

TIMES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # t
SHARES = (0.0, 0.25, 0.5, 0.75)  # r / t
EVERY, BATCH = 5, 300  # images


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    arguments = parser.parse_args()
    found = {str(run): ratios(load_run(run, "none", None, torch.device("cpu"))) for run in arguments.runs}
    cells = []
    for t in TIMES:
        for share in SHARES:
            interval = positive_interval([of_run[t, share] for of_run in found.values()])
            cells.append({"t": t, "r": share * t, "ratio": interval.value, "interval": [interval.lower, interval.upper]})
            print(cells[-1], flush=True)
    shared.write_results("mean_flow_targets", {"runs": len(found), "cells": cells})
    draw(cells)


@torch.no_grad()
def ratios(trained: TrainedModel) -> dict[tuple[float, float], float]:
    """Mean square of the sampled target's noise over the predicted one's, by t and r / t, over every fifth training image."""
    dataset = DATASETS[trained.config.data.name](trained.config.data, "train")
    sums = {(t, share): torch.zeros(2, dtype=torch.float64) for t in TIMES for share in SHARES}
    for first in range(0, len(dataset) // EVERY, BATCH):
        numbers = EVERY * np.arange(first, min(first + BATCH, len(dataset) // EVERY))
        batch = dataset.fetch(numbers)
        images = batch["images"]
        noise = philox.normal(trained.config.debug.seed, "evaluation", torch.from_numpy(numbers), tuple(images.shape[1:]))
        for t in TIMES:
            for share in SHARES:
                sums[t, share] += squares(trained, images, noise, t, share * t, batch["class"])
    return {cell: float(sampled / predicted) for cell, (sampled, predicted) in sums.items()}


def squares(trained: TrainedModel, images: Tensor, noise: Tensor, t: float, r: float, condition: Tensor) -> Tensor:
    """Sums of squares of the noise of the sampled and of the predicted target, [2]."""
    time, duration = torch.full((len(images),), t), torch.full((len(images),), t - r)
    x_t = (1 - t) * images + t * noise

    def mean_velocity(x: Tensor, over: Tensor) -> Tensor:
        return trained.model(x, 1 - time, condition, over)

    n = noise - images - mean_velocity(x_t, torch.zeros_like(time))
    with sdpa_kernel(SDPBackend.MATH):  # the others have no forward derivative
        along = torch.func.jvp(lambda x: mean_velocity(x, duration), (x_t,), (n,))[1]
    return torch.stack([(n - (t - r) * along).double().square().sum(), n.double().square().sum()])


def draw(cells: list[dict]) -> None:
    figure, axes = new_figure("Noise of MeanFlow's target over that of improved MeanFlow's")
    axis = axes[0, 0]
    for color, share in zip(ordered_colours(len(SHARES)), SHARES, strict=True):
        line = [cell for cell in cells if abs(cell["r"] - share * cell["t"]) < 1e-9]
        values = [cell["ratio"] for cell in line]
        errors = [
            [value - cell["interval"][0] for value, cell in zip(values, line, strict=True)],
            [cell["interval"][1] - value for value, cell in zip(values, line, strict=True)],
        ]
        axis.errorbar(TIMES, values, errors, fmt="o-", color=color, capsize=3, label=f"r = {share:g} t" if share else "r = 0")
    axis.axhline(1.0, color="grey", linewidth=1)
    axis.set(xlabel="t (1 is noise)", ylabel="ratio of mean squares", yscale="log")
    axis.set_yticks([0.5, 0.7, 1.0, 1.4, 2.0], minor=False)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.legend()
    figure.savefig(shared.ROOT / "docs/research/images/mean_flow_targets.png")


if __name__ == "__main__":
    main()
