"""Estimated against measured memory of a training step: python benchmarks/estimate_memory.py [--batch B]

Three models in three layouts, each in real processes on the CPU. Measured is the peak of all tensors allocated on the
CPU in the third step of rank 0: the run's state before that step, and the allocations recorded by the profiler since.
Memory freed by gloo's own threads is not in that record (`unseen`, the apparent remainder of a step): there the true
value is up to that much lower. Writes benchmarks/results/estimate_memory.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import shared
from torchtitan.config.job import load_config
from torchtitan.distributed.mesh import process_group
from torchtitan.distributed.parallelize import local
from torchtitan.estimate.memory import estimate_memory
from torchtitan.trainer import Trainer

MODELS = {
    "debug": ["--model.flavor", "debug"],
    "digits": ["--model.flavor", "digits", "--activation_checkpoint.mode", "selective"],
    "DiT-S/2": ["--model.flavor", "DiT-S/2"],
}
LAYOUTS = {"one process": (1, 1), "DDP x 2": (2, 1), "FSDP x 2": (1, 2)}
IMAGES = ["--data.name", "synthetic", "--data.kind", "noise", "--data.shape", "[4, 32, 32]"]
_STEPS_BEFORE = 2  # buckets are rebuilt in the first, the optimizer's state is made


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=16, help="images per rank (default: 16)")
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        _measure_here(arguments.measure)
    rows: list[dict[str, Any]] = []
    for model, layout in ((model, layout) for model in MODELS for layout in LAYOUTS):
        replicas, shards = LAYOUTS[layout]
        words = [*MODELS[model], *IMAGES, *degrees(replicas, shards)]
        words += ["--training.local_batch_size", str(arguments.batch)]
        estimated = estimate_memory(load_config(words, replicas * shards), replicas * shards).total
        measured, unseen = _measure(words, replicas * shards)
        rows.append({
            "model": model, "layout": layout, "estimated_bytes": estimated, "measured_bytes": measured,
            "unseen_bytes": unseen, "error": estimated / measured - 1.0,
        })  # fmt: skip
        print(f"{model:10} {layout:12} {estimated / 2**20:9.2f} MiB estimated {measured / 2**20:9.2f} measured "
              f"{100 * rows[-1]['error']:+6.2f} %, {unseen / 2**20:.2f} unseen", flush=True)
    result = {"batch": arguments.batch, "images": "4 x 32 x 32", "rows": rows, **shared.conditions(torch.device("cpu"))}
    shared.write_results("estimate_memory", result)


def degrees(replicas: int, shards: int) -> list[str]:
    """Layout as words of a command line."""
    return [
        "--parallelism.data_parallel_replicate_degree", str(replicas),
        "--parallelism.data_parallel_shard_degree", str(shards),
    ]  # fmt: skip


def measured_peak(words: list[str], world_size: int) -> tuple[int, int]:
    """Measure the third of three train steps in this process.

    Args:
        words: command line of a configuration.
        world_size: processes of the run.

    Returns:
        bytes of all live tensors at the peak, the run's whole state included; bytes not freed according to the step's
        record, although no tensor remains.
    """
    config = load_config([*words, "--checkpoint.enable", "false", "--sampling.enable", "false",
                          "--metrics.enable_tensorboard", "false"], world_size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer = Trainer(config)
        for _ in range(_STEPS_BEFORE):
            trainer.train_step()
        state = _state_bytes(trainer)
        with torch.profiler.record_function("measured step"):
            trainer.train_step()
    trainer.close()
    events = profile.profiler.kineto_results.events()
    step = next(event for event in events if event.name() == "measured step")
    within = [e for e in events if e.name() == "[memory]" and step.start_ns() <= e.start_ns() <= step.end_ns()]
    changes = [event.nbytes() for event in sorted(within, key=lambda event: event.start_ns())]
    return state + max(accumulate(changes)), sum(changes)


def _state_bytes(trainer: Trainer) -> int:
    model = trainer.state.model
    tensors = [*trainer.state.tensors().values(), *(p.detach() for p in model.parameters()), *model.buffers()]
    storages = {id(storage): storage for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    buckets = 0
    if isinstance(trainer.state.train_module, DistributedDataParallel):
        buckets = sum(parameter.nbytes for parameter in trainer.state.parameters.values())
    return buckets + sum(storage.nbytes() for storage in storages.values())


def _measure(words: list[str], processes: int) -> tuple[int, int]:
    command = [str(Path(__file__).resolve()), "--measure", *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    launched = [sys.executable, *(launcher if processes > 1 else []), *command]
    done = subprocess.run(launched, cwd=shared.ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return next(tuple(json.loads(line)["bytes"]) for line in done.stdout.splitlines() if line.startswith('{"bytes"'))


def _measure_here(words: list[str]) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    folder = tempfile.mkdtemp()
    with process_group():
        words = [*words, "--job.dump_folder", f"{folder}/{os.environ.get('RANK', '0')}"]
        peak = measured_peak(words, world_size)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(json.dumps({"bytes": peak}))
    sys.stdout.flush()
    os._exit(0)  # a gloo thread may abort the interpreter while it shuts down


if __name__ == "__main__":
    main()
