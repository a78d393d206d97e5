"""Cost of averages of the weights: python benchmarks/ema_cost.py [--pairs N] [--batch B]

Train steps of DiT-S/2 on 3x32x32 images, without averages and with three of them, one of each kind. Steps are
interleaved in one process and the ratio is taken pair by pair. Writes benchmarks/results/ema_cost.json.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.trainer_overhead import CLASSES, SHAPE, interleaved, median_interval
from torchtitan.config.job import load_config
from torchtitan.runs.folder import versions
from torchtitan.trainer import Trainer
from torchtitan.training.hardware import device_name

ROOT = Path(__file__).resolve().parent.parent
TRACKS = [{"name": "constant"}, {"name": "half_life", "kind": "half_life"}, {"name": "power", "kind": "power"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with_tracks, without = train_step(arguments.batch, TRACKS), train_step(arguments.batch, [])
    times = interleaved(with_tracks, without, arguments.pairs, device)
    shares = [averaging / plain - 1.0 for averaging, plain in times]
    result = {
        "model": "DiT-S/2 on 3x32x32, float32", "batch": arguments.batch, "pairs": arguments.pairs,
        "tracks": len(TRACKS), "threads": torch.get_num_threads(),
        "step_seconds": statistics.median(plain for _, plain in times),
        "cost_share": statistics.median(shares), "cost_share_95_percent": list(median_interval(shares)),
        "cost_share_per_track": statistics.median(shares) / len(TRACKS),
        "device": device_name(device), "date": date.today().isoformat(), "versions": versions(),
    }
    path = ROOT / "benchmarks" / "results" / "ema_cost.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def train_step(batch: int, tracks: list[dict]) -> Callable[[], None]:
    """Train step with these averages."""
    trainer = Trainer(load_config([
        "--job.dump_folder", tempfile.mkdtemp(), "--model.flavor", "DiT-S/2", "--data.name", "synthetic",
        "--data.kind", "noise", "--data.shape", json.dumps(SHAPE), "--data.num_classes", str(CLASSES),
        "--training.local_batch_size", str(batch), "--training.steps", "1000000", "--checkpoint.enable", "false",
        "--sampling.enable", "false", "--ema.tracks", json.dumps(tracks),
    ], 1))

    def step() -> None:
        trainer.state.step += 1
        trainer.train_step()

    return step


if __name__ == "__main__":
    main()
