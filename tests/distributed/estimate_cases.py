"""What the ranks of the memory estimate's test run; see tests.launcher."""

import tempfile
from typing import Any
from unittest.mock import patch

from benchmarks import estimate_memory


def peak(words: list[str], ranks: int) -> list[Any]:
    """Measured peak of a step of this rank, and what its record leaves open, in bytes; what the run says that a step holds."""
    held, state_bytes = {}, estimate_memory._state_bytes

    def measured(trainer) -> int:
        held.update(trainer.state.held_gib())
        return state_bytes(trainer)

    with tempfile.TemporaryDirectory() as folder, patch.object(estimate_memory, "_state_bytes", measured):
        return [*estimate_memory.measured_peak([*words, "--job.dump_folder", folder], ranks), held]
