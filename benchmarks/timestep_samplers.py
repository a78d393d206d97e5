"""Cost of each timestep sampler per step: python benchmarks/timestep_samplers.py [--batch B] [--rounds N]

Timesteps of a global batch are drawn, and samplers that learn observe its losses: one process's work in a step, without
the model. Samplers are visited in turn, and the median and its 95 % interval are taken per sampler. On a discrete DDPM
path and on the rectified flow, each sample by itself and spread over strata.

Writes benchmarks/results/timestep_samplers.json.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import trange

from benchmarks import shared
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objectives import objective_problems
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.timesteps.registry import TIMESTEPS, build_sampler
from torchtitan.diffusion.timesteps.sampler import GlobalBatch, TimestepSampler
from torchtitan.distributed.mesh import compute_device

PATH_NAMES = ("ddpm_linear", "rectified_flow")
SPREADS: tuple[Any, ...] = ("none", "stratified")
SLOTS = {
    "ddpm_linear": [0.0, 5.0, 13.0, 23.0, 37.0, 56.0, 82.0, 120.0, 177.0, 277.0, 1000.0],
    "rectified_flow": [0.1 * k for k in range(10)] + [1.0],
}
WARM_UP = 50  # steps, so that every index has had its losses


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    device = compute_device()
    samplers = {key: build_sampler(config, PATHS[config.path](), seed=0) for key, config in configurations().items()}
    seconds: dict[tuple, list[float]] = {key: [] for key in samplers}
    for number in trange(WARM_UP + arguments.rounds, desc="rounds"):
        for key, sampler in samplers.items():
            found = step_seconds(sampler, number, arguments.batch, device)
            if number >= WARM_UP:
                seconds[key].append(found)
    rows = []
    for (name, path, spread), of_sampler in seconds.items():
        figures = shared.figures("milliseconds", [1e3 * found for found in of_sampler])
        rows.append({"sampler": name, "path": path, "spread": spread, **figures})
        low, high = figures["milliseconds_95_percent"]
        print(f"{name:<20}{path:<16}{spread:<12}{figures['milliseconds']:.3f} ms [{low:.3f}, {high:.3f}]")
    result = {"settings": vars(arguments), "rows": rows, **shared.conditions(device)}
    shared.write_results("timestep_samplers", result)


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

    def step() -> None:
        t, importance = sampler.sample(batch, indices)
        sampler.observe(batch, indices, t, importance * loss)
        sampler.update(skip)

    return shared.timed(step, device)


if __name__ == "__main__":
    main()
