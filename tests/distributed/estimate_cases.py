"""What the ranks of the memory estimate's test run; see tests.launcher."""

import tempfile

from benchmarks.estimate_memory import measured_peak


def peak(words: list[str], ranks: int) -> list[int]:
    """Measured peak of a step of this rank, and what its record leaves open, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        return list(measured_peak([*words, "--job.dump_folder", folder], ranks))
