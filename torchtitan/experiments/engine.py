"""Engine of all experiments: missing cells are settled in order, one by one or several at the same time."""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from tqdm import tqdm

from torchtitan.experiments.process import Stopped

C = TypeVar("C")
Advance = Callable[[int], None]


def settle_cells(
    cells: Sequence[C], missing: Sequence[C], settle: Callable[[C, Advance], None], *, cost: Callable[[C], int], unit: str,
    name: Callable[[C], str] = lambda cell: "", jobs: int = 1, stop: threading.Event | None = None,
) -> None:  # fmt: skip
    """Settle the missing cells, and show the progress.

    Args:
        settle: brings a cell to its end and on record; may report the share of its cost done meanwhile. With one job it
            is called in this thread, with several in separate threads.
        stop: set when the other threads must end, where `settle` raises Stopped.

    Raises:
        KeyboardInterrupt: asked to stop, after all threads have ended.
        Exception: the first one that `settle` raises, likewise.
    """
    total, left = sum(map(cost, cells)), sum(map(cost, missing))
    turn, stop = threading.Lock(), stop or threading.Event()

    def settle_one(position: int, cell: C) -> None:
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            with turn:
                bar.update(amount)

        with turn:
            bar.set_description(f"{position} of {len(cells)}, {name(cell)}".removesuffix(", "))
        settle(cell, advance)
        advance(cost(cell) - done)

    numbered = enumerate(missing, len(cells) - len(missing) + 1)
    # The time that is left is estimated from this process's own work: `initial` does not count in the rate.
    with tqdm(
        total=total, initial=total - left, unit=unit, unit_scale=total > 10_000, file=sys.stderr, dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    ) as bar:  # fmt: skip
        if jobs == 1:
            for position, cell in numbered:
                settle_one(position, cell)
            return
        with ThreadPoolExecutor(jobs) as pool:
            futures = []
            try:
                for each in numbered:
                    futures.append(pool.submit(settle_one, *each))
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
    failures = [future.exception() for future in futures if not future.cancelled()]
    for failure in failures:
        if failure is not None and not isinstance(failure, Stopped):
            raise failure
