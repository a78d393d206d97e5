"""Numerical guard: skip steps with a non-finite loss or gradient, or a gradient too large to square.

The verdict on a step is a tensor on the device, the same on every rank, which the optimizer takes as it is; the host
reads it one step late, so that no healthy step waits for the device.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.diffusion.timesteps.sampler import GlobalBatch

logger = logging.getLogger(__name__)

# Adam squares every element in float32. From this norm on a square may be infinite: the parameter would never move again.
LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)

# Images lie within [-1, 1] and latents within a few units of 0; values above, and NaN, are named.
LARGEST_VALUE = 1e3
_MOST_NAMED = 20


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step over all ranks, and microbatches of each rank, to read them again."""

    step: int
    samples: GlobalBatch
    microbatches: int


def backward(loss: Tensor) -> None:
    """Backward of a scalar loss; of a non-finite one, with a gradient of NaN.

    An infinite error can have a finite gradient, known to its own rank only. NaN passes through the reduction, so that
    all ranks find it in the gradient norm, without another collective.
    """
    loss.backward(loss.detach() * 0.0 + 1.0)


class NumericalGuard:
    """Guard that judges every step, and counts the skipped ones.

    Attributes:
        last_skipped: the latest of them known to the host, None if there is none.
        last_healthy: the latest step that counted, likewise.
        reason: why `last_skipped` was skipped, in a few words.
        in_doubt: whether the latest known step was skipped; no save then, since its cause may be in the weights.
    """

    def __init__(self, limit: int, image_of: Callable[[int, int], int] | None = None) -> None:
        """limit: skipped steps tolerated between checkpoints; image_of: (sample, attempt) -> image, for messages."""
        self.skipped, self.rollbacks = 0, 0
        self.last_skipped: StepSamples | None = None
        self.last_healthy: StepSamples | None = None
        self.reason = ""
        self.in_doubt = False
        self._limit = limit
        self._since_checkpoint = 0
        self._rolled_back_to: int | None = None
        self._pending: tuple[StepSamples, Tensor, torch.cuda.Event | None] | None = None
        self._image_of = image_of or (lambda sample, attempt: sample)
        self._largest: list[Tensor] = []  # values of this rank's images of the step, by microbatch
        self._numbers: list[Tensor] = []  # of their samples
        self._named: set[int] = set()

    def add_images(self, images: Tensor, indices: Tensor) -> None:
        """Add the images [B, ...] of one of a step's microbatches and their sample numbers [B]."""
        rows = images.flatten(1)
        self._largest.append(torch.maximum(rows.amax(1), rows.amin(1).neg_()))  # NaN where there is one
        self._numbers.append(indices)

    def judge(self, samples: StepSamples, norm: Tensor, *others: Tensor) -> Tensor:
        """Judge whether a step must be skipped, bool scalar on the device, after its last microbatch.

        Args:
            norm: of the network's reduced gradient before clipping, equal on all ranks. A loss that is not finite makes it
                NaN, see `backward`.
            others: the same of parameters trained besides the network's, if there are any.
        """
        self.settle()
        norms = torch.stack((norm, *others)).to(torch.float64)
        broken = ~(norms < LARGEST_NORM).all()
        largest, place = torch.cat(self._largest).max(dim=0, keepdim=True)  # NaN counts as the largest
        number = torch.cat(self._numbers).index_select(0, place)
        self._largest, self._numbers = [], []
        found, event = torch.cat((broken[None], largest, number, norms)), None  # float64
        if found.device.type == "cuda":
            found = found.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = (samples, found, event)
        return broken

    def settle(self) -> None:
        """Settle the verdict on the latest step; waits for the device."""
        if self._pending is None:
            return
        (samples, found, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        broken, largest, number, *norms = found.tolist()
        if not largest <= LARGEST_VALUE and len(self._named) < _MOST_NAMED:
            self._name_image(samples, largest, int(number))
        self.in_doubt = bool(broken)
        if not self.in_doubt:
            self.last_healthy = samples
            return
        self.skipped += 1
        self._since_checkpoint += 1
        self.last_skipped = samples
        self.reason = _too_large(norms)
        _warn(
            f"step {samples.step}: skipped, {self.reason} ({self._since_checkpoint} since the last checkpoint, "
            f"training.max_skipped_steps = {self._limit})"
        )

    def _name_image(self, samples: StepSamples, largest: float, number: int) -> None:
        """Warn of an implausible value in an image, once per image; on the rank that read it."""
        image = self._image_of(number, samples.samples.attempt)
        if image not in self._named:
            self._named.add(image)
            more = "; no more images are named" if len(self._named) == _MOST_NAMED else ""
            logger.warning(f"step {samples.step}: {describe_image(number, image, largest)}: check it{more}")

    def counts(self) -> dict[str, int]:
        """Count of skipped steps by its tag; nothing if it is 0."""
        return {"skipped_steps": self.skipped} if self.skipped else {}

    @property
    def exhausted(self) -> bool:
        """Check whether more steps than the limit were skipped, of those known to the host."""
        return self._since_checkpoint > self._limit

    def may_roll_back_to(self, step: int) -> bool:
        """Whether the run has never been rolled back to this checkpoint: a second time would repeat the first."""
        return step != self._rolled_back_to

    def checkpoint_saved(self) -> None:
        """Reset the count after a saved checkpoint, unless it had to be saved in doubt."""
        if not self.in_doubt:
            self._since_checkpoint = 0

    def rolled_back(self, step: int) -> None:
        """Record a rollback to a checkpoint."""
        self.rollbacks += 1
        self._rolled_back_to = step
        self._since_checkpoint = 0
        self.in_doubt = False
        self._pending = self.last_healthy = None  # of steps that do not count now
        self._largest, self._numbers = [], []

    def state_dict(self) -> dict:
        """Return plain numbers; waits for the device."""
        self.settle()
        return {"skipped": self.skipped, "rollbacks": self.rollbacks}


def describe_image(number: int, image: int, largest: float) -> str:
    """Describe a sample with an implausible value, in words."""
    return f"sample {number}, image {image} of the dataset, has a value of {largest:g} (images lie within [-1, 1])"


def _too_large(norms: list[float]) -> str:
    """Name the gradient norm that is not finite or too large, the network's first."""
    place = next(place for place, norm in enumerate(norms) if not norm < LARGEST_NORM)
    owner = " of the objective's parameters" if place else ""
    return f"the gradient norm{owner} is {norms[place]:g}"


def _warn(line: str) -> None:
    """Log a warning once over all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(line)
