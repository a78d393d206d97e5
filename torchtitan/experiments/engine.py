"""The engine of all experiments: cells that are missing are settled in order, one by one or several side by side."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from tqdm import tqdm

from torchtitan.experiments.process import Stopped

C = TypeVar("C")
Advance = Callable[[int], None]


def settle_cells(
    cells: Sequence[C],
    missing: Sequence[C],
    settle: Callable[[C, Advance], None],
    *,
    cost: Callable[[C], int],
    unit: str,
    name: Callable[[C], str] = lambda cell: "",
    jobs: int = 1,
    stop: threading.Event | None = None,
) -> None:
    """Settle the missing cells, and show how far that is.

    Args:
        cells: all that were asked for.
        missing: those of them that are not on record.
        settle: brings a cell to its end and on record; may tell how much of its cost is done meanwhile. Of one job it
            is called in this thread, of several in threads of their own.
        cost: of a cell, in units.
        unit: of costs, in the singular.
        name: of a cell, for the progress bar.
        jobs: cells that are settled side by side.
        stop: set when the other threads must end; they raise Stopped.

    Raises:
        KeyboardInterrupt: asked to stop, after all threads have ended.
        Exception: the first one that `settle` raises, likewise.
    """
    total, left = sum(map(cost, cells)), sum(map(cost, missing))
    waiting = deque(enumerate(missing, len(cells) - len(missing) + 1))
    turn, stop = threading.Lock(), stop or threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        while waiting and not stop.is_set():
            with turn:
                if not waiting:
                    return
                position, cell = waiting.popleft()
                bar.set_description(f"cell {position} of {len(cells)}, {name(cell)}".removesuffix(", "))
            _settle(cell, settle, cost(cell), bar, turn)

    def work_in_thread() -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as failure:  # carried to the thread that waits
            failures.append(failure)
            stop.set()

    # The time that is left is estimated from this process's own work: `initial` does not count in the rate.
    with tqdm(
        total=total, initial=total - left, unit=unit, unit_scale=total > 10_000, file=sys.stderr, mininterval=0.5,
        dynamic_ncols=True,
    ) as bar:  # fmt: skip
        if jobs == 1:
            work()
            return
        threads = [threading.Thread(target=work_in_thread) for _ in range(min(jobs, len(missing)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # short waits, so that a signal is noticed
        finally:
            stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
    if failures:
        raise failures[0]


def _settle(cell: C, settle: Callable[[C, Advance], None], cost: int, bar: tqdm, turn: threading.Lock) -> None:
    done = 0

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        with turn:
            bar.update(amount)

    settle(cell, advance)
    advance(cost - done)
