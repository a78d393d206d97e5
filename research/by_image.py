"""Intervals of averages over images and over repetitions of a training, paired by image."""

import math

import torch
from torch import Tensor

from torchtitan.statistics.interval import Interval, mean_interval
from torchtitan.statistics.student import student_quantile

# Fewer, drawn anew, say too little of what other images would give.
LEAST_RESAMPLED = 8


def with_student(value: float, variances: list[tuple[float, float]], confidence: float = 0.95) -> Interval:
    """Interval of an estimate whose variance is a sum of estimated ones, by Student's t.

    Args:
        value: the estimate.
        variances: (variance, its degrees of freedom) of each part.
        confidence: of the interval.

    Source: Satterthwaite, "An approximate distribution of estimates of variance components", Biometrics 2, 1946.
    """
    total = sum(variance for variance, _ in variances)
    if total == 0.0:
        return Interval(value, value, value)
    degrees = total**2 / sum(variance**2 / degrees for variance, degrees in variances)
    half = student_quantile(0.5 + 0.5 * confidence, degrees) * math.sqrt(total)
    return Interval(value, value - half, value + half)


def log_ratio(after: Tensor, before: Tensor) -> Interval:
    """Log ratio ln(mean error after / mean error before) with its 95 % interval, the mean over repetitions of the
    training.

    Its variance is that between repetitions plus that over images of the paired, linearised ratio; the interaction of
    both counts twice, so that the interval is a little too wide.

    Args:
        after: errors [R, K] of K images in each of R repetitions.
        before: errors of the same images, [1, K], or [R, K] of paired repetitions.

    Returns:
        in ln. With one image it is without an interval (infinite); with one repetition it is of images alone.
    """
    repetitions, images = after.shape
    each = after.mean(1).log() - before.mean(1).log()  # [R]
    relative = after / after.mean(1, keepdim=True) - before / before.mean(1, keepdim=True)  # [R, K]
    if images < 2:
        return Interval(each.mean().item())
    parts = [(relative.mean(0).var().item() / images, images - 1.0)]
    if repetitions > 1:
        parts.append((each.var().item() / repetitions, repetitions - 1.0))
    return with_student(each.mean().item(), parts)


def root_mean(errors: Tensor) -> Interval:
    """Root mean sqrt(mean) of squared errors [K] with its 95 % interval, by the mean's own."""
    found = mean_interval(errors.tolist())
    return Interval(math.sqrt(found.value), math.sqrt(max(found.lower, 0.0)), math.sqrt(found.upper))


def resampled_shares(images: int, resamples: int) -> Tensor:
    """Shares of each image in sets of as many, drawn with replacement: float64 [resamples, images], always the same."""
    drawn = torch.randint(images, (resamples, images), generator=torch.Generator().manual_seed(0))
    shares = torch.zeros(resamples, images, dtype=torch.float64)
    return shares.scatter_add_(1, drawn, torch.full_like(shares, 1 / images))


def cosine(products: Tensor, i: int, j: int) -> Interval | None:
    """Cosine <G_i, G_j> / (|G_i| |G_j|) with its 95 % interval, by the jackknife over independent estimates.

    Args:
        products: unbiased estimates of <G_i, G_j>, [R, K, K], two at least.
        i, j: of the K.

    Returns:
        None where a squared norm is not significantly above zero, so that the direction is undefined. Noise may put the
        estimate outside of [-1, 1].
    """
    count = len(products)
    for k in (i, j):
        norms = products[:, k, k]
        found = with_student(norms.mean().item(), [(norms.var().item() / count, count - 1.0)])
        if found.lower <= 0:
            return None
    if i == j:
        return Interval(1.0, 1.0, 1.0)
    rest = (products.sum(0) - products) / (count - 1)  # [R, K, K], each without one
    if (rest[:, i, i] <= 0).any() or (rest[:, j, j] <= 0).any():
        return None
    left_out = rest[:, i, j] / (rest[:, i, i] * rest[:, j, j]).sqrt()
    mean = products.mean(0)
    value = (mean[i, j] / (mean[i, i] * mean[j, j]).sqrt()).item()
    variance = (count - 1) / count * (left_out - left_out.mean()).square().sum().item()
    return with_student(value, [(variance, count - 1.0)])


def to_text(errors: Tensor) -> str:
    """Format values [K] as one field of a table, to float32's precision."""
    return " ".join(f"{error:.9g}" for error in errors.tolist())


def from_text(text: str) -> Tensor:
    """Parse the values that `to_text` formats: float64 [K]."""
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float64)
