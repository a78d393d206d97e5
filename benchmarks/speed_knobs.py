"""Gain of each setting for speed: python benchmarks/speed_knobs.py [--flavor DiT-S/2] [--batch B] [--processes N] [--rounds N]

Train steps of a run with a setting of docs/speed.md and of one without, each in separate processes, in alternating
rounds; a ratio below 1 is a gain. Settings that the device or the number of processes does not have are named with the
reason. Wall time on CUDA, processor time on the CPU; peak memory of the fullest rank. Writes
benchmarks/results/speed_knobs.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.trainer_overhead import median_interval, timed
from torchtitan.config.job import ConfigError, load_config
from torchtitan.distributed.collectives import highest_over_ranks
from torchtitan.distributed.mesh import process_group
from torchtitan.runs.folder import versions
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import PEAK_MEMORY, device_name, memory_metrics

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "benchmarks" / "results" / "speed_knobs.json"
WARM_UP = 3

BF16 = {"training.mixed_precision_param": "bfloat16"}
COMPILED = BF16 | {"compile.enable": "true"}
SHARDED = BF16 | {"parallelism.data_parallel_shard_degree": "-1"}
REPLICATED = {"parallelism.data_parallel_replicate_degree": "-1", "parallelism.data_parallel_shard_degree": "1"}
FLOAT8 = SHARDED | {"float8.enable": "true"}

# Name -> (settings of the run without it, what it changes).
KNOBS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    **{f"attention {name}": (BF16, {"training.attention_backend": name}) for name in ("flash", "cudnn", "efficient", "math")},
    "TF32": ({}, {"training.float32_matmul_precision": "high"}),
    "compile": (BF16, {"compile.enable": "true"}),
    **{f"compile {mode}": (COMPILED, {"compile.mode": mode}) for mode in (
        "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
    )},
    **{f"reshard {when}": (SHARDED, {"parallelism.fsdp_reshard_after_forward": when}) for when in ("always", "never")},
    "prefetch 2": (SHARDED, {"parallelism.fsdp_prefetch_blocks": "2"}),
    "bfloat16 reduction": (SHARDED, {"training.mixed_precision_reduce": "bfloat16"}),
    "CPU offload": (SHARDED, {"training.enable_cpu_offload": "true"}),
    "float8": (SHARDED, {"float8.enable": "true"}),
    "float8 gather": (FLOAT8, {"float8.enable_fsdp_float8_all_gather": "true"}),
    "tokens over 2": (REPLICATED | BF16, {"parallelism.context_parallel_degree": "2"}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="DiT-S/2")
    parser.add_argument("--shape", default="[4, 32, 32]", help="of the images, as JSON")
    parser.add_argument("--batch", type=int, default=8, help="images per process")
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of each round, after three of warm-up")
    parser.add_argument("--knobs", nargs="+", choices=KNOBS, default=list(KNOBS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(json.loads(arguments.measure), arguments.steps)
        return
    results = json.loads(PATH.read_text()) if PATH.exists() else {}
    for name in arguments.knobs:
        results[f"{arguments.flavor}, {name}"] = found = compare(name, arguments)
        PATH.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name:28s} {_line(found)}", flush=True)


def compare(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare runs with a setting and without it, in turn."""
    without, changed = KNOBS[name]
    sharing = int(changed.get("parallelism.context_parallel_degree", 1))
    # The same images per step either way; with context parallelism processes share their tokens.
    batches = arguments.batch, arguments.batch * sharing
    processes = arguments.processes if any(key.startswith("parallelism.") for key in without) else 1
    words = [_words(settings, batch, arguments) for settings, batch in zip((without, without | changed), batches, strict=True)]
    record = {
        "batch": arguments.batch, "shape": arguments.shape, "processes": processes, "settings": without | changed,
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip
    try:
        for each in words:
            load_config(each, processes)
    except ConfigError as error:
        return {"refused": error.problems[0]} | record
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append([_in_own_processes(each, processes, arguments.steps) for each in words])
    ratios = [changed["seconds"] / plain["seconds"] for plain, changed in rounds]
    return {
        "seconds_without": statistics.median(plain["seconds"] for plain, _ in rounds),
        "seconds": statistics.median(changed["seconds"] for _, changed in rounds),
        "ratio": statistics.median(ratios), "ratio_95_percent": list(median_interval(ratios)),
        "peak_GiB_without": max(plain["peak_GiB"] for plain, _ in rounds),
        "peak_GiB": max(changed["peak_GiB"] for _, changed in rounds),
        "rounds": arguments.rounds, "steps": arguments.steps,
    } | record  # fmt: skip


def measure(words: list[str], steps: int) -> None:
    """Measure train steps in these processes; the first prints their median of the slowest rank, and the peak memory."""
    with process_group(), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(load_config([*words, "--job.dump_folder", os.environ.get("FOLDER", folder)], _world_size()))
        device = trainer.state.layout.device

        def step() -> None:
            trainer.state.step += 1
            trainer.train_step()

        times = []
        for _ in range(WARM_UP + steps):
            times.append(timed(step, device))
        peak = memory_metrics(device)[PEAK_MEMORY[device.type]]
        seconds, peak = highest_over_ranks(statistics.median(times[WARM_UP:]), peak)
        if trainer.state.layout.rank == 0:
            print(json.dumps({"seconds": seconds, "peak_GiB": peak}), flush=True)
        trainer.close()


def _words(settings: dict[str, str], batch: int, arguments: argparse.Namespace) -> list[str]:
    common = {
        "model.flavor": arguments.flavor, "data.name": "synthetic", "data.kind": "noise", "data.shape": arguments.shape,
        "data.num_classes": "10", "training.local_batch_size": str(batch), "checkpoint.enable": "false",
        "sampling.enable": "false", "gns.enable": "false", "metrics.enable_tensorboard": "false",
    }  # fmt: skip
    return [word for key, value in (common | settings).items() for word in (f"--{key}", value)]


def _in_own_processes(words: list[str], processes: int, steps: int) -> dict[str, float]:
    own = [__file__, "--measure", json.dumps(words), "--steps", str(steps)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"FOLDER": folder}
        found = subprocess.run([sys.executable, *launcher, *own], capture_output=True, text=True, env=environment)
    if found.returncode:
        raise RuntimeError(found.stderr[-3000:])
    return json.loads(found.stdout.splitlines()[-1])


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _line(found: dict[str, Any]) -> str:
    if "refused" in found:
        return found["refused"]
    low, high = found["ratio_95_percent"]
    memory = f"{found['peak_GiB_without']:.2f} -> {found['peak_GiB']:.2f} GiB"
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}], {memory}"


if __name__ == "__main__":
    main()
