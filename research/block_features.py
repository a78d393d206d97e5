"""Features of a diffusion network's blocks in noisy images, for linear probes: those of many blocks in one forward.

A network that takes classes never gets an image's own: what it gets is a function of image numbers alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan import philox
from torchtitan.conditions import Condition, ConditionKind
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.paths import per_image
from torchtitan.evaluation.eval_mode import evaluating
from torchtitan.models.base import DiffusionModel, ProbePoint

# Condition of all images: the null condition, or choices drawn uniformly for each image.
Conditioning = Literal["null", "uniform"]


class BlockFeatures:
    """Reader of block features: means over all places of the blocks' outputs, at several noise levels.

    Args:
        model: a whole network, on the device where features are read.
        objective: of its training.
        blocks: names of `model.probe_points()`.
        times: of the noise levels, in the common time, 0 <= t < 1.
        conditioning: see `conditions`.
        seed: of noise and conditions.

    Raises:
        KeyError: a block is not among the model's probe points.
    """

    def __init__(
        self, model: DiffusionModel, objective: Objective, blocks: Sequence[str], times: Sequence[float], *,
        conditioning: Conditioning = "null", seed: int = 0,
    ) -> None:
        self._model, self._objective = model, objective
        points = model.probe_points()
        self._points = {name: points[name] for name in blocks}
        self._times, self._conditioning, self._seed = list(times), conditioning, seed

    @torch.no_grad()
    def read(self, images: Tensor, numbers: Tensor, attempt: int = 0) -> list[dict[str, Tensor]]:
        """Read the features of images.

        Args:
            images: clean, float32 [B, C, H, W].
            numbers: of the images, int64 [B]: noise and conditions are functions of (seed, number, attempt). At all
                levels an image has the same noise.
            attempt: changes with every pass over the images.

        Returns:
            for each time, features float32 [B, D] by block.
        """
        model, path = self._model, self._objective.path
        numbers = numbers.to(images.device)
        noise = self._objective.scaled(philox.normal(self._seed, "probe", numbers, tuple(images.shape[1:]), attempt))
        condition = conditions(model.condition_kind, self._conditioning, numbers, self._seed, attempt)
        found = []
        with evaluating(model, compiled=False):
            for time in self._times:
                t = torch.full((len(images),), time, dtype=torch.float32, device=images.device)
                a, b = (per_image(c, images) for c in path.coefficients(t))
                with captured(model, self._points) as outputs:
                    self._objective.predict(model, a * images + b * noise, t, condition)
                found.append({name: outputs[name] for name in self._points})
        return found


def conditions(kind: ConditionKind, conditioning: Conditioning, numbers: Tensor, seed: int, attempt: int = 0) -> Condition:
    """Conditions that carry nothing of the images [B]: the null condition, or one of the kind's choices drawn uniformly.

    Args:
        kind: of the network.
        conditioning: "null" or "uniform".
        numbers: of the images, int64 [B].
        seed, attempt: of the draws.
    """
    if conditioning == "uniform":
        drawn = philox.uniform(seed, "sampled_class", numbers, attempt) * kind.choices
        return kind.choose(drawn.long().clamp(max=kind.choices - 1))
    of_nothing = kind.of(kind.placeholder(len(numbers), numbers.device))
    return kind.drop(of_nothing, torch.ones_like(numbers, dtype=torch.bool))


@contextmanager
def captured(model: nn.Module, points: Mapping[str, ProbePoint]) -> Iterator[dict[str, Tensor]]:
    """Collect the pooled outputs of probe points, by name, from one forward of the model inside the block."""
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(point.module).register_forward_hook(_collector(found, name, point))
        for name, point in points.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _collector(found: dict[str, Tensor], name: str, point: ProbePoint) -> Callable[[nn.Module, Any, Tensor], None]:
    def collect(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if name in found:
            raise ValueError(f"probe point {name}: {point.module} runs more than once in a forward")
        found[name] = point.pooled(output)

    return collect
