"""Exponential moving averages of the weights: any number of tracks, sharded like the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from torchtitan.distributed.parallelize import local, release_unsharded
from torchtitan.training.config import EMAConfig, EMATrackConfig


def kept_share(track: EMATrackConfig, step: int, images_per_step: int, factor: int = 1) -> float:
    """Share of the average that one update keeps.

    Args:
        step: optimizer steps done; 1 in the first update. A step of a batch that has grown counts as `factor` of them.
        factor: batch size of this step as a multiple of that.

    Returns:
        a number in [0, 1]. The first update of a power-function average, and of a half-life with ramp-up, keeps
        nothing: the average is then the weights.
    """
    return _KINDS[track.kind](track, step, images_per_step, factor)


def power_exponent(sigma_rel: float) -> float:
    """Exponent gamma of the power-function profile tau^gamma on (0, 1] whose standard deviation is sigma_rel.

    The variance (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) = sigma_rel^2 is a cubic equation with three real roots
    for 0 < sigma_rel < 12^-1/2; the largest one is meant, and is 0 at the upper end.

    Source: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.1.
    """
    s = sigma_rel**-2
    # x^3 + p x + q = 0 with x = gamma + 7/3, solved by cosines.
    p = -1.0 / 3.0 - s
    q = 4.0 * s / 3.0 + 2.0 / 27.0
    radius = 2.0 * math.sqrt(-p / 3.0)
    return radius * math.cos(math.acos(3.0 * q / (p * radius)) / 3.0) - 7.0 / 3.0


class EMABank:
    """Bank of float32 averages of a model's parameters.

    A track starts from the present weights; each update is one foreach call on this rank's shards.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: EMAConfig, images_per_step: int) -> None:
        self._parameters = parameters
        self._images_per_step = images_per_step
        self.tracks = {
            track.name: {key: parameter.detach().clone() for key, parameter in parameters.items()} for track in config.tracks
        }
        # Of every track its share kept at a step, see `kept_share`, and this rank's shards.
        self._averages = [
            (partial(_KINDS[track.kind], track), [*map(local, self.tracks[track.name].values())]) for track in config.tracks
        ]

    @torch.no_grad()
    def update(self, step: int, factor: int = 1) -> None:
        """Move every track towards the weights after an optimizer step; see `kept_share` for the arguments."""
        weights = [local(parameter) for parameter in self._parameters.values()]
        for kept_share_at, averages in self._averages:
            torch._foreach_lerp_(averages, weights, 1.0 - kept_share_at(step, self._images_per_step, factor))

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of every average, as `<track>.<parameter>`; the tensors themselves, not copies."""
        return {f"{name}.{key}": tensor for name, track in self.tracks.items() for key, tensor in track.items()}

    @contextmanager
    def weights(self, track: str, model: nn.Module) -> Iterator[None]:
        """Use a track's weights in the model inside the context; "none": the trained ones."""
        if track == "none":
            yield
            return
        trained = {key: parameter.detach().clone() for key, parameter in self._parameters.items()}
        try:
            self._assign(self.tracks[track], model)
            yield
        finally:
            self._assign(trained, model)

    @torch.no_grad()
    def _assign(self, values: dict[str, Tensor], model: nn.Module) -> None:
        if torch.cuda.is_available() and any(p.device.type == "cpu" for p in self._parameters.values()):
            torch.cuda.synchronize()  # weights in host memory may be on their way to the device
        for key, parameter in self._parameters.items():
            local(parameter.detach()).copy_(local(values[key]))
        release_unsharded(model)


def _constant(track: EMATrackConfig, step: int, images_per_step: int, factor: int) -> float:
    if track.warmup_power == 0:
        return track.decay**factor
    return min(track.decay, 1.0 - (1.0 + step) ** -track.warmup_power) ** factor


def _half_life(track: EMATrackConfig, step: int, images_per_step: int, factor: int) -> float:
    half_life = track.half_life
    if track.rampup_ratio > 0:
        half_life = min(half_life, track.rampup_ratio * (step - factor) * images_per_step)
    return 0.5 ** (factor * images_per_step / half_life) if half_life > 0 else 0.0


def _power(track: EMATrackConfig, step: int, images_per_step: int, factor: int) -> float:
    return (1.0 - factor / step) ** (power_exponent(track.sigma_rel) + 1.0)


_KINDS = {"constant": _constant, "half_life": _half_life, "power": _power}
