"""Noise scales from the gradients of the data-parallel ranks: small batch = one rank's, large batch = all ranks'.

Groups, by the layout and the configuration:

    ranks          a group is everything a rank accumulates in a step; the objective as a whole, on every step
    microbatches   in a single process that accumulates, a group is a microbatch; the objective as a whole
    bin-pure       every microbatch holds one timestep bin on all ranks and is reduced by itself, so that its ranks'
                   gradients tell that bin's noise scale; a reduction and a copy of the gradient per microbatch

Plain geometry, every parameter, before clipping; a rank's gradient is seen as it goes into the reduction.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.distributed.mesh import Layout
from torchtitan.gns.outliers import OutlierRule
from torchtitan.gns.rank_gradients import RankGradients, SetAside, square_norm
from torchtitan.gns.statistics import GroupSums, RatioMoments
from torchtitan.statistics.ratio_intervals import fieller
from torchtitan.statistics.student import student_quantile


class RankMonitor:
    """Monitor of the squared norms of small and large batches, and the estimates of each bin or the whole from them."""

    def __init__(
        self, train_module: nn.Module, layout: Layout, *, microbatches: int, num_bins: int | None, half_life: float
    ) -> None:
        """Install on a parallelised model.

        Args:
            train_module: what `parallelize` returned.
            layout: where it runs.
            microbatches: per step and rank.
            num_bins: bins of bin-pure microbatches; None: microbatches mix bins.
            half_life: samples of a bin, or of the whole, after which a step counts half.

        Raises:
            ValueError: there are no two groups.
        """
        if layout.world_size == 1 and (microbatches == 1 or num_bins is not None):
            raise ValueError("a single process has no two groups of a kind")
        self._layout, self.microbatches, self._half_life = layout, microbatches, half_life
        self.bin_pure = num_bins is not None
        self._ranks = RankGradients(train_module, layout) if layout.world_size > 1 else None
        self._aside = SetAside()
        self._names = ["all"] if num_bins is None else [str(k) for k in range(num_bins)]
        self._sums = [GroupSums.zeros() for _ in self._names]
        # Of each bin the last step's: squared norms of small and large batches, and their sizes.
        self._last: list[list[float]] = [[math.nan] * 4 for _ in self._names]
        self._outliers = OutlierRule(len(self._names))
        self._noted: list[tuple[int, float, Tensor, Tensor]] = []  # of a step that no verdict has been given on
        self._pending: list[tuple[int, float, Tensor, Tensor]] = []
        self._small: list[Tensor] = []

    @property
    def separate(self) -> bool:
        """True if every microbatch is reduced separately."""
        return self.bin_pure or self._ranks is None

    def forget(self) -> None:
        """Forget the gradients that a backward handed to the reduction."""
        if self._ranks:
            self._ranks.take()

    def end_microbatch(self, parameters: Sequence[nn.Parameter], samples: int, k: int, importance: float) -> None:
        """End a microbatch, after its backward; collective where microbatches are separate.

        Args:
            samples: of the microbatch on this rank.
            k: its bin, where it is pure.
            importance: weight of the bin's samples in the loss.
        """
        if not self.separate:
            return
        if self.bin_pure and self._ranks is not None:
            large = square_norm(parameters, self._layout)
            # A microbatch's loss is divided by their number, and weighted by the bin's importance.
            scale = (self.microbatches / importance) ** 2
            self._note(k, samples, self._ranks.take() * scale, large * scale)
        else:
            self._small.append(square_norm(parameters, self._layout))
        self._aside.add(parameters)

    def end_step(self, parameters: Sequence[nn.Parameter], samples: int) -> None:
        """End a step, after its last microbatch and before clipping; collective. p.grad is the step's gradient
        afterwards.

        Args:
            samples: of a group: all samples of this rank in the step, or of one microbatch in a single process.
        """
        if self.separate:
            self._aside.restore(parameters)
        if self.bin_pure:
            return
        large = square_norm(parameters, self._layout)
        if self._ranks is None:
            # A microbatch's loss is divided by their number.
            self._noted.append((0, samples, torch.stack(self._small) * len(self._small) ** 2, large))
            self._small = []
        else:
            self._note(0, samples, self._ranks.take(), large)

    def _note(self, k: int, samples: int, small: Tensor, large: Tensor) -> None:
        everyone = torch.zeros(self._layout.world_size, dtype=torch.float64, device=small.device)
        everyone[self._layout.rank] = small
        dist.all_reduce(everyone)
        self._noted.append((k, samples, everyone, large))

    def conclude(self, skip: Tensor) -> None:
        """Conclude a step after its verdict; skip: it does not count, bool scalar."""
        self._pending += [(k, n, torch.where(skip, torch.nan, small), large) for k, n, small, large in self._noted]
        self._noted = []

    def settle(self) -> None:
        """Settle: pool the measurements; waits for the device, once."""
        if not self._pending:
            return
        on_host = torch.cat([torch.cat((small, large[None])) for _, _, small, large in self._pending]).cpu()
        rows = on_host.split([len(small) + 1 for _, _, small, _ in self._pending])
        for (k, samples, _, _), row in zip(self._pending, rows, strict=True):
            small, large = row[:-1], row[-1]
            if not (small.isfinite().all() and large.isfinite()):
                continue
            means = torch.full((len(self._names),), torch.nan, dtype=torch.float64)
            means[k] = small.mean()
            if self._outliers.stands_out(means):
                continue
            total = samples * len(small)
            step = GroupSums.of_step(torch.full_like(small, samples), small, large)
            kept = torch.tensor(0.5 ** (total / self._half_life), dtype=torch.float64)
            self._sums[k] = GroupSums(self._sums[k].moments.decayed(kept)) + step
            self._last[k] = [small.mean().item(), large.item(), float(samples), float(total)]
        self._pending = []

    def metrics(self) -> dict[str, float]:
        """Metrics `gns/plain/ranks/<bin or all>/<quantity>`; unknown ones are left out."""
        self.settle()
        found: dict[str, float] = {}
        for name, sums, last in zip(self._names, self._sums, self._last, strict=True):
            signal, noise, covariance = sums.signal, sums.noise, sums.covariance
            quantile = student_quantile(0.975, sums.moments.steps - 1.0)
            lower, upper, _ = fieller(noise, signal, covariance[0, 0], covariance[1, 1], covariance[0, 1], quantile)
            values = {
                "signal": signal, "noise": noise, "b_simple": noise / signal, "lower": lower.clamp_min(0.0),
                "upper": upper, "small_square_norm": last[0], "large_square_norm": last[1],
                "small_batch": last[2], "large_batch": last[3],
            }  # fmt: skip
            found |= {
                f"gns/plain/ranks/{name}/{key}": float(value) for key, value in values.items() if math.isfinite(value)
            }
        if self._outliers.count:
            found["gns/plain/ranks/outlier_steps"] = float(self._outliers.count)
        return found

    def state_dict(self) -> dict:
        self.settle()
        moments = [[sums.moments.first.tolist(), sums.moments.second.tolist()] for sums in self._sums]
        return {"names": self._names, "moments": moments, "outliers": self._outliers.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; a state of other bins is dropped."""
        self._noted, self._pending = [], []
        if state.get("names") != self._names:
            return
        self._outliers.load_state_dict(state.get("outliers", {}))
        self._sums = [
            GroupSums(RatioMoments(*(torch.tensor(values, dtype=torch.float64) for values in moments)))
            for moments in state["moments"]
        ]
