"""Exponential moving averages of the weights."""

from dataclasses import dataclass

from torchtitan.settings import setting


@dataclass(kw_only=True)
class EMATrackConfig:
    """One entry of `ema.tracks`."""

    name: str = setting("ema", "name of the track, by which sampling and validation select it")
    decay: float = setting(0.9999, "share of the average kept per step", ge=0, lt=1)
    warmup_power: float = setting(
        0.6667, "early decay is at most 1 - (1 + n)^-power after n steps; 0: no warm-up", ge=0
    )


@dataclass(kw_only=True)
class EMAConfig:
    """`[ema]`"""

    tracks: list[EMATrackConfig] = setting([EMATrackConfig()], "averages to keep, each sharded like the weights")
