"""Published times of a fine-tuning of Flux.1-schnell on two GPUs, with what its own figures and file names tell of them.

Source: README of "Flux Schnell fine-tuning across hardware", its table of runtimes and its inference times. The sample
files of that repository carry the time at which each round of ten samples began; the remarks are derived from them.
"""

from dataclasses import dataclass

TITLE = "Flux Schnell fine-tuning across hardware"
CLAIMED_SPEED_UP = 1.8  # "on average", of the A100 over the A40
SECONDS_AN_IMAGE = {"A40": 34.0, "A100": 17.0}  # at inference; batch and warm-up are not told


@dataclass(frozen=True)
class PublishedTime:
    """Row of the published table.

    Attributes:
        device: its name.
        steps: trained.
        seconds: told as the runtime.
        clock: of the runtime, `train` without and `wall` with the sampling every 250 steps, as far as it can be told.
        remark: its evidence, and the row's faults.
    """

    device: str
    steps: int
    seconds: float
    clock: str
    remark: str

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds


TIMES = (
    PublishedTime(
        "A100", 500, 1013.0, "train",
        "excludes sampling, by its ratio to the A40's row; no uninterrupted run: its samples have a first interval of 1,520 s "
        "and a gap of 36 h",
    ),
    PublishedTime(
        "A40", 500, 1744.0, "train",
        "excludes sampling: 2,110 s pass between its first and its last sample alone",
    ),
    PublishedTime(
        "A100", 2000, 5236.0, "wall",
        "includes sampling, 637 to 643 s for 250 steps; no uninterrupted run: a gap of 20 h after step 1,500",
    ),
    PublishedTime(
        "A40", 2000, 9017.0, "wall",
        "includes sampling: its eight intervals take 8,446 s, with the last round about 8,629 s",
    ),
)  # fmt: skip

REMARKS = (
    "The rows of 500 steps exclude the sampling, those of 2,000 include it: the table mixes two clocks, and a rate of one must "
    "not be set against a rate of the other.",
    "The A100's rows hold gaps of 36 h (500 steps) and 20 h (2,000 steps) between samples and are no single uninterrupted run.",
    "An A40 has 48 GB, not 40 as published.",
    "One run each: the table has no repeats, and so no intervals.",
)


def speed_ups() -> dict[int, float]:
    """Speed-up of the A100 over the A40 by number of steps, from the published runtimes."""
    seconds = {(one.device, one.steps): one.seconds for one in TIMES}
    return {steps: seconds["A40", steps] / seconds["A100", steps] for steps in (500, 2000)}
