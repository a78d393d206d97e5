"""Optional outputs of a run: a disk that is full, read-only or failing loses the picture, not the training."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan.errors import reason

logger = logging.getLogger(__name__)


class OptionalOutputs:
    """Record of the outputs that fail at present. Any thread may use it.

    A failure is logged in one line when it begins, and its end in another; in between the output is silent.
    """

    def __init__(self) -> None:
        self._failing: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def attempt(
        self,
        output: str,
        path: Path,
        *errors: type[Exception],
        consequence: str = "training continues, and the next interval tries again",
    ) -> Iterator[None]:
        """Attempt to write an output: a failure in the block ends the block, not the run.

        Pillow, matplotlib, pyarrow and torch's profiler all raise OSError where a disk or a name refuses a file.

        Args:
            output: name of the output, the same at every attempt.
            errors: other exceptions that may be raised, besides OSError.
            consequence: the end of the line that is logged.
        """
        expected: tuple[type[Exception], ...] = (OSError, *errors)
        try:
            yield
        except expected as error:
            self.failed(output, path, error, consequence)
        else:
            self.worked(output, path)

    def failed(self, output: str, path: Path, error: Exception, consequence: str) -> None:
        """Record a failure; logged if the output worked before."""
        with self._lock:
            known = output in self._failing
            self._failing.add(output)
        if not known:
            logger.error(f"{path}: {output} cannot be written: {reason(error)}; {consequence}")

    def worked(self, output: str, path: Path) -> None:
        """Record a success; logged if the output failed before."""
        with self._lock:
            known = output in self._failing
            self._failing.discard(output)
        if known:
            logger.warning(f"{path}: {output} can be written again")
