"""Failures recognised by their exceptions: memory has run out, or another rank is lost."""

import torch
import torch.distributed as dist

# What allocators and the libraries that call them say when memory has run out. On the CPU torch raises a plain
# RuntimeError, and C++ code a bad_alloc.
OUT_OF_MEMORY_WORDS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "std::bad_alloc",
    "MemoryError",
)
# What gloo's plain RuntimeErrors say.
LOST_RANK_WORDS = ("/gloo/transport/", "Application timeout caused pair closure", "Connection closed by peer")


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an exception means that the device's or the host's memory has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def is_lost_rank(error: BaseException | None) -> bool:
    """Check whether an exception, or its cause, means that another process could not be reached in a collective."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_RANK_WORDS):
            return True
        error = error.__cause__
    return False
