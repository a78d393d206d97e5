"""Posterior mean of the clean image given a noisy one, over a finite training set: the optimal denoiser.

    x_t = a x0 + b noise,    E[x0 | x_t] = sum_i w_i E[x0 | x_t, i],    w_i proportional to p(x_t | i)

Image i of the set is a point x_i, so that p(x_t | i) = N(x_t; a x_i, b^2), or normal with mean x_i and independent
deviations s_i, as a latent that training draws anew: p(x_t | i) = N(x_t; a x_i, a^2 s_i^2 + b^2). Among all functions of x_t
the posterior mean has the least expected squared error, in every prediction, as each is linear in x0 at a given x_t.

Source: Karras et al., "Elucidating the design space of diffusion-based generative models", arXiv 2206.00364, eq. 57.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Group of a noisy image that may come from every image of the set.
EVERY = -1
# Stands for b = 0, where an image is its own posterior mean.
_SMALLEST_B = 1e-12


@dataclass(frozen=True)
class Posterior:
    """Posterior of x0 given each noisy image.

    Attributes:
        mean: float64 [M, D].
        variance: of an element of x0, mean over elements, float64 [M]: the expected squared error of `mean`.
    """

    mean: Tensor
    variance: Tensor


class PosteriorSums:
    """Sums of a posterior over images that are added in pieces, in float64, by a running log-sum-exp."""

    def __init__(self, x_t: Tensor, a: Tensor, b: Tensor, groups: Tensor) -> None:
        """
        Args:
            x_t: noisy images [M, D].
            a, b: coefficients of the path at their times, [M].
            groups: number of the group of images that each may come from, as of its class, int64 [M]; EVERY: all.
        """
        self._x = x_t.to(torch.float64)
        self._a, self._b = a.to(torch.float64), b.to(torch.float64).clamp_min(_SMALLEST_B)
        count, size = x_t.shape
        self._peak = self._x.new_full((count,), -torch.inf)  # largest log-likelihood so far
        self._total = self._x.new_zeros(count)  # of likelihoods, relative to the largest
        self._mean = self._x.new_zeros(count, size)  # sum of likelihood x mean of x0
        self._square = self._x.new_zeros(count)  # sum of likelihood x mean of |x0|^2
        self._rows = {group: torch.nonzero(groups == group)[:, 0] for group in groups.unique().tolist()}

    def add(self, images: Tensor, groups: Tensor | None = None, deviations: Tensor | None = None) -> None:
        """Add images of the set, all equally likely.

        Args:
            images: [N, D].
            groups: of each image, int64 [N]; None where every noisy image may come from each.
            deviations: of the normal noise on each element, [N, D]; None: images are points.
        """
        images = images.to(torch.float64)
        deviations = None if deviations is None else deviations.to(torch.float64)
        if EVERY in self._rows:
            self._add(self._rows[EVERY], images, deviations)
        for group in () if groups is None else groups.unique().tolist():
            if group in self._rows:
                chosen = groups == group
                self._add(self._rows[group], images[chosen], None if deviations is None else deviations[chosen])

    def over_ranks(self, group: dist.ProcessGroup | None) -> None:
        """Join the sums of all ranks, each of its own images and the same noisy ones; collective, in a group of gloo."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        peak = self._peak.clone().cpu()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        self._rescale(slice(None), peak.to(self._peak.device))
        for sums in (self._total, self._mean, self._square):
            joined = sums.clone().cpu()
            dist.all_reduce(joined, group=group)
            sums.copy_(joined)

    def posterior(self) -> Posterior:
        """Posterior of the noisy images. Raises ValueError: one has no image that it may come from."""
        if bool((self._total == 0).any()):
            raise ValueError("a noisy image is of a group without images")
        mean = self._mean / self._total[:, None]
        variance = (self._square / self._total - mean.square().sum(1)).clamp_min(0.0) / mean.shape[1]
        return Posterior(mean, variance)

    def _rescale(self, rows: Tensor | slice, peak: Tensor) -> None:
        """Make sums relative to larger log-likelihoods [R]."""
        factor = torch.where(self._peak[rows] == -torch.inf, 0.0, torch.exp(self._peak[rows] - peak))
        self._peak[rows] = peak
        self._total[rows] *= factor
        self._mean[rows] *= factor[:, None]
        self._square[rows] *= factor

    def _add(self, rows: Tensor, images: Tensor, deviations: Tensor | None) -> None:
        if deviations is None:
            self._add_points(rows, images)
            return
        levels = torch.stack((self._a[rows], self._b[rows]), dim=1)
        different, which = levels.unique(dim=0, return_inverse=True)
        for number, (a, b) in enumerate(different):
            self._add_normal(rows[which == number], a, b, images, deviations)

    def _add_points(self, rows: Tensor, images: Tensor) -> None:
        a, b = self._a[rows, None], self._b[rows, None]
        squares = images.square().sum(1)
        # Without the term of |x_t|^2, which all images have.
        likelihood = torch.exp(self._raise(rows, (self._x[rows] @ images.T * a - 0.5 * a**2 * squares) / b**2))
        self._total[rows] += likelihood.sum(1)
        self._mean[rows] += likelihood @ images
        self._square[rows] += likelihood @ squares

    def _add_normal(self, rows: Tensor, a: Tensor, b: Tensor, images: Tensor, deviations: Tensor) -> None:
        """Add normal images to noisy ones of one level: x0 given (x_t, i) is normal too, of mean x + k (x_t - a x)."""
        x = self._x[rows]
        precision = 1.0 / ((a * deviations) ** 2 + b**2)  # of x_t, [N, D]
        scaled = images * precision
        quadratic = x.square() @ precision.T - 2.0 * a * x @ scaled.T + a**2 * (images * scaled).sum(1)
        likelihood = torch.exp(self._raise(rows, 0.5 * (precision.log().sum(1) - quadratic)))
        gain = a * deviations.square() * precision  # k
        offset = b**2 * scaled  # (1 - a k) x
        squares = (offset.square() + b**2 * deviations.square() * precision).sum(1)
        self._total[rows] += likelihood.sum(1)
        self._mean[rows] += likelihood @ offset + likelihood @ gain * x
        crossed, squared = likelihood @ (2.0 * offset * gain), likelihood @ gain.square()
        self._square[rows] += likelihood @ squares + (x * crossed + x.square() * squared).sum(1)

    def _raise(self, rows: Tensor, logs: Tensor) -> Tensor:
        """Raise the largest log-likelihoods to those of more images [R, N]; these relative to the largest, [R, N]."""
        peak = torch.maximum(self._peak[rows], logs.amax(1))
        self._rescale(rows, peak)
        return logs - peak[:, None]
