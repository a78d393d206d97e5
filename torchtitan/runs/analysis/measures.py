"""Speed and memory of one run: medians over its logged points after the warm-up, with intervals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan.runs.record import RunRecord, Series
from torchtitan.statistics.estimate import Estimate


@dataclass(frozen=True)
class Metric:
    """A quantity of the tables.

    Attributes:
        name: column, with its unit.
        title: for pictures and texts.
        tags: in metrics.jsonl, the first that is logged counts.
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
# As the run itself counted it, where that count is known to be another one than this program's.
MFU_REPORTED = Metric("mfu_reported_percent", "MFU as reported, %", ())

METRICS = (IMAGES, TOKENS, TFLOPS, MFU, STEP, MEMORY, ACTIVE_MEMORY, MFU_REPORTED)


def measure(series: Mapping[str, Series], warmup_steps: int) -> dict[str, Estimate]:
    """Median of every metric that was logged after the warm-up.

    Args:
        series: tag -> logged values.
        warmup_steps: steps at the start that do not count, >= 0.

    Returns:
        metric's name -> median with its interval; metrics without a point are left out.
    """
    found = {}
    for metric in METRICS:
        logged = next((series[tag] for tag in metric.tags if tag in series and len(series[tag])), Series())
        if values := after_warm_up(logged, warmup_steps):
            found[metric.name] = median_interval(values)
    return found


def measure_run(record: RunRecord, warmup_steps: int) -> dict[str, Estimate]:
    """`measure` of a run's folder."""
    return measure({tag: record.series(tag) for metric in METRICS for tag in metric.tags}, warmup_steps)


def after_warm_up(series: Series, warmup_steps: int) -> list[float]:
    """The values whose window, the steps since the point before, holds no warm-up step."""
    starts = (0, *series.steps)
    return [value for start, value in zip(starts, series.values, strict=False) if start >= warmup_steps]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Median with the interval between two order statistics, whatever the distribution of independent values.

    [x_(k), x_(n+1-k)] covers the median with probability 1 - 2 P(Binomial(n, 1/2) < k); k is the largest for which that
    is at least `confidence`. Below six values none reaches 95 %: then it is the range, and `coverage` says how little
    that is. One value alone has no interval.

    Args:
        values: at least one.
        confidence: in (0, 1).

    Source: David and Nagaraja, "Order Statistics", section 7.1.
    """
    ordered, n = sorted(values), len(values)
    median = statistics.median(ordered)
    if n == 1:
        return Estimate(median, None, None, 1, None)
    rank, tail = 1, _binomial(n, 0)  # P(Binomial < rank)
    while rank < n // 2:
        further = tail + _binomial(n, rank)
        if 2 * further > 1 - confidence:
            break
        rank, tail = rank + 1, further
    return Estimate(median, ordered[rank - 1], ordered[n - rank], n, 1 - 2 * tail)


def _binomial(n: int, k: int) -> float:
    """Probability of k in n throws of a coin; by logarithms, as 2^-n is 0 for the points of a long run."""
    return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))
