"""Metrics of a run: losses gathered on the device, rates, and their sinks."""

import json
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from torchtitan.diffusion.objective import LossTerms
from torchtitan.errors import one_line
from torchtitan.files.patient_file import PatientFile
from torchtitan.training.config import MetricsConfig
from torchtitan.training.metric_cut import cut_metrics
from torchtitan.training.metric_points import iter_points
from torchtitan.training.metric_sinks import CALLBACKS, Callback, TensorBoardFile, WandbRun

METRICS_FILE = "metrics.jsonl"
logger = logging.getLogger(__name__)
_MOST_WAITING = 32  # microbatches


class LossWindow:
    """Losses summed on the device since the last logged point, without any host synchronisation.

    Attributes:
        sums: of this rank's losses, float64 [N]; a checkpoint holds them over all ranks.
    """

    def __init__(self, bin_edges: Tensor, diagnostics: Sequence[str] = ()) -> None:
        """
        Args:
            bin_edges: inner edges in t, rising, [K - 1]; bin k holds edges[k - 1] < t <= edges[k].
            diagnostics: names of the objective's per-sample values, whose means by bin are logged.
        """
        self._diagnostics = tuple(diagnostics)
        self._edges = bin_edges
        bins, device = len(bin_edges) + 1, bin_edges.device
        rows = 2 + len(self._diagnostics)  # sums of errors, counts, sums of each diagnostic
        self.sums = torch.zeros(3 + rows * bins, dtype=torch.float64, device=device)
        self._loss, self._by_bin = self.sums[:3], self.sums[3:].view(rows, bins)  # sums of loss and weighted error, count
        self._waiting: list[Tensor] = []  # of microbatches: counted together, they take as many operations as one

    def add(self, terms: LossTerms) -> None:
        """Count one microbatch; samples whose loss is not finite are left out."""
        diagnostics = [terms.diagnostics[name] for name in self._diagnostics]
        added = torch.stack((terms.t, terms.loss.detach(), terms.weighted, terms.error, *diagnostics))  # [4 + diagnostics, B]
        if self._waiting and self._waiting[0].shape != added.shape:
            self._count()
        self._waiting.append(added)
        if len(self._waiting) == _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        """Add the microbatches that wait to the sums, one after the other."""
        if not self._waiting:
            return
        waiting, self._waiting = torch.stack(self._waiting), []  # [M, 4 + diagnostics, B]
        values = waiting[:, 1:].to(torch.float64)
        finite = values[:, :3].isfinite().all(1)  # [M, B]
        values = torch.where(finite[:, None], values, 0.0)
        self._loss[:2] = torch.cat((self._loss[None, :2], values[:, :2].sum(2))).cumsum(0)[-1]
        self._loss[2] += finite.sum()
        bins = torch.bucketize(waiting[:, 0].contiguous(), self._edges).flatten()
        _, _, error, *diagnostics = values.unbind(1)
        for row, added in enumerate((error, finite.to(torch.float64), *diagnostics)):
            self._by_bin[row].index_add_(0, bins, added.flatten())

    def reduce(self) -> dict[str, float]:
        """Metrics over all ranks' samples; starts a new window. Called by all ranks together.

        The weighted error is one of them where the loss is another: of further terms, or divided by what it is.
        """
        self._count()
        highest, sums = self._loss[0] / self._loss[2], self.sums.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        self.begin()
        (loss, weighted, count), (errors, counts, *diagnostics) = sums[:3].tolist(), sums[3:].view_as(self._by_bin).tolist()
        filled = [k for k in range(len(counts)) if counts[k]]
        return {
            "loss_metrics/global_avg_loss": float(sums[0] / sums[2]),
            "loss_metrics/global_max_loss": float(highest),
            **({} if weighted == loss else {"loss_metrics/global_avg_weighted_error": weighted / count}),
            **{f"loss_by_bin/{k}": errors[k] / counts[k] for k in filled},
            **{
                f"{name}/{k}": values[k] / counts[k]
                for name, values in zip(self._diagnostics, diagnostics, strict=True) for k in filled
            },
        }

    def state_dict(self) -> dict:
        """Sums over all ranks, so that a mean over a window survives an interruption. Called by all ranks."""
        self._count()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.sums)
        state = {"sums": self.sums.tolist()}
        if dist.is_initialized() and dist.get_rank() > 0:
            self.begin()  # from here on the first rank carries the sums, as it will after a resume
        return state

    def begin(self) -> None:
        """Begin a window without losses."""
        self._waiting = []
        self.sums.zero_()


class Stopwatch:
    """Time spent training since the last lap; what runs inside `excluded` does not count."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._excluded = 0.0

    @contextmanager
    def excluded(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - start

    def lap(self) -> float:
        """Seconds of training since the last lap."""
        now = time.perf_counter()
        seconds = now - self._start - self._excluded
        self._start, self._excluded = now, 0.0
        return seconds


class MetricsLog:
    """Sinks of the first rank: metrics.jsonl always, TensorBoard and Weights & Biases by configuration.

    No method raises but `open`: a point that cannot be written waits, and other sinks are skipped while they fail.
    """

    def __init__(
        self, folder: Path, config: MetricsConfig, run_name: str, run_config: dict, steps_done: int,
        callbacks: Sequence[Callback] = (),
    ) -> None:  # fmt: skip
        """steps_done: where the run resumes; later points are dropped. callbacks: called with every point."""
        self._folder = folder
        self._callbacks = CALLBACKS | {str(number): each for number, each in enumerate(callbacks, start=1)}
        self._broken_callbacks: set[str] = set()
        path = folder / METRICS_FILE
        self._lines = PatientFile(path, "the file of metrics", prepare=lambda: cut_metrics(path, steps_done))
        self._num_points = 0
        self._tensorboard = TensorBoardFile(folder / "tb", steps_done) if config.enable_tensorboard else None
        self._wandb = WandbRun(folder, run_name, run_config) if config.enable_wandb else None

    def open(self) -> None:
        """Bring metrics.jsonl into the state of the step that the run resumes from. Raises OSError."""
        self._lines.open()

    def write(self, step: int, metrics: dict[str, float], beside: Mapping[str, float] = MappingProxyType({})) -> None:
        """Append one point to every sink; beside: more values of it, for metrics.jsonl alone."""
        self._lines.add(json.dumps({"step": step, **metrics, **beside}).encode() + b"\n")
        self._num_points += 1
        if self._tensorboard:
            self._tensorboard.add_scalars(step, metrics)
        if self._wandb:
            self._wandb.log(step, metrics)
        for name, callback in self._callbacks.items():
            try:
                callback(step, {**metrics, **beside})
            except Exception as error:  # noqa: BLE001 (a callback may raise anything)
                if name not in self._broken_callbacks:
                    logger.error(f"callback {name}: {one_line(error)}; training continues, and it is called again")
                self._broken_callbacks.add(name)

    def write_image(self, step: int, tag: str, picture: Image.Image) -> None:
        """Show a picture in the sinks that can."""
        if self._tensorboard:
            self._tensorboard.add_image(step, tag, picture)
        if self._wandb:
            self._wandb.log_image(step, tag, picture)

    def summarise(self, results: Mapping[str, float | str]) -> None:
        """Show results of the run as a whole in the sinks that can."""
        if self._wandb:
            self._wandb.summarise(results)

    def sync(self) -> None:
        """Bring what is written to the disk, as far as the disk allows; any thread may call it."""
        self._lines.sync()
        if self._tensorboard:
            self._tensorboard.sync()

    def settle(self) -> tuple[int, int]:
        """Bring metrics.jsonl to the disk; return the number of points that it lacks, and of those of this process."""
        self._lines.sync()
        return self._lines.num_waiting, self._num_points

    def close(self) -> None:
        """Close all sinks; what waits is written if that is possible now."""
        self._lines.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.close()


def tail_medians(path: Path, tags: tuple[str, ...], after_step: int = 0) -> dict[str, float]:
    """Median of each tag over the last half of metrics.jsonl's points after a step. Raises OSError: it cannot be read."""
    points = [{tag: point[tag] for tag in tags if tag in point} for point in iter_points(path) if point["step"] > after_step]
    points = [point for point in points if point]
    tail = points[len(points) // 2 :]
    values = {tag: [point[tag] for point in tail if isinstance(point.get(tag), int | float)] for tag in tags}
    return {tag: statistics.median(found) for tag, found in values.items() if found}


def highest(path: Path, tag: str, after_step: int) -> float:
    """Highest value of a tag over metrics.jsonl's points after a step; 0 without any. Raises OSError: it cannot be read."""
    values = (point.get(tag) for point in iter_points(path, tag) if point["step"] > after_step)
    return max((value for value in values if isinstance(value, int | float)), default=0.0)
