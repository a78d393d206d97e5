"""Loader processes: their start and end, the transfer of their batches, and messages about lost ones.

Batches travel in shared memory (/dev/shm), of which a container has 64 MiB by default; a batch that does not fit goes
through a pipe, with the same values. torch alone would lose it, and training would wait forever.
"""

import logging
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchtitan.data.base import DatasetError
from torchtitan.errors import unwrapped
from torchtitan.processes.command_line import readable_size
from torchtitan.processes.launch import usable_cores
from torchtitan.processes.parent_death import end_with_parent
from torchtitan.training.host_memory import host_memory

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"
MOST_PER_CORE = 64
PREFETCH_FACTOR = 2  # batches that each loader process holds ready
_SMALL = 2**16  # bytes; passing on the descriptor of shared memory costs more than copying as much twice
_OPEN_FILES_PER_PROCESS = 4  # of the training process: both ends of a queue, two for the end of the process
_OPEN_FILES_BESIDE = 128  # of data, checkpoints, connections and libraries
_LOOK_SECONDS = 0.5  # between two looks whether all processes that are waited for are alive
_PATIENCE = 10.0  # seconds for loader processes to end by themselves
_DEATH_SHOWS = 2.0  # seconds; a broken connection may be seen before the end of the process


class _Loader(DataLoader):
    def check_worker_number_rationality(self) -> None:
        """Leave torch's four lines out: `crowded_cores` says it in one, once for all ranks."""


class LoaderProcesses:
    """Iterator over batches, loaded by torch's DataLoader in other processes; a lost process is a DatasetError."""

    def __init__(
        self, dataset_name: str, num_workers: int, *, dataset: Any, sampler: Iterable[Any], pin_memory: bool = False,
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Raises DatasetError: a process cannot be started."""
        self._name = dataset_name
        self._said_full = False
        self._lost: str | None = None
        ends_with_parent = threading.current_thread() is threading.main_thread()
        loader: DataLoader = _Loader(
            cast(Any, _ErrorsAsTexts(dataset)),
            sampler=sampler,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=_LOOK_SECONDS,
            collate_fn=cast(Any, _for_the_trainer),
            worker_init_fn=partial(begin_worker, ends_with_parent=ends_with_parent),
            generator=torch.Generator(),  # or else starting a loader would advance the global generator
            **arguments,
        )
        known = set(multiprocessing.active_children())
        try:
            self._batches: Any = iter(loader)
        except (OSError, RuntimeError) as error:  # no memory, no room for a semaphore, too many processes or open files
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if isinstance(half_made := frame.f_locals.get("self"), _BaseDataLoaderIter):
                    cast(Any, half_made)._shutdown = True  # or else torch closes it later, and fails with a traceback
            for process in set(multiprocessing.active_children()) - known:
                process.kill()
                process.join(_PATIENCE)
            cause = error.strerror if isinstance(error, OSError) else unwrapped(error)
            raise DatasetError(
                f"dataset {dataset_name}: {num_workers} loader processes cannot be started: {cause} (set data.num_workers "
                f"lower, or to 0; check ulimit -u, ulimit -n and the room in {SHARED_MEMORY})"
            ) from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next batch. Raises DatasetError."""
        try:
            batch = self._next()
        except StopIteration:
            self.close()
            raise
        except (RuntimeError, OSError, EOFError) as error:  # a process was killed, or pinning failed
            reason = self.lost(_DEATH_SHOWS) or f"loading failed: {unwrapped(error)}"
            self.close()
            raise DatasetError(f"dataset {self._name}: {reason}") from error
        if isinstance(batch, str):
            self.close()
            raise DatasetError(batch)
        if batch.pop("by_pipe", False) and not self._said_full:
            self._said_full = True
            logger.warning(
                f"{SHARED_MEMORY} is full: batches of the loader processes go through pipes, which is slower "
                "(docker run --shm-size, or fewer data.num_workers)"
            )
        return batch

    def _next(self) -> dict[str, Any] | str:
        while True:
            try:
                return next(self._batches)
            except RuntimeError as error:
                if self.lost() or "timed out" not in str(error):
                    raise
                if self._pinning_has_ended():
                    raise RuntimeError("the thread that pins batches has ended (its error is above)") from error

    def _pinning_has_ended(self) -> bool:
        """Check whether torch's pinning thread has ended: with a timeout, torch does not look at it."""
        thread = getattr(self._batches, "_pin_memory_thread", None)
        return thread is not None and not thread.is_alive()

    def lost(self, wait: float = 0.0) -> str | None:
        """Name the lost loader process and the cause, in words; waits that many seconds for one to end."""
        deadline = time.monotonic() + wait
        while self._lost is None:
            for process in self._batches._workers:
                if process.exitcode:
                    self._lost = f"loader process {process.pid} {_ending(process.exitcode)}"
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return self._lost

    def close(self) -> None:
        """Stop the processes."""
        if self.lost():  # the others may wait for a lock that it held
            self._kill()
        # Apart, because it waits for a thread that may wait for a process which is no more.
        thread = threading.Thread(target=self._batches._shutdown_workers, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        self._kill()

    def _kill(self) -> None:
        for process in self._batches._workers:
            if process.is_alive():
                process.kill()
                process.join(_PATIENCE)


def shared_memory_shortage(batch_bytes: int, num_workers: int, ranks: int, free_bytes: int | None = None) -> str | None:
    """Shortage in free_bytes of shared memory (None: now) of the batches loaded ahead, in one line."""
    if not num_workers or batch_bytes < _SMALL:
        return None
    batches = ranks * (num_workers * PREFETCH_FACTOR + 1)  # one more in the hands of the trainer
    free = _free_shared_memory() if free_bytes is None else free_bytes
    if free is None or batches * batch_bytes <= free:
        return None
    fitting = (free // (ranks * batch_bytes) - 1) // PREFETCH_FACTOR
    fewer = f"data.num_workers {max(fitting, 0)}"
    return (
        f"{SHARED_MEMORY} has {readable_size(free)} free, and {batches} batches of {readable_size(batch_bytes)} are "
        f"loaded ahead: batches that do not fit go through pipes, which is slower "
        f"(docker run --shm-size={-(-batches * batch_bytes // 2**20) + 16}m, or {fewer})"
    )


def loader_problem(num_workers: int, ranks: int) -> str | None:
    """Problem of that number of loader processes for each of a machine's ranks; None if there is none.

    The maximum is 64 for each core that this process may use, within the limits of processes and open files.
    """
    cores = usable_cores()
    of_files = (_soft_limit(resource.RLIMIT_NOFILE) - _OPEN_FILES_BESIDE) // _OPEN_FILES_PER_PROCESS
    limits = {
        f"{MOST_PER_CORE} for each of the {cores} cores": MOST_PER_CORE * cores // ranks,
        "the limit of open files (ulimit -n)": of_files,
    }
    if os.geteuid():  # root's number is not limited
        limits["the limit of processes (ulimit -u)"] = _soft_limit(resource.RLIMIT_NPROC) // ranks
    name, most = min(limits.items(), key=lambda limit: limit[1])
    most = max(most, 0)
    if num_workers <= most:
        return None
    each = f" in each of {ranks} ranks" if ranks > 1 else ""
    return f"{num_workers} processes{each} are more than {name} allow (set it to {most} at most; 1 or 2 per core are usual)"


def crowded_cores(num_workers: int, ranks: int) -> str | None:
    """Warning of more loader processes than this machine has cores; None: no more."""
    processes, cores = num_workers * ranks, usable_cores()
    if processes <= cores:
        return None
    return f"data.num_workers {num_workers}: {processes} loader processes share {cores} cores (try {max(1, cores // ranks)})"


def prefetch_problem(batch_bytes: int, num_workers: int, ranks: int) -> str | None:
    """Problem of that many batches held ready; None if there is none."""
    memory = min((limit for _, _, limit in host_memory()), default=None)
    batches = ranks * num_workers * PREFETCH_FACTOR
    needed = batches * batch_bytes
    if memory is None or needed <= memory:
        return None
    return (
        f"{batches} batches of {readable_size(batch_bytes)} held ready are "
        f"{readable_size(needed)}, and there are {readable_size(memory)} of memory (set it lower)"
    )


def _soft_limit(kind: int) -> int:
    limit, _ = resource.getrlimit(kind)
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def _free_shared_memory() -> int | None:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _ending(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL, as the system does where memory has run out (fewer data.num_workers need less)"
    if exit_code == -signal.SIGBUS:
        return (
            f"was killed by SIGBUS: {SHARED_MEMORY} is full (docker run --shm-size, or data.num_workers 0 does without), "
            "or a file of the data became shorter while it was read"
        )
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


# ---------------------------------------------------------------------- in the loader processes


class _ErrorsAsTexts:
    """Reader that returns a DatasetError as its message: the loader would raise a copy with a traceback as its text."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getitem__(self, item: Any) -> dict[str, Any] | str:
        try:
            return self._reader[item]
        except DatasetError as error:
            return str(error)


class _ByPipe:
    """Tensor that is pickled with its values, and is a tensor again on arrival."""

    def __init__(self, tensor: Tensor) -> None:
        self._array = tensor.numpy()

    def __reduce__(self):
        return torch.from_numpy, (self._array,)


def _for_the_trainer(batch: dict[str, Any] | str) -> dict[str, Any] | str:
    """Move a batch's large tensors to shared memory, or through the pipe if there is no room: "by_pipe" is then true.

    The queue's own thread would move them later, where an error drops the batch.
    """
    if isinstance(batch, str):
        return batch
    sent, by_pipe = {}, False
    for key, value in batch.items():
        sent[key] = value
        if isinstance(value, Tensor):
            small = value.nbytes < _SMALL
            if small or not _is_shared(value):
                sent[key] = _ByPipe(value)
                by_pipe |= not small
    return sent | {"by_pipe": by_pipe}


def _is_shared(tensor: Tensor) -> bool:
    try:
        tensor.share_memory_()
    except RuntimeError:  # no room, no such folder, no more open files: the tensor is as it was
        return False
    return True


def begin_worker(worker: int, ends_with_parent: bool = True) -> None:
    """Begin a loader process: it ignores requests to stop, but ends with the process that started it.

    Args:
        ends_with_parent: whether the parent's main thread has started it; the kernel looks at that thread.
    """
    _leave_signals_to_the_trainer()
    parent = multiprocessing.parent_process()
    if not (ends_with_parent and parent is not None and end_with_parent(parent.pid or 0)):
        threading.Thread(target=_end_with_the_trainer, daemon=True).start()


def _end_with_the_trainer() -> None:
    """End with the trainer: torch looks at the parent alone, which may be a fork server that lives on."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _leave_signals_to_the_trainer() -> None:
    """Ignore signals to the whole process group: the trainer stops at the end of its step, and needs data.

    The second request to terminate is obeyed, so that a hung loader can be ended.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
