"""Gradient noise scale of one timestep bin at frozen weights, from gradients computed for it alone.

Samples are drawn independently: an image uniformly from the split (with replacement), its mirroring and its dropped
label as in training, t from the training density restricted to the bin, noise. So neither a spread of timesteps over a
batch nor an order of images affects the estimate of the covariance of single samples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.conditions import each_tensor
from torchtitan.data.base import Batch, Dataset, Draws, UnreadableImage, require_one_shape
from torchtitan.diffusion.objective import Draw, Microbatch, Objective
from torchtitan.diffusion.paths import has_indices, indexed
from torchtitan.distributed.precision import compute_context
from torchtitan.gns.statistics import moments_of_groups, no_groups
from torchtitan.models.base import DiffusionModel
from torchtitan.statistics.ratio_intervals import fieller
from torchtitan.statistics.student import student_quantile
from torchtitan.training.data_loading import fetch

# Offsets of the draws of one sample, added to its number.
_TIMESTEP, _NOISE, _IMAGE, _MIRROR, _LABEL = (place << 40 for place in range(5))
_MAX_UNREADABLE = 100
_CHUNK = 1 << 22  # values squared at a time
SUB_BATCH = 32  # samples of a forward and backward pass

Advance = Callable[[int], None]


class GradientError(Exception):
    """Gradients that allow no estimate; the message is one line."""


class EstimateFailed(Exception):
    """Estimator without an answer for these draws; the message is one line."""


def sub_batch_sizes(batch: int, sub_batch: int = SUB_BATCH) -> list[int]:
    """Sizes of the sub-batches of a batch: full ones, then the rest."""
    full, rest = divmod(batch, sub_batch)
    return [sub_batch] * full + [rest] * (rest > 0)


@dataclass(frozen=True)
class TimestepBin:
    """Timestep bin [t_low, t_high), with its interval of the training density's quantiles."""

    t_low: float
    t_high: float
    quantile_low: float
    quantile_high: float

    @property
    def mass(self) -> float:
        """Mass of the bin: its share of the training samples."""
        return self.quantile_high - self.quantile_low


WHOLE = TimestepBin(0.0, 1.0, 0.0, 1.0)


def timestep_bin(objective: Objective, low: float, high: float, unit: str = "t") -> TimestepBin:
    """Timestep bin [low, high) of an objective.

    Args:
        objective: of the density of t.
        low, high: in t, in sigma = t / (1 - t), or in indices of a DDPM path, integers T at most on a discrete one.
        unit: "t", "sigma" or "index".

    Raises:
        ValueError: the bin is empty, reaches beyond t in [0, 1], has no training samples, or the path has no indices.
    """
    if not low < high:
        raise ValueError(f"[{low:g}, {high:g}) is empty")
    t_low, t_high = (_to_time(objective, value, unit) for value in (low, high))
    if t_low < 0 or t_high > 1:
        raise ValueError(f"[{low:g}, {high:g}) reaches beyond the timesteps, t from 0 to 1")
    quantile_low, quantile_high = (_mass_below(objective, t) for t in (t_low, t_high))
    if not quantile_high > quantile_low:
        raise ValueError(f"no training timestep lies in [{low:g}, {high:g})")
    return TimestepBin(t_low, t_high, quantile_low, quantile_high)


def equal_mass_edges(objective: Objective, bins: int) -> tuple[list[float], str]:
    """Edges of bins that training visits equally often, and their unit: index on a discrete DDPM path, else t."""
    shares = torch.arange(1, bins, dtype=torch.float64) / bins
    if objective.path.discrete:
        # A little more: the index that begins at the edge is meant, not the one that ends there.
        inner = objective.timestep_sampler.density.quantile(shares + 1e-9)
        return [0.0, *indexed(objective.path).t_to_index(inner).double().tolist(), float(objective.path.num_indices)], "index"
    return [0.0, *objective.timestep_sampler.density.quantile(shares).tolist(), 1.0], "t"


def _to_time(objective: Objective, value: float, unit: str) -> float:
    if unit == "t":
        return value
    if unit == "sigma":
        return value / (1.0 + value) if math.isfinite(value) else 1.0
    path = objective.path
    if not has_indices(path):
        raise ValueError("only a DDPM path has indices (give the bins in t or sigma)")
    if value >= path.num_indices:
        return 1.0
    if value <= 0:
        return 0.0
    # A discrete path trains the index itself; half an index below is in the middle of what separates two.
    return path.index_to_t(torch.tensor(value - 0.5 * path.discrete)).item()


def _mass_below(objective: Objective, t: float) -> float:
    """Probability of a timestep below t: the inverse of the density's quantile function, by bisection."""
    if t <= 0.0 or t >= 1.0:
        return float(t >= 1.0)
    low, high = 0.0, 1.0
    for _ in range(52):
        middle = 0.5 * (low + high)
        quantile = objective.timestep_sampler.density.quantile(torch.tensor([middle], dtype=torch.float64))
        low, high = (low, middle) if quantile.item() >= t else (middle, high)
    return high if high < 1.0 - 1e-12 else 1.0


# ---------------------------------------------------------------------- gradients


@dataclass(frozen=True)
class GroupNorms:
    """Norms of one large batch, cut into groups.

    Attributes:
        sizes: samples in each group, [m].
        square_norms: |h_j|^2 of each group's mean gradient, float64 [m].
        mean_square_norm: |g|^2 of the mean over all samples.
    """

    sizes: Tensor
    square_norms: Tensor
    mean_square_norm: float


@dataclass(frozen=True)
class NoiseScale:
    """Noise scale: an estimate of S / |G|^2 with its confidence interval.

    Attributes:
        signal: |G|^2; may be negative.
        noise: S, trace of the covariance of single samples' gradients.
        lower, upper: ends of the interval of noise / signal; 0 <= lower since no noise is negative.
        unbounded: the data do not exclude |G|^2 = 0, so that only `lower` is meaningful.
    """

    signal: float
    noise: float
    lower: float
    upper: float
    unbounded: bool


def noise_scale(blocks: list[GroupNorms], confidence: float = 0.95) -> NoiseScale:
    """Noise scale from independent blocks, with Fieller's interval of the ratio.

    The variances are those between the blocks, for any distribution of gradients.

    Raises:
        ValueError: fewer than two blocks.
    """
    if len(blocks) < 2:
        raise ValueError(f"{len(blocks)} block: an interval needs two at least")
    sums = no_groups()
    for block in blocks:
        sums = sums + moments_of_groups(block.sizes, block.square_norms, block.mean_square_norm)
    (var_noise, joint), (_, var_signal) = sums.covariance
    quantile = student_quantile(0.5 + 0.5 * confidence, sums.steps.item() - 1.0)
    noise, signal = sums.ratios
    lower, upper, unbounded = (end.item() for end in fieller(noise, signal, var_noise, var_signal, joint, quantile))
    return NoiseScale(signal.item(), noise.item(), max(lower, 0.0), max(upper, 0.0), bool(unbounded))


class Gradients:
    """Mean gradients of batches of a bin, at a model's present weights. Holds `.grad` and one buffer of the same size.

    A sample is identified by (stream, number): those of other streams, or other numbers, are independent of it.
    """

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        dataset: Dataset,
        *,
        label_dropout: float,
        horizontal_flip: bool,
        seed: int,
        device: torch.device,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Put the model into training mode with gradients.

        Args:
            model: whole, on `device`.
            objective: of the differentiated loss.
            dataset: the split of the images.
            label_dropout: share of conditions replaced by the null one.
            horizontal_flip: whether half of the images are mirrored.
            seed: of every draw.
            device: of the model.
            dtype: of the forward, a name of DTYPES.
            batch_size: images at a time; a larger group is the sum of several.

        Raises:
            DatasetError: the split has images in buckets.
        """
        require_one_shape(dataset, "a measurement of gradients")
        self.model = model.train().requires_grad_(True)
        self.objective = objective
        self.dataset = dataset
        self.label_dropout = label_dropout
        self.horizontal_flip = horizontal_flip
        self.seed = seed
        self.device = device
        self.dtype = dtype
        self.batch_size = batch_size
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._total = [torch.zeros_like(parameter) for parameter in self.parameters]

    def group_norms(
        self, where: TimestepBin, sizes: list[int], stream: int, first: int = 0, advance: Advance | None = None
    ) -> GroupNorms:
        """Norms of the mean gradients of groups of samples first, first + 1, ... and of the mean over all of them.

        Args:
            where: the bin.
            sizes: samples in each group.
            stream: of samples, 0 <= stream < 2^24.
            first: number of the first sample.
            advance: called with the number of samples after each of them is done.

        Raises:
            GradientError: a gradient is not finite.
            DatasetError: an image could not be read.
        """
        square_norms = []
        with self._cleared():
            for size in sizes:
                self.accumulate(where, stream, torch.arange(first, first + size), 1.0 / size, advance)
                first += size
                square_norms.append(self._close_group(size))
            mean_square_norm = square_norm(self._total) / sum(sizes) ** 2
        norms = torch.tensor(square_norms, dtype=torch.float64)
        return GroupNorms(torch.tensor(sizes), norms, mean_square_norm)

    def published_square_norm(
        self, where: TimestepBin, size: int, stream: int, first: int = 0, advance: Advance | None = None
    ) -> float:
        """Square norm |g|^2 of a batch as published: an equally weighted mean of the means of its sub-batches of 32."""
        parts = sub_batch_sizes(size, SUB_BATCH)
        with self._cleared():
            for part in parts:
                numbers = torch.arange(first, first + part)
                self.accumulate(where, stream, numbers, 1.0 / (part * len(parts)), advance)
                first += part
            return _finite(square_norm([parameter.grad for parameter in self.parameters]))

    def mean_gradient(
        self, where: TimestepBin, numbers: Tensor, stream: int, advance: Advance | None = None
    ) -> Tensor:
        """Mean gradient of samples of a bin, in one vector.

        Args:
            where: the bin.
            numbers: of the samples, int64 [N].
            stream: of samples, 0 <= stream < 2^24.
            advance: called with the number of samples after each of them is done.

        Returns:
            float32 [P], the parameters in their order.

        Raises:
            GradientError: it is not finite.
            DatasetError: an image could not be read.
        """
        with self._cleared():
            self.accumulate(where, stream, numbers, 1.0 / len(numbers), advance)
            found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters])
        _finite(square_norm([found]))
        return found

    def held_losses(self, where: TimestepBin, numbers: Tensor, stream: int) -> Callable[[], Tensor]:
        """Losses of fixed samples of a bin as a function of the model's present weights.

        Args:
            where: the bin.
            numbers: of the samples, int64 [N].
            stream: of samples, 0 <= stream < 2^24.

        Returns:
            function of the losses, float64 [N]: the same images, labels, timesteps, noise and dropout at every call.

        Raises:
            DatasetError: an image could not be read.
        """
        drawn = [(samples, self.samples(where, stream, samples)) for samples in numbers.split(self.batch_size)]

        @torch.no_grad()
        def losses() -> Tensor:
            found = []
            for samples, (microbatch, draw) in drawn:
                self.model.draw_dropout(self.seed, samples.to(self.device), stream)
                with compute_context(self.dtype, self.device, sharded=False):
                    found.append(self.objective.loss(self.model, microbatch, draw).loss.double().cpu())
            return torch.cat(found)

        return losses

    def accumulate(
        self, where: TimestepBin, stream: int, numbers: Tensor, weight: float, advance: Advance | None = None
    ) -> None:
        """Accumulate weight x the sum of the gradients of samples `numbers` [N] of a bin in `.grad`. Raises
        DatasetError.
        """
        for samples in numbers.split(self.batch_size):
            microbatch, draw = self.samples(where, stream, samples)
            self.model.draw_dropout(self.seed, samples.to(self.device), stream)
            with compute_context(self.dtype, self.device, sharded=False):
                terms = self.objective.loss(self.model, microbatch, draw)
            (weight * terms.loss.sum()).backward()
            if advance:
                advance(len(samples))

    def _close_group(self, size: int) -> float:
        grads = [parameter.grad for parameter in self.parameters]
        squared = _finite(square_norm(grads))
        for total, grad in zip(self._total, grads, strict=True):
            if grad is not None:
                total.add_(grad, alpha=size)
                grad.zero_()
        return squared

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        """Clear the gradients and their running total at the beginning, and remove the gradients at the end."""
        for parameter, total in zip(self.parameters, self._total, strict=True):
            parameter.grad = None
            total.zero_()
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def samples(self, where: TimestepBin, stream: int, samples: Tensor) -> tuple[Microbatch, Draw]:
        """Samples [N] of a bin, with everything random about them. Raises DatasetError."""
        uniform = partial(self._uniform, samples, stream)
        chosen = (uniform(_IMAGE) * len(self.dataset)).long()
        batch = self._read(chosen.numpy(), Draws(self.seed, samples, stream))
        if self.horizontal_flip:
            mirrored = (uniform(_MIRROR) < 0.5)[:, None, None, None]
            batch = batch | {"images": torch.where(mirrored, batch["images"].flip(-1), batch["images"])}
        kind = self.model.condition_kind
        condition = kind.drop(kind.of(batch), uniform(_LABEL) < self.label_dropout)
        kept = self.objective.kept(uniform(_LABEL).to(self.device), self.label_dropout)
        condition = each_tensor(condition, lambda value: value.to(self.device))
        quantile = where.quantile_low + where.mass * uniform(_TIMESTEP)
        t = self.objective.timestep_sampler.density.quantile(quantile).to(torch.float32)
        if where is not WHOLE:  # rounding to float32 may have left the bin
            t = t.clamp(where.t_low, float(np.nextafter(np.float32(where.t_high), np.float32(0))))
        index = indexed(self.objective.path).t_to_index(t).to(self.device) if self.objective.path.discrete else None
        batch = {name: value.to(self.device) for name, value in batch.items()}
        images, t = batch["images"], t.to(self.device)
        noise = philox.normal(self.seed, "evaluation", samples.to(self.device) + _NOISE, images.shape[1:], stream)
        noise = self.objective.scaled(noise)
        return Microbatch(images, condition, batch, kept), Draw(t, noise, torch.ones_like(t), index)

    def _uniform(self, samples: Tensor, stream: int, purpose: int) -> Tensor:
        return philox.uniform(self.seed, "evaluation", samples + purpose, stream)

    def _read(self, chosen: np.ndarray, draws: Draws) -> Batch:
        """Read images with their conditions; the next readable image replaces one that cannot be decoded."""
        for _ in range(_MAX_UNREADABLE):
            try:
                return fetch(self.dataset, chosen, draws)
            except UnreadableImage as error:
                last, chosen = error, np.where(chosen == error.index, (chosen + 1) % len(self.dataset), chosen)
        raise last


def square_norm(tensors: Sequence[Tensor | None]) -> float:
    """Square norm in float64, a few million values at a time; None counts as zeros."""
    return sum((chunk.double().square().sum().item() for chunk in _chunks(tensors)), 0.0)


def _chunks(tensors: Sequence[Tensor | None]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor is not None:
            yield from tensor.detach().flatten().split(_CHUNK)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise GradientError("the gradient is not finite")
    return value
