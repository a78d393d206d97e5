"""Error of mean flows' difference quotient du/dt by precision, of trained runs: python benchmarks/mean_flow_slope.py RUN ...

For the first images of the training split, with times, durations and tangents as in training, du/dt by two calls of the network
against the forward derivative of the same network in float32: the root of the ratio of squared norms, and by how much the
quotient is too long along the derivative. TF32 is imitated: operands of products are rounded to its ten bits, their sums are
float32's, as tensor cores have it. In bfloat16 the weights are, as FSDP2 gathers them; autocast leaves the quotient in float32.
Writes benchmarks/results/mean_flow_slope.json.
"""

import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from benchmarks import shared
from torchtitan.data import DATASETS
from torchtitan.diffusion.mean_flow import MeanFlow, MeanFlowConfig
from torchtitan.diffusion.paths import per_image
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.models.base import DiffusionModel
from torchtitan.weights.trained_model import TrainedModel, load_run

IMAGES = 1024
STEPS = (0.001, 0.002, 0.005, 0.01, 0.0125, 0.015, 0.02, 0.05, 0.1)


class TF32(TorchFunctionMode):
    """Products of float32 as tensor cores have them with `training.float32_matmul_precision = "high"`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.linear:
            return F.linear(_ten_bits(args[0]), _ten_bits(args[1]), *args[2:], **kwargs)
        if function is F.scaled_dot_product_attention:
            q, k, v = map(_ten_bits, args[:3])
            scale = kwargs.get("scale") or q.shape[-1] ** -0.5
            return _ten_bits((q @ k.transpose(-2, -1) * scale).softmax(-1)) @ v
        return function(*args, **kwargs)


def _ten_bits(x: Tensor) -> Tensor:
    """Round float32 to ten bits behind the point of its mantissa, halves away from 0."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    rows = []
    for run in parser.parse_args().runs:
        trained = load_run(run, "none", None, torch.device("cpu"))
        rows += [{"steps": trained.config.training.steps} | row for row in errors(trained)]
    shared.write_results("mean_flow_slope", {"images": IMAGES, "rows": rows})


@torch.no_grad()
def errors(trained: TrainedModel) -> list[dict[str, float | str]]:
    objective, network = trained.objective, trained.model
    assert isinstance(objective, MeanFlow)
    batch = DATASETS[trained.config.data.name](trained.config.data, "train").fetch(np.arange(IMAGES))
    images, condition = batch["images"], batch["class"]
    draw = objective.draw(tuple(images.shape[1:]), GlobalBatch(0, IMAGES), torch.arange(IMAGES))
    assert draw.duration is not None
    two = draw.duration > 0
    images, condition, noise, t, duration = (each[two] for each in (images, condition, draw.noise, draw.t, draw.duration))
    predicted = cast(MeanFlowConfig, objective.config).tangent == "predicted"
    a, b = objective.path.coefficients(per_image(t, images))
    x_t, tangent = a * images + b * noise, noise - images
    if predicted:
        tangent = objective.velocity(network, x_t, t, condition)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no forward derivative
        wanted = torch.func.jvp(
            lambda x, at, over: objective.outputs(network, x, at, over, condition)[0],
            (x_t, t, duration), (tangent, torch.ones_like(t), torch.ones_like(t)),
        )[1]  # fmt: skip
    rows: list[dict[str, float | str]] = []
    ways: dict[str, tuple[AbstractContextManager, DiffusionModel]] = {
        "float32": (nullcontext(), network), "TF32": (TF32(), network),
        "bfloat16": (nullcontext(), copy.deepcopy(network).bfloat16()),
    }  # fmt: skip
    for precision, (context, of_precision) in ways.items():
        for step in STEPS:
            objective.step = step
            with context:
                found = objective.slope(of_precision, x_t, tangent, t, duration, condition)
            off = float((found - wanted).norm() / wanted.norm())
            longer = float((found * wanted).sum() / wanted.square().sum()) - 1.0
            about = {"tangent": "predicted" if predicted else "sampled", "precision": precision, "step": step}
            rows.append(about | {"percent_off": 100 * off, "percent_longer": 100 * longer})
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
