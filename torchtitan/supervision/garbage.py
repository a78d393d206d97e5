"""Python's garbage collector at chosen steps, on all ranks at once, instead of whenever one rank's objects ask for it."""

import gc


class GarbageControl:
    """Turns automatic collection off and collects every so many steps; as it was before, afterwards.

    A collection takes tens of milliseconds, and in a synchronous step all ranks wait for the one that collects.
    """

    def __init__(self, every: int) -> None:
        """every: steps from one collection to the next; 0 leaves the collector alone."""
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
        """Collect if it is time to."""
        if self._every and step % self._every == 0:
            gc.collect()
