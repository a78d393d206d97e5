"""Real runs of train.py in processes of their own, as the tests see them."""

import json
import signal
import time
from pathlib import Path

from safetensors.torch import load_file

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
    """Folder and processes of one training, which tests.faults.forked starts, or a launcher."""

    def __init__(self, folder: Path, processes: list) -> None:
        self.folder, self.processes = folder, processes

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
