"""Batch size search against trying every batch size: python benchmarks/autotune_scan.py

Three configurations on the CPU, alone, under DDP and sharded with recomputation. Each is first tried at every multiple of
16 up to 128; then the search gets a memory budget between the needs of two neighbours, and must answer with the lower one.
Writes benchmarks/results/autotune_scan.json.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from benchmarks import shared
from torchtitan.config.job import load_config
from torchtitan.experiments.autotune.probe import run_probe
from torchtitan.experiments.autotune.tuning import autotune

SETTINGS: shared.Settings = {
    "model.flavor": "debug", "model.num_layers": 2, "data.name": "synthetic", "data.kind": "constant",
    "data.shape": [4, 32, 32],
}  # fmt: skip
REPLICAS, SHARDS = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
CASES: dict[str, tuple[int, shared.Settings]] = {
    "one process": (1, {}),
    "DDP x 2": (2, {REPLICAS: 2, SHARDS: 1}),
    "FSDP x 2, recomputation": (2, {REPLICAS: 1, SHARDS: 2, "activation_checkpoint.mode": "full"}),
}
MULTIPLE, LARGEST = 16, 128
LARGEST_THAT_FIT = {"one process": 48, "DDP x 2": 96, "FSDP x 2, recomputation": 80}


def main() -> None:
    shared.parser_of(__doc__).parse_args()
    # Freed buffers are given back at once: where they are kept, the peak differs by up to 0.1 GiB between runs.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    rows = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = compare(name, Path(folder))
        print(name, json.dumps(rows[name]))
    shared.write_results("autotune_scan", {"rows": rows, **shared.conditions()})


def compare(name: str, folder: Path) -> dict:
    processes, settings = CASES[name]
    arguments = shared.words_of(SETTINGS | settings | {"job.dump_folder": str(folder / "outputs")})
    needs = {}
    for batch_size in tqdm(range(MULTIPLE, LARGEST + 1, MULTIPLE), desc=name, leave=False):
        config = load_config([*arguments, f"--training.local_batch_size={batch_size}"], processes)
        probe = run_probe(config, processes=processes, timeout_s=600.0, log=folder / "scan.log")
        needs[batch_size] = probe.memory_gib or math.nan
    wanted = LARGEST_THAT_FIT[name]
    budget = (needs[wanted] + needs[wanted + MULTIPLE]) / 2
    found = autotune(
        arguments, processes, memory_gib=budget, headroom=0.0, multiple_of=MULTIPLE, max_batch_size=LARGEST
    )
    return {
        "memory_gib": needs, "budget_gib": budget, "largest_by_scan": max(b for b, gib in needs.items() if gib <= budget),
        "largest_by_search": found.batch_size, "tries": [probe.batch_size for probe in found.probes],
    }  # fmt: skip


if __name__ == "__main__":
    main()
