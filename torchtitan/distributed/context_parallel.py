"""Context parallelism: the tokens of an image divided between processes, which exchange tokens for heads in attention.

Each of C processes has T / C tokens of the same images through all layers but attention, where it has all T tokens of
N / C heads. Weights' gradients on a process are those of its tokens, times C: the mean over all processes, of which
C have the same images, is the mean over images.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509 (the exchange of tokens for heads).
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


class SplitContext:
    """Exchange of tokens between the processes with the same images, this one the `rank`-th; collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = group.group_name
        self.size, self.rank = group.size(), group.rank()

    def split(self, tokens: Tensor) -> Tensor:
        """Take this process's tokens of [B, T, ...]: [B, T / C, ...]."""
        return tokens.chunk(self.size, dim=1)[self.rank]

    def gather(self, tokens: Tensor) -> Tensor:
        """Gather the tokens [B, T / C, ...] of all processes: [B, T, ...].

        Backward sums the gradients of all processes, which have the same loss: C times the gradient of one.
        """
        parts = self._exchange(tokens.expand(self.size, *tokens.shape))  # [C, B, T / C, ...]
        return parts.transpose(0, 1).flatten(1, 2)

    def all_tokens_of_own_heads(self, heads: Tensor) -> Tensor:
        """Exchange [S, B, N, T / C, D / N], as queries, keys and values, for [S, B, N / C, T, D / N]."""
        parts = self._exchange(heads.unflatten(2, (self.size, -1)).movedim(2, 0))  # [C, S, B, N / C, T / C, D / N]
        return parts.movedim(0, 3).flatten(3, 4)

    def own_tokens_of_all_heads(self, heads: Tensor) -> Tensor:
        """Exchange back: [B, N / C, T, D / N] for [B, N, T / C, D / N]."""
        parts = self._exchange(heads.unflatten(2, (self.size, -1)).movedim(2, 0))  # [C, B, N / C, T / C, D / N]
        return parts.movedim(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part number r of [C, ...] to process r; the parts received, in the order of their senders."""
        return all_to_all_single_autograd(parts.contiguous(), None, None, self._name)


def context_bytes(
    batch: int, tokens: int, width: int, num_blocks: int, degree: int, dtype: torch.dtype, recomputed: bool
) -> float:
    """Bytes that a process sends in a microbatch for q, k, v and results: in forward, backward and recomputation."""
    of_exchange = batch * tokens / degree * width * dtype.itemsize * (degree - 1) / degree
    return 4 * of_exchange * num_blocks * (3 if recomputed else 2)
