"""Noise scale in the norm that Muon's step is steepest in, from the gradients of data-parallel ranks.

Muon changes matrix W_i by a multiple of s_i U_i V_i', the steepest descent among changes with spectral norms of at most s_i.
What such a step gains to first order is the dual norm of the gradient, |G| = sum_i s_i |G_i|_*, nuclear norms over the matrices
that Muon updates. With n_b the noise of a mean of b samples, here one rank's samples of a step,

    B = (sqrt(b) E|n_b| / |G|)^2 = noise / signal,    noise = b E[|n_b|]^2,    signal = |G|^2.

A mean of few samples has a gradient of low rank, so noise rises with b, to that of Gaussian noise: B is of that b. Averages of
gradients over steps, which Muon orthogonalises, are not accounted for.

Of W ranks with gradients h_r of mean h: h_r - h is the noise times sqrt(1 - 1/W), if it is Gaussian. |h| is above |G|; its square
is above |G|^2 by an amount that is proportional to the noise's variance where that is small (of matrices with no zero singular
value) and where G is 0. So signal = 2 |h|^2 - (|h_1|^2 + |h_2|^2) / 2 with the means h_1, h_2 of either half of the ranks, as
is exact for the Frobenius norm. Between, on Gaussian matrices of 24 x 48, |G| is off by -1 % (all singular values equal), 5 %
(falling as 1 / k) and 30 % (21 of 24 zero) where the nuclear norm of a step's noise is 0.7 of G's, and by -1, 9 and 66 %
where the Frobenius norm is.

Source: arXiv 2602.03001 (noise scales in dual norms of an optimizer); the correction by halves is derived above.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.distributed.mesh import Layout
from torchtitan.gns.decayed import WINDOW_SHARES, DecayedSums, tags
from torchtitan.gns.statistics import PairSums


def nuclear_norm(matrix: Tensor) -> Tensor:
    """Sum of the singular values of a matrix [M, N], float64 scalar; those below 1e-8 of the largest count as up to that."""
    x = matrix.to(torch.float64)
    gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    return torch.linalg.eigvalsh(gram).clamp_min(0.0).sqrt().sum()


class NuclearNorms:
    """Norms of a step's matrices over the ranks, of each bin or the whole, and what follows from them."""

    def __init__(
        self, sizes: Mapping[nn.Parameter, float], layout: Layout, names: list[str], half_life: float, interval: int
    ) -> None:
        """
        Args:
            sizes: s_i of every matrix that Muon updates, whole on every rank.
            names: of the bins, or "all".
            half_life: samples of a bin, or of the whole, after which a measurement counts half, at most.
            interval: steps between measured ones.
        """
        self._sizes, self._layout, self._names, self._interval = sizes, layout, names, interval
        self._sums = DecayedSums(len(names), half_life, WINDOW_SHARES)
        self._samples = [math.nan] * len(names)  # of the last measurement
        self._noted: list[tuple[int, int, Tensor]] = []
        self._pending: list[tuple[int, int, Tensor]] = []

    def measures(self, step: int) -> bool:
        """Whether a step is measured."""
        return step % self._interval == 0

    @torch.no_grad()
    def measure(self, k: int, samples: int, own: Mapping[Tensor, Tensor], scale: float) -> None:
        """Measure gradients of `samples` samples of this rank, before they are clipped; p.grad is the ranks' mean; collective.

        Args:
            k: bin, or 0.
            own: this rank's gradients of the matrices, float32.
            scale: factor from these gradients to those of the mean loss.
        """
        ranks, rank = self._layout.world_size, self._layout.rank
        half = 1.0 if rank < ranks // 2 else -1.0
        contrast = torch.cat([half / ranks * own[parameter].flatten() for parameter in self._sizes])
        dist.all_reduce(contrast)  # half the difference of the halves' means
        found = torch.zeros(4, dtype=torch.float64, device=contrast.device)
        for number, (parameter, size) in enumerate(self._sizes.items()):
            assert parameter.grad is not None
            mean = parameter.grad.to(torch.float32)
            apart, contrast = contrast[: mean.numel()].view_as(mean), contrast[mean.numel() :]
            found[0] += size / ranks * nuclear_norm(own[parameter] - mean)
            if number % ranks == rank:  # equal on all ranks, which divide the matrices
                found[1:] += size * torch.stack([nuclear_norm(each) for each in (mean, mean + apart, mean - apart)])
        dist.all_reduce(found)
        self._noted.append((k, samples, found * scale))

    def keep_step(self, skip: Tensor) -> None:
        """Keep what was measured in a step after its verdict; skip: it does not count, bool scalar."""
        self._pending += [(k, samples, torch.where(skip, torch.nan, found)) for k, samples, found in self._noted]
        self._noted = []

    def pool_kept_steps(self) -> None:
        """Pool all that was kept; waits for the device."""
        ranks = self._layout.world_size
        for k, samples, found in self._pending:
            noise, mean, *halves = found.tolist()
            if not math.isfinite(noise + mean):
                continue
            variance = samples * noise**2 * ranks / (ranks - 1)
            signal = 2.0 * mean**2 - (halves[0] ** 2 + halves[1] ** 2) / 2.0
            step = PairSums.of_estimates(k, len(self._names), samples * ranks, variance, signal)
            self._sums.add(step, step.count * self._interval)
            self._samples[k] = float(samples)
        self._pending = []

    def metrics(self, pattern: str) -> dict[str, float]:
        """Metrics of each bin, or of the whole, as of `tags`; small_batch is b."""
        found = tags(pattern, self._sums.estimate(self._sums.window()))
        sizes = {f"{pattern.format(k)}/small_batch": samples for k, samples in enumerate(self._samples)}
        return found | {tag: samples for tag, samples in sizes.items() if math.isfinite(samples)}

    def state_dict(self) -> dict:
        return self._sums.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._noted, self._pending = [], []
        self._sums.load_state_dict(state)
