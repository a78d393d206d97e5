"""Processes of scripts/sample.py and scripts/evaluate.py, each started as torchrun would."""

import importlib
import os
import sys
from pathlib import Path

from tests.forked import ROOT, ForkedProcess
from tests.launcher import free_port


def start_command(name: str, *words: str, ranks: int = 1, folder: Path = ROOT) -> list[ForkedProcess]:
    """Start every rank of `scripts/NAME.py WORDS` in a folder."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    return [
        ForkedProcess(_call, (name, list(map(str, words))), environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, folder)
        for rank in range(ranks)
    ]


def results_of(processes: list[ForkedProcess]) -> list[tuple[int, str]]:
    return [(process.wait(300), process.said()) for process in processes]


def start_sampling(output: Path, run: Path, *options: str, ranks: int = 1) -> list[ForkedProcess]:
    """Start every rank of `scripts/sample.py RUN --output OUTPUT OPTIONS`."""
    return start_command("sample", run, "--output", output, *options, ranks=ranks)


def sample(output: Path, run: Path, *options: str, ranks: int = 1) -> list[tuple[int, str]]:
    return results_of(start_sampling(output, run, *options, ranks=ranks))


def _call(name: str, words: list[str]) -> int:
    sys.argv = [f"{name}.py", *words]
    from torchtitan.processes.command_line import exit_code

    return exit_code(importlib.import_module(f"torchtitan_dit.commands.{name}").main)  # which reads RANK when it is imported
