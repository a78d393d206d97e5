"""Real runs of train.py in processes of their own, for the end-to-end tests."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from tests.launcher import ROOT, free_port

CONFIG = """
[model]
flavor = "debug"
num_layers = 2
[data]
name = "digits"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 5
decay_type = "cosine"
[training]
steps = 60
local_batch_size = 4
global_batch_size = 16
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 1
[[ema.tracks]]
name = "ema"
decay = 0.9
[metrics]
log_freq = 5
enable_tensorboard = false
[checkpoint]
interval = 30
keep_latest_k = 2
[sampling]
interval = 60
num_steps = 4
images_per_class = 2
"""


def write_config(folder: Path) -> Path:
    path = folder / "small.toml"
    path.write_text(CONFIG)
    return path


class Run:
    """Processes of one training, each started as torchrun would."""

    def __init__(self, config: Path, name: str, *overrides: str, ranks: int = 1, replicas: int = 1, shards: int = 1):
        self.folder = config.parent / "outputs" / name
        arguments = [
            "--job.config_file", str(config), "--job.dump_folder", str(config.parent / "outputs"), "--job.name", name,
            "--parallelism.data_parallel_replicate_degree", str(replicas),
            "--parallelism.data_parallel_shard_degree", str(shards), *overrides,
        ]
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment["WORLD_SIZE"] = str(ranks)
        self.processes = [
            self.start(arguments, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
        ]

    def start(self, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "train.py", *arguments], cwd=ROOT, text=True, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(self, timeout: float = 300) -> tuple[list[int], list[str]]:
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        finally:
            self.send(signal.SIGKILL)
        return [process.returncode for process in self.processes], outputs

    def finish(self) -> list[str]:
        """Wait for a run that must succeed; outputs of all ranks."""
        codes, outputs = self.wait()
        assert codes == [0] * len(codes), "\n".join(outputs)
        return outputs

    def wait_for_step(self, step: int, timeout: float = 300) -> None:
        """Return once metrics.jsonl has a point at `step` or later."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            points = self.points()  # none for a moment where a resumed run writes its checkpoint's lines again
            if points and points[-1]["step"] >= step:
                return
            assert all(process.poll() is None for process in self.processes), self.wait()
            time.sleep(0.02)
        raise AssertionError(f"no step {step} after {timeout} s")

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def points(self) -> list[dict]:
        """Logged points so far; a line that is being written does not count."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def losses(self) -> list[tuple[int, float, float]]:
        points = [p for p in self.points() if "grad_norm" in p]  # held-out losses and noise scales are logged apart
        return [(p["step"], p["loss_metrics/global_avg_loss"], p["grad_norm"]) for p in points]

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


def checkpoint_tensors(folder: Path) -> dict:
    """Every tensor of a checkpoint, shards put together along the first dimension."""
    pieces: dict[str, list] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            pieces.setdefault(name, []).append((path.name, tensor))
    import torch

    return {
        name: found[0][1] if len(found) == 1 else torch.cat([tensor for _, tensor in found])
        for name, found in pieces.items()
    }
