"""Runs of train.py whose processes start cheaply; see tests.forked."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.runs import Run
from tests.forked import ForkedProcess
from tests.launcher import free_port

# Asks for a fault in one rank: its number, then what `tests.faults.moments.arm` takes, colons between.
FAULT = "TEST_FAULT"


class ForkedRun(Run):
    """Training in processes that start as torchrun would start them, without the seconds that importing torch takes."""

    def __init__(self, config: Path, name: str, *overrides: str, ranks: int = 1, replicas: int = 1, shards: int = 1) -> None:
        outputs = config.parent / "outputs"
        arguments = [
            "--job.config_file", str(config), "--job.dump_folder", str(outputs), "--job.name", name,
            "--parallelism.data_parallel_replicate_degree", str(replicas),
            "--parallelism.data_parallel_shard_degree", str(shards), *overrides,
        ]  # fmt: skip
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment["WORLD_SIZE"] = str(ranks)
        of_ranks = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        super().__init__(outputs / name, [self.start(arguments, each) for each in of_ranks])

    def said(self) -> str:
        return "".join(process.said() for process in self.processes)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline and all(p.poll() is None for p in self.processes), self.said()
            time.sleep(0.02)

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
