"""Garbage collection at chosen steps, on all ranks at once, instead of at each rank's own times."""

import gc


class GarbageControl:
    """Garbage control: turns automatic collection off, collects at an interval of steps, and restores it afterwards.

    A collection takes tens of milliseconds, and in a synchronous step all ranks wait for the one that collects.
    """

    def __init__(self, every: int = 1000) -> None:
        """every: steps between collections."""
        self._every = every
        self._was_enabled = False

    def __enter__(self) -> "GarbageControl":
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *details: object) -> None:
        if self._was_enabled:
            gc.enable()

    def step(self, step: int) -> None:
        """Collect if it is due."""
        if step % self._every == 0:
            gc.collect()
