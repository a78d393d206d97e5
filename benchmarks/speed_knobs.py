"""Gain of each setting for speed: python benchmarks/speed_knobs.py [--flavor DiT-S/2] [--batch B] [--processes N] [--rounds N]

Train steps of a run with a setting of docs/speed.md and of one without, each in separate processes; in each round every
run takes its turn once, and a ratio below 1 is a gain. Settings that the device or the number of processes does not have are
in the result with the reason. Wall time on CUDA, processor time of the slowest process on the CPU, where waiting for others
counts nothing; peak memory of the fullest process. The interval of a ratio covers 95 % from six rounds on; with fewer its
coverage is in the result. Writes benchmarks/results/speed_knobs.json.
"""

import argparse
import functools
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import shared
from torchtitan.config.job import ConfigError, load_config
from torchtitan.distributed.collectives import highest_over_ranks
from torchtitan.distributed.kernel_choices import KernelError
from torchtitan.distributed.mesh import process_group
from torchtitan.experiments.command_lines import words_of
from torchtitan.statistics.interval import median_interval
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import PEAK_MEMORY, memory_metrics

BF16 = {"training.mixed_precision_param": "bfloat16"}
COMPILED = BF16 | {"compile.enable": "true"}
SHARDED = BF16 | {"parallelism.data_parallel_shard_degree": "-1"}
REPLICATED = {"parallelism.data_parallel_replicate_degree": "-1", "parallelism.data_parallel_shard_degree": "1"}
FLOAT8 = SHARDED | {"float8.enable": "true"}
MUON = {"optimizer.name": "Muon"}
ALLOCATOR = "PYTORCH_ALLOC_CONF"

# Name -> (settings of the run without it, what it changes). A key without a section is a variable of the environment.
KNOBS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    **{f"attention {name}": (BF16, {"training.attention_backend": name}) for name in ("flash", "cudnn", "efficient", "math")},
    "TF32": ({}, {"training.float32_matmul_precision": "high"}),
    "compile": (BF16, {"compile.enable": "true"}),
    **{f"compile {mode}": (COMPILED, {"compile.mode": mode}) for mode in (
        "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
    )},
    **{f"reshard {when}": (SHARDED, {"parallelism.fsdp_reshard_after_forward": when}) for when in ("always", "never")},
    "bfloat16 reduction": (SHARDED, {"training.mixed_precision_reduce": "bfloat16"}),
    "CPU offload": (SHARDED, {"training.enable_cpu_offload": "true"}),
    "float8": (SHARDED, {"float8.enable": "true"}),
    "float8 gather": (FLOAT8, {"float8.enable_fsdp_float8_all_gather": "true"}),
    "tokens over 2": (REPLICATED | BF16, {"parallelism.context_parallel_degree": "2"}),
    # There is no switch for the division of the matrices: its gain is that of the second ratio to AdamW over the first.
    "Muon on one process": (BF16, MUON),
    "Muon divided": (REPLICATED | BF16, MUON),
    "expandable segments": (
        BF16 | {ALLOCATOR: "expandable_segments:False"}, {ALLOCATOR: "expandable_segments:True"},
    ),
}  # fmt: skip


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--flavor", default="DiT-S/2")
    parser.add_argument("--shape", default="[4, 32, 32]", help="of the images, as JSON")
    parser.add_argument("--batch", type=int, default=8, help="images per process")
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5, help="of each round, after three of warm-up")
    parser.add_argument("--knobs", nargs="+", choices=KNOBS, default=list(KNOBS))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = shared.read_results("speed_knobs")
    pairs = {name: pair_of(name, arguments) for name in arguments.knobs}
    refusals = {name: reason for name, pair in pairs.items() if (reason := refusal_of(pair))}
    rounds: list[dict[Run, dict[str, Any]]] = []
    for number in range(arguments.rounds):
        runs = dict.fromkeys(run for name, pair in pairs.items() if name not in refusals for run in pair)
        rounds.append({run: _in_own_processes(run, arguments.steps) for run in runs})
        refusals |= {name: rounds[0][run]["refused"] for name, pair in pairs.items() for run in pair
                     if "refused" in rounds[0].get(run, {})}  # fmt: skip
        for name, (without, changed) in pairs.items():
            found: dict[str, Any] = {"refused": refusals.get(name)}
            if name not in refusals:
                found = compared([each[without] for each in rounds], [each[changed] for each in rounds])
                found |= {"rounds": len(rounds)}
            found |= {"settings": KNOBS[name][0] | KNOBS[name][1], "processes": changed.processes}
            results[f"{arguments.flavor}, {name}"] = found | {
                "batch": arguments.batch, "shape": arguments.shape, "steps": arguments.steps, **shared.conditions(),
            }  # fmt: skip
        shared.write_results("speed_knobs", results)
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    for name in pairs:
        print(f"{name:36s} {_line(results[f'{arguments.flavor}, {name}'])}")


@dataclass(frozen=True)
class Run:
    """Run to be measured: words of its command line, processes, and variables of their environment."""

    words: tuple[str, ...]
    processes: int
    environment: tuple[tuple[str, str], ...] = ()


def pair_of(name: str, arguments: argparse.Namespace) -> tuple[Run, Run]:
    """Runs without a setting and with it."""
    without, changed = KNOBS[name]
    sharing = int(changed.get("parallelism.context_parallel_degree", 1))
    processes = arguments.processes if any(key.startswith("parallelism.") for key in without) else 1
    # The same images per step either way; with context parallelism processes share their tokens.
    return (
        _run(without, arguments.batch, processes, arguments),
        _run(without | changed, arguments.batch * sharing, processes, arguments),
    )


def refusal_of(pair: tuple[Run, Run]) -> str | None:
    """Reason for which a configuration is refused here; None: there is none."""
    try:
        for run in pair:
            load_config(list(run.words), run.processes)
    except ConfigError as error:
        return error.problems[0].removeprefix("command line: ")
    if any(ALLOCATOR in dict(run.environment) for run in pair) and not torch.cuda.is_available():
        return f"{ALLOCATOR}: is of CUDA's allocator, and CUDA is not there"
    return None


def compared(without: list[dict[str, float]], changed: list[dict[str, float]]) -> dict[str, Any]:
    """Compare the rounds of two runs."""
    ratios = [there["seconds"] / here["seconds"] for here, there in zip(without, changed, strict=True)]
    found = median_interval(ratios)
    return {
        "seconds_without": statistics.median(one["seconds"] for one in without),
        "seconds": statistics.median(one["seconds"] for one in changed),
        "ratio": found.value, "ratio_interval": [found.lower, found.upper] if found.bounded else None,
        "coverage": found.coverage, "ratios": ratios,
        "peak_GiB_without": max(one["peak_GiB"] for one in without),
        "peak_GiB": max(one["peak_GiB"] for one in changed),
    }  # fmt: skip


def measure(words: list[str], steps: int) -> dict[str, Any]:
    """Measure train steps in these processes: their median on the slowest rank and the highest peak memory, or a refusal."""
    with process_group(), tempfile.TemporaryDirectory() as folder:
        try:
            trainer = Trainer(load_config([*words, "--job.dump_folder", os.environ.get("FOLDER", folder)], _world_size()))
        except KernelError as error:  # of this device, on every rank
            return {"refused": str(error)}
        device = trainer.state.layout.device
        step = functools.partial(shared.train_step, trainer)
        times = [shared.timed(step, device) for _ in range(shared.WARM_UP + steps)]
        peak = memory_metrics(device)[PEAK_MEMORY[device.type]]
        seconds, peak = highest_over_ranks(statistics.median(times[shared.WARM_UP:]), peak)
        trainer.close()
        return {"seconds": seconds, "peak_GiB": peak}


def _run(settings: dict[str, str], batch: int, processes: int, arguments: argparse.Namespace) -> Run:
    environment = {key: value for key, value in settings.items() if "." not in key}
    keys = {key: value for key, value in settings.items() if key not in environment}
    common = shared.UNATTENDED | shared.SYNTHETIC | {
        "model.flavor": arguments.flavor, "data.shape": arguments.shape, "training.local_batch_size": batch, "gns.enable": False,
    }  # fmt: skip
    return Run(tuple(words_of(common | keys)), processes, tuple(environment.items()))


def _in_own_processes(run: Run, steps: int) -> dict[str, Any]:
    """Measure a run in new processes, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan.trainer"])
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        # Torch's allocator reads its variable at the first use of a device, which a forked process has not had.
        environment = dict(run.environment)
        environment |= {"FOLDER": folder, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        if run.processes > 1:
            environment |= {"WORLD_SIZE": str(run.processes), "LOCAL_WORLD_SIZE": str(run.processes)}
        answers = [context.SimpleQueue() for _ in range(run.processes)]
        processes = [
            context.Process(target=_answer, args=(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, run, steps, answer))
            for rank, answer in enumerate(answers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"a process failed: {' '.join(run.words)}")
        return answers[0].get()


def _answer(environment: dict[str, str], run: Run, steps: int, answer: Any) -> None:
    os.environ |= environment
    answer.put(measure(list(run.words), steps))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _line(found: dict[str, Any]) -> str:
    if "refused" in found:
        return found["refused"]
    memory = f"{found['peak_GiB_without']:.2f} -> {found['peak_GiB']:.2f} GiB"
    if found["ratio_interval"] is None:
        return f"{found['ratio']:.3f} in one round, interval unknown, {memory}"
    low, high = found["ratio_interval"]
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}] ({found['coverage']:.0%}), {memory}"


if __name__ == "__main__":
    main()
