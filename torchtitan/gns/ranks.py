"""Noise scales from the gradients of the data-parallel ranks: small batch = one rank's, large batch = all ranks'.

Groups, by the layout and the configuration:

    ranks          a group is everything a rank accumulates in a step; the objective as a whole, on every step
    microbatches   in a single process that accumulates, a group is a microbatch; the objective as a whole
    bin-pure       every microbatch holds one timestep bin on all ranks and is reduced by itself, so that its ranks'
                   gradients tell that bin's noise scale; a reduction and a copy of the gradient per microbatch

Plain geometry, every parameter, before clipping. A rank's own gradient exists only inside the backward, where it is
measured as it is handed to the reduction. Its squared norm and that of the reduced one are in units of the loss that
backward was given: where each of M microbatches is reduced by itself and its mean loss was divided by M, both are
1 / M^2 of those of the mean loss.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import fsdp_modules, gradient_norm, local, sum_of_squares
from torchtitan.gns.decayed import WINDOW_SHARES, DecayedSums, tags
from torchtitan.gns.nuclear import NuclearNorms
from torchtitan.gns.pool import OutlierRule
from torchtitan.gns.statistics import PairSums, moments_of_groups


class RankMonitor:
    """Monitor of the squared norms of small and large batches, and the estimates of each bin or the whole from them."""

    def __init__(
        self, train_module: nn.Module, layout: Layout, *, microbatches: int, num_bins: int | None, half_life: float,
        matrices: dict[nn.Parameter, float] | None = None, interval: int = 1,
    ) -> None:  # fmt: skip
        """Install on a parallelised model.

        Args:
            num_bins: bins of bin-pure microbatches; None: microbatches mix bins.
            half_life: samples of a bin, or of the whole, after which a step counts half, at most.
            matrices: sizes of Muon's updates of the matrices to measure in its norm, as NuclearNorms; None: none.
            interval: steps between such measurements.
        """
        self._layout, self.microbatches = layout, microbatches
        self.bin_pure = num_bins is not None
        self._ranks = RankGradients(train_module, layout, matrices or ()) if layout.world_size > 1 else None
        self._aside = SetAside()
        self._names = ["all"] if num_bins is None else [str(k) for k in range(num_bins)]
        self._sums = DecayedSums(len(self._names), half_life, WINDOW_SHARES)
        # Of each bin the last step's: squared norms of small and large batches, and their sizes.
        self._last: list[list[float]] = [[math.nan] * 4 for _ in self._names]
        self._outliers = OutlierRule(len(self._names))
        self._noted: list[tuple[int, float, Tensor, Tensor]] = []  # of a step that no verdict has been given on
        self._pending: list[tuple[int, float, Tensor, Tensor]] = []
        self._small: list[Tensor] = []
        self._nuclear = NuclearNorms(matrices, layout, self._names, half_life, interval) if matrices else None

    @property
    def separate(self) -> bool:
        return self.bin_pure or self._ranks is None

    def begin_step(self, step: int) -> None:
        """Begin a step, before its first microbatch."""
        if self._nuclear and self._ranks:
            self._ranks.keeps = self._nuclear.measures(step)

    def discard_backward(self) -> None:
        """Discard what a backward handed to the reduction."""
        if self._ranks:
            self._ranks.pop_square_norm()

    def end_microbatch(self, parameters: Sequence[nn.Parameter], samples: int, k: int, importance: float) -> None:
        """End a microbatch, after backward, collective if separate; k: its bin, with that importance, if pure."""
        if not self.separate:
            return
        if self.bin_pure and self._ranks is not None:
            large = square_norm(parameters, self._layout)
            # A microbatch's loss is divided by their number, and weighted by the bin's importance.
            scale = self.microbatches / importance
            self._note(k, samples, self._ranks.pop_square_norm() * scale**2, large * scale**2)
            self._note_matrices(k, samples, scale)
        else:
            self._small.append(square_norm(parameters, self._layout))
        self._aside.add(parameters)

    def end_step(self, parameters: Sequence[nn.Parameter], samples: int) -> None:
        """End a step, after its last microbatch, before clipping; p.grad is then the step's gradient; collective.

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
            self._note(0, samples, self._ranks.pop_square_norm(), large)
            self._note_matrices(0, samples)

    def _note(self, k: int, samples: int, small: Tensor, large: Tensor) -> None:
        everyone = torch.zeros(self._layout.world_size, dtype=torch.float64, device=small.device)
        everyone[self._layout.rank] = small
        dist.all_reduce(everyone)
        self._noted.append((k, samples, everyone, large))

    def _note_matrices(self, k: int, samples: int, scale: float = 1.0) -> None:
        if self._nuclear and self._ranks and self._ranks.keeps:
            self._nuclear.measure(k, samples, self._ranks.pop_kept(), scale)

    def keep_step(self, skip: Tensor) -> None:
        """Keep the measurement of a step after its verdict; skip: it does not count, bool scalar."""
        if self._nuclear:
            self._nuclear.keep_step(skip)
        self._pending += [(k, n, torch.where(skip, torch.nan, small), large) for k, n, small, large in self._noted]
        self._noted = []

    def pool_kept_steps(self) -> None:
        """Pool all steps that were kept; waits for the device, once."""
        if self._nuclear:
            self._nuclear.pool_kept_steps()
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
            noise, signal = moments_of_groups(torch.full_like(small, samples), small, large).ratios
            self._sums.add(PairSums.of_estimates(k, len(self._names), total, noise, signal))
            self._last[k] = [small.mean().item(), large.item(), float(samples), float(total)]
        self._pending = []

    def metrics(self) -> dict[str, float]:
        """Metrics `gns/plain/ranks/<bin or all>/<quantity>`; unknown ones are left out."""
        self.pool_kept_steps()
        bins = "{}" if self.bin_pure else "all"
        found = tags(f"gns/plain/ranks/{bins}", self._sums.estimate(self._sums.window()))
        sizes = ("small_square_norm", "large_square_norm", "small_batch", "large_batch")
        for name, last in zip(self._names, self._last, strict=True):
            known = {key: value for key, value in zip(sizes, last, strict=True) if math.isfinite(value)}
            found |= {f"gns/plain/ranks/{name}/{key}": value for key, value in known.items()}
        if self._nuclear:
            found |= self._nuclear.metrics(f"gns/muon/ranks/{bins}")
        if self._outliers.count:
            found["gns/plain/ranks/outlier_steps"] = float(self._outliers.count)
        return found

    def state_dict(self) -> dict:
        self.pool_kept_steps()
        found = {"names": self._names, "sums": self._sums.state_dict(), "outliers": self._outliers.state_dict()}
        return found | ({"nuclear": self._nuclear.state_dict()} if self._nuclear else {})

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; a state of other bins is dropped."""
        self._noted, self._pending = [], []
        if state.get("names") != self._names or "sums" not in state:
            return
        self._outliers.load_state_dict(state["outliers"])
        if self._nuclear and "nuclear" in state:
            self._nuclear.load_state_dict(state["nuclear"])
        self._sums.load_state_dict(state["sums"])


class RankGradients:
    """Sum of squares of this rank's gradient, taken just before every reduction. Changes no bit of the gradient.

    A backward without reduction is not seen; the next one with a reduction hands over the sum.

    Attributes:
        keeps: whether the gradients of the parameters in question are kept, too; of DDP.
    """

    def __init__(self, train_module: nn.Module, layout: Layout, kept: Iterable[nn.Parameter] = ()) -> None:
        """Install on a parallelised model, once, before its first backward."""
        self.keeps, self._to_keep = False, set(kept)
        self._kept: dict[Tensor, Tensor] = {}
        self._squares = torch.zeros((), dtype=torch.float64, device=layout.device)
        self._measured: torch.cuda.Event | None = None
        if isinstance(train_module, DistributedDataParallel):
            train_module.register_comm_hook(train_module.process_group, self._measure_and_average)
            return
        for module in fsdp_modules(train_module):
            module.set_custom_reduce_scatter(_MeasuredReduceScatter(self._add))

    def pop_square_norm(self) -> Tensor:
        """Return |h|^2, float64 scalar on the device, of the gradients that this rank handed over since the last call.

        h is the gradient of the loss that this rank accumulated, not divided by the number of ranks.
        """
        if self._measured is not None:
            torch.cuda.current_stream(self._squares.device).wait_event(self._measured)
        taken = self._squares.clone()
        self._squares.zero_()
        return taken

    def pop_kept(self) -> dict[Tensor, Tensor]:
        """Return the gradients kept since the last call, float32; after `pop_square_norm`, which waits for them."""
        kept, self._kept = self._kept, {}
        return kept

    def _add(self, gradient: Tensor) -> None:
        # On the stream that reduces. A norm of bfloat16 numbers would itself be rounded to bfloat16.
        self._squares += sum_of_squares([gradient.to(torch.float32)])
        if gradient.is_cuda:
            self._measured = torch.cuda.current_stream(gradient.device).record_event()

    def _measure_and_average(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer()
        if self.keeps:
            self._kept |= {
                parameter: own.to(torch.float32, copy=True).view_as(parameter)
                for parameter, own in zip(bucket.parameters(), bucket.gradients(), strict=True) if parameter in self._to_keep
            }  # fmt: skip
        self._add(gradient)
        # As DDP does without a hook. A division differs in the last bit where 1 / size is not a power of two.
        gradient.mul_(1.0 / group.size())
        return dist.all_reduce(gradient, group=group, async_op=True).get_future().then(lambda work: work.value()[0])


class _MeasuredReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter of one module, with the whole local gradient as input, flat and padded with zeros."""

    def __init__(self, measure: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._measure = measure

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._measure(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class SetAside:
    """Sum of the reduced gradients of a step's microbatches, kept aside so that each can be measured alone."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add p.grad to the sum and set it to None, for every parameter that has one."""
        sums, gradients = [], []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                sums.append(local(self._sums[parameter]))
                gradients.append(local(parameter.grad))
            else:
                # DDP's gradients are views of its buckets, which the next backward overwrites; FSDP's are new every time.
                self._sums[parameter] = parameter.grad if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
            parameter.grad = None
        if sums:
            torch._foreach_add_(sums, gradients)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restore p.grad: the sum plus the gradients in it; then forget the sum."""
        parameters = list(parameters)
        self.add(parameters)
        for parameter in parameters:
            parameter.grad = self._sums.pop(parameter, None)


def square_norm(parameters: Sequence[nn.Parameter], layout: Layout) -> Tensor:
    """Square norm |g|^2 of the reduced gradient, whole model, float64 scalar, equal on every rank; collective."""
    return gradient_norm(list(parameters), layout).square()
