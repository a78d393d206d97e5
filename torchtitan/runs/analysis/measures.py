"""Measures of one run: medians of speed over its logged points after the warm-up, with intervals; and its peak memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan.runs.record import RunRecord, Series
from torchtitan.statistics.interval import Interval, median_interval
from torchtitan.training.utilisation import mfu_percent, products_of


@dataclass(frozen=True)
class Metric:
    """Metric of the tables.

    Attributes:
        tags: in metrics.jsonl, the first logged one counts.
    """

    name: str
    title: str
    tags: tuple[str, ...]


IMAGES = Metric("images_per_second", "images/s", ("throughput(img/s)",))
TOKENS = Metric("tokens_per_second", "tokens/s", ("throughput(tps)",))
TFLOPS = Metric("tflops_per_device", "TFLOP/s per device", ("tflops",))
MFU = Metric("mfu_percent", "MFU, %", ("mfu(%)",))
STEP = Metric("step_seconds", "s/step", ("time_metrics/end_to_end(s)",))
# What the device's allocator holds decides whether a batch fits; a CPU process has its resident memory alone.
MEMORY = Metric("memory_gib", "memory, GiB", ("memory/max_reserved(GiB)", "memory/max_resident(GiB)"))
ACTIVE_MEMORY = Metric("memory_active_gib", "active memory, GiB", ("memory/max_active(GiB)",))

_SMOOTHING = 0.03  # of a run's steps, for its loss
_LOSS_POINTS = 500  # that a picture has, about

METRICS = (IMAGES, TOKENS, TFLOPS, MFU, STEP, MEMORY, ACTIVE_MEMORY)


def measure(series: Mapping[str, Series], warmup_steps: int, after_step: int = 0) -> dict[str, Interval]:
    """Measure the median of every speed logged after the warm-up, and the highest memory logged at all.

    Args:
        warmup_steps: steps at the start that do not count, >= 0.
        after_step: step after which the series begin.

    Returns:
        metric's name -> median with its interval, or a peak without one; metrics without a point are left out.
    """
    found = {}
    for metric in METRICS:
        logged = next((series[tag] for tag in metric.tags if tag in series and len(series[tag])), Series())
        if values := after_warm_up(logged, warmup_steps, after_step):
            of_memory = metric in (MEMORY, ACTIVE_MEMORY)
            found[metric.name] = Interval(max(logged.values)) if of_memory else median_interval(values)
    return found


def measure_run(record: RunRecord, warmup_steps: int) -> dict[str, Interval]:
    """Measure a run's folder; MFU by its configuration and device where they are known, whatever version logged it."""
    resumed = record.resumed_after if record.resumed_after == record.timed_after else 0  # a window of a batch that grew is mixed
    found = measure({tag: record.speeds(tag) for metric in METRICS for tag in metric.tags}, warmup_steps, resumed)
    if TFLOPS.name in found and (peak := _peak_tflops(record)):
        found[MFU.name] = found[TFLOPS.name].scaled(mfu_percent(1.0, peak))
    return found


def _peak_tflops(record: RunRecord) -> float | None:
    """Peak of a run's device for its products; None where it is not known."""
    given = record.settings.get("metrics.peak_tflops")
    if given:
        return float(given)
    device = record.about.get("device")
    if not device or device.startswith("CPU"):
        return None
    from torchtitan.training.hardware import named_peak_tflops  # imports torch, which takes seconds

    section = "training."
    training = {key.removeprefix(section): value for key, value in record.settings.items() if key.startswith(section)}
    return named_peak_tflops(device, products_of(training))


def after_warm_up(series: Series, warmup_steps: int, after_step: int = 0) -> list[float]:
    """Select the values of windows without a warm-up step; a window is the steps since the point before, first `after_step`."""
    starts = (after_step, *series.steps)
    return [value for start, value in zip(starts, series.values, strict=False) if start >= warmup_steps]


def loss_points(record: RunRecord) -> list[dict[str, float]]:
    """Smooth and thin a run's training loss, without further terms as of alignment.

    Returns:
        `loss` by `images`, model `flops` and `hours` of training; 0 where unknown, or hours are of several layouts.
    """
    per_image = record.about.get("flops_per_image") or 0
    seconds = Series() if record.resumed_after else record.series("clock/train(s)")  # of one layout and device
    hours = {step: value / 3600 for step, value in zip(seconds.steps, seconds.values, strict=True)}
    losses = record.series(record.weighted_error_tag).smoothed(_SMOOTHING * record.last_step)
    points = []
    for step, loss in list(zip(losses.steps, losses.values, strict=True))[:: -(len(losses) // _LOSS_POINTS + 1)][::-1]:
        images = record.images_at(step)
        points.append({"loss": loss, "images": images, "flops": images * per_image, "hours": hours.get(step, 0)})
    return points
