"""Batch size search against trying every batch size: python benchmarks/autotune_scan.py

Three configurations on the CPU, alone, under DDP and sharded with recomputation. Each is first tried at every multiple of
16 up to 128; then the search gets a memory budget between the needs of two neighbours, and must answer with the lower one.
Writes benchmarks/results/autotune_scan.json.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from torchtitan.config.job import load_config
from torchtitan.experiments.autotune.probe import run_probe
from torchtitan.experiments.autotune.tuning import autotune
from torchtitan.runs.folder import versions

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """
[model]
flavor = "debug"
num_layers = 2
[data]
name = "synthetic"
kind = "constant"
shape = [4, 32, 32]
"""
CASES = {
    "one process": (1, []),
    "DDP x 2": (2, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]),
    "FSDP x 2, recomputation": (
        2, ["--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=2",
            "--activation_checkpoint.mode=full"],
    ),
}  # fmt: skip
MULTIPLE, LARGEST = 16, 128
LARGEST_THAT_FIT = {"one process": 48, "DDP x 2": 96, "FSDP x 2, recomputation": 80}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    # Freed buffers are given back at once: where they are kept, the peak differs by up to 0.1 GiB between runs.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    rows = {}
    for name, (processes, overrides) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = row = compare(name, processes, overrides, Path(folder))
        print(name, json.dumps(row))
    path = ROOT / "benchmarks" / "results" / "autotune_scan.json"
    path.write_text(json.dumps({"rows": rows, "date": date.today().isoformat(), "versions": versions()}, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def compare(name: str, processes: int, overrides: list[str], folder: Path) -> dict:
    file = folder / "small.toml"
    file.write_text(CONFIG)
    arguments = ["--job.config_file", str(file), "--job.dump_folder", str(folder / "outputs"), *overrides]
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
