"""Overhead of the trainer over a bare PyTorch loop: python benchmarks/trainer_overhead.py [--pairs N] [--batch B ...]

One train step of the debug model on 3x32x32 images in 16 tokens, which takes milliseconds, by the trainer and by the
shortest loop that trains the same model with the same optimizer, clipping and EMA. Steps are interleaved (trainer, loop,
trainer, ...) in one process, and the difference is taken pair by pair, in milliseconds: it does not depend on the model,
as a ratio does. Operations are torch's without views, counted in a separate step of each; peak memory is that of a separate
process for each. Replaces benchmarks/results/trainer_overhead.json.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import shared
from benchmarks.shared import CLASSES, SHAPE
from torchtitan.conditions import Classes
from torchtitan.distributed.mesh import compute_device
from torchtitan.models import MODELS

FLAVOR, PATCH_SIZE = "debug", 8
LOG_FREQ = 10
# Operations that move or compute nothing.
VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64], help="images per step")
    parser.add_argument("--memory-of", choices=("trainer", "loop"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = compute_device()
    if arguments.memory_of:
        batch = arguments.batch[0]
        step = trainer_step(batch) if arguments.memory_of == "trainer" else loop_step(batch, device)
        print(shared.peak_gib(step, 6, device))
        return
    result = {
        "model": f"{FLAVOR}, patches of {PATCH_SIZE}, on 3x32x32, float32", "pairs": arguments.pairs,
        "batches": {str(batch): compared(batch, arguments.pairs, device) for batch in arguments.batch},
        **shared.conditions(device),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    shared.write_results("trainer_overhead", result)


def compared(batch: int, pairs: int, device: torch.device) -> dict[str, object]:
    """Compare steps of the trainer and of the loop at a number of images per step."""
    ours, bare = trainer_step(batch), loop_step(batch, device)
    times = shared.time_in_turns((ours, bare), pairs, device)
    of_trainer, of_loop = shared.medians(times)
    memory = {
        kind: shared.in_own_process(__file__, "--memory-of", kind, "--batch", batch) for kind in ("trainer", "loop")
    }
    return {
        "trainer_ms": 1000 * of_trainer, "loop_ms": 1000 * of_loop,
        **shared.figures("overhead_ms", [1000 * (one - other) for one, other in times]),
        "trainer_operations": operations(ours), "loop_operations": operations(bare),
        "trainer_peak_GiB": memory["trainer"], "loop_peak_GiB": memory["loop"],
    }  # fmt: skip


class Operations(TorchDispatchMode):
    """Count of torch's operations, views left out."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def operations(step: Callable[[], None]) -> int:
    """Operations of one step, backward and optimizer included."""
    with Operations() as found:
        step()
    return found.count


def trainer_step(batch: int) -> Callable[[], None]:
    """Step of the trainer, logging and finite check included."""
    trainer = shared.build_trainer(shared.SYNTHETIC | {
        "model.flavor": FLAVOR, "model.patch_size": PATCH_SIZE, "training.local_batch_size": batch,
        "metrics.log_freq": LOG_FREQ, "metrics.enable_tensorboard": True,
    })  # fmt: skip

    def step() -> None:
        trainer.state.step += 1
        trainer.phases.step = trainer.state.step
        norm, lr = trainer.train_step()
        if trainer.state.step % LOG_FREQ == 0:
            trainer.reports.log(norm, lr)

    return step


def loop_step(batch: int, device: torch.device) -> Callable[[], None]:
    """Step of the shortest loop: images in memory, torch's own random numbers, no metrics."""
    family = MODELS["dit"]
    model = family.build(replace(family.flavors[FLAVOR], patch_size=PATCH_SIZE), SHAPE, Classes(CLASSES)).to(device)
    model.init_weights()
    parameters = list(model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    data = torch.randn(1024, *SHAPE)
    labels = torch.randint(CLASSES, (1024,))

    def step() -> None:
        chosen = torch.randint(1024, (batch,))
        x0, classes = data[chosen].to(device), labels[chosen].to(device)
        classes = torch.where(torch.rand(batch, device=device) < 0.1, CLASSES, classes)
        noise, t = torch.randn_like(x0), torch.sigmoid(torch.randn(batch, device=device))
        mix = t[:, None, None, None]
        output = model((1 - mix) * x0 + mix * noise, 1000 * t, classes)
        torch.nn.functional.mse_loss(output, noise - x0).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 1e-4)

    return step


if __name__ == "__main__":
    main()
