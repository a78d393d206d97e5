"""Eval mode, in which compiled blocks take batches of any size."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchtitan.distributed.compile import any_batch_size, compiled_blocks


@contextmanager
def evaluating(model: nn.Module, *, compiled: bool = True) -> Iterator[None]:
    """Evaluate in eval mode; restored however the block ends.

    Args:
        model: in which blocks may be compiled. One that is compiled whole, or replayed as CUDA graphs, runs without
            compilation, since it would be compiled or recorded again for other batch sizes.
        compiled: whether compiled blocks are used; false where hooks look into them.
    """
    was_training = model.training
    model.eval()
    by_blocks = compiled and compiled_blocks(model)
    try:
        with any_batch_size(model) if by_blocks else torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
