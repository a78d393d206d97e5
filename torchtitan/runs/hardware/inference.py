"""Seconds an image at inference: measured with a run's weights on this machine, kept in the run's folder."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.distributed.mesh import compute_device
from torchtitan.evaluation.sampling import balanced_choices
from torchtitan.files.durable import replace_file
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.regular import read_regular
from torchtitan.runs.record import is_number
from torchtitan.statistics.interval import Interval, positive_interval
from torchtitan.training.hardware_description import describe_hardware

FILE = "inference.json"
_START = '{\n "kind": "seconds an image at inference"'
_LARGEST_FILE = 1 << 24
_MOST_REPEATS = 100_000


@dataclass(frozen=True)
class Measurement:
    """Times of one batch size.

    Attributes:
        batch_size: images drawn together.
        seconds: of each drawing of a batch, decoding included, after the warm-up.
        warm_up: drawings before them.
    """

    batch_size: int
    seconds: tuple[float, ...]
    warm_up: int

    @property
    def seconds_an_image(self) -> Interval:
        """Geometric mean over the drawings with Student's interval over their logarithms."""
        return positive_interval([value / self.batch_size for value in self.seconds])


@dataclass(frozen=True)
class Inference:
    """Measurements of one run's weights on one machine.

    Attributes:
        hardware: as found when it was measured.
        method: settings of drawing: step and track of the weights, solver, guidance, size, dtype.
        measurements: by rising batch size.
    """

    hardware: dict[str, Any]
    method: dict[str, Any]
    measurements: tuple[Measurement, ...]


def measure(drawing: Any, batch_sizes: Sequence[int], warm_up: int, repeats: int) -> Iterator[Measurement]:
    """Measure drawing and decoding batches on this process's device.

    Args:
        drawing: SamplingSetup of the run.
        batch_sizes: in images.
        warm_up: drawings of each size that do not count, as the first ones compile and allocate.
        repeats: drawings that count.
    """
    sampler, choices = drawing.sampler(), drawing.trained.model.condition_kind.choices

    def draw(batch_size: int, seed: int) -> float:
        start = time.perf_counter()
        images = sampler.draw(balanced_choices(batch_size, choices), seed, **drawing.method(), batch_size=batch_size)
        if drawing.decoder:
            drawing.decoder.decode(images)
        return time.perf_counter() - start  # the images are on the host, so the device has finished

    for batch_size in sorted(set(batch_sizes)):
        for seed in range(warm_up):
            draw(batch_size, seed)
        seconds = tuple(draw(batch_size, seed) for seed in range(warm_up, warm_up + repeats))
        yield Measurement(batch_size, seconds, warm_up)


def check_writable(folder: Path) -> Path:
    """File of a run's measurements. Raises OSError: something else than the program's is there."""
    refuse_foreign_file(folder / FILE, _START.encode())
    return folder / FILE


def write_inference(path: Path, method: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    """Write or replace a run's measurements, with the settings that others must share to compare. Raises OSError."""
    content = {
        "kind": "seconds an image at inference",
        "hardware": describe_hardware(compute_device(), 1),
        "method": method,
        "measurements": [
            {"batch_size": one.batch_size, "warm_up": one.warm_up, "seconds": list(one.seconds)} for one in measurements
        ],
    }
    replace_file(path, json.dumps(content, indent=1) + "\n")


def read_inference(folder: Path) -> Inference | None:
    """Read a run's measurements; None without any.

    Raises:
        ValueError: the file is no whole measurement.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(read_regular(folder / FILE, _LARGEST_FILE))
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    try:
        found = [Measurement(one["batch_size"], tuple(one["seconds"]), one["warm_up"]) for one in content["measurements"]]
        hardware, method = content["hardware"], content["method"]
    except (KeyError, TypeError) as error:
        raise ValueError("is no measurement of inference") from error
    whole = isinstance(hardware, dict) and isinstance(method, dict) and all(map(_is_whole, found))
    if not whole or not found:
        raise ValueError("is no measurement of inference")
    return Inference(hardware, method, tuple(sorted(found, key=lambda one: one.batch_size)))


def _is_whole(one: Measurement) -> bool:
    times = 0 < len(one.seconds) <= _MOST_REPEATS and all(is_number(value) and value > 0 for value in one.seconds)
    return times and all(type(value) is int and 0 <= value < 2**31 for value in (one.batch_size - 1, one.warm_up))
