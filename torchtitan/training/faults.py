"""What stops a run that has gone wrong."""

import torch
from torch import Tensor

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


class FiniteCheck:
    """Notices a gradient norm that is not finite one step late, so that no healthy step waits for the device.

    The norm is the same on every rank, and a non-finite loss makes it non-finite too, so all ranks stop at the
    same step.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def record(self, step: int, norm: Tensor) -> None:
        """Look at the previous step's norm, and start copying this one's to the host."""
        self.raise_if_broken()
        if norm.device.type == "cuda":
            copy = norm.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (step, copy, event)
        else:
            self._pending = (step, norm, None)

    def raise_if_broken(self) -> None:
        """Wait for the recorded norm. Raises TrainingError if it is not finite."""
        if self._pending is None:
            return
        step, norm, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        if not torch.isfinite(norm):
            raise TrainingError(
                f"step {step}: the gradient norm is {norm.item()}; the last checkpoint is from before "
                "(a lower optimizer.lr, a longer lr_scheduler.warmup_steps or model.qk_norm = true may help)"
            )
