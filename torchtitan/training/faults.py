"""What stops a run that has gone wrong."""

import torch

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device's or the host's memory has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


class TrainingError(Exception):
    """Training cannot go on; the message is one line: what happened and what to do."""
