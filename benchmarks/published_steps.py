"""Estimated against published step times: python benchmarks/published_steps.py

Each row is a system of MLPerf Training 5.1's Flux benchmark, and the estimate of train_configs/flux_schnell_256.toml on as
many devices in bfloat16, by the default efficiencies and no fitted number. Times alone: the simulation of the memory in
scripts/estimate.py takes minutes.
Prints their table, of which docs/comparing.md gives the errors, and writes benchmarks/results/published_steps.json.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import shared
from torchtitan.config.job import JobConfig, load_config
from torchtitan.estimate.devices import DEVICES, Device
from torchtitan.estimate.memory import MemoryEstimate, model_on_meta
from torchtitan.estimate.roofline import Efficiency, StepTime, estimate_step_time, training_flops_per_image
from torchtitan.experiments.command_lines import words_of
from torchtitan.models.base import DiffusionModel

MXFP8, SPLIT = "MXFP8", "bfloat16, tensor parallel 4"


@dataclass(frozen=True)
class Published:
    """Published system.

    Attributes:
        device, devices, images: of a step.
        seconds: median `train_step_time` of its ten logs in mlcommons/training_results_v5.1, validation not counted; several
            systems: the middle of theirs.
        precision: of the published run, and how it splits layers.
        shards: of each copy of the weights in the estimated run.
    """

    device: str
    devices: int
    images: int
    seconds: float
    precision: str
    shards: int


ROWS = (
    Published("GB300", 16, 1024, 0.919, MXFP8, 16),
    Published("GB300", 72, 2304, 0.511, MXFP8, 72),
    Published("GB300", 512, 2048, 0.171, SPLIT, 64),
    Published("GB200", 16, 512, 0.567, MXFP8, 16),
    Published("GB200", 72, 2304, 0.574, MXFP8, 72),
    Published("GB200", 512, 2048, 0.184, SPLIT, 64),
    Published("GB200", 1152, 2304, 0.133, SPLIT, 72),
    Published("B200", 16, 512, 0.625, MXFP8, 8),
    Published("B200", 32, 1024, 0.625, MXFP8, 8),
)


def main() -> None:
    shared.parser_of(__doc__).parse_args()
    found = [record_of(row) for row in ROWS]
    shared.write_results("published_steps", {"rows": found, **shared.conditions()})
    print("\n".join(table_of(found)))


def config_of(row: Published) -> JobConfig:
    """Configuration of the estimated run."""
    settings = {
        "job.config_file": str(shared.ROOT / "train_configs" / "flux_schnell_256.toml"), "data.name": "synthetic",
        "data.shape": [16, 32, 32], "data.text_length": 256, "data.num_workers": 0,
        "training.global_batch_size": row.images, "parallelism.data_parallel_replicate_degree": -1,
        "parallelism.data_parallel_shard_degree": row.shards,
    }  # fmt: skip
    return load_config(words_of(settings), row.devices, elsewhere=True)


def record_of(row: Published) -> dict[str, Any]:
    """Record of a row: the published step and the estimated one."""
    config, device = config_of(row), DEVICES[row.device]
    model = model_on_meta(config)
    time = time_of(config, model, device)
    flops = training_flops_per_image(config, model) * row.images / row.devices
    return dataclasses.asdict(row) | {
        "of_bfloat16_peak": flops / row.seconds / (1e12 * device.tflops_bf16), "estimate": dataclasses.asdict(time),
        "error": time.step / row.seconds - 1.0,
    }  # fmt: skip


def time_of(config: JobConfig, model: DiffusionModel, device: Device) -> StepTime:
    """Time of a step; the optimizer has the bytes of a rank's shards: of weights, gradients and two moments, no average."""
    assert config.optimizer.name == "AdamW" and not config.ema.tracks
    shards = config.parallelism.data_parallel_shard_degree
    shard = sum(-(-tensor.shape[0] // shards) * tensor[0].nbytes for tensor in model.parameters())
    memory = MemoryEstimate(
        parameters=shard, gradients=shard, optimizer=2 * shard, ema=0, activations=0, communication=0, phase="optimizer",
        all_gradients=shard, start_up=0,
    )  # fmt: skip
    return estimate_step_time(config, model, memory, device, Efficiency())


def table_of(found: list[dict[str, Any]]) -> list[str]:
    """Rows of a Markdown table."""
    lines = [
        "| GPUs | images a step | published run | published s | of the bfloat16 peak | estimated layout | estimated s | error"
        " | its compute, s | its communication, s |",
        "|---" * 10 + "|",
    ]
    for row in found:
        copies, shards = row["devices"] // row["shards"], row["shards"]
        time = row["estimate"]
        cells = [
            f"{row['devices']:,} {row['device']}", f"{row['images']:,}", row["precision"], f"{row['seconds']:.3f}",
            f"{row['of_bfloat16_peak']:.1%}", f"FSDP {shards}" if copies == 1 else f"HSDP {copies} x {shards}",
            f"{time['step']:.3f}", f"{row['error']:+.0%}", f"{time['compute']:.3f}", f"{time['communication']:.3f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
