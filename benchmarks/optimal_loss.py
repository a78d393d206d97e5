"""Trained networks against the optimal loss: python benchmarks/optimal_loss.py RUN [--steps STEP ...] [--images N]

No function of the noisy image comes below the optimal loss on training images, in expectation. For the trained and the averaged
weights of a run's checkpoints, by timestep bin (those of `[gns]`): the loss of the network less that of the posterior mean on
the same images, times and noise, with a 95 % interval (Student's t over draws), and the excess |f - m|^2, which has the same
expectation. A network that is significantly below in a bin would show an error of either. Adds to
benchmarks/results/optimal_loss.json.
"""

import argparse
import json
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from torchtitan.checkpoint.checkpointer import checkpoint_steps
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.data import DATASETS, dataset_info
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.predictions import target
from torchtitan.evaluation.excess_loss import optimal_prediction
from torchtitan.evaluation.optimal_draws import OptimalDraws, TrainingSet, optimal_draws
from torchtitan.gns.config import bin_edges
from torchtitan.runs.folder import versions
from torchtitan.runs.trained_model import TrainedModel, load_run
from torchtitan.statistics.interval import mean_interval
from torchtitan.training.hardware import device_name

PATH = Path(__file__).resolve().parent / "results" / "optimal_loss.json"
DEVICE = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run on one process")
    parser.add_argument("--steps", type=int, nargs="+", help="of its checkpoints (default: all)")
    parser.add_argument("--images", type=int, default=10_000, help="training images, no more than there are")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    draws: OptimalDraws | None = None
    for step in arguments.steps or checkpoint_steps(run_checkpoints(arguments.run)):
        for track in ("none", *(entry.name for entry in load_run(arguments.run, "none", step, DEVICE).config.ema.tracks)):
            trained = load_run(arguments.run, track, step, DEVICE)
            draws = draws or draws_of(trained, arguments.images)
            rows += compared(trained, draws, {"step": step, "weights": "trained" if track == "none" else track})
    results = json.loads(PATH.read_text()) if PATH.exists() else {}
    results[arguments.run.name] = {
        "images": len(draws) if draws else 0, "rows": rows, "device": device_name(DEVICE), "date": date.today().isoformat(),
        "versions": versions(),
    }  # fmt: skip
    PATH.write_text(json.dumps(results, indent=1) + "\n")
    show(rows)


def draws_of(trained: TrainedModel, images: int) -> OptimalDraws:
    """Draw training images with their times, noise and posterior, as a run's validation does."""
    config = trained.config
    training_set = TrainingSet(
        DATASETS[config.data.name](config.data, "train"), dataset_info(config.data), config.data, trained.model.condition_kind
    )
    with tempfile.TemporaryDirectory() as folder:
        return optimal_draws(
            training_set, trained.objective, count=images, timesteps=(), rank=0, world_size=1, device=DEVICE,
            folder=Path(folder),
        )  # fmt: skip


@torch.no_grad()
def compared(trained: TrainedModel, draws: OptimalDraws, of: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare a network with the posterior mean: a row per bin."""
    objective, model = trained.objective, trained.model.eval()
    optimal, _ = optimal_prediction(objective, draws)
    condition = model.condition_kind.of(draws.batch)
    x0, noise, t = draws.batch["images"], draws.draw.noise, draws.draw.t
    a, b = (per_image(c, x0) for c in objective.path.coefficients(t))
    found = objective.predicted(model, a * x0 + b * noise, t, condition)
    wanted = target(objective.prediction, x0, noise, a, b, objective.sigma_data)
    network, least, excess = (_error(*pair) for pair in ((found, wanted), (optimal, wanted), (found, optimal)))
    bins = torch.bucketize(t, bin_edges(trained.config.gns, trained.config.objective).to(t))
    rows = []
    for k in range(int(bins.max()) + 1):
        here = bins == k
        difference = mean_interval((network - least)[here].tolist())
        rows.append(of | {
            "bin": k, "draws": int(here.sum()), "loss": network[here].mean().item(), "optimal": least[here].mean().item(),
            "difference": difference.value, "difference_95_percent": [difference.lower, difference.upper],
            "excess": excess[here].mean().item(),
        })  # fmt: skip
    return rows


def _error(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error of each image, float64 [M]."""
    return (found.to(torch.float64) - wanted.to(torch.float64)).square().flatten(1).mean(1)


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        low, high = row["difference_95_percent"]
        below = "  below the optimum" if high < 0 else ""
        print(
            f"step {row['step']}, {row['weights']:8} bin {row['bin']}: loss {row['loss']:.4f}, optimal {row['optimal']:.4f}, "
            f"difference {row['difference']:+.4f} [{low:+.4f}, {high:+.4f}], excess {row['excess']:.4f}{below}"
        )


if __name__ == "__main__":
    main()
