"""Statements on the batch size: half-progress batches of single bins, and advice by the noise scale of the whole objective."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.gns.allocate import WORTHWHILE
from torchtitan.gns.decayed import BinEstimates

# Half-progress batch of Adam's update over the noise scale in plain geometry: geometric mean of 100 cells (digits and CIFAR-10,
# five ages, ten bins) and the 2.5 and 97.5 percentiles of single cells; research/results/gns_calibration.md.
RATIO, RATIO_LOWER, RATIO_UPPER = 0.585, 0.307, 1.57

_TEST = "python -m research critical_batch tests it, from a checkpoint (--step) before the learning rate decayed"


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


def batch_advice(b_simple: float, lower: float, upper: float, global_batch_size: int) -> str | None:
    """Advice on the batch size in one line: below or above the noise scale; None where it is near or too few samples tell.

    Near is within a factor of 2 of the estimate, or within the interval.

    Args:
        b_simple, lower, upper: noise scale of the whole objective with its confidence interval, in samples; an infinite
            upper end means that only the lower one is known.

    The noise scale stands in for the critical batch size, which was found far larger (Merrill et al., arXiv 2505.23971)
    and, under a decayed learning rate, two to four times smaller: what another batch would do is for a test to say.

    Source: McCandlish et al., arXiv 1812.06162, eq. 2.7: a batch of B makes 1 / (1 + B_simple / B) of the largest
    progress of one step where the Hessian is a multiple of the identity; for bins under Adam half was measured at 0.585
    B_simple (`RATIO`).
    """
    if math.isinf(upper):
        below, above = WORTHWHILE * global_batch_size <= lower, False
    elif math.isnan(lower) or math.isnan(upper) or 0.5 <= global_batch_size / b_simple <= 2.0:
        return None
    else:
        below, above = global_batch_size < lower, global_batch_size > upper
    if not below and not above:
        return None
    where = f"is {'below' if below else 'above'} the noise scale, {scale_in_words(b_simple, lower, upper)}"
    change = "a larger one may need fewer steps" if below else "a smaller one may need fewer samples"
    return f"global batch size {global_batch_size:,} {where}: {change}; {_TEST}"


def scale_in_words(b_simple: float, lower: float, upper: float) -> str:
    """Noise scale with its interval, in samples; an infinite upper end means that only the lower one is known."""
    if math.isinf(upper):
        return f"by estimate more than {_samples(lower)} samples"
    return f"estimate {_samples(b_simple)} [{_samples(lower)}, {_samples(upper)}] samples"


def half_progress_in_words(half: HalfProgress, edges: Tensor) -> str:
    """The least and the largest half-progress batch of the bins with an upper end, with their intervals; "" without any.

    Args:
        edges: their inner edges in t, [K - 1].
    """
    known = half.upper.isfinite().nonzero().flatten().tolist()
    if not known:
        return ""
    bounds = [0.0, *edges.tolist(), 1.0]

    def of_bin(k: int) -> str:
        value, lower, upper = (_samples(values[k].item()) for values in (half.batch, half.lower, half.upper))
        return f"{value} [{lower}, {upper}] samples of t {bounds[k]:.2f} to {bounds[k + 1]:.2f}"

    least, most = (pick(known, key=lambda k: half.batch[k].item()) for pick in (min, max))
    bins = len(half.batch)
    which = "by timestep bin" if len(known) == bins else f"of {len(known)} of {bins} timestep bins (the others have no upper end)"
    values = of_bin(least) if least == most else f"least {of_bin(least)}, largest {of_bin(most)}"
    return f"half-progress batch of one step of Adam, {which}: {values}"


def _samples(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.2g}"
