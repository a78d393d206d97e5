"""Ancestral sampling with the truth instead of the model's estimate of x0 at some indices, or with an added error.

The last step of the chain returns its estimate of x0 unchanged. So for any model, the truth at the last index gives the
truth at the end: replacing a range that holds it says nothing about the range, nor does replacing everywhere except a
range that does not hold it. The error at the end per unit of added error is meaningful for every range.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from torchtitan.diffusion.paths import IndexedPath

# (x at an index [B, ...], the index) -> estimate of x0, of x's shape
PredictX0 = Callable[[Tensor, int], Tensor]


def ancestral_chain(
    path: IndexedPath,
    predict: PredictX0,
    x0: Tensor,
    start: Tensor,
    draw_noise: Callable[[int], Tensor],
    indices: Sequence[int],
    *,
    truth_at: Collection[int] = (),
    error: Tensor | None = None,
    error_at: Collection[int] = (),
) -> Tensor:
    """Ancestral chain from the last index to data: x' = c_x0 x0_hat + c_x x + deviation noise, with the posterior's
    variance.

    Args:
        path: with indices.
        predict: the model's estimate of x0; not called where the truth is used.
        x0: the truth, [B, ...].
        start: x at the last index, of x0's shape and dtype.
        draw_noise: standard normal noise of the step that leaves an index, of x0's shape. The last step has none.
        indices: visited ones, rising; the last step is from the first of them to data.
        truth_at: indices at which x0 itself is the estimate.
        error: added to the estimate at the indices of `error_at`, broadcastable to x0.
        error_at: see `error`.

    Returns:
        the final image, of x0's shape.

    Raises:
        ValueError: the indices do not rise within the path, or error_at is without an error.

    Source: Ho, Jain and Abbeel, arXiv 2006.11239, algorithm 2; the replacement: Xie and Agam, arXiv 2502.01990.
    """
    rising = all(low < high for low, high in itertools.pairwise(indices))
    if not (indices and rising and indices[0] >= 0 and indices[-1] < path.num_indices):
        raise ValueError(f"indices must rise within 0 to {path.num_indices - 1}")
    if error is None and error_at:
        raise ValueError("error_at: there is no error to add")
    x = start
    for place in reversed(range(len(indices))):
        index, then = indices[place], indices[place - 1] if place else None
        estimate = x0 if index in truth_at else predict(x, index)
        if error is not None and index in error_at:
            estimate = estimate + error
        of_x0, of_x, variance = posterior(path, index, then)
        x = of_x0 * estimate + of_x * x
        if variance > 0:
            x = x + math.sqrt(variance) * draw_noise(index)
    return x


def posterior(path: IndexedPath, index: int, then: int | None) -> tuple[float, float, float]:
    """Posterior q(x_then | x_index, x0): coefficients of x0 and of x_index in its mean, and its variance.

    Args:
        path: with indices.
        index: of the noisy image.
        then: a lower index, or None for data: (1, 0, 0).

    Source: Ho, Jain and Abbeel, arXiv 2006.11239, eq. 7, with alpha_bar_then / alpha_bar_index for a step over several
    indices (Nichol and Dhariwal, arXiv 2102.09672, section 3.4).
    """
    if then is None:
        return 1.0, 0.0, 0.0
    now, before = path.alphas_cumprod[index].item(), path.alphas_cumprod[then].item()
    alpha, noise, noise_before = now / before, 1.0 - now, 1.0 - before
    beta = path.betas[index].item() if then == index - 1 else 1.0 - alpha
    return math.sqrt(before) * beta / noise, math.sqrt(alpha) * noise_before / noise, beta * noise_before / noise


def visited_indices(num_indices: int, num_steps: int) -> list[int]:
    """Visited indices of a chain of `num_steps` steps: all, or quadratically spaced, every one near data.

    Args:
        num_indices: T of the path.
        num_steps: 2 to T.

    Returns:
        rising from 0 to T - 1, `num_steps` of them.

    Raises:
        ValueError: num_steps is outside.

    Source: Song, Meng and Ermon, arXiv 2010.02502, appendix D.2, which spaces them so for CIFAR-10.
    """
    if not 2 <= num_steps <= num_indices:
        raise ValueError(f"{num_steps} steps: give 2 to {num_indices}")
    last = num_steps - 1
    return [max(place, round((num_indices - 1) * (place / last) ** 2)) for place in range(num_steps)]


def unit_errors(noise: Tensor) -> Tensor:
    """Errors of root mean square 1, each channel a little lighter or darker as a whole: [B, C, 1, 1] of noise [B, C, H, W]."""
    return torch.where(noise[:, :, :1, :1] < 0, -1.0, 1.0)
