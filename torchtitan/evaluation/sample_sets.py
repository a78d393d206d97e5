"""Sets of samples on the disk, drawn by any number of processes, and resumable after a kill.

The unit of work is a batch of the plan. A batch is written whole by the process that drew it, and the set's files are the
same bytes on any number of processes.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from torchtitan.distributed.collectives import from_first_rank, of_all_ranks
from torchtitan.distributed.shared_work import SharedProgress
from torchtitan.evaluation.decoding import LatentDecoder
from torchtitan.evaluation.sample_plans import KEY, SampleNotFinite, SampleSetError, SetPlan
from torchtitan.evaluation.sampling import ImageSampler
from torchtitan.fidelity.images import SET_CLASSES, SET_RECORD
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file
from torchtitan.files.ownership import foreign_entry, foreign_text, refuse_foreign_file
from torchtitan.files.record_difference import first_difference
from torchtitan.files.regular import read_regular
from torchtitan.files.run_lock import Busy, RunLock
from torchtitan.pictures.grids import to_rgb

_FORMAT = {"sample_set": 1}
_CLASSES_HEADER = "file,class"
_START = b'{\n "sample_set": 1,'
_MOST_RECORD_BYTES = 64 << 20


class SampleSet:
    """Set of samples in a separate folder: a PNG file per image, named by its seed, their classes, and a record of the plan."""

    def __init__(self, folder: Path, plan: SetPlan) -> None:
        self.folder, self.plan = folder, plan
        self._record = json.loads(json.dumps(_FORMAT | plan.record()))  # as it is read
        self._lock = RunLock(folder)

    def begin(self) -> list[int]:
        """Begin or resume the set, in one process, which holds the folder from now on: batches that are not written yet.

        Raises:
            SampleSetError: the folder holds something else, or another plan's set, both unchanged; or is not writable.
            Busy: another process draws into it.
        """
        with self._writing():
            self._refuse_others()
            make_folder(self.folder)
            if (owner := self._lock.acquire()) is not None:
                raise Busy(self.folder, owner, "wait for it, or draw into another folder")
            self._refuse_others()  # what came before the lock
            if not (self.folder / SET_RECORD).exists():
                replace_file(self.folder / SET_RECORD, json.dumps(self._record, indent=1, ensure_ascii=False) + "\n")
            remove_unfinished(self.folder)
            self._write_classes()
            return self._missing()

    def is_written(self, batch: int) -> bool:
        """Check whether a batch is written."""
        return all((self.folder / name).exists() for name in reversed(self._names(batch)))

    def write(self, batch: int, images: Tensor) -> None:
        """Write images [B, C, H, W] in [-1, 1] (clipped), C 1 or 3. Raises SampleNotFinite, OSError."""
        finite = images.isfinite().flatten(1).all(1)
        if not finite.all():
            seed = self.plan.batch(batch)[0][~finite][0].item()
            raise SampleNotFinite(
                f"{self.folder}: the image of seed {seed} has values that are not finite (try more steps or less guidance)"
            )
        for name, picture in zip(self._names(batch), to_rgb(images.numpy()), strict=True):
            replace_file(self.folder / name, _png(picture))

    def finish(self) -> Path:
        """Finish the set, and let go of the folder. Raises SampleSetError: images are missing."""
        if self._missing():
            raise SampleSetError(f"{self.folder}: images are missing (the same command draws them)")
        self._lock.release()
        return self.folder

    def _missing(self) -> list[int]:
        there = {path.name for path in self.folder.iterdir()}
        return [batch for batch in range(self.plan.num_batches) if not there.issuperset(self._names(batch))]

    def _names(self, batch: int) -> list[str]:
        return [f"{seed:06d}.png" for seed in self.plan.batch(batch)[0].tolist()]

    def _write_classes(self) -> None:
        """Write the class of each image, for those who read the folder. Raises SampleSetError, OSError."""
        own = {name for batch in range(self.plan.num_batches) for name in self._names(batch)}
        if others := sorted(path.name for path in self.folder.glob("*.png") if path.name not in own):
            raise SampleSetError(f"{self.folder}: holds {others[0]}, which is not of this set (move it away)")
        if self.plan.choices is not None:
            prompts, lines = self.plan.prompts, io.StringIO()
            table = csv.writer(lines, lineterminator="\n")
            table.writerow([*_CLASSES_HEADER.split(","), *(["prompt"] if prompts else [])])
            for seed, choice in zip(self.plan.seeds.tolist(), self.plan.choices.tolist(), strict=True):
                table.writerow([f"{seed:06d}.png", choice, *([prompts[choice]] if prompts else [])])
            refuse_foreign_file(self.folder / SET_CLASSES, _CLASSES_HEADER.encode())
            replace_file(self.folder / SET_CLASSES, lines.getvalue())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SampleSetError(
                f"{self.folder}: cannot be written: {error.strerror or error} (make room, or draw into another folder)"
            ) from error

    def _refuse_others(self) -> None:
        advice = "give a new or empty folder"
        if name := foreign_entry(self.folder, {SET_RECORD: _START}):
            raise SampleSetError(foreign_text(self.folder, name, "a set of samples'", advice))
        record = self.folder / SET_RECORD
        if not record.exists():
            return
        try:
            found = json.loads(read_regular(record, _MOST_RECORD_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise SampleSetError(f"{record}: is damaged ({advice})") from error
        if difference := first_difference(found, self._record):
            name, begun, wanted = difference
            other = "other classes or prompts" if name == "choices" else f"{name} {begun}, not {wanted}"
            raise SampleSetError(f"{self.folder}: was begun with {other} (give that, or another folder)")


def draw_set(
    samples: SampleSet, sampler: ImageSampler, method: Mapping[str, Any], decoder: LatentDecoder | None = None,
    group: dist.ProcessGroup | None = None, progress: bool = False,
) -> Path:  # fmt: skip
    """Draw the missing images of a set, and return its folder; called by every rank with its own model and decoder.

    Args:
        decoder: of latents; None for a model of images.
        group: of all ranks, for CPU tensors, with a timeout above the duration of the work; None: one process.

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
        len(plan.seeds), pending, lambda batch: len(plan.batch(batch)[0]), samples.is_written, group,
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


def _png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", compress_level=1)
    return content.getvalue()
