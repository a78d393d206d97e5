"""Throughput of training between two logged points: images, tokens, TFLOP/s and MFU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from torchtitan.training.data_loading import TrainingData
from torchtitan.training.metrics import Stopwatch
from torchtitan.training.utilisation import mfu_percent


class Rates:
    """Rates since the last lap; excluded work counts neither by its time nor by its images."""

    def __init__(
        self, data: TrainingData, *, flops_of: Callable[[tuple[int, ...]], int], tokens_of: Callable[[tuple[int, ...]], int],
        world_size: int, peak_tflops: float | None,
    ) -> None:  # fmt: skip
        """
        Args:
            data: counts images by shape, and seconds of waiting for them.
            flops_of: shape (C, H, W) of an image -> floating-point operations of its forward and backward.
            tokens_of: shape -> tokens of the network.
            peak_tflops: of one device for the products' kind, in TFLOP/s, for the MFU; None: unknown, and no MFU is given.
        """
        self._data = data
        self._flops_of = flops_of
        self._tokens_of = tokens_of
        self._world_size = world_size
        self._peak_tflops = peak_tflops
        self._watch = Stopwatch()
        self._begin(0)

    def restart(self, step: int) -> None:
        """Restart: begin a lap after a step, and discard the present one."""
        self._watch.lap()
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._step, self._work, self._waited = step, self._work_done(), self._data.data_seconds

    def _work_done(self) -> np.ndarray:
        """Images, tokens and FLOPs of all images that were delivered so far, by their shapes, float64 [3]."""
        rows = [
            (count, count * self._tokens_of(shape), count * self._flops_of(shape))
            for shape, count in self._data.images_by_shape.items()
        ]
        return np.array(rows, np.float64).reshape(-1, 3).sum(0)

    def excluded(self) -> AbstractContextManager:
        """Exclude the time inside."""
        return self._watch.excluded()

    @contextmanager
    def excluded_step(self) -> Iterator[None]:
        """Exclude the train step inside: its time and its images."""
        work, waited = self._work_done(), self._data.data_seconds
        with self._watch.excluded():
            yield
        self._step += 1
        self._work = self._work + self._work_done() - work
        self._waited += self._data.data_seconds - waited

    def lap(self, step: int) -> dict[str, float]:
        """End a lap with a step and begin the next; metrics by tag, none if every step in it was excluded."""
        steps, seconds = step - self._step, self._watch.lap()
        if steps == 0:
            return {}
        images, tokens, flops = ((self._work_done() - self._work) / seconds).tolist()
        waited = self._data.data_seconds - self._waited
        self._begin(step)
        tflops = flops / self._world_size / 1e12
        rates = {
            "throughput(img/s)": images,
            "throughput(tps)": tokens,
            "tflops": tflops,
            "time_metrics/end_to_end(s)": seconds / steps,
            "time_metrics/data_loading(%)": 100.0 * waited / seconds,
        }
        if self._peak_tflops:
            rates["mfu(%)"] = mfu_percent(tflops, self._peak_tflops)
        return rates
