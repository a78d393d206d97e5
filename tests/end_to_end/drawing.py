"""Processes of scripts/sample.py, each started as torchrun would."""

import os
import sys
from pathlib import Path

from tests.forked import ForkedProcess
from tests.launcher import free_port


def start_sampling(output: Path, run: Path, *options: str, ranks: int = 1) -> list[ForkedProcess]:
    """Start every rank of `scripts/sample.py RUN --output OUTPUT OPTIONS`."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    words = [str(run), "--output", str(output), *map(str, options)]
    return [
        ForkedProcess(_sample, (words,), environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]


def sample(output: Path, run: Path, *options: str, ranks: int = 1) -> list[tuple[int, str]]:
    """Exit code and output of every rank."""
    processes = start_sampling(output, run, *options, ranks=ranks)
    return [(process.wait(300), process.said()) for process in processes]


def _sample(words: list[str]) -> int:
    sys.argv = ["sample.py", *words]
    from scripts import sample  # reads RANK when it is imported
    from torchtitan.processes.command_line import exit_code

    return exit_code(sample.main)
