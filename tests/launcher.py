"""Run a test function on several gloo processes and bring back what every rank returned.

As a module (`python -m tests.launcher`) it is one of those processes.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


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
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment["WORLD_SIZE"] = str(ranks)
        processes = []
        for rank in range(ranks):
            with open(f"{folder}/{rank}.log", "w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.launcher", function, json.dumps(arguments or {}), f"{folder}/{rank}.json"],
                        cwd=ROOT, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log,
                    )
                )
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        logs = [Path(f"{folder}/{rank}.log").read_text()[-3000:] for rank in range(ranks)]
        failed = "\n".join(f"rank {rank}, exit code {code}:\n{log}" for rank, (code, log) in enumerate(zip(codes, logs, strict=True)) if code)
        assert not failed, failed
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(ranks)]


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve(function: str, arguments: str, result: str) -> None:
    import torch.distributed as dist

    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a gloo thread may abort the interpreter while it shuts down


if __name__ == "__main__":
    _serve(*sys.argv[1:])
