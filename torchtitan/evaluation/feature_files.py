"""Features of sets of images on the disk, computed once by any number of processes, and resumable after a kill.

The unit of work is a chunk of neighbouring images. Its features are a file for each output of the extractor, named by the
hash of the chunk's images, so that whoever computes them writes the same bytes, and other sets that hold the same chunk
find them there.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from torchtitan.distributed.collectives import from_first_rank, of_all_ranks, on_all_ranks
from torchtitan.distributed.shared_work import SharedProgress
from torchtitan.errors import EvaluationError, first_line
from torchtitan.evaluation.image_sets import ImageSet, read_ahead
from torchtitan.features.base import ExtractorError, FeatureExtractor
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file
from torchtitan.files.ownership import LOCK_FILE, foreign_entry, foreign_text
from torchtitan.files.removal import remove_folder
from torchtitan.files.run_lock import Busy, RunLock

CHUNK = 512  # images
BATCH_SIZE = 64
RECORD = "features.json"
_START = b'{\n "image_features": 1,'
_FEATURES = "features"
_PART = re.compile(r"[0-9a-f]{64}\.\w+\.safetensors")


class ExtractionFailed(EvaluationError):
    """Images whose features cannot be computed or written; raised on the rank that met them alone."""


@dataclass(frozen=True)
class HashedImages:
    """Set of images with the hash of each chunk.

    Attributes:
        images: the set.
        digests: of its chunks in order, hexadecimal.
        stamps: of the chunks' files, taken before they were hashed.
        chunk: images of each but the last.
    """

    images: ImageSet
    digests: tuple[str, ...]
    stamps: tuple[bytes, ...] = ()
    chunk: int = CHUNK

    @property
    def sha256(self) -> str:
        """Hash of all images and their order."""
        return hashlib.sha256(f"{len(self.images)} {self.chunk} {' '.join(self.digests)}".encode()).hexdigest()

    def numbers(self, chunk: int) -> range:
        """Images of a chunk."""
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, len(self.images)))


class FeatureFolder:
    """Folder of one extractor's features within a cache, written by any number of processes of one command."""

    def __init__(self, cache: Path, extractor: FeatureExtractor) -> None:
        self.key = extractor_key(extractor.record())
        self.extractor = extractor
        self.path = cache / f"{_letters(extractor.name)}-{self.key[:12]}"

    def part(self, digest: str, output: str) -> Path:
        """File of a chunk's features."""
        return self.path / f"{digest}.{output}.safetensors"

    @contextmanager
    def opened(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Hold the folder, made if it is missing, on the first rank for all of the group.

        Raises:
            EvaluationError: it holds something else, or cannot be written.
            Busy: another command computes features there.
        """
        lock = RunLock(self.path)
        from_first_rank(self._open, lock, group=group)
        try:
            yield
        finally:
            lock.release()

    def remove(self) -> None:
        """Remove the files of this folder, when nobody needs them any more, and the cache if it is empty then."""
        remove_folder(self.path, lambda name: name in (RECORD, LOCK_FILE) or _PART.fullmatch(name) is not None)
        with suppress(OSError):
            self.path.parent.rmdir()

    def rows(self, hashed: HashedImages, output: str) -> Iterator[np.ndarray]:
        """Rows of each chunk, float32 [B, D], in order. Raises EvaluationError: a file is missing or damaged."""
        size = self.extractor.dims[output]
        for chunk, digest in enumerate(hashed.digests):
            path = self.part(digest, output)
            try:
                with safe_open(path, framework="np") as file:
                    rows = file.get_tensor(_FEATURES)
            except (SafetensorError, OSError) as error:
                advice = "remove it, and the same command computes it again"
                raise EvaluationError(f"{path}: cannot be read: {first_line(error)} ({advice})") from error
            if rows.dtype != np.float32 or rows.shape != (len(hashed.numbers(chunk)), size):
                raise EvaluationError(f"{path}: holds {rows.dtype} {list(rows.shape)} (remove it: it is computed again)")
            yield rows

    def _open(self, lock: RunLock) -> None:
        content = json.dumps({"image_features": 1, "extractor": self.extractor.record()}, indent=1) + "\n"
        try:
            if name := foreign_entry(self.path, {RECORD: _START}):
                raise EvaluationError(foreign_text(self.path, name, "a cache of features'", "give another --cache"))
            make_folder(self.path)
            if (owner := lock.acquire()) is not None:
                raise Busy(self.path, owner, "give another --cache")
            if not (self.path / RECORD).exists():
                replace_file(self.path / RECORD, content)
            remove_unfinished(self.path)
        except OSError as error:
            text = f"{self.path}: cannot be written: {error.strerror or error} (make room, or give another --cache)"
            raise EvaluationError(text) from error


def extractor_key(record: dict[str, Any]) -> str:
    """Hash of all that features depend on besides the images, from the extractor's record."""
    kept = {name: record[name] for name in ("sha256", "resize", "dims")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def hash_images(
    images: ImageSet, group: dist.ProcessGroup | None = None, progress: bool = False, chunk: int = CHUNK
) -> HashedImages:
    """Hash the chunks of a set, every rank its share; collective.

    Raises:
        EvaluationError: images are damaged or of several sizes; on every rank.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    whole = HashedImages(images, (), chunk=chunk)
    chunks = range(-(-len(images) // chunk))

    def share() -> list[tuple[bytes, str]]:
        shown = progress and rank == 0
        with tqdm(chunks[rank::ranks], desc="hashing", unit="chunk", disable=not shown, leave=False) as bar:
            ranges = map(whole.numbers, bar)
            return [(stamp, images.digest(numbers).hex()) for numbers in ranges for stamp in (images.stamp(numbers),)]

    of_ranks = of_all_ranks(on_all_ranks(share, (EvaluationError,), group), group)
    found = [of_ranks[number % ranks][number // ranks] for number in chunks]
    return HashedImages(images, tuple(digest for _, digest in found), tuple(stamp for stamp, _ in found), chunk)


def extract_features(
    hashed: HashedImages, outputs: Sequence[str], folder: FeatureFolder, batch_size: int = BATCH_SIZE,
    group: dist.ProcessGroup | None = None, progress: bool = False,
) -> None:  # fmt: skip
    """Compute the features that are missing in an opened folder; called by every rank, each with its own extractor.

    Args:
        hashed: the images.
        outputs: of the extractor, those to be kept.
        folder: to write to.
        batch_size: images at a time on each rank.
        group: of all ranks, for CPU tensors, with a timeout above the duration of the work; None: one process.
        progress: show a bar over the whole set, on the first rank.

    Raises:
        ExtractionFailed: images cannot be read, features are not finite or cannot be written; on that rank alone.
    """

    def missing(chunk: int) -> list[str]:
        return [output for output in outputs if not folder.part(hashed.digests[chunk], output).exists()]

    pending = from_first_rank(lambda: [chunk for chunk in range(len(hashed.digests)) if missing(chunk)], group=group)
    with SharedProgress(
        len(hashed.images), pending, lambda chunk: len(hashed.numbers(chunk)), lambda chunk: not missing(chunk), group,
        verb="features", shown=progress,
    ) as work:  # fmt: skip
        batches = [(chunk, batch) for chunk in work.mine for batch in _cut(hashed.numbers(chunk), batch_size)]
        found: list[dict[str, Tensor]] = []
        try:
            reading = read_ahead(hashed.images, [batch for _, batch in batches])
            for (chunk, batch), pixels in zip(batches, reading, strict=True):
                images = torch.from_numpy(np.array(pixels.transpose(0, 3, 1, 2), order="C"))  # [B, 3, H, W]
                found.append(folder.extractor.extract(images))
                if batch.stop == hashed.numbers(chunk).stop:
                    _write(hashed, chunk, found, outputs, folder)
                    found = []
                work.advance(len(batch))
        except (EvaluationError, ExtractorError) as error:
            raise ExtractionFailed(str(error)) from error
        except OSError as error:
            raise ExtractionFailed(f"{folder.path}: cannot be written: {error.strerror or error} (make room)") from error
        work.wait_for_all()


def _write(
    hashed: HashedImages, chunk: int, found: list[dict[str, Tensor]], outputs: Sequence[str], folder: FeatureFolder
) -> None:
    if hashed.images.stamp(hashed.numbers(chunk)) != hashed.stamps[chunk]:  # their features would have the others' name
        raise EvaluationError(f"{hashed.images.place}: images were changed while they were read (give the same command again)")
    for output in outputs:
        if (path := folder.part(hashed.digests[chunk], output)).exists():
            continue
        rows = torch.cat([features[output] for features in found]).cpu()
        finite = rows.isfinite().all(1)
        if not finite.all():
            number = hashed.numbers(chunk)[int(finite.logical_not().nonzero()[0])]
            raise EvaluationError(
                f"{hashed.images.place}: {folder.extractor.name} gives image {number} {output} features that are not finite"
                " (other weights, or without that image)"
            )
        replace_file(path, save({_FEATURES: rows.contiguous()}))


def _cut(numbers: range, size: int) -> list[range]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _letters(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in Path(name).stem)[:40]
