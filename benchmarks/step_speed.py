"""Train step of this DiT against diffusers' `DiTTransformer2DModel`: python benchmarks/step_speed.py [--flavors ...]

The same sizes, images of 3x32x32 (256 tokens), labels, loss, precision and optimizer (fused AdamW); only the model
differs. Eager, compiled (ours block by block) and compiled whole (diffusers' in both), interleaved in one process in
random order, ratio pair by pair. Peak memory is that of a separate process. With --profile the share of a step's time
by kind of operation is kept too. Adds to benchmarks/results/step_speed.json. Needs diffusers.
"""

import argparse
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks import shared
from benchmarks.shared import CLASSES, SHAPE
from torchtitan.conditions import Classes
from torchtitan.distributed.compile import compile_blocks, compile_model
from torchtitan.distributed.mesh import compute_device
from torchtitan.models import MODELS
from torchtitan.models.dit.config import DiTConfig

# models.py of facebookresearch/DiT, which is not distributed with this program.
FACEBOOK = shared.ROOT / ".gpu" / "dit_models.py"

MODES = ("eager", "compiled", "compiled whole")

# Fragments of operators' names, the first that fits counts.
KINDS = {
    "attention": ("scaled_dot_product", "flash_attention"),
    "matrix products": ("addmm", "aten::mm", "bmm", "mkldnn", "linear"),
    "optimizer": ("adam",),
    "normalisation": ("layer_norm", "rms_norm"),
}


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--flavors", nargs="+", default=["DiT-S/2", "DiT-B/2"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--memory-of", choices=("ours", "diffusers"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = compute_device()
    if arguments.memory_of:
        network = build(arguments.memory_of, arguments.flavors[0], arguments.modes[0], device)
        print(shared.peak_gib(train_step(network, arguments.batch, device), 4, device))
        return
    results = shared.read_results("step_speed")
    for flavor in arguments.flavors:
        for mode in arguments.modes:
            results[f"{flavor}, {mode}"] = found = measure(flavor, mode, arguments, device)
            print(flavor, mode, json.dumps(found, indent=1))
            shared.write_results("step_speed", results)


def measure(flavor: str, mode: str, arguments: argparse.Namespace, device: torch.device) -> dict:
    """Measure the ratios of our step to diffusers', below 1 where ours is faster or smaller."""
    models = {kind: build(kind, flavor, mode, device) for kind in ("ours", "diffusers")}
    steps = [train_step(model, arguments.batch, device) for model in models.values()]
    times = shared.time_in_turns(steps, arguments.pairs, device)
    words = ("--flavors", flavor, "--modes", mode, "--batch", arguments.batch)
    memory = {kind: shared.in_own_process(__file__, "--memory-of", kind, *words) for kind in models}
    sizes = {kind: sum(parameter.numel() for parameter in model.parameters()) for kind, model in models.items()}
    seconds = shared.medians(times)
    found = {
        "batch": arguments.batch, "pairs": arguments.pairs, "our_seconds": seconds[0], "diffusers_seconds": seconds[1],
        **shared.figures("time_ratio", [one / other for one, other in times]),
        "our_peak_GiB": memory["ours"], "diffusers_peak_GiB": memory["diffusers"],
        "our_parameters": sizes["ours"], "diffusers_parameters": sizes["diffusers"],
    }  # fmt: skip
    if arguments.profile:
        found |= {"our_shares": shares(steps[0]), "diffusers_shares": shares(steps[1])}
    described = shared.conditions(device)
    return found | described | {"versions": described["versions"] | {"diffusers": version("diffusers")}}


def build(
    kind: str, flavor: str, mode: str, device: torch.device, shape: tuple[int, int, int] = SHAPE, num_classes: int = CLASSES
) -> nn.Module:
    """Build a network as `model(x [B, C, H, W], t [B], classes [B])`, with as many output channels as its prediction has.

    Args:
        kind: "ours", "diffusers" or "facebook".
        flavor: named size of this DiT; the others get the same.
        mode: "eager"; "compiled" by block; of diffusers' model, and "compiled whole", as a whole.
        device: of the network.
        shape: of an image, (C, H, W).
        num_classes: without the null class.
    """
    torch.manual_seed(0)
    family = MODELS["dit"]
    sizes = family.flavors[flavor]
    if kind == "facebook":
        return _facebook(sizes, mode, shape, num_classes).to(device)
    if kind == "ours":
        model = family.build(sizes, shape, Classes(num_classes)).to(device)
        model.init_weights()
        if mode == "compiled":
            compile_blocks(model.blocks())
        elif mode == "compiled whole":
            compile_model(model)
        return model
    from diffusers import DiTTransformer2DModel

    transposed = Transposed(
        DiTTransformer2DModel(
            num_attention_heads=sizes.num_heads, attention_head_dim=sizes.dim // sizes.num_heads, in_channels=shape[0],
            out_channels=shape[0], num_layers=sizes.num_layers, sample_size=shape[1], patch_size=sizes.patch_size,
            num_embeds_ada_norm=num_classes, norm_type="ada_norm_zero", activation_fn="gelu-approximate",
            norm_elementwise_affine=False,
        )
    ).to(device)  # fmt: skip
    if mode != "eager":
        transposed.compile()
    return transposed


class Transposed(nn.Module):
    """Adapter of diffusers' model to our call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, t, classes):
        return self.model(x, timestep=t, class_labels=classes, return_dict=False)[0]


def _facebook(sizes: DiTConfig, mode: str, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    spec = importlib.util.spec_from_file_location("dit_models", FACEBOOK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.DiT(
        input_size=shape[1], patch_size=sizes.patch_size, in_channels=shape[0], hidden_size=sizes.dim, depth=sizes.num_layers,
        num_heads=sizes.num_heads, num_classes=num_classes, learn_sigma=False,
    )  # fmt: skip
    if mode != "eager":
        compile_blocks(model.blocks)
    return model


def train_step(
    model: nn.Module, batch: int, device: torch.device, shape: tuple[int, int, int] = SHAPE, num_classes: int = CLASSES,
    autocast: torch.dtype | None = None,
) -> Callable[[], None]:
    """Forward, backward and fused AdamW on random images; autocast: dtype of compute, None: float32."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(1)

    def step() -> None:
        x0, noise = (torch.randn(batch, *shape, generator=generator, device=device) for _ in range(2))
        t = torch.rand(batch, generator=generator, device=device)
        classes = torch.randint(num_classes, (batch,), generator=generator, device=device)
        mix = t[:, None, None, None]
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            output = model((1 - mix) * x0 + mix * noise, 999 * t, classes)
        torch.nn.functional.mse_loss(output.float(), noise - x0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def shares(step: Callable[[], None]) -> dict[str, float]:
    """Share of the operators' own time in three steps, by kind."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_device = torch.cuda.is_available()
    if on_device:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            step()
    found: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        found[kind] += spent
    total = sum(found.values())
    return {kind: round(spent / total, 4) for kind, spent in sorted(found.items(), key=lambda item: -item[1])}


if __name__ == "__main__":
    main()
