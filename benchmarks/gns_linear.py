"""Noise scale of a linear network on Gaussian images of 64 to 12,288 dimensions: python benchmarks/gns_linear.py [--seeds N]

Images have power spectra 1 / f^2 in each channel, unit variance a pixel. A network v = W x_t at W = 0 (rectified flow,
x_t = (1 - t) x0 + t e, target e - x0) has single gradients r x_t', r = x0 - e, and in closed form (Isserlis), with the
eigenvalues l of the images' covariance, C = (1 - t)^2 l + t^2 and S = (1 - t) l - t:

    |G|^2 = sum S^2,     tr Sigma = sum (l + 1) sum C + sum S^2,     B = tr Sigma / |G|^2

Measured: the estimator of torchtitan/gns/statistics.py on `--samples` draws of each size and time for each seed. Is B over
dimensions one curve of logit(t) - ln sqrt(dimensions)? Writes benchmarks/results/gns_linear.json and, under docs/research/images,
gns_linear.png.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks import shared
from torchtitan.gns.statistics import PairSums, noise, signal
from torchtitan.pictures.style import new_figure, ordered_colours
from torchtitan.statistics.interval import mean_interval

SHAPES = ((1, 8), (3, 8), (3, 16), (3, 32), (3, 64))  # channels, side
SHIFTED = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # logit(t) - ln sqrt(dimensions)


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096)
    arguments = parser.parse_args()
    sizes = {}
    for channels, side in SHAPES:
        spectrum = spectrum_of(side)
        dimensions = channels * side * side
        points = []
        for u in SHIFTED:
            t = 1.0 / (1.0 + math.exp(-u - math.log(dimensions) / 2))
            found = [measured(spectrum, channels, t, arguments.samples, seed) for seed in range(arguments.seeds)]
            interval = mean_interval(found)
            points.append({
                "shifted": u, "t": t, "closed_form": closed_form(spectrum, channels, t), "measured": interval.value,
                "interval": [interval.lower, interval.upper],
            })  # fmt: skip
            print(dimensions, points[-1], flush=True)
        sizes[str(dimensions)] = points
    spreads = {space: spread(sizes, space) for space in ("shifted", "same t")}
    result = {"sizes": sizes, "spreads": spreads, "samples": arguments.samples, "seeds": arguments.seeds}
    shared.write_results("gns_linear", result)
    draw(sizes)


def spectrum_of(side: int) -> Tensor:
    """Eigenvalues of the images' covariance, [side, side] by frequency, mean 1."""
    f = torch.fft.fftfreq(side, dtype=torch.float64) * side
    power = 1.0 / (f[:, None] ** 2 + f[None, :] ** 2).clamp_min(1.0)
    return power / power.mean()


def closed_form(spectrum: Tensor, channels: int, t: float) -> float:
    """B at time t."""
    correlated = channels * ((1 - t) ** 2 * spectrum + t**2).sum()
    square = channels * ((1 - t) * spectrum - t).square().sum()
    return ((channels * (spectrum + 1).sum() * correlated + square) / square).item()


def measured(spectrum: Tensor, channels: int, t: float, samples: int, seed: int) -> float:
    """B from single gradients r x', which have inner products (r_i . r_j)(x_i . x_j)."""
    generator = torch.Generator().manual_seed(seed)
    white, e = (torch.randn(samples, channels, *spectrum.shape, generator=generator) for _ in range(2))
    x0 = torch.fft.ifft2(torch.fft.fft2(white) * spectrum.sqrt().to(torch.float32)).real.flatten(1)
    e = e.flatten(1)
    x, r = (1 - t) * x0 + t * e, x0 - e
    squares = (r.double().square().sum(1) * x.double().square().sum(1)).sum()
    products = ((r @ r.T).double() * (x @ x.T).double()).sum()
    sums = PairSums.of_group(torch.tensor([samples]), squares[None], products[None, None])
    return (noise(sums) / signal(sums)).item()


def spread(sizes: dict, space: str) -> float:
    """Largest over smallest B / dimensions among the three-channel sizes, closed form, at the worst of the compared times."""
    ratios = []
    for u in SHIFTED:
        values = []
        for channels, side in SHAPES[1:]:
            dimensions = channels * side * side
            logit = u + (math.log(dimensions) / 2 if space == "shifted" else math.log(3 * 32 * 32) / 2)
            values.append(closed_form(spectrum_of(side), channels, 1 / (1 + math.exp(-logit))) / dimensions)
        ratios.append(max(values) / min(values))
    return max(ratios)


def draw(sizes: dict) -> None:
    figure, axes = new_figure("Noise scale of a linear network on Gaussian images", columns=2, size=(10.0, 4.2))
    for color, (dimensions, points) in zip(ordered_colours(len(sizes)), sizes.items(), strict=True):
        count = int(dimensions)
        values = [point["measured"] / count for point in points]
        for axis, xs in zip(axes[0], ([math.log(p["t"] / (1 - p["t"])) for p in points], SHIFTED), strict=True):
            axis.plot(xs, values, "o", color=color, markersize=4, label=f"{count:,}")
            axis.plot(xs, [point["closed_form"] / count for point in points], color=color)
    for axis, label in zip(axes[0], ("logit(t)", "logit(t) - ln √dimensions"), strict=True):
        axis.set(xlabel=label, ylabel="B / dimensions", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    axes[0, 1].legend(title="dimensions", fontsize=8)
    figure.savefig(shared.ROOT / "docs" / "research" / "images" / "gns_linear.png")


if __name__ == "__main__":
    main()
