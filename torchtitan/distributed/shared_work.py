"""Work in units that are divided among the ranks when it begins, with one progress bar over all of it."""

import time
from collections.abc import Callable, Sequence
from typing import Self

import torch.distributed as dist
from tqdm import tqdm

SECONDS_BETWEEN_LOOKS = 1.0  # at what other ranks have done


class SharedProgress:
    """Progress over all images: this rank's units (`mine`) as done, those of others by looking for them."""

    def __init__(
        self,
        total: int,
        pending: Sequence[int],
        images_of: Callable[[int], int],
        is_done: Callable[[int], bool],
        group: dist.ProcessGroup | None,
        *,
        verb: str,
        unit: str = "img",
        shown: bool = True,
    ) -> None:
        """
        Args:
            total: images of the whole work, done before or not.
            pending: units that are not done yet, of which rank r of n does each n-th from the r-th.
            images_of: number of images of a unit.
            is_done: whether a unit of another rank is done.
            group: of all ranks, for CPU tensors, with a timeout above the duration of the work; None: one process.
        """
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
        shown &= rank == 0
        self.mine = list(pending[rank::ranks])
        self._others = sorted({*pending} - {*self.mine}) if shown else []
        self._images_of, self._is_done, self._group = images_of, is_done, group
        missing = sum(map(images_of, pending))
        self._bar = tqdm(total=total, initial=total - missing, unit=unit, desc=verb, disable=not (shown and pending))
        self._looked = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.close()

    def advance(self, images: int) -> None:
        """Count images that this rank has done."""
        self._bar.update(images)
        self._look()

    def wait_for_all(self) -> None:
        """Wait until every rank is here."""
        if self._group is not None:
            arrival = dist.barrier(group=self._group, async_op=True)
            while not arrival.is_completed():
                self._look()
                time.sleep(SECONDS_BETWEEN_LOOKS / 10)
            arrival.wait()
        self._look(now=True)

    def _look(self, now: bool = False) -> None:
        """Look for units that others have done since, at most once in SECONDS_BETWEEN_LOOKS."""
        if not self._others or not (now or time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS):
            return
        self._looked = time.monotonic()
        done = {unit for unit in self._others if self._is_done(unit)}
        self._others = [unit for unit in self._others if unit not in done]
        self._bar.update(sum(map(self._images_of, done)))
