"""Runs of train.py whose processes start cheaply; see tests.forked."""

import os

from tests.end_to_end.runs import Run
from tests.forked import ForkedProcess

# Asks for a fault in one rank: its number, then what `tests.faults.moments.arm` takes, colons between.
FAULT = "TEST_FAULT"


class ForkedRun(Run):
    """A `Run` without the seconds that importing torch takes."""

    def said(self) -> str:
        return "".join(process.said() for process in self.processes)

    def start(self, arguments: list[str], environment: dict[str, str]) -> ForkedProcess:
        return ForkedProcess(_train, (arguments,), environment)


def _train(arguments: list[str]) -> int:
    from tests.faults.moments import arm
    from torchtitan_dit.commands.train import main

    if FAULT in os.environ:
        rank, moment, occurrence = os.environ[FAULT].split(":")
        if rank == os.environ["RANK"]:
            arm(moment, int(occurrence))
    return main(arguments)
