"""Collectives of plain objects: one rank decides for all, or one rank's request reaches everyone."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LONGEST_WORK = timedelta(days=365)
_FIRST_RANK_ALONE: ContextVar[bool] = ContextVar("first rank alone", default=False)


def from_first_rank(function: Callable[..., Any], *args: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Call a function on rank 0 and return its result (a picklable object) on every rank.

    What the function raises on rank 0 is raised on every rank. The group, by default that of all, holds all ranks.
    """
    if not _several():
        return function(*args)
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        alone = _FIRST_RANK_ALONE.set(True)
        try:
            box[0] = function(*args)
        except Exception as error:  # noqa: BLE001 (every rank must learn of it, or the others wait for ever)
            box[1] = error
        finally:
            _FIRST_RANK_ALONE.reset(alone)
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's value (a picklable object), in rank order; collective over a group of all ranks."""
    if not _several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_all_ranks(function: Callable[[], Any], errors: tuple[type[Exception], ...], group: dist.ProcessGroup | None) -> Any:
    """Call a function on every rank; one of `errors` on the first failing rank is raised on all. The group holds all."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = function()
    except errors as error:
        failure = error
    for found in of_all_ranks(failure, group):
        if found is not None:
            raise found
    return result


def group_for_work() -> dist.ProcessGroup | None:
    """Group of all ranks for CPU tensors, in which one may wait for another as long as work lasts; None: one process."""
    return dist.new_group(backend="gloo", timeout=LONGEST_WORK) if dist.is_initialized() else None


def highest_over_ranks(*values: float) -> list[float]:
    """Maximum of each value over all ranks; collective."""
    highest = torch.tensor(values, dtype=torch.float64)
    if _several():
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest.tolist()


def _several() -> bool:
    """True if there are other ranks. Raises AssertionError: one of them alone calls a collective, and would wait for ever."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and _FIRST_RANK_ALONE.get():
        raise AssertionError("a collective was called in work of the first rank alone, where no other rank answers")
    return several


class Interrupted(Exception):
    """Signal that asked this process to stop in work that resumes by itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)  # an exception travels between ranks by its arguments
        self.number = number

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.number).name}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted at a stop request in the block, wherever it is: for work that may be left at any moment."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    previous = {number: signal.signal(number, interrupt) for number in StopRequest.SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def requests_ignored_at_the_end() -> Iterator[None]:
    """Ignore stop requests around training and its closing, where no StopRequest listens inside.

    When one process fails, its launcher at once asks the others to stop; they still have to write the reason.
    """
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Stop request: a signal to any rank stops all ranks after the same step.

    Each step sends this rank's request around while it computes, and reads the previous step's answer, so that every
    rank sees the same answer at the same step and none waits. A later second signal ends the process at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is what Slurm sends before it ends a job
    # Ctrl-C reaches a rank twice, from the terminal and from torchrun, which passes it on: one wish.
    ECHO_SECONDS = 2.0

    def __init__(self, acknowledgement: str = "") -> None:
        """acknowledgement: line for standard error when the first signal arrives; "" for none, of a second one either."""
        self._acknowledgement = acknowledgement
        self._received = 0
        self._received_at = 0.0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other is interrupted by a signal
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:  # after an error the other ranks may never answer
            self._exchange_result()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if not self._received:
            self._received, self._received_at = number, time.monotonic()
            self._say(self._acknowledgement)
        elif time.monotonic() - self._received_at > self.ECHO_SECONDS:
            self._say("ending by a second signal, without another save")
            raise SystemExit(128 + number)

    def _say(self, line: str) -> None:
        if self._acknowledgement:
            # Not by print: the signal may have come in the middle of one, which cannot be entered again.
            with suppress(OSError):
                os.write(2, f"{line}\n".encode())

    def poll(self) -> int:
        """Poll once per step, on every rank: the number of the signal to stop for, or 0."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._received
        answer = self._exchange_result()
        wish = torch.tensor([self._received], dtype=torch.int32)
        self._pending = (wish, dist.all_reduce(wish, op=dist.ReduceOp.MAX, async_op=True))
        return answer

    def _exchange_result(self) -> int:
        if self._pending is None:
            return 0
        wish, work = self._pending
        self._pending = None
        work.wait()
        return int(wish.item())
