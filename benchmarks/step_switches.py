"""Gain of each choice in a train step: python benchmarks/step_switches.py [--flavor DiT-S/2] [--pairs N]

Train steps of one model on 3x32x32 images (of the last two, the update alone) with the choice and without it,
interleaved in one process in random order, ratio pair by pair: below 1, the choice is faster. Adds
to benchmarks/results/step_switches.json.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.step_speed import build, train_step
from benchmarks.trainer_overhead import CLASSES, SHAPE, interleaved, median_interval
from torchtitan.models.dit import layers
from torchtitan.models.dit.layers import Attention, Block
from torchtitan.runs.folder import versions
from torchtitan.training.config import EMAConfig, EMATrackConfig
from torchtitan.training.ema import EMABank
from torchtitan.training.hardware import device_name

ROOT = Path(__file__).resolve().parent.parent


Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="DiT-S/2")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = ROOT / "benchmarks" / "results" / "step_switches.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.choices:
        with_it, without = CHOICES[name](arguments.flavor, arguments.batch, device)
        times = interleaved(with_it, without, arguments.pairs, device)
        ratios = [chosen / plain for chosen, plain in times]
        results[f"{arguments.flavor}, {name}"] = found = {
            "batch": arguments.batch, "pairs": arguments.pairs,
            "seconds": statistics.median(chosen for chosen, _ in times),
            "seconds_without": statistics.median(plain for _, plain in times),
            "ratio": statistics.median(ratios), "ratio_95_percent": list(median_interval(ratios)),
            "threads": torch.get_num_threads(), "device": device_name(device), "date": date.today().isoformat(),
            "versions": versions(),
        }  # fmt: skip
        print(f"{name:40s} {found['ratio']:.3f} [{found['ratio_95_percent'][0]:.3f}, {found['ratio_95_percent'][1]:.3f}]")
        path.write_text(json.dumps(results, indent=1) + "\n")


# ---------------------------------------------------------------------- choices: a step with it and one without


def one_operation(flavor: str, batch: int, device: torch.device) -> tuple[Step, Step]:
    """Scale and shift, and gate and residual, by one multiply-add each, against a product and a sum."""

    def block(self: Block, x: Tensor, c: Tensor, rotary: Tensor | None) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(c)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(layers.modulate(self.attention_norm(x), shift, scale), rotary)
        return x + mlp_gate * self.mlp(layers.modulate(self.mlp_norm(x), mlp_shift, mlp_scale))

    def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return x * (1 + scale) + shift

    return _patched(flavor, batch, device, {(layers, "_modulate"): modulate, (Block, "forward"): block})


def packed_qkv(flavor: str, batch: int, device: torch.device) -> tuple[Step, Step]:
    """Queries, keys and values by one product against three."""

    def attention(self: Attention, x: Tensor, rotary: Tensor | None) -> Tensor:
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for weight, bias in zip(weights, biases, strict=True)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return _patched(flavor, batch, device, {(Attention, "forward"): attention})


def modulation_by_block(flavor: str, batch: int, device: torch.device) -> tuple[Step, Step]:
    """Modulation of each block by its own product, against one product for all blocks."""
    model: Any = _model(flavor, device)
    plain = train_step(model, batch, device)
    linears = [block.modulation for block in model.layers]
    one = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears)).to(device)
    together: Any = _model(flavor, device)
    together.together = one  # as many weights, in one matrix
    for block in together.layers:
        block.modulation = None

    class Shares(nn.Module):
        """Shares of the one product, made by the first block of the step, for each block."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, c: Tensor) -> Tensor:
            if self.number == 0:
                together.parts = one(c).chunk(len(linears), dim=-1)
            return together.parts[self.number]

    for number, block in enumerate(together.layers):
        block.modulation = Shares(number)
    return plain, train_step(together, batch, device)


def fused_adamw(flavor: str, batch: int, device: torch.device) -> tuple[Step, Step]:
    """AdamW in one fused call against one call per operation; the update alone."""
    model = _model(flavor, device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    fused = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    foreach = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    return fused.step, foreach.step


def foreach_ema(flavor: str, batch: int, device: torch.device) -> tuple[Step, Step]:
    """An average of the weights by one call for all tensors against one for each; the update alone."""
    model = _model(flavor, device)
    bank = EMABank(dict(model.named_parameters()), EMAConfig(tracks=[EMATrackConfig(name="ema")]), batch)

    @torch.no_grad()
    def one_by_one() -> None:
        for name, parameter in model.named_parameters():
            bank.tracks["ema"][name].lerp_(parameter.detach(), 1e-4)

    return lambda: bank.update(100), one_by_one


CHOICES = {
    "one operation to modulate, one to gate": one_operation,
    "packed queries, keys and values": packed_qkv,
    "modulation block by block": modulation_by_block,
    "fused AdamW": fused_adamw,
    "foreach average": foreach_ema,
}


def _model(flavor: str, device: torch.device) -> nn.Module:
    model = build("ours", flavor, "eager", device)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # gates of zero would hide a mistake
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(device))
    return model


def _patched(flavor: str, batch: int, device: torch.device, replaced: dict[tuple, Callable]) -> tuple[Step, Step]:
    model = _model(flavor, device)
    step = train_step(model, batch, device)

    def without() -> None:
        with _replacing(replaced):
            step()

    generator = torch.Generator().manual_seed(2)
    x, t, classes = torch.randn(2, *SHAPE, generator=generator).to(device), torch.tensor([3.0, 800.0]), torch.tensor([1, 2])
    found = []
    for context in (nullcontext(), _replacing(replaced)):
        with context, torch.no_grad():
            found.append(model(x, t.to(device), classes.to(device).clamp(max=CLASSES)))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    return step, without


def _replacing(replaced: dict[tuple, Callable]) -> AbstractContextManager:
    stack = ExitStack()
    for (owner, name), value in replaced.items():
        stack.enter_context(patch.object(owner, name, value))
    return stack


if __name__ == "__main__":
    main()
