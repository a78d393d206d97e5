"""Dropout as a function of sample numbers: the same activations on any layout, after a resume, and when recomputed."""

import torch
from torch import Tensor

from torchtitan import philox

# Each activation is decided by 16 bits.
_LEVELS = 2**16


def dropout_keys(seed: int, samples: Tensor, layers: int, attempt: int = 0) -> Tensor:
    """Keys of a forward in training, int64 [layers, B, 2] in [0, 2^32), by seed < 2^64 and sample numbers [B]."""
    words = philox.random_words(seed, "dropout", samples, 2 * layers, attempt)  # [B, 2 layers]
    return words.unflatten(1, (layers, 2)).transpose(0, 1).contiguous()


def dropout(x: Tensor, keys: Tensor, probability: float) -> Tensor:
    """Drop activations of x [B, ...] and scale the others by 1 / the share kept.

    Args:
        keys: of this layer [B, 2], of `dropout_keys`.
        probability: of each activation, rounded to a multiple of 2^-16.
    """
    dropped = min(round(probability * _LEVELS), _LEVELS - 1)
    count = x[0].numel()
    counter = torch.arange(-(-count // 8), device=x.device)  # [N]: four words of 32 bits make eight decisions
    low, high = keys[:, :1], keys[:, 1:]  # [B, 1]
    words = torch.stack(philox.philox_4x32((counter, low, high, torch.zeros_like(low)), (0, 0)), dim=-1)  # [B, N, 4]
    bits = torch.stack((words & (_LEVELS - 1), words >> 16), dim=-1)  # [B, N, 4, 2]
    kept = bits.flatten(1)[:, :count].reshape(x.shape) >= dropped
    return torch.where(kept, x * (_LEVELS / (_LEVELS - dropped)), 0.0)
