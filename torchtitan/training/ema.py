"""Exponential moving averages of the weights: any number of tracks, sharded like the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan.distributed.parallelize import local, release_unsharded
from torchtitan.settings import setting


@dataclass(kw_only=True)
class EMATrackConfig:
    """One entry of `ema.tracks`."""

    name: str = setting("ema", "name of the track, by which sampling and validation select it")
    decay: float = setting(0.9999, "share of the average kept per step", ge=0, lt=1)
    warmup_power: float = setting(
        0.6667, "the share kept after n steps is at most 1 - (1 + n)^-power; 0: no warm-up", ge=0
    )


@dataclass(kw_only=True)
class EMAConfig:
    """`[ema]`"""

    tracks: list[EMATrackConfig] = setting([EMATrackConfig()], "averages to keep, each sharded like the weights")


def decay_at(track: EMATrackConfig, step: int) -> float:
    """Share of the average kept in the update after optimizer step `step` (1 is the first)."""
    if track.warmup_power == 0:
        return track.decay
    return min(track.decay, 1.0 - (1.0 + step) ** -track.warmup_power)


class EMABank:
    """Averages of a model's parameters in float32.

    A track starts from the weights as they are; each update is one foreach call on this rank's shards.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: EMAConfig) -> None:
        self._parameters = parameters
        self._configs = {track.name: track for track in config.tracks}
        self.tracks = {
            name: {key: parameter.detach().clone() for key, parameter in parameters.items()} for name in self._configs
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move every track towards the weights after optimizer step `step` (1 is the first)."""
        weights = [local(parameter.detach()) for parameter in self._parameters.values()]
        for name, averages in self.tracks.items():
            kept = decay_at(self._configs[name], step)
            torch._foreach_lerp_([local(average) for average in averages.values()], weights, 1.0 - kept)

    def tensors(self) -> dict[str, Tensor]:
        """Every average, as `<track>.<parameter>`; the tensors themselves, not copies."""
        return {f"{name}.{key}": tensor for name, track in self.tracks.items() for key, tensor in track.items()}

    @contextmanager
    def weights(self, track: str, model: nn.Module) -> Iterator[None]:
        """Let the model compute with a track's weights inside the context; "none": with the trained ones."""
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
