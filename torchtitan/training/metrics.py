"""What a run reports: losses gathered on the device, rates, and the sinks they are written to."""

import errno
import json
import logging
import os
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.diffusion.objective import LossTerms
from torchtitan.settings import setting

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class MetricsConfig:
    """`[metrics]`"""

    log_freq: int = setting(10, "steps between logged points; losses are means over them", ge=1, trajectory=False)
    enable_tensorboard: bool = setting(True, "write TensorBoard events to <run>/tb", trajectory=False)
    enable_wandb: bool = setting(False, "log to Weights & Biases (WANDB_* variables apply)", trajectory=False)
    peak_tflops: float | None = setting(
        None, "dense peak of one device for MFU, in TFLOP/s; default: the table of known devices", gt=0,
        trajectory=False,
    )
    enable_events: bool = setting(
        True, "write each rank's phases and faults to <run>/events, for scripts/timeline.py", trajectory=False
    )
    loss_bins: int = setting(10, "timestep bins of equal training mass for loss_by_bin", ge=1, le=1000, trajectory=False)


METRICS_FILE = "metrics.jsonl"


class LossWindow:
    """Losses summed on the device since the last logged point, without any host synchronisation."""

    def __init__(self, bin_edges: Tensor, heads: Sequence[str] = ()) -> None:
        """
        Args:
            bin_edges: inner edges in t, rising, [K - 1]; bin k holds edges[k - 1] < t <= edges[k].
            heads: names of the predictions whose shares in the loss are counted.
        """
        self._heads = tuple(heads)
        self._edges = bin_edges
        bins, device = len(bin_edges) + 1, bin_edges.device
        self._loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum, count
        # Sums of errors, counts, sums of each head's share.
        self._by_bin = torch.zeros(2 + len(self._heads), bins, dtype=torch.float64, device=device)

    def add(self, terms: LossTerms) -> None:
        """Count one microbatch; samples whose loss is not finite are left out."""
        loss, error = terms.loss.detach().to(torch.float64), terms.error.to(torch.float64)
        finite = loss.isfinite() & error.isfinite()
        self._loss[0] += torch.where(finite, loss, 0.0).sum()
        self._loss[1] += finite.sum()
        bins = torch.bucketize(terms.t, self._edges)
        self._by_bin[0].index_add_(0, bins, torch.where(finite, error, 0.0))
        self._by_bin[1].index_add_(0, bins, finite.to(torch.float64))
        for k in range(len(self._heads)):
            share = terms.shares[:, k].to(torch.float64)
            self._by_bin[2 + k].index_add_(0, bins, torch.where(finite, share, 0.0))

    def reduce(self) -> dict[str, float]:
        """Metrics over all ranks' samples; starts a new window. Called by all ranks together."""
        total, highest, by_bin = self._loss.clone(), self._loss[0] / self._loss[1], self._by_bin.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            packed = torch.cat((total, by_bin.flatten()))
            dist.all_reduce(packed)
            total, by_bin = packed[:2], packed[2:].view_as(by_bin)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        self._loss.zero_()
        self._by_bin.zero_()
        sums, counts, *shares = by_bin.tolist()
        filled = [k for k in range(len(counts)) if counts[k]]
        return {
            "loss_metrics/global_avg_loss": float(total[0] / total[1]),
            "loss_metrics/global_max_loss": float(highest),
            **{f"loss_by_bin/{k}": sums[k] / counts[k] for k in filled},
            **{
                f"head_share/{name}/{k}": of_head[k] / counts[k]
                for name, of_head in zip(self._heads, shares, strict=True) for k in filled
            },
        }

    def state_dict(self) -> dict:
        """Sums over all ranks, so that a mean over a window survives an interruption. Called by all ranks."""
        packed = torch.cat((self._loss, self._by_bin.flatten()))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(packed)
            # From here on the first rank carries the sums, as it will after a resume.
            self._restore(packed if dist.get_rank() == 0 else torch.zeros_like(packed))
        return {"sums": packed.tolist()}

    def load_state_dict(self, state: dict) -> None:
        packed = torch.tensor(state["sums"], dtype=torch.float64, device=self._edges.device)
        first = not dist.is_initialized() or dist.get_rank() == 0
        if len(packed) == self._loss.numel() + self._by_bin.numel():  # else: another number of bins, start anew
            self._restore(packed if first else torch.zeros_like(packed))

    def _restore(self, packed: Tensor) -> None:
        self._loss.copy_(packed[:2])
        self._by_bin.copy_(packed[2:].view_as(self._by_bin))


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


class PatientLines:
    """A file of lines that a full disk does not break: what cannot be written waits for the next line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)
        self._waiting = b""

    def add(self, line: str) -> None:
        """Write a line and those that wait for it; says once that they wait."""
        said = bool(self._waiting)
        self._waiting += line.encode()
        try:
            written = self._file.write(self._waiting)
            if written < len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(self._size)  # no half line: readers need not know
            if not said:
                logger.error(f"{self._path}: cannot be written: {error.strerror}; training goes on, lines wait in memory")
            return
        self._size += written
        self._waiting = b""

    def close(self) -> None:
        """Write what waits, if that is possible now."""
        if self._waiting:
            self.add("")
        self._file.close()


class MetricsLog:
    """The sinks of the first rank: metrics.jsonl always, TensorBoard and Weights & Biases by configuration."""

    def __init__(self, folder: Path, config: MetricsConfig, run_name: str, run_config: dict, steps_done: int) -> None:
        self._lines = PatientLines(folder / METRICS_FILE)
        self._tensorboard = self._wandb = None
        if config.enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Hides points after the checkpoint that an interrupted run had written.
            self._tensorboard = SummaryWriter(str(folder / "tb"), purge_step=steps_done + 1 if steps_done else None)
        if config.enable_wandb:
            import wandb

            self._wandb = wandb.init(
                project="torchtitan", name=run_name, id=_wandb_id(folder), resume="allow", dir=str(folder),
                config=run_config,
            )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one point to every sink."""
        self._lines.add(json.dumps({"step": step, **metrics}) + "\n")
        if self._tensorboard:
            try:
                for tag, value in metrics.items():
                    self._tensorboard.add_scalar(tag, value, step)
            except OSError as error:
                logger.error(f"TensorBoard's file cannot be written: {error}; {METRICS_FILE} has every point")
                self._tensorboard = None
        if self._wandb:
            self._wandb.log(metrics, step=step)

    def write_image(self, step: int, tag: str, path: Path) -> None:
        """Show a picture in the sinks that can."""
        if self._tensorboard:
            import numpy as np
            from PIL import Image

            with Image.open(path) as image:
                self._tensorboard.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")
        if self._wandb:
            import wandb

            self._wandb.log({tag: wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        self._lines.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def cut_metrics(path: Path, last_step: int) -> None:
    """Drop the points after a step from metrics.jsonl, so that a resumed run reads as one run."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if _step_of(line) <= last_step]
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def tail_medians(path: Path, tags: tuple[str, ...]) -> dict[str, float]:
    """Median of each tag over the last half of the points in metrics.jsonl; tags never logged are left out."""
    points = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    points = [point for point in points if any(tag in point for tag in tags)]
    tail = points[len(points) // 2 :]
    values = {tag: [point[tag] for point in tail if isinstance(point.get(tag), int | float)] for tag in tags}
    return {tag: statistics.median(found) for tag, found in values.items() if found}


def _wandb_id(folder: Path) -> str:
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _step_of(line: str) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")  # a line cut off by a kill
    return step if type(step) is int else float("inf")
