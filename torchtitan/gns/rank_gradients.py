"""Squared norms of gradients on their way through the reduction: each rank's own, and the reduced one.

A rank's own gradient is the smaller group of a noise scale, the reduced one the larger. The former exists only inside
the backward, where it is measured as it is handed to the reduction. Both are in units of the loss that backward was
given: where each of M microbatches is reduced by itself and its mean loss was divided by M, both squared norms are
1 / M^2 of those of the mean loss.
"""

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


class RankGradients:
    """Sum of squares of this rank's gradient, taken just before every reduction. Changes no bit of the gradient.

    A backward without reduction is not seen; the next one with a reduction hands over the sum.
    """

    def __init__(self, train_module: nn.Module, layout: Layout) -> None:
        """Install on a parallelised model, once, before its first backward.

        Args:
            train_module: what `parallelize` returned.
            layout: where it runs, more than one process.

        Raises:
            ValueError: a single process reduces nothing.
        """
        if layout.world_size == 1:
            raise ValueError("one process reduces no gradient: take square_norm of every microbatch instead")
        self._squares = torch.zeros((), dtype=torch.float64, device=layout.device)
        self._measured: torch.cuda.Event | None = None
        if isinstance(train_module, DistributedDataParallel):
            train_module.register_comm_hook(train_module.process_group, self._measure_and_average)
            return
        for module in fsdp_modules(train_module):
            module.set_custom_reduce_scatter(_MeasuredReduceScatter(self._add))

    def take(self) -> Tensor:
        """Take |h|^2, float64 scalar on the device, of the gradients that this rank handed over since the last call.

        h is the gradient of the loss that this rank accumulated, not divided by the number of ranks.
        """
        if self._measured is not None:
            torch.cuda.current_stream(self._squares.device).wait_event(self._measured)
        taken = self._squares.clone()
        self._squares.zero_()
        return taken

    def _add(self, gradient: Tensor) -> None:
        # On the stream that reduces. A norm of bfloat16 numbers would itself be rounded to bfloat16.
        self._squares += sum_of_squares([gradient.to(torch.float32)])
        if gradient.is_cuda:
            self._measured = torch.cuda.current_stream(gradient.device).record_event()

    def _measure_and_average(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        gradient = bucket.buffer()
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
                self._sums[parameter] = _kept(parameter.grad)
            parameter.grad = None
        if sums:
            torch._foreach_add_(sums, gradients)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restore p.grad: the sum plus the gradients in it; then forget the sum."""
        parameters = list(parameters)
        self.add(parameters)
        for parameter in parameters:
            parameter.grad = self._sums.pop(parameter, None)


def _kept(gradient: Tensor) -> Tensor:
    """Keep a gradient safe from the next backward: DDP's are views of its buckets, FSDP's are new every time."""
    return gradient if isinstance(gradient, DTensor) else gradient.clone()


def square_norm(parameters: Sequence[nn.Parameter], layout: Layout) -> Tensor:
    """Square norm |g|^2 of the reduced gradient, whole model, float64 scalar, equal on every rank; collective."""
    return gradient_norm(list(parameters), layout).square()
