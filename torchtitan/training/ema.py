"""Exponential moving averages of the weights: any number of tracks, sharded like the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchtitan.distributed.parallelize import local, release_unsharded
from torchtitan.settings import setting


@dataclass(kw_only=True)
class EMATrackConfig:
    """One entry of `ema.tracks`."""

    name: str = setting("ema", "name of the track, by which sampling and validation select it")
    kind: Literal["constant", "half_life", "power"] = setting(
        "constant", "unit of its length: a decay per step, a half-life in images, a share of the training so far"
    )
    decay: float = setting(0.9999, "share of the average kept per step", ge=0, lt=1, applies={"kind": ("constant",)})
    warmup_power: float = setting(
        0.6667, "the share kept after n steps is at most 1 - (1 + n)^-power; 0: no warm-up", ge=0,
        applies={"kind": ("constant",)},
    )
    half_life: float = setting(
        500_000.0, "images after which a weight counts half", gt=0, applies={"kind": ("half_life",)}
    )
    rampup_ratio: float = setting(
        0.05, "the half-life is at most this share of the images seen; 0: no ramp-up", ge=0,
        applies={"kind": ("half_life",)},
    )
    sigma_rel: float = setting(
        0.1, "standard deviation of the power-function profile, as a share of the training so far", gt=0, lt=0.288675,
        applies={"kind": ("power",)},
    )


@dataclass(kw_only=True)
class EMAConfig:
    """`[ema]`"""

    tracks: list[EMATrackConfig] = setting([EMATrackConfig()], "averages to keep, each sharded like the weights")


def kept_share(track: EMATrackConfig, step: int, images_per_step: int, factor: int = 1) -> float:
    """Share of the average that one update keeps.

    Args:
        track: the average's settings.
        step: optimizer steps done; 1 in the first update. A step of a batch that has grown counts as `factor` of them.
        images_per_step: global batch size.
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
        self._configs = {track.name: track for track in config.tracks}
        self._images_per_step = images_per_step
        self.tracks = {
            name: {key: parameter.detach().clone() for key, parameter in parameters.items()} for name in self._configs
        }

    @torch.no_grad()
    def update(self, step: int, factor: int = 1) -> None:
        """Move every track towards the weights after an optimizer step; see `kept_share` for the arguments."""
        weights = [local(parameter.detach()) for parameter in self._parameters.values()]
        for name, averages in self.tracks.items():
            kept = kept_share(self._configs[name], step, self._images_per_step, factor)
            torch._foreach_lerp_([local(average) for average in averages.values()], weights, 1.0 - kept)

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
