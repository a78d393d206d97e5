"""Half-progress batches of single bins, from their noise scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.gns.decayed import BinEstimates

# Half-progress batch of Adam's update over the noise scale in plain geometry: geometric mean of 100 cells (digits and CIFAR-10,
# five ages, ten bins) and the 2.5 and 97.5 percentiles of single cells; research/results/gns_calibration.md.
RATIO, RATIO_LOWER, RATIO_UPPER = 0.585, 0.307, 1.57


@dataclass(frozen=True)
class HalfProgress:
    """Half-progress batches of K timestep bins, in samples; float64.

    Attributes:
        batch: [K]; NaN where the noise scale has no upper end.
        lower, upper: ends of the interval, [K], which combines that of the noise scale with the spread of single bins' ratios;
            an infinite upper end where the noise scale has none.
    """

    batch: Tensor
    lower: Tensor
    upper: Tensor


def half_progress(found: BinEstimates) -> HalfProgress:
    """Batches at which one step of Adam on a bin makes half of the best progress on the bin's loss, step size tuned.

    The two relative errors, of the noise scale and of the ratio, are taken as independent and added in quadrature, as
    logarithms and to each side separately; of a noise scale without an upper end the lower ends are multiplied.

    Args:
        found: of single bins, in plain geometry.

    Source: docs/research/critical_batch.md, "Calibration": 100 cells on two data sets, small models, frozen weights.
    """
    scale = torch.where(found.unbounded, torch.nan, found.b_simple)
    batch = RATIO * scale
    below, above = (scale / found.lower).log(), (found.upper / scale).log()
    of_ratio = torch.tensor([RATIO / RATIO_LOWER, RATIO_UPPER / RATIO], dtype=torch.float64).log()
    lower, upper = batch * torch.exp(-below.hypot(of_ratio[0])), batch * torch.exp(above.hypot(of_ratio[1]))
    return HalfProgress(
        batch,
        torch.where(found.unbounded, RATIO_LOWER * found.lower, lower),
        torch.where(found.unbounded, torch.inf, upper),
    )
