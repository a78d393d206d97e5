"""Errors of a model by timestep, on fixed images with fixed noise: two models, or two timesteps, are paired."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.data.base import Batch, Dataset, DatasetError, UnreadableImage, require_one_shape
from torchtitan.diffusion.objective import Draw, Microbatch, Objective
from torchtitan.diffusion.paths import indexed
from torchtitan.diffusion.predictions import noise_error_weight
from torchtitan.distributed.precision import compute_context
from torchtitan.evaluation.eval_mode import evaluating
from torchtitan.models.base import DiffusionModel
from torchtitan.training.data_loading import joined

# Outside of these quantiles of the training density nothing can be said to have been learned.
_TAIL = 1e-3
# Apart from the noise of other evaluations.
_NOISE_OFFSET = 1 << 41


@dataclass(frozen=True)
class TimestepNodes:
    """Timestep nodes at which errors are measured, rising.

    Attributes:
        t: in (0, 1), float64 [N].
        index: their DDPM indices, int64 [N]; None where the path has none or they lie between.
    """

    t: Tensor
    index: Tensor | None = None

    @property
    def log_sigma(self) -> Tensor:
        """ln sigma, float64 [N]."""
        return torch.logit(self.t)


def timestep_nodes(objective: Objective, count: int | None = None) -> TimestepNodes:
    """Timestep nodes of an objective: its DDPM indices, or nodes equally spaced in ln sigma.

    Args:
        objective: of the path and density.
        count: number of nodes; default: every index of a discrete path, else 128. Fewer indices are spread evenly,
            the first and the last among them.

    Raises:
        ValueError: count is below 2, or above the number of indices.
    """
    path = objective.path
    if count is not None and count < 2:
        raise ValueError(f"{count} timesteps: at least 2 are needed")
    if path.discrete:
        if count is not None and count > path.num_indices:
            raise ValueError(f"{count} timesteps: the path has {path.num_indices}")
        index = torch.linspace(0, path.num_indices - 1, count or path.num_indices, dtype=torch.float64).round().long()
        return TimestepNodes(indexed(path).index_to_t(index), index)
    ends = objective.timestep_sampler.density.quantile(torch.tensor([_TAIL, 1.0 - _TAIL], dtype=torch.float64))
    low, high = torch.logit(ends).tolist()
    return TimestepNodes(torch.sigmoid(torch.linspace(low, high, count or 128, dtype=torch.float64)))


@dataclass(frozen=True)
class FixedSamples:
    """Fixed samples: images with the noise that is added to each of them at every timestep.

    Attributes:
        batch: images float32 [K, C, H, W] and what comes with them.
        noise: float32 [K, C, H, W].
    """

    batch: Batch
    noise: Tensor

    @property
    def images(self) -> Tensor:
        """Clean images, float32 [K, C, H, W]."""
        return self.batch["images"]

    def __getitem__(self, chosen: slice | Tensor) -> "FixedSamples":
        """Select some of the samples."""
        return FixedSamples({name: value[chosen] for name, value in self.batch.items()}, self.noise[chosen])


def fixed_samples(dataset: Dataset, count: int, seed: int) -> FixedSamples:
    """Fixed samples: the first readable images of an order fixed by the seed, each with its own noise.

    Args:
        dataset: one split.
        count: number of images K.
        seed: of the order and of the noise.

    Raises:
        DatasetError: the split has fewer readable images, or images in buckets.
    """
    require_one_shape(dataset, "a set of fixed samples")
    order = philox.uniform(seed, "evaluation", torch.arange(len(dataset))).argsort().numpy()
    found: list[Batch] = []
    for index in order:
        if len(found) == count:
            break
        try:
            found.append(dataset.fetch(np.array([index])))
        except UnreadableImage:
            continue
    if len(found) < count:
        raise DatasetError(f"{count} images are requested, the split has {len(found)} that can be read")
    batch = joined(found)
    noise = philox.normal(seed, "evaluation", torch.arange(count) + _NOISE_OFFSET, tuple(batch["images"].shape[1:]))
    return FixedSamples(batch, noise)


@torch.no_grad()
def timestep_errors(
    model: DiffusionModel,
    objective: Objective,
    samples: FixedSamples,
    nodes: TimestepNodes,
    *,
    batch_size: int = 256,
    param_dtype: str = "float32",
    device: torch.device | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Timestep errors: mean squared error of the objective's prediction, for every sample at every timestep.

    Args:
        model: a whole network, on `device`; put into eval mode meanwhile.
        objective: of its training. The loss weights do not count.
        samples: K images with noise.
        nodes: N timesteps.
        batch_size: images at a time.
        param_dtype: dtype of compute.
        device: of compute, the CPU by default.
        advance: called with the number of the K x N errors found since the last call.

    Returns:
        float64 [K, N] on the CPU.
    """
    device = device or torch.device("cpu")
    count, num_nodes = len(samples.images), len(nodes.t)
    found = torch.empty(count * num_nodes, dtype=torch.float64)
    with evaluating(model):
        for numbers in torch.arange(count * num_nodes).split(batch_size):
            which, node = numbers // num_nodes, numbers % num_nodes
            t = nodes.t[node].to(device, torch.float32)
            index = indexed(objective.path).t_to_index(t) if objective.path.discrete else None
            batch = {name: value[which].to(device) for name, value in samples.batch.items()}
            microbatch = Microbatch(batch["images"], model.condition_kind.of(batch), batch)
            draw = Draw(t, objective.scaled(samples.noise[which].to(device)), torch.ones_like(t), index)
            with compute_context(param_dtype, device, False):
                terms = objective.loss(model, microbatch, draw)
            found[numbers] = terms.error.to("cpu", torch.float64)
            advance(len(numbers))
    return found.view(count, num_nodes)


def in_parametrisation(errors: Tensor, objective: Objective, nodes: TimestepNodes, parametrisation: str) -> Tensor:
    """Convert errors of the objective's prediction to those of another one.

    Args:
        errors: squared errors [..., N] at the nodes.
        objective: of their prediction.
        nodes: N timesteps.
        parametrisation: a key of `predictions.PREDICTIONS`.

    Returns:
        squared errors of the `parametrisation` that follows from the same estimate of x0, [..., N].
    """
    sigma = torch.exp(nodes.log_sigma)
    a, _ = objective.path.coefficients(nodes.t)
    wanted, given = (
        noise_error_weight(name, sigma, a, objective.sigma_data) for name in (parametrisation, objective.prediction)
    )
    return errors * (wanted / given)
