"""Overhead of the trainer over a bare PyTorch loop: python benchmarks/trainer_overhead.py [--pairs N] [--batch B ...]
[--against CHECKOUT]

One train step of the debug model on 3x32x32 images in 16 tokens, which takes milliseconds, by the trainer and by the
shortest loop that trains the same model with the same optimizer, clipping and EMA. Steps are interleaved (trainer, loop,
trainer, ...) in one process, and the difference is taken pair by pair, in milliseconds: it does not depend on the model,
as a ratio does. Operations are torch's, views and what NumPy draws on a CPU left out, counted in a separate step of each;
peak memory is that of a separate process for each. With --against, blocks of pairs alternate with blocks of another checkout
of this repository, each in a separate process, and the ratio of the two overheads is taken block by block, which cancels slow
changes of the machine's load. Writes benchmarks/results/trainer_overhead.json.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.conditions import Classes
from torchtitan.config.job import load_config
from torchtitan.models import MODELS
from torchtitan.runs.folder import versions
from torchtitan.statistics.interval import median_interval as order_statistics
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import device_name, peak_resident_gib

ROOT = Path(__file__).resolve().parent.parent
SHAPE, CLASSES = (3, 32, 32), 10
FLAVOR, PATCH_SIZE = "debug", 8
# Operations that move or compute nothing.
VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip

PAIRS_PER_BLOCK = 15
# Program of a process that answers each number of pairs with their times, by the benchmark of its checkout.
SERVER = """
import json, sys
sys.path.insert(0, sys.argv[1] + "/benchmarks")
import trainer_overhead as benchmark
device = benchmark.torch.device("cuda" if benchmark.torch.cuda.is_available() else "cpu")
ours, bare = benchmark.trainer_step(int(sys.argv[2])), benchmark.loop_step(int(sys.argv[2]), device)
print("answer", json.dumps(benchmark.versions()["git_commit"]), flush=True)
for line in sys.stdin:
    print("answer", json.dumps(benchmark.interleaved(ours, bare, int(line), device)), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64], help="images per step")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout to compare with")
    parser.add_argument("--memory-of", choices=("trainer", "loop"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(peak_memory(arguments.memory_of, arguments.batch[0]))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "model": f"{FLAVOR}, patches of {PATCH_SIZE}, on 3x32x32, float32", "pairs": arguments.pairs,
        "batches": {str(batch): compared(batch, arguments.pairs, device) for batch in arguments.batch},
        "device": device_name(device), "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip
    if arguments.against:
        result["against"] = {
            str(batch): alternating(arguments.against, batch, arguments.pairs) for batch in arguments.batch
        }
    path = ROOT / "benchmarks" / "results" / "trainer_overhead.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def compared(batch: int, pairs: int, device: torch.device) -> dict[str, object]:
    """Compare steps of the trainer and of the loop at a number of images per step."""
    ours, bare = trainer_step(batch), loop_step(batch, device)
    times = interleaved(ours, bare, pairs, device)
    overheads = [1000 * (of_trainer - of_loop) for of_trainer, of_loop in times]
    memory = {kind: memory_in_own_process(kind, batch) for kind in ("trainer", "loop")}
    return {
        "trainer_ms": 1000 * statistics.median(of_trainer for of_trainer, _ in times),
        "loop_ms": 1000 * statistics.median(of_loop for _, of_loop in times),
        "overhead_ms": statistics.median(overheads), "overhead_ms_95_percent": list(median_interval(overheads)),
        "trainer_operations": operations(ours), "loop_operations": operations(bare),
        "trainer_peak_GiB": memory["trainer"], "loop_peak_GiB": memory["loop"],
    }


def alternating(checkout: Path, batch: int, pairs: int) -> dict[str, object]:
    """Compare the overheads of this checkout and of another by alternating blocks of pairs, in random order."""
    servers = [Server(folder, batch) for folder in (ROOT, checkout.resolve())]
    order, blocks = random.Random(0), []
    for _ in range(-(-pairs // PAIRS_PER_BLOCK)):
        first = order.randrange(2)
        times = {number: servers[number].times(PAIRS_PER_BLOCK) for number in (first, 1 - first)}
        blocks.append([[1000 * (ours - bare) for ours, bare in times[number]] for number in range(2)])
    for server in servers:
        server.close()
    ratios = [statistics.median(here) / statistics.median(there) for here, there in blocks]
    here, there = (statistics.median(ms for block in blocks for ms in block[number]) for number in range(2))
    return {
        "git_commit": servers[1].commit, "overhead_ms": here, "its_overhead_ms": there, "blocks": len(blocks),
        "pairs_per_block": PAIRS_PER_BLOCK, "ratio": statistics.median(ratios),
        "ratio_95_percent": list(median_interval(ratios)),
    }  # fmt: skip


class Server:
    """Process that measures a checkout's overhead on demand."""

    def __init__(self, checkout: Path, batch: int) -> None:
        self._checkout = checkout
        command = [sys.executable, "-c", SERVER, str(checkout), str(batch)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.commit = self._answer()

    def times(self, pairs: int) -> list[tuple[float, float]]:
        """Seconds of the trainer's step and of the loop's in each pair."""
        assert self._process.stdin
        print(pairs, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:  # the trainer's own lines come in between
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"the benchmark of {self._checkout} has ended with exit code {self._process.wait()}")


class Operations(TorchDispatchMode):
    """Count of torch's operations, views left out."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def operations(step: Callable[[], None]) -> int:
    """Operations of one step, backward and optimizer included."""
    with Operations() as found:
        step()
    return found.count


def trainer_step(batch: int) -> Callable[[], None]:
    """Step of the trainer, logging and finite check included."""
    folder = tempfile.mkdtemp()
    trainer = Trainer(load_config([
        "--job.dump_folder", folder, "--model.flavor", FLAVOR, "--model.patch_size", str(PATCH_SIZE),
        "--data.name", "synthetic", "--data.kind", "noise", "--data.shape", json.dumps(SHAPE), "--data.num_classes", str(CLASSES),
        "--training.local_batch_size", str(batch),
        "--training.steps", "1000000", "--checkpoint.enable", "false", "--sampling.enable", "false",
        "--metrics.log_freq", "10",
    ], 1))

    def step() -> None:
        trainer.state.step += 1
        trainer.phases.step = trainer.state.step
        norm, lr = trainer.train_step()
        if trainer.state.step % 10 == 0:
            trainer.reports.log(norm, lr)

    return step


def loop_step(batch: int, device: torch.device) -> Callable[[], None]:
    """Step of the shortest loop: images in memory, torch's own random numbers, no metrics."""
    family = MODELS["dit"]
    model = family.build(replace(family.flavors[FLAVOR], patch_size=PATCH_SIZE), SHAPE, Classes(CLASSES)).to(device)
    model.init_weights()
    parameters = list(model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    data = torch.randn(1024, *SHAPE)
    labels = torch.randint(CLASSES, (1024,))

    def step() -> None:
        chosen = torch.randint(1024, (batch,))
        x0, classes = data[chosen].to(device), labels[chosen].to(device)
        classes = torch.where(torch.rand(batch, device=device) < 0.1, CLASSES, classes)
        noise, t = torch.randn_like(x0), torch.sigmoid(torch.randn(batch, device=device))
        mix = t[:, None, None, None]
        output = model((1 - mix) * x0 + mix * noise, 1000 * t, classes)
        torch.nn.functional.mse_loss(output, noise - x0).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 1e-4)

    return step


def interleaved(
    ours: Callable[[], None], bare: Callable[[], None], pairs: int, device: torch.device
) -> list[tuple[float, float]]:
    """Interleave steps, pair by pair, after three pairs of warm-up, in alternating random order; seconds of each."""
    order = random.Random(0)
    times = []
    for _ in range(pairs + 3):
        first_ours = order.random() < 0.5
        first, second = (timed(step, device) for step in ((ours, bare) if first_ours else (bare, ours)))
        times.append((first, second) if first_ours else (second, first))
    return times[3:]


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one step: processor time on the CPU, where other programs share it; wall time on CUDA."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def median_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median between two order statistics; of fewer than six values their range, which covers less."""
    found = order_statistics(values)
    return found.lower, found.upper


def peak_memory(kind: str, batch: int) -> float:
    """Peak GiB of this process (of the device on CUDA) after six steps of one kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = trainer_step(batch) if kind == "trainer" else loop_step(batch, device)
    for _ in range(6):
        step()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return peak_resident_gib()


def memory_in_own_process(kind: str, batch: int) -> float:
    command = [sys.executable, __file__, "--memory-of", kind, "--batch", str(batch)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
