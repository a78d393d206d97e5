"""Cost of each timestep sampler per step: python benchmarks/timestep_samplers.py [--batch B] [--rounds N]

Timesteps of a global batch are drawn, and samplers that learn observe its losses: one process's work in a step, without
the model. Samplers are visited in turn, and the median and its 95 % interval are taken per sampler. On a discrete DDPM
path and on the rectified flow, each sample by itself and spread over strata.

Writes benchmarks/results/timestep_samplers.json.
"""

import argparse
import json
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import trange

from benchmarks.trainer_overhead import median_interval
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import objective_problems
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.registry import TIMESTEPS, build_sampler
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepSampler
from torchtitan.runs.folder import versions
from torchtitan.training.hardware import device_name

ROOT = Path(__file__).resolve().parent.parent
PATH_NAMES = ("ddpm_linear", "rectified_flow")
SPREADS: tuple[Any, ...] = ("none", "stratified")
SLOTS = {
    "ddpm_linear": [0.0, 5.0, 13.0, 23.0, 37.0, 56.0, 82.0, 120.0, 177.0, 277.0, 1000.0],
    "rectified_flow": [0.1 * k for k in range(10)] + [1.0],
}
WARM_UP = 50  # steps, so that every index has had its losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    samplers = {key: build_sampler(config, PATHS[config.path](), seed=0) for key, config in configurations().items()}
    seconds: dict[tuple, list[float]] = {key: [] for key in samplers}
    for number in trange(WARM_UP + arguments.rounds, desc="rounds"):
        for key, sampler in samplers.items():
            found = step_seconds(sampler, number, arguments.batch, device)
            if number >= WARM_UP:
                seconds[key].append(found)
    rows = [
        {
            "sampler": name, "path": path, "spread": spread,
            "milliseconds": 1e3 * statistics.median(found),
            "milliseconds_95_percent": [1e3 * end for end in median_interval(found)],
        }
        for (name, path, spread), found in seconds.items()
    ]  # fmt: skip
    for row in rows:
        low, high = row["milliseconds_95_percent"]
        figures = f"{row['milliseconds']:.3f} ms [{low:.3f}, {high:.3f}]"
        print(f"{row['sampler']:<20}{row['path']:<16}{row['spread']:<12}{figures}")
    result = {
        "settings": vars(arguments), "threads": torch.get_num_threads(), "rows": rows, "device": device_name(device),
        "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / "timestep_samplers.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def configurations() -> dict[tuple[str, str, str], DenoisingConfig]:
    """Configurations of every sampler on its paths, by (name, path, spread)."""
    found = {}
    for name in TIMESTEPS:
        for path in PATH_NAMES:
            for spread in SPREADS:
                keys = {"edges": SLOTS[path], "importance": True} if name == "slots" else {}
                config = DenoisingConfig(path=path, timesteps=TIMESTEPS[name](name=name, **keys), spread=spread)
                if not any(objective_problems(config)):
                    found[name, path, spread] = config
    return found


def step_seconds(sampler: TimestepSampler, number: int, size: int, device: torch.device) -> float:
    """Seconds of one step of a process that has the whole batch."""
    batch, indices = GlobalBatch(number * size, size), torch.arange(number * size, (number + 1) * size, device=device)
    loss, skip = torch.rand(size, device=device), torch.tensor(False, device=device)
    _wait(device)
    started = time.perf_counter()
    t, importance = sampler.sample(batch, indices)
    sampler.observe(batch, indices, t, importance * loss)
    sampler.update(skip)
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
