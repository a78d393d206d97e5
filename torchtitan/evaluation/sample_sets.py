"""Sets of samples on the disk, drawn by any number of processes, and resumable after a kill.

The unit of work is a batch of the plan. A batch is written whole by the process that drew it, and the set's files are the
same bytes on any number of processes.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan.distributed.collectives import from_first_rank, of_all_ranks
from torchtitan.distributed.shared_work import SharedProgress
from torchtitan.evaluation.decoding import LatentDecoder
from torchtitan.evaluation.sample_files import SET_FORMATS, SetFiles
from torchtitan.evaluation.sample_plans import KEY, SampleNotFinite, SampleSetError, SetPlan
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file
from torchtitan.files.ownership import foreign_entry, foreign_text
from torchtitan.files.record_difference import first_difference
from torchtitan.files.regular import read_regular
from torchtitan.files.run_lock import Busy, RunLock
from torchtitan.pictures.grids import to_rgb

RECORD = "set.json"
_FORMAT = {"sample_set": 1}
_START = b'{\n "sample_set": 1,'
_MOST_RECORD_BYTES = 64 << 20


class SampleSet:
    """Set of samples in a folder of its own, with a record of its plan beside the images."""

    def __init__(self, folder: Path, plan: SetPlan, file_format: str) -> None:
        """file_format: a key of SET_FORMATS."""
        self.folder, self.plan = folder, plan
        self.files: SetFiles = SET_FORMATS[file_format](folder, plan)
        self._record = json.loads(json.dumps(_FORMAT | {"format": file_format} | plan.record()))  # as it is read
        self._lock = RunLock(folder)

    def begin(self) -> list[int]:
        """Begin or resume the set, in one process, which holds the folder from now on: batches that are not written yet.

        Raises:
            SampleSetError: the folder holds something else, or a set of another plan, and nothing was changed; or it cannot
                be written.
            Busy: another process draws into it.
        """
        with self._writing():
            self._refuse_others()
            make_folder(self.folder)
            if (owner := self._lock.acquire()) is not None:
                raise Busy(self.folder, owner, "give another --output")
            self._refuse_others()  # what came before the lock
            if not (self.folder / RECORD).exists():
                replace_file(self.folder / RECORD, json.dumps(self._record, indent=1, ensure_ascii=False) + "\n")
            remove_unfinished(self.folder)
            self.files.begin()
            return [batch for batch, there in enumerate(self.files.written()) if not there]

    def write(self, batch: int, images: Tensor) -> None:
        """Write a batch of images [B, C, H, W] in [-1, 1] (clipped), C being 1 or 3.

        Raises:
            SampleNotFinite: values are not finite.
            OSError: it cannot be written.
        """
        finite = images.isfinite().flatten(1).all(1)
        if not finite.all():
            seed = self.plan.batch(batch)[0][~finite][0].item()
            raise SampleNotFinite(
                f"{self.folder}: the image of seed {seed} has values that are not finite (try more steps or less guidance)"
            )
        self.files.write(batch, to_rgb(images.numpy()))

    def finish(self) -> Path:
        """Finish the set, and let go of the folder: what there is to use.

        Raises:
            SampleSetError: a part is missing or damaged, or it cannot be written.
        """
        with self._writing():
            found = self.files.finish()
        self._lock.release()
        return found

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SampleSetError(
                f"{self.folder}: cannot be written: {error.strerror or error} (make room, or give another --output)"
            ) from error

    def _refuse_others(self) -> None:
        advice = "give a new or empty folder"
        if name := foreign_entry(self.folder, {RECORD: _START}):
            raise SampleSetError(foreign_text(self.folder, name, "a set of samples'", advice))
        record = self.folder / RECORD
        if not record.exists():
            return
        try:
            found = json.loads(read_regular(record, _MOST_RECORD_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise SampleSetError(f"{record}: is damaged ({advice})") from error
        if difference := first_difference(found, self._record):
            name, begun, wanted = difference
            raise SampleSetError(
                f"{self.folder}: was begun with {name} {begun}, not {wanted} (give that, or another --output)"
            )


def draw_set(
    samples: SampleSet, sampler: ImageSampler, method: Mapping[str, Any], decoder: LatentDecoder | None = None,
    group: dist.ProcessGroup | None = None, progress: bool = False,
) -> Path:  # fmt: skip
    """Draw the missing images of a set; called by every rank, each with its own model and decoder.

    Args:
        samples: the set, the same on every rank.
        sampler: of the model, which is whole on every rank.
        method: as in `ImageSampler.drawing`.
        decoder: of latents; None for a model of images.
        group: of all ranks, for CPU tensors, with a timeout above the duration of the work; None: one process.
        progress: show a bar over the whole set, on the first rank.

    Returns:
        what there is to use: the folder of PNG files, or the one file.

    Raises:
        SampleSetError, Busy: as in `SampleSet.begin` and `SampleSet.finish`; on every rank.
        SampleNotFinite, OSError: as in `SampleSet.write`; on the rank where it happens.
    """
    records = of_all_ranks(samples.plan.record(), group)
    for rank, record in enumerate(records):
        if difference := first_difference(record, records[0]):
            raise SampleSetError(f"rank {rank}: has {difference[0]} {difference[1]}, and rank 0 {difference[2]}")
    pending = from_first_rank(samples.begin, group=group)
    plan = samples.plan
    with SharedProgress(
        len(plan.seeds), pending, lambda batch: len(plan.batch(batch)[0]), samples.files.is_written, group,
        verb="drawing", shown=progress,
    ) as work:  # fmt: skip
        with decoder.on_device() if decoder else nullcontext():
            for batch in work.mine:
                seeds, choices = plan.batch(batch)
                with sampler.drawing(KEY, **method) as draw_batch:
                    images = draw_batch(choices, seeds)
                samples.write(batch, decoder.decode_alone(images) if decoder else images.cpu())
                work.advance(len(seeds))
        work.wait_for_all()
    return from_first_rank(samples.finish, group=group)
