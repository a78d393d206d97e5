"""Change of activations in the first steps by width, with and without the maximal update parametrisation: flat if it transfers.

Source: Yang et al., "Tensor programs V", arXiv 2203.03466, appendix D.1.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from research.frame import require_at_least
from research.pictures import interval_text
from torchtitan.conditions import Classes
from torchtitan.experiments.folder import ResultsFolder, StudyError
from torchtitan.models.dit.config import DiTConfig
from torchtitan.models.dit.model import DiT
from torchtitan.pictures.markdown import markdown_table
from torchtitan.pictures.style import new_figure, ordered_colours
from torchtitan.statistics.interval import mean_interval
from torchtitan.training.config import OptimizerConfig
from torchtitan.training.optimizer import build_optimizer

SHAPE, CLASSES, BATCH, HEAD = (3, 8, 8), 10, 32, 16
# Role -> module of which the outputs are compared.
ROLES = {
    "patch embedding": "patch_embed", "attention": "layers.1.attention.out", "feed-forward": "layers.1.mlp.out",
    "tokens behind the blocks": "layers.3", "output": "output.linear",
}  # fmt: skip
ARMS: dict[str, tuple[bool, OptimizerConfig]] = {
    "Adam": (False, OptimizerConfig(lr=4e-3)),
    "Adam, maximal updates": (True, OptimizerConfig(lr=4e-3)),
    "Muon (fan), maximal updates": (True, OptimizerConfig(name="Muon", muon_scale="fan", lr=1e-2)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help=f"each a multiple of {HEAD}; the first is the base's")
    add("--steps", type=int, default=5)
    add("--seeds", type=int, default=5)
    add("--output", type=Path, default=Path("outputs/coordinate_check"))


def run_alone(arguments: argparse.Namespace) -> Path:
    """Train the first steps of every width, and write the table of slopes and the picture; return summary.md.

    Raises:
        StudyError: bad options, or a folder of other files.
    """
    require_at_least(arguments, {"steps": 2, "seeds": 1})
    if len(set(arguments.widths)) < 2 or any(width < HEAD or width % HEAD for width in arguments.widths):
        raise StudyError(f"--widths: two or more different multiples of {HEAD}, not {arguments.widths}")
    ResultsFolder(arguments.output, {"coordinate_check.png": b"\x89PNG"}).refuse_foreign()
    arguments.output.mkdir(parents=True, exist_ok=True)
    base, rows = arguments.widths[0], []
    figure, axes = new_figure("Change of activations by width", columns=len(ARMS), size=(4.2 * len(ARMS), 4.4), sharey=True)
    for axis, (arm, (transfers, config)) in zip(axes[0], ARMS.items(), strict=True):
        found = [
            {width: changes(width, base if transfers else None, config, arguments.steps, seed) for width in arguments.widths}
            for seed in range(arguments.seeds)
        ]
        for color, role in zip(ordered_colours(len(ROLES)), ROLES, strict=True):
            means = [math.exp(sum(math.log(run[width][role]) for run in found) / len(found)) for width in arguments.widths]
            axis.plot(arguments.widths, means, "o-", color=color, label=role)
            slopes = mean_interval([slope({width: run[width][role] for width in run}) for run in found])
            rows.append([arm, role, interval_text(slopes, ".2f")])
        axis.set(title=arm, xlabel="width", xscale="log", yscale="log")
        axis.set_xticks(arguments.widths, [str(width) for width in arguments.widths], minor=False)
        axis.minorticks_off()
    axes[0, 0].set_ylabel(f"root mean square change after {arguments.steps} steps")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(arguments.output / "coordinate_check.png")
    summary = arguments.output / "summary.md"
    table = markdown_table(["updates", "activations", "slope of log change over log width"], rows)
    over = f"95 % intervals over {arguments.seeds} seeds" if arguments.seeds > 1 else "One seed, without intervals"
    summary.write_text(f"{table}\n\n{over}; 0 is flat.\n")
    return summary


def changes(width: int, base: int | None, config: OptimizerConfig, steps: int, seed: int) -> dict[str, float]:
    """Root mean square change of each role's outputs by so many steps on one batch; base: None without maximal updates."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"dim": width, "num_layers": 4, "num_heads": width // HEAD, "mlp_hidden_dim": 4 * width}
    model = DiT(DiTConfig(**sizes, mup_base_dim=base), SHAPE, Classes(CLASSES))
    model.init_weights()
    optimizer = build_optimizer(dict(model.named_parameters()), config, model.blocks(), fan_in_ratios=model.fan_in_ratios())
    x, target = torch.randn(2, BATCH, *SHAPE)
    t, labels = torch.rand(BATCH), torch.arange(BATCH) % CLASSES
    seen: dict[str, list[Tensor]] = {role: [] for role in ROLES}
    for role, name in ROLES.items():
        model.get_submodule(name).register_forward_hook(_keeper(seen[role]))
    for _ in range(steps + 1):
        (model(x, t, labels) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {role: (outputs[-1] - outputs[0]).square().mean().sqrt().item() for role, outputs in seen.items()}


def slope(values: dict[int, float]) -> float:
    """Slope of the logarithm over that of the width, least squares."""
    xs, ys = ([math.log(each) for each in of] for of in (values, values.values()))
    middle = sum(xs) / len(xs)
    return sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / sum((x - middle) ** 2 for x in xs)


def _keeper(kept: list[Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
    return lambda _, __, output: kept.append(output.detach())
