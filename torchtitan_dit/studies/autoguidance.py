"""Guidance of a small network on the fractal mixture: plain, by the null condition, and by the run's own past.

The study trains its own networks, one per seed, through the program's objective, averages, solver and guidance. Question and
setting are of Karras et al., "Guiding a diffusion model with a bad version of itself", arXiv 2406.02507, section 3.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.conditions import Classes, Condition
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.guidance import Guidance, Guide
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.solvers import SCHEDULES, SOLVERS
from torchtitan.diffusion.timesteps.registry import TIMESTEPS
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.diffusion.weightings import WEIGHTINGS
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.experiments.cells import Cell, Row
from torchtitan.experiments.engine import Advance
from torchtitan.models.base import DiffusionModel
from torchtitan.settings import chosen
from torchtitan.training.config import EMAConfig, EMATrackConfig
from torchtitan.training.ema import EMABank
from torchtitan_dit.studies.autoguidance_report import PICTURE, draw_picture, seed_of, summary
from torchtitan_dit.studies.fractal_mixture import FractalMixture, fractal_mixtures
from torchtitan_dit.studies.frame import number, require_at_least, run_study

NAME = "autoguidance"
COLUMNS = (
    "model", "reference", "scale", "steps", "guide_steps", "samples", "outside", "coverage", "status", "reason", "date",
    "runtime",
)  # fmt: skip
KEY = ("model", "reference", "scale", "steps", "guide_steps", "samples")
UNIT = "draw"
# Reference of guidance -> scales; real: the data's own points, none: the plain network.
REFERENCES = {"real": (1.0,), "none": (1.0,), "null": (1.5, 2.0, 3.0), "past": (1.5, 2.0, 3.0)}
# Reference and scale -> title of a panel of the picture.
SHOWN = {
    ("real", 1.0): "data", ("none", 1.0): "no guidance", ("null", 3.0): "classifier-free, scale 3",
    ("past", 3.0): "autoguidance, scale 3",
}  # fmt: skip
SHAPE, CLASSES = (2, 1, 1), 2
SOLVER_STEPS, SIGMA_MAX = 32, 5.0
BATCH, WIDTH, LAYERS, LEARNING_RATE, EMA_SIGMA_REL, LABEL_DROPOUT = 1024, 64, 4, 1e-2, 0.05, 0.1
TRAINING_POINTS = 1 << 16  # of each class
FIRST_REAL = 1 << 30  # numbers of real points that no network was trained on
OUTSIDE = 1e-3  # share of the data that counts as outside of its own support


class SmallDenoiser(DiffusionModel):
    """Perceptron of two coordinates, ln(sigma) / 4 and the class; small enough to fit the thin branches badly."""

    image_shape, out_channels = SHAPE, SHAPE[0]
    condition_kind = Classes(CLASSES)

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(2, WIDTH)
        self.noise_level = nn.Linear(9, WIDTH)
        self.classes = nn.Embedding(CLASSES + 1, WIDTH)
        self.hidden = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.outputs = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        frequencies = 2.0 ** torch.arange(4, device=t.device)
        angles = t[:, None] * frequencies * (math.pi / 2)
        waves = torch.cat((t[:, None], angles.cos(), angles.sin()), dim=1)  # [B, 9]
        values = self.inputs(x.flatten(1)) + self.noise_level(waves) + self.classes(condition)
        for layer in self.hidden:
            values = values + layer(nn.functional.silu(values))
        return self.outputs(nn.functional.silu(values))[:, :, None, None]


@dataclass
class Toy:
    """Networks of the seeds, trained when they are needed, and the options.

    Attributes:
        options: of the command line.
        results: folder of all studies that are of no run.
        mixtures: of both classes.
    """

    options: argparse.Namespace
    results: Path = Path("outputs/studies")
    mixtures: tuple[FractalMixture, ...] = field(default_factory=fractal_mixtures)
    _trained: tuple[int, SmallDenoiser, SmallDenoiser] | None = None

    def __post_init__(self) -> None:
        numbers = FIRST_REAL + torch.arange(20_000)
        self.limits = [mixture.log_density(mixture.draw(0, numbers)).quantile(OUTSIDE) for mixture in self.mixtures]

    @property
    def description(self) -> str:
        """Description of the study, for the first line of the summary."""
        options = self.options
        return (
            f"Two trees of {len(self.mixtures[0].branch_weights)} branches each. {options.seeds} networks of"
            f" {sum(p.numel() for p in SmallDenoiser().parameters()):,} parameters, {options.steps} steps of {BATCH} points;"
            f" their past is after {options.guide_steps} steps. {options.samples} samples each, {SOLVER_STEPS} steps of Heun's"
            " method."
        )

    def networks(self, seed: int) -> tuple[SmallDenoiser, SmallDenoiser]:
        """Averaged network of a seed after the training and in its past; kept until the next seed."""
        if self._trained is None or self._trained[0] != seed:
            self._trained = (seed, *train(self.mixtures, seed, self.options.steps, self.options.guide_steps))
        return self._trained[1:]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="networks, each trained from another seed (default: 5)")
    add("--steps", type=int, default=2000, help="optimizer steps of a training (default: 2000)")
    add("--guide-steps", type=int, default=500, help="steps after which the past of a network is kept (default: 500)")
    add("--samples", type=int, default=4000, help="points drawn by each method (default: 4000)")
    add("--retry-failed", action="store_true", help="measure again the cells whose row says failed")
    add("--output", type=Path, help=f"folder of the results (default: outputs/studies/{NAME})")


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train the networks, draw and measure; return summary.md. Raises StudyError."""
    require_at_least(arguments, {"seeds": 2, "guide_steps": 1, "steps": arguments.guide_steps + 1, "samples": 100})
    return run_study(NAME, sys.modules[__name__], Toy(arguments))


def cells(toy: Toy) -> list[Cell]:
    options = toy.options
    return [
        {"model": f"seed-{seed}", "reference": reference, "scale": scale, "steps": options.steps,
         "guide_steps": options.guide_steps, "samples": options.samples}
        for seed in range(options.seeds) for reference, scales in REFERENCES.items() for scale in scales
    ]  # fmt: skip


def cost(cell: Cell) -> int:
    return 1


def measure(toy: Toy, cell: Cell, advance: Advance) -> dict[str, Any]:
    """Share of points outside of the support of their class, and coverage of the class's branches, both over classes."""
    points = draw(toy, seed_of(cell), cell["reference"], float(cell["scale"]), int(cell["samples"]))
    advance(1)
    outside, coverage = [], []
    for mixture, limit, of_class in zip(toy.mixtures, toy.limits, points, strict=True):
        outside.append((mixture.log_density(of_class) < limit).double().mean().item())
        shares = mixture.branch_of(of_class).bincount(minlength=len(mixture.branch_weights)) / len(of_class)
        coverage.append(torch.minimum(shares, mixture.branch_weights).sum().item())
    return {"outside": f"{sum(outside) / CLASSES:.6g}", "coverage": f"{sum(coverage) / CLASSES:.6g}"}


def report(toy: Toy, rows: list[Row], folder: Path) -> str:
    """Write the picture of the last seed's samples; return the table."""
    seed, found = toy.options.seeds - 1, {(row["reference"], float(row["scale"])): row for row in rows}
    panels = []
    for (reference, scale), name in SHOWN.items():
        row = found[reference, scale]
        if row["status"] == "ok":
            panels.append((name, draw(toy, seed, reference, scale, toy.options.samples), number(row, "outside")))
    draw_picture(toy.mixtures, panels, folder / PICTURE)
    return summary(rows) + f"![Samples of one class]({PICTURE})\n\nSamples of one class, of the network of seed {seed}.\n\n"


def draw(toy: Toy, seed: int, reference: str, scale: float, count: int) -> Tensor:
    """Draw points [classes, count / classes, 2]; image n of every method starts from the same noise."""
    share = count // CLASSES
    if reference == "real":
        numbers = FIRST_REAL + (1 + seed) * count + torch.arange(share)
        return torch.stack([mixture.draw(0, numbers) for mixture in toy.mixtures])
    strong, past = toy.networks(seed)
    objective = toy_objective(seed)
    guide = Guide(past, objective, conditional=True) if reference == "past" else None
    images = ImageSampler(strong, objective, "float32", torch.device("cpu")).draw(
        torch.arange(CLASSES).repeat_interleave(share), seed, solver=chosen(SOLVERS, "edm_heun"), num_steps=SOLVER_STEPS,
        schedule=chosen(SCHEDULES, "edm", sigma_max=SIGMA_MAX), guidance=Guidance(scale), guide=guide, batch_size=1000,
    )  # fmt: skip
    return images.reshape(CLASSES, share, 2).double()


def toy_objective(seed: int) -> Objective:
    """EDM's objective for points of deviation 0.5."""
    config = DenoisingConfig(
        path="edm", prediction="x0", preconditioning="edm", sigma_data=0.5, weighting=chosen(WEIGHTINGS, "edm"),
        timesteps=chosen(TIMESTEPS, "lognormal_sigma", p_mean=-2.3, p_std=1.5),
    )  # fmt: skip
    return build_objective(config, seed)


def train(
    mixtures: tuple[FractalMixture, ...], seed: int, steps: int, guide_steps: int
) -> tuple[SmallDenoiser, SmallDenoiser]:
    """Train a network: its average after all steps, and in its past."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmallDenoiser()
        past = SmallDenoiser()
    objective = toy_objective(seed)
    tracks = [EMATrackConfig(name="ema", kind="power", sigma_rel=EMA_SIGMA_REL)]
    ema = EMABank(dict(model.named_parameters()), EMAConfig(tracks=tracks), BATCH)
    data = torch.stack([mixture.draw(seed, torch.arange(TRAINING_POINTS)) for mixture in mixtures]).float()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    for step in range(1, steps + 1):
        numbers = (step - 1) * BATCH + torch.arange(BATCH)
        classes, points = numbers % CLASSES, data[numbers % CLASSES, numbers // CLASSES % TRAINING_POINTS]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE / math.sqrt(max(1.0, 10.0 * step / steps))
        drawn = objective.draw(SHAPE, GlobalBatch(int(numbers[0]), BATCH), numbers)
        condition = model.condition_kind.drop_some(classes, LABEL_DROPOUT, seed, numbers)
        loss = objective.loss(model, points.reshape(-1, *SHAPE), condition, drawn).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(step)
        if step == guide_steps:
            past.load_state_dict(ema.tracks["ema"])
    model.load_state_dict(ema.tracks["ema"])
    return model.eval(), past.eval()
