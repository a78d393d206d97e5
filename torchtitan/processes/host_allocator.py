"""Memory of the host between steps: what a step frees, the next one needs again. Imports no torch."""

import ctypes
import os

# Options of glibc's mallopt and their largest values (mallopt(3)). Up to 2 GiB of freed memory stay at the end of the heap.
# Blocks of up to 32 MiB are allocated on the heap; larger ones are mapped, and unmapped as soon as they are freed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 2**31 - 1), (-3, 2**25)

_CHOSEN_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, up to 2 GiB, instead of handing it back at the end of every step.

    The system clears pages before it hands them out again, one fault for each: some five thousand in a step of a small
    model. The peak of a process's memory stays what it is. A choice in the environment stays too.

    Returns:
        Whether it does; False where the environment chose, or with another C library.
    """
    if any(name in os.environ for name in _CHOSEN_BY):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # none, or no library of the process itself
        return False
    return all(mallopt(*option) == 1 for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
