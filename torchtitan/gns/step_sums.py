"""Sums measured in one step, and their way from the device to the host, which reads them without waiting for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.gns.statistics import PairSums

PARTS = ("modulation", "embedding", "patch", "token")
FREE_PARTS = PARTS[:3]
GEOMETRIES = ("plain", "adam")


@dataclass(frozen=True)
class StepSums:
    """Sums measured in one step, float64, of the gradient of the per-sample loss; K bins, P parts, G geometries.

    Attributes:
        count: samples [K].
        square_losses: sums of squared per-sample losses [K].
        pairs: ordered pairs of samples in the free parts' products, own pairs not counted, [K, K].
        squares: sums of squared norms [P, G, K]; NaN in parts that were not measured.
        products: inner products of the bins' sums, own products included, [P, G, K, K]: within microbatches.
        all_pairs: ordered pairs of the whole step [K, K]; None on a free step, like the two below.
        sketched: inner products over the whole step, of sketches where the part has any, [P, G, K, K].
        corrections: exact minus sketched products of the pairs of one microbatch, [P, G, K, K].

    count, square_losses, squares, all_pairs and sketched are the same on any layout; others depend on the microbatches.
    """

    count: Tensor
    square_losses: Tensor
    pairs: Tensor
    squares: Tensor
    products: Tensor
    all_pairs: Tensor | None = None
    sketched: Tensor | None = None
    corrections: Tensor | None = None

    @property
    def measured(self) -> bool:
        """True if the token part was measured."""
        return self.sketched is not None

    @property
    def known(self) -> list[Tensor]:
        """Sums in the order of the fields, without the last three on a free step."""
        return [*filter(torch.is_tensor, vars(self).values())]

    @property
    def all_products(self) -> Tensor:
        """Inner products over the whole step [P, G, K, K]: the best known of every pair; of a measured step."""
        assert self.sketched is not None and self.corrections is not None
        return self.sketched + self.corrections

    def whole(self, geometry: int) -> PairSums:
        """Sums of the whole model in the geometry of this index of GEOMETRIES; of a measured step."""
        assert self.all_pairs is not None
        return PairSums(self.count, self.squares[:, geometry].sum(0), self.all_products[:, geometry].sum(0), self.all_pairs)

    def rescaled(self, factor: Tensor) -> "StepSums":
        """Rescale the losses of bin b by factor[b], [K]."""
        matrix = torch.outer(factor, factor)
        return StepSums(
            self.count, self.square_losses * factor**2, self.pairs, self.squares * factor**2,
            self.products * matrix, self.all_pairs,
            None if self.sketched is None else self.sketched * matrix,
            None if self.corrections is None else self.corrections * matrix,
        )  # fmt: skip

    def of_all_bins(self) -> "StepSums":
        """Combine all bins of a measured step into one."""
        of_bins = ("count", "square_losses", "squares")  # others are of pairs of bins
        values = vars(self).items()
        return StepSums(*(value.sum(-1 if name in of_bins else (-2, -1), keepdim=True) for name, value in values))

    def to_host(self) -> "StepSums":
        """Copy the sums to the host's memory; waits for the device."""
        return StepSums(*(value.cpu() for value in self.known))


class LateSums:
    """Queue of steps: they wait on the device, are sent to the host in one copy, and are received there later."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Tensor]]] = []  # step; whether it was skipped, and its sums
        self._sent: list[tuple[int, list[Tensor]]] = []
        self._copy = torch.empty(0)
        self._arrival: torch.cuda.Event | None = None

    def add(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Add a step's sums, on the device, and whether the step was skipped, bool scalar."""
        self._waiting.append((step, [skip.to(torch.float64), *sums.known]))

    def send(self) -> None:
        """Send the steps that wait to the host, which does not wait for them; those sent before must have been received."""
        assert not self._sent, "sent twice without a receive"
        if not self._waiting:
            return
        self._sent, self._waiting = self._waiting, []
        self._copy, self._arrival = torch.cat([value.flatten() for _, values in self._sent for value in values]), None
        if self._copy.device.type == "cuda":
            self._copy = self._copy.to("cpu", non_blocking=True)  # into pinned memory
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def receive(self) -> list[tuple[int, StepSums]]:
        """Receive what was sent, in order and without skipped steps; waits for that copy, not for later work."""
        sent, self._sent = self._sent, []
        if not sent:
            return []
        if self._arrival is not None:
            self._arrival.synchronize()
        found, arrived = [], iter(self._copy.split([value.numel() for _, values in sent for value in values]))
        for step, values in sent:
            skipped, *sums = (next(arrived).view(value.shape) for value in values)
            if not skipped:
                found.append((step, StepSums(*sums)))
        return found

    def clear(self) -> None:
        """Drop everything."""
        self._waiting, self._sent = [], []
