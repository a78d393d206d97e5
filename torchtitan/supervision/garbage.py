"""Garbage collection at chosen steps, on all ranks at once, instead of at each rank's own times."""

import gc


class GarbageControl:
    """Garbage control: turns automatic collection off, collects at an interval of steps, and restores it afterwards.

    A collection takes tens of milliseconds, and in a synchronous step all ranks wait for the one that collects.
    """

    def __init__(self, every: int) -> None:
        """every: steps between collections; 0 leaves automatic collection on."""
        self._every = every
        self._was_enabled = False

    def __enter__(self) -> "GarbageControl":
        self._was_enabled = gc.isenabled()
        if self._every:
            gc.collect()
            gc.disable()
        return self

    def __exit__(self, *details: object) -> None:
        if self._every and self._was_enabled:
            gc.enable()

    def step(self, step: int) -> None:
        """Collect if it is due."""
        if self._every and step % self._every == 0:
            gc.collect()
