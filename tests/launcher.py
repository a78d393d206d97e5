"""Run a test function on several gloo processes and bring back what every rank returned."""

import importlib
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.forked import ROOT, ForkedProcess

__all__ = ["ROOT", "free_port", "run_on_ranks"]


def run_on_ranks(function: str, ranks: int, arguments: dict[str, Any] | None = None, timeout: float = 300) -> list[Any]:
    """Call `module:function(**arguments)` on `ranks` processes that share a gloo group.

    Args:
        function: dotted module and function name; its result must be JSON-serialisable.
        ranks: number of processes; 1 runs without a process group.
        arguments: keyword arguments, JSON-serialisable.
        timeout: seconds for all of it.

    Returns:
        the result of each rank, in their order.

    Raises:
        AssertionError: a rank failed, with the end of its output.
        subprocess.TimeoutExpired: they took longer.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment["WORLD_SIZE"] = str(ranks)
        results = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        processes = [
            ForkedProcess(
                _serve, (function, arguments or {}, str(result)), environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank, result in enumerate(results)
        ]
        deadline = time.monotonic() + timeout
        try:
            codes = [process.wait(max(deadline - time.monotonic(), 0)) for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = "\n".join(
            f"rank {rank}, exit code {code}:\n{process.said()[-3000:]}"
            for rank, (code, process) in enumerate(zip(codes, processes, strict=True))
            if code
        )
        assert not failed, failed
        return [json.loads(result.read_text()) for result in results]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve(function: str, arguments: dict[str, Any], result: str) -> int:
    import torch.distributed as dist

    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(**arguments)
    Path(result).write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0
