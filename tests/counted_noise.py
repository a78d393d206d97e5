"""Operations of measuring gradient noise, counted on an imitated CUDA device; the process must be new, see `fake_cuda`."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_counts import as_record, count_step, images_words
from tests.counted_steps import SYNTHETIC
from torchtitan.conditions import Classes
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.estimate.fake_cuda.counter import StepCounter
from torchtitan.estimate.fake_cuda.device import NoFakeCuda, fake_cuda
from torchtitan.gns.capture import GradientTaps
from torchtitan.gns.config import GNSConfig
from torchtitan.models import MODELS
from torchtitan.models.dit.config import DiTConfig

IMAGES, INTERVAL, CLASSES, SHAPE = 256, 8, 1000, (4, 32, 32)
LAYERS = (1, 2)  # of XL/2's width
STEPS = (2 * INTERVAL, 2 * INTERVAL + 1)  # a measured one, and the next


def write_noise_counts(path: str) -> int:
    """Write the counts as JSON, or why there are none."""
    try:
        found: dict[str, Any] = {
            f"{layers} {kind}": count_taps(layers, measured)
            for layers in LAYERS for kind, measured in (("measured", True), ("free", False))
        }  # fmt: skip
        words = [
            "--job.config_file", "train_configs/dit_xl2_256.toml", *SYNTHETIC, "--model.num_layers", "1", "--gns.enable", "true",
            "--gns.interval", str(INTERVAL), *images_words(IMAGES),
        ]  # fmt: skip
        found |= {f"step {step}": as_record(count_step(words, 1, step)) for step in STEPS}
    except NoFakeCuda as error:
        found = {"skipped": str(error)}
    Path(path).write_text(json.dumps(found))
    return 0


def count_taps(layers: int, measured: bool) -> dict[str, dict[str, int]]:
    """Count operations and bytes of every call of the taps, and of the model's own forward and backward with them."""
    counter = StepCounter()
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=1))
    config = DiTConfig(dim=1152, num_layers=layers, num_heads=16, mlp_hidden_dim=4608, learned_variance=True)
    with fake_cuda(counter):
        device = torch.device("cuda", 0)
        kind = Classes(CLASSES)
        with device:
            model = MODELS["dit"].build(config, SHAPE, kind)
        taps = GradientTaps(
            model, bin_edges=torch.arange(1, 10) / 10, local_batch_size=IMAGES, sketch_size=GNSConfig().sketch_size, seed=0,
            adam=True, device=device, compute_dtype=torch.bfloat16,
        )  # fmt: skip
        state = {
            parameter: {"exp_avg_sq": torch.zeros_like(parameter), "step": torch.zeros((), device=device)}
            for parameter in model.parameters()
        }
        images, t = torch.zeros(IMAGES, *SHAPE, device=device), torch.zeros(IMAGES, device=device)
        labels = torch.zeros(IMAGES, dtype=torch.int64, device=device)
        counter.reset()
        with counter.phase("begin_step"):
            taps.begin_step(0, measured, state, 0.999, layout)
        with counter.phase("begin_microbatch"):
            taps.begin_microbatch(t)
        with counter.phase("forward"), torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(images, t, kind.of({"class": labels})).float().square().flatten(1).mean(1)
        with counter.phase("backward"):
            loss.mean().backward()
        with counter.phase("end_microbatch"):
            taps.end_microbatch(IMAGES, loss)
        with counter.phase("end_step"):
            taps.end_step()
    return {name: {"operations": phase.operations, "moved": phase.moved} for name, phase in counter.phases.items()}
