"""Stages of the three calls, the most important first, with the speeds that some must reach."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu_day import correct, costs, speed
from benchmarks.gpu_day.visit import Results


@dataclass(frozen=True)
class Stage:
    """Stage of a call.

    Attributes:
        name: key of its results.
        seconds: time limit on a GPU machine.
        run: measures, row by row.
    """

    name: str
    seconds: float
    run: Callable[[Results], None]


CALLS: dict[int, tuple[Stage, ...]] = {
    1: (
        Stage("machine", 20, correct.machine),
        Stage("random numbers", 40, correct.random_numbers),
        Stage("parity", 90, correct.parity),
        Stage("features", 200, correct.features),
        Stage("interrupt and resume", 120, correct.interrupt_and_resume),
        Stage("two ranks", 150, correct.two_ranks),
        Stage("tests", 90, correct.tests),
    ),
    2: (
        Stage("machine", 20, correct.machine),
        *(Stage(name, seconds, run) for name, seconds, run in speed.STAGES),
        Stage(speed.SEVEN_B, 90, speed.seven_b),
        Stage("ceilings", 40, speed.ceilings),
    ),
    3: (
        Stage("machine", 20, correct.machine),
        Stage("networks", 240, costs.networks),
        Stage("noise scale", 110, costs.noise_scale),
        Stage("kernels", 50, costs.kernels),
        Stage("sampling", 50, costs.sampling),
        Stage("checkpoints", 150, costs.checkpoints),
        Stage("loader", 60, costs.loader),
    ),
}

# Least values: stage -> fragment of the device's name -> (key, value).
BARS: dict[str, dict[str, tuple[str, float]]] = {
    "XL/2 compiled": {"H200": ("images_per_s", 625), "H100": ("images_per_s", 520)},
    speed.SEVEN_B: {"H200": ("mfu_percent", 45), "H100": ("mfu_percent", 45)},
}
