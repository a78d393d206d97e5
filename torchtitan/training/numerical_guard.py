"""Numerical guard: skip steps with a non-finite loss or gradient, a gradient too large to square, or a loss spike.

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

_SPIKE_MEMORY = 0.99  # decay per step of the running mean and variance of ln loss
_SPIKE_STEPS = 100  # steps before which nothing is called a spike

# Adam squares every element in float32. From this norm on a square may be infinite: the parameter would never move again.
LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)

# Images lie within [-1, 1] and latents within a few units of 0; values above are named.
LARGEST_VALUE = 1e3
_MOST_NAMED = 20


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step, to read them again.

    Attributes:
        step: its number.
        samples: of all ranks.
        microbatches: of each rank.
    """

    step: int
    samples: GlobalBatch
    microbatches: int


def backward(loss: Tensor) -> None:
    """Backward of a scalar loss; of a non-finite one, with a gradient of NaN.

    An infinite error can have a finite gradient, known to its own rank only. NaN passes through the reduction, so that
    all ranks find it in the gradient norm, without another collective.
    """
    loss.backward(loss.detach() * 0.0 + 1.0)


def is_sane(value: float) -> bool:
    """Check whether the largest absolute value of an image or latent is plausible; NaN is not."""
    return value <= LARGEST_VALUE


class NumericalGuard:
    """Guard that judges every step, and counts the skipped ones.

    Attributes:
        skipped: steps skipped in the run.
        zeroed_steps: steps that counted though elements of their gradients were not finite and were set to zero.
        zeroed_elements: number of these elements.
        rollbacks: number of rollbacks of the run.
        last_skipped: the latest of them known to the host, None if there is none.
        last_healthy: the latest step that counted and had no such element, likewise.
        reason: why `last_skipped` was skipped, in a few words.
        in_doubt: whether the latest step known to the host was skipped: then no save, since its cause may be in the
            weights already.
    """

    def __init__(
        self, limit: int, spike_threshold: float, device: torch.device,
        image_of: Callable[[int, int], int] | None = None, *, zeroes: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            limit: skipped steps tolerated between checkpoints.
            spike_threshold: standard deviations of ln loss above its running mean; 0: any loss will do.
            device: of compute.
            image_of: (sample number, attempt) -> index in the dataset, for messages.
            zeroes: whether non-finite elements of gradients are set to zero before their norms are measured.
        """
        self.skipped, self.rollbacks = 0, 0
        self.zeroed_steps, self.zeroed_elements = 0, 0
        self.last_skipped: StepSamples | None = None
        self.last_healthy: StepSamples | None = None
        self.reason = ""
        self.in_doubt = False
        self._limit = limit
        self._since_checkpoint = 0
        self._rolled_back_to: int | None = None
        self._spikes = _Spikes(spike_threshold, device) if spike_threshold > 0 else None
        self._zeroes = zeroes
        self._lost = torch.zeros((), dtype=torch.float64, device=device)  # losses of the step that are not finite
        self._pending: tuple[StepSamples, Tensor, torch.cuda.Event | None] | None = None
        self._image_of = image_of or (lambda sample, attempt: sample)
        self._largest: list[tuple[Tensor, Tensor]] = []  # of each image of this rank's step, and its sample number
        self._named: set[int] = set()

    def add_images(self, images: Tensor, indices: Tensor) -> None:
        """Add the images [B, ...] of one of a step's microbatches and their sample numbers [B]."""
        self._largest.append((_largest_values(images.flatten(1)), indices))

    def watch_loss(self, loss: Tensor) -> None:
        """Watch the losses [B] of one of a step's microbatches, whose NaN in the gradient is lost if elements are set to
        zero.
        """
        if self._zeroes:
            self._lost += loss.detach().isfinite().logical_not().sum()

    def add_loss(self, loss: Tensor, microbatches: int) -> None:
        """Add the per-sample losses [B] of one of a step's microbatches."""
        if self._spikes:
            self._spikes.add(loss, microbatches)

    def judge(self, samples: StepSamples, norm: Tensor, *others: Tensor, zeroed: Tensor | None = None) -> Tensor:
        """Judge whether a step must be skipped, bool scalar on the device; collective with a spike threshold.

        Args:
            samples: the step.
            norm: of the network's reduced gradient before clipping, equal on all ranks. A loss that is not finite makes it
                NaN, see `backward`.
            others: the same of parameters trained besides the network's, if there are any.
            zeroed: number of elements that were set to zero before each of these norms was measured [1 + others]; then
                collective. The norm counts as NaN if a loss is not finite, or nothing but zeros is left.
        """
        self.settle()
        norms = torch.stack((norm, *others)).to(torch.float64)
        if zeroed is None:
            zeroed = torch.zeros_like(norms)
        else:
            norms = torch.where(self._take_lost() | (zeroed > 0) & (norms == 0), math.nan, norms)
        broken = ~(norms < LARGEST_NORM).all()
        spike = self._spikes.judge(broken) if self._spikes else torch.zeros_like(broken)
        verdict = torch.stack((broken, spike)).to(torch.float64)
        found, event = torch.cat((verdict, self._take_largest(norms), norms, zeroed)), None
        if found.device.type == "cuda":
            found = found.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._pending = (samples, found, event)
        return broken | spike

    def _take_lost(self) -> Tensor:
        """Take whether a loss of the step is not finite on any rank, bool scalar; collective."""
        lost = self._lost.clone()
        self._lost.zero_()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(lost, op=dist.ReduceOp.MAX)
        return lost > 0

    def _take_largest(self, like: Tensor) -> Tensor:
        """Take the largest absolute value of this rank's images of the step, and the number of its sample; float64 [2].
        """
        noted, self._largest = self._largest, []
        if not noted:
            return like.new_zeros(2)
        value, place = torch.cat([values for values, _ in noted]).max(dim=0, keepdim=True)  # NaN counts as the largest
        number = torch.cat([indices for _, indices in noted]).index_select(0, place)
        return torch.cat((value.to(like), number.to(like)))

    def settle(self) -> None:
        """Settle the verdict on the latest step; waits for the device."""
        if self._pending is None:
            return
        samples, found, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        broken, spike, largest, number, *rest = found.tolist()
        norms, zeroed = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        self._name_image(samples, largest, int(number))
        self.in_doubt = bool(broken or spike)
        if not self.in_doubt:
            self._count_zeroed(samples, int(sum(zeroed)))
            return
        self.skipped += 1
        self._since_checkpoint += 1
        self.last_skipped = samples
        self.reason = _too_large(norms) if broken else "its loss is a spike"
        _warn(
            f"step {samples.step}: skipped, {self.reason} ({self._since_checkpoint} since the last checkpoint, "
            f"training.max_skipped_steps = {self._limit})"
        )

    def _count_zeroed(self, samples: StepSamples, zeroed: int) -> None:
        """Count the elements of a step that counts, and warn of the first such step, the second, fourth, eighth, ..."""
        if not zeroed:
            self.last_healthy = samples
            return
        self.zeroed_steps += 1
        self.zeroed_elements += zeroed
        if self.zeroed_steps.bit_count() == 1:
            _warn(
                f"step {samples.step}: {zeroed:,} elements of the gradient are not finite and count as 0 (in "
                f"{self.zeroed_steps:,} steps so far; training.non_finite_gradients = zero)"
            )

    def _name_image(self, samples: StepSamples, largest: float, number: int) -> None:
        """Warn of an implausible value in an image, once per image; on the rank that read it."""
        if is_sane(largest) or len(self._named) == _MOST_NAMED:
            return
        image = self._image_of(number, samples.samples.attempt)
        if image not in self._named:
            self._named.add(image)
            more = "; no more images are named" if len(self._named) == _MOST_NAMED else ""
            logger.warning(f"step {samples.step}: {describe_image(number, image, largest)}: check it{more}")

    def counts(self) -> dict[str, int]:
        """Counts of steps that were skipped or had elements set to zero, by their tags; those that are not 0."""
        counts = {
            "skipped_steps": self.skipped, "zeroed_steps": self.zeroed_steps,
            "zeroed_gradient_elements": self.zeroed_elements,
        }  # fmt: skip
        return {tag: count for tag, count in counts.items() if count}

    @property
    def exhausted(self) -> bool:
        """Check whether more steps than the limit were skipped, of those known to the host."""
        return self._since_checkpoint > self._limit

    def may_roll_back_to(self, step: int) -> bool:
        """Check whether the run has not been rolled back to this checkpoint before: a second time would repeat the
        first.
        """
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

    def state_dict(self) -> dict:
        """Return plain numbers; waits for the device."""
        self.settle()
        counts = {"skipped": self.skipped, "rollbacks": self.rollbacks}
        if self.zeroed_steps:
            counts |= {"zeroed_steps": self.zeroed_steps, "zeroed_elements": self.zeroed_elements}
        return counts | ({"spikes": self._spikes.state_dict()} if self._spikes else {})

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; this process's own count stays if it is higher."""
        self._pending = self.last_healthy = None
        self._lost.zero_()
        self._largest = []
        self.skipped = max(self.skipped, state.get("skipped", 0))
        self.rollbacks = max(self.rollbacks, state.get("rollbacks", 0))
        self.zeroed_steps = max(self.zeroed_steps, state.get("zeroed_steps", 0))
        self.zeroed_elements = max(self.zeroed_elements, state.get("zeroed_elements", 0))
        if self._spikes:
            self._spikes.load_state_dict(state.get("spikes", {}))


def _largest_values(rows: Tensor) -> Tensor:
    """Largest absolute value of each row [B, N], or NaN if there is one, [B]."""
    if rows.device.type == "cpu":
        return torch.maximum(rows.amax(1), rows.amin(1).neg_())  # a tenth of the norm's time, one kernel elsewhere
    return torch.linalg.vector_norm(rows, math.inf, dim=1)


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


class _Spikes:
    """Spike detector: running mean and variance of ln loss, exponentially weighted."""

    def __init__(self, threshold: float, device: torch.device) -> None:
        self._threshold = threshold
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # mean over this rank's samples of the step
        self._seen = torch.zeros(3, dtype=torch.float64, device=device)  # steps, mean, variance

    def add(self, loss: Tensor, microbatches: int) -> None:
        self._loss += loss.detach().to(torch.float64).mean() / microbatches

    def judge(self, broken: Tensor) -> Tensor:
        """Judge whether the step's loss is a spike, bool scalar; a spike, and a broken step's loss, leave the mean
        unchanged.
        """
        loss = self._loss.clone()
        self._loss.zero_()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        steps, mean, variance = self._seen.unbind()
        off = loss.log() - mean
        spike = (steps >= _SPIKE_STEPS) & (off > self._threshold * variance.sqrt())
        # As many steps as there are weigh the same until the memory is full.
        share = torch.clamp(1.0 / (steps + 1.0), min=1.0 - _SPIKE_MEMORY)
        updated = torch.stack((steps + 1.0, mean + share * off, (1.0 - share) * (variance + share * off**2)))
        self._seen = torch.where(broken | spike | ~off.isfinite(), self._seen, updated)
        return spike & ~broken

    def state_dict(self) -> dict:
        return {"seen": self._seen.tolist()}

    def load_state_dict(self, state: dict) -> None:
        self._loss.zero_()
        seen = state.get("seen", [0.0, 0.0, 0.0])
        self._seen.copy_(torch.tensor(seen, dtype=torch.float64))

