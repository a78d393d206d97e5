"""Training and validation batches by sample number.

The data of a run are a function of (seed, global sample number, attempt): sample s is image s mod N of the permutation
of epoch s // N, mirrored or not by its own draw. Ranks, microbatches and loader processes only divide the numbers among
themselves, so a checkpoint only stores the next number. Of images in buckets each global batch is of one bucket (see
BucketOrder), so that the same holds, and all ranks of a step have images of one shape.

An image that cannot be decoded is replaced by the next decodable one in stored order, of its bucket if there are any,
with its own label: a function of the image's index alone, so that all of the above holds for damaged data too.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.conditions import Entries
from torchtitan.data.base import (
    Batch,
    DataConfig,
    Dataset,
    DatasetError,
    DatasetInfo,
    Draws,
    UnreadableImage,
    bucket_range,
    check_buckets,
    held_out_parts,
    small_buckets,
)
from torchtitan.errors import unwrapped
from torchtitan.pictures.number_text import counted
from torchtitan.processes.launch import launch_number
from torchtitan.training.loader_processes import PREFETCH_FACTOR, LoaderProcesses, crowded_cores, shared_memory_shortage
from torchtitan.training.sample_order import BucketOrder, SampleOrder, sample_order

logger = logging.getLogger(__name__)

ADDED = {"samples", "unreadable", "num_replaced", "by_pipe", "indices", "weights"}  # to what a dataset gives
SHARE_WINDOW = 1000  # samples of one rank over which data.max_corrupt_share is taken
MAX_UNREADABLE_IN_A_ROW = 1000
_INDICES_AT_A_TIME = 2**12  # of as many samples: for a few, they would take as long

Batches = LoaderProcesses | Generator[dict[str, Any], None, None]
OnUnreadable = Callable[[Sequence[UnreadableImage]], None]


class TrainingData:
    """Training data: a rank's microbatches, from the next sample of the run to its last.

    The step that begins at sample n covers [n, n + global_batch_size). With b = local_batch_size and W = world_size, its
    microbatch m on rank r holds samples n + (m W + r) b + [0, b).

    Attributes:
        next_sample: global number of the first sample of the next optimizer step; advances by
            `global_batch_size` after as many microbatches as make it up. A step may be several of these.
        attempt: selects order and flips; another number after a rollback.
        end_sample: steps begin before this number.
        global_batch_size: images of as many microbatches as `microbatches_per_step` on every rank.
        in_buckets: each global batch is of one bucket.
        data_seconds: time spent waiting in `next_batch` so far.
        images_by_shape: images delivered by this object, over all ranks, by (C, H, W); counted by global batches.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        info: DatasetInfo,
        seed: int,
        end_sample: int,
        global_batch_size: int,
        local_batch_size: int,
        rank: int,
        world_size: int,
        pin_memory: bool = False,
        on_unreadable: OnUnreadable | None = None,
        encode: Callable[[Batch, int], Batch] | None = None,
    ) -> None:
        """
        Args:
            config: `[data]`; its `horizontal_flip` is applied here.
            info: of the dataset; batches are checked against it.
            global_batch_size: a multiple of world_size x local_batch_size.
            pin_memory: place batches in pinned memory, which a GPU copies from without waiting.
            on_unreadable: called with the unreadable images of each microbatch that has any, before it is
                returned; the same image may come again.
            encode: of a microbatch and its attempt, what is delivered instead.
        """
        self.next_sample = 0
        self.attempt = 0
        self.end_sample = end_sample
        self.global_batch_size = global_batch_size
        self.in_buckets = dataset.buckets is not None
        self.data_seconds = 0.0
        self.images_by_shape: Counter[tuple[int, ...]] = Counter()
        self.microbatches_per_step = microbatches_per_step(global_batch_size, local_batch_size, world_size)
        self.dataset, self._config, self._info, self._seed, self._pin_memory = dataset, config, info, seed, pin_memory
        self._local_batch_size, self._rank, self._world_size = local_batch_size, rank, world_size
        self._encode = encode
        self._on_unreadable = on_unreadable or (lambda found: None)
        self._share = _CorruptShare(config.max_corrupt_share, _name(dataset))
        self._batches: Batches | None = None
        self._microbatches_taken = 0
        check_buckets(dataset, info)
        if launch_number("LOCAL_RANK", rank) == 0:
            if repeated := small_buckets(dataset, info, global_batch_size):
                logger.warning(repeated)
            batch_bytes = local_batch_size * info.sample_bytes
            ranks = launch_number("LOCAL_WORLD_SIZE", world_size)
            for warning in (
                shared_memory_shortage(batch_bytes, config.num_workers, ranks), crowded_cores(config.num_workers, ranks)
            ):  # fmt: skip
                if warning:
                    logger.warning(warning)

    def next_batch(self) -> Batch:
        """Return the next microbatch: a batch of the dataset, with {"samples": int64 [b]}.

        Raises:
            DatasetError: an image could not be read, or too many could not be decoded; a loader process failed.
            RuntimeError: the run's last sample has been delivered.
        """
        started = time.perf_counter()
        if self._batches is None:
            self._batches = self._read(self.next_sample, self.end_sample, self.attempt)
        batch = next(self._batches, None)
        self.data_seconds += time.perf_counter() - started
        if batch is None:
            raise RuntimeError(f"all {self.end_sample} samples of the run have been read")
        found, replaced = batch.pop("unreadable"), batch.pop("num_replaced")
        batch = self._encode(batch, self.attempt) if self._encode else batch
        if found:
            self._on_unreadable(found)
        self._share.add(replaced, len(batch["samples"]))
        self._microbatches_taken += 1
        if self._microbatches_taken == self.microbatches_per_step:
            self._microbatches_taken = 0
            self.next_sample += self.global_batch_size
            self.images_by_shape[tuple(batch["images"].shape[1:])] += self.global_batch_size
        return batch

    def again(self, first_sample: int, attempt: int, microbatches: int) -> Iterator[Batch]:
        """Read this rank's microbatches of an earlier step again; the position of the run does not change."""
        end_sample = first_sample + microbatches // self.microbatches_per_step * self.global_batch_size
        for batch in self._read(first_sample, end_sample, attempt):
            del batch["unreadable"], batch["num_replaced"]  # counted when they were first read
            yield self._encode(batch, attempt) if self._encode else batch

    def image_of(self, sample: int, attempt: int) -> int:
        """Index in the dataset of a sample number's image."""
        return int(self._order(attempt).indices(np.array([sample]))[0])

    def state_dict(self) -> dict[str, int]:
        """Return the position between steps: the begin of the next one."""
        return {"next_sample": self.next_sample, "attempt": self.attempt}

    def lost_loader(self) -> str | None:
        """Name the lost loader process and the cause, in words."""
        return self._batches.lost() if isinstance(self._batches, LoaderProcesses) else None

    def close(self) -> None:
        """Close the loader processes; `next_batch` starts them again at the next step's first sample."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._microbatches_taken = 0

    def _read(self, first_sample: int, end_sample: int, attempt: int) -> "Batches":
        """Read the microbatches of the steps that begin between two samples, in order.

        Beside what `next_batch` returns, each has {"unreadable": the images of this microbatch that could not be decoded, a list
        of UnreadableImage, "num_replaced": number of replaced samples}.
        """
        reader = _SampleReader(self.dataset, self._info, self._seed, attempt, self._config.horizontal_flip)
        microbatches = self._microbatches(range(first_sample, end_sample, self.global_batch_size), self._order(attempt))
        if not self._config.num_workers:
            return read_here(reader, microbatches, self._pin_memory)
        # One pass serves the whole run, so the processes live as long as it: nothing to keep between passes.
        return LoaderProcesses(
            _name(self.dataset), self._config.num_workers, dataset=reader, sampler=microbatches,
            prefetch_factor=PREFETCH_FACTOR, pin_memory=self._pin_memory,
        )  # fmt: skip

    def _order(self, attempt: int) -> SampleOrder | BucketOrder:
        return sample_order(self.dataset, self._seed, attempt, self.global_batch_size)

    def _microbatches(self, steps: range, order: SampleOrder | BucketOrder) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Sample numbers and image indices of each microbatch of this rank."""
        size = self._local_batch_size
        offsets = (np.arange(self.microbatches_per_step) * self._world_size + self._rank) * size
        numbers = np.add.outer(offsets, np.arange(size))  # [M, B] of a step
        at_a_time = max(1, _INDICES_AT_A_TIME // numbers.size)
        for begin in range(0, len(steps), at_a_time):
            samples = np.add.outer(steps[begin : begin + at_a_time], numbers).reshape(-1, size)
            yield from zip(samples, order.indices(samples.ravel()).reshape(samples.shape), strict=True)


def read_here(reader: Any, items: Iterable[Any], pin_memory: bool = False) -> Generator[dict[str, Any], None, None]:
    """Read batches in this process, as they are asked for: a DataLoader would add a third to the time of a small one.

    Args:
        pin_memory: place them in pinned memory, where there is a GPU.
    """
    pin_memory &= torch.cuda.is_available()
    for item in items:
        batch = reader[item]
        if pin_memory:
            batch = {key: value.pin_memory() if isinstance(value, Tensor) else value for key, value in batch.items()}
        yield batch


def microbatches_per_step(global_batch_size: int, local_batch_size: int, world_size: int) -> int:
    """Number of microbatches of each rank in one optimizer step. Raises ValueError where it is not a whole number."""
    count, rest = divmod(global_batch_size, local_batch_size * world_size)
    if rest or count < 1:
        raise ValueError(
            f"training.global_batch_size: {global_batch_size} is not a multiple of "
            f"{counted(world_size, 'rank')} x {local_batch_size} images"
        )
    return count


def num_validation_batches(dataset: Dataset, num_images: int, batch_size: int, world_size: int) -> int:
    """Number of batches that `validation_batches` of the same arguments yields on each rank."""
    parts = held_out_parts(dataset, min(num_images, len(dataset)))
    return sum(-(-total // (batch_size * world_size)) for _, _, total in parts)


def validation_batches(
    dataset: Dataset,
    info: DatasetInfo,
    num_images: int,
    batch_size: int,
    rank: int,
    world_size: int,
    on_unreadable: OnUnreadable | None = None,
) -> Iterator[Batch]:
    """Read the first `num_images` held-out images, or all where there are fewer, divided among the ranks.

    Every rank gets the same number of batches, all of one size (at most `batch_size`), so that ranks that communicate
    in each batch stay together. Missing samples are filled with image 0 at weight 0. Of images in buckets, the first of
    each bucket are read, as many as is its share of all, one bucket after the other: the above holds for each.

    Args:
        on_unreadable: called with the unreadable images of each batch that has any; the next take their places.

    Yields:
        batches of the dataset's `fetch`, with {"indices": int64 [b], numbers of the images among all that are read,
        "weights": float32 [b], 1 or 0}.

    Raises:
        DatasetError: an image could not be read.
    """
    check_buckets(dataset, info)
    reader = ReplacingReader(dataset, info)
    for first_number, first_index, total in held_out_parts(dataset, min(num_images, len(dataset))):
        for places, weights in equal_shares(total, batch_size, rank, world_size):
            batch, found, _ = reader.read(first_index + places)
            if found and on_unreadable:
                on_unreadable(found)
            yield batch | {"indices": torch.from_numpy(first_number + places), "weights": torch.from_numpy(weights)}


def equal_shares(total: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Divide places 0 .. total - 1 into as many batches of one size on every rank.

    Yields:
        places int64 [b] with b <= batch_size, and their weights float32 [b]: 1, or 0 of a place 0 that fills a batch up.
    """
    num_batches = -(-total // (batch_size * world_size))
    size = -(-total // max(num_batches * world_size, 1))  # the least padding for that number of batches
    for number in range(num_batches):
        places = (number * world_size + rank) * size + np.arange(size)
        held = places < total
        yield np.where(held, places, 0), held.astype(np.float32)


class _SampleReader:
    """Reader of one microbatch at a time, in the training process or in a loader process."""

    def __init__(self, dataset: Dataset, info: DatasetInfo, seed: int, attempt: int, horizontal_flip: bool) -> None:
        self._reader = ReplacingReader(dataset, info)
        self._seed = seed
        self._attempt = attempt
        self._horizontal_flip = horizontal_flip

    def __getitem__(self, microbatch: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
        samples, indices = torch.from_numpy(microbatch[0]), microbatch[1]
        draws = Draws(self._seed, samples, self._attempt)
        batch, found, num_replaced = self._reader.read(indices, draws)
        if self._horizontal_flip:
            batch["images"] = mirrored_by_chance(batch["images"], draws)
        return batch | {"samples": samples, "unreadable": found, "num_replaced": num_replaced}


def mirrored_by_chance(images: Tensor, draws: Draws) -> Tensor:
    """Mirror each image [B, C, H, W] with probability 1/2."""
    mirrored = draws.uniform("horizontal_flip") < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


class ReplacingReader:
    """Reader of images by index that replaces an undecodable one by the next decodable one in stored order."""

    def __init__(self, dataset: Dataset, info: DatasetInfo) -> None:
        self._dataset = dataset
        self._info = info
        self._unreadable: dict[int, UnreadableImage] = {}  # those met so far, so that each is tried once

    def read(self, indices: np.ndarray, draws: Draws | None = None) -> tuple[Batch, list[UnreadableImage], int]:
        """Read a batch, the unreadable images met on the way, and the number of replacements."""
        if not self._unreadable or not any(int(index) in self._unreadable for index in indices):
            try:
                return read_checked(self._dataset, self._info, indices, draws), [], 0
            except UnreadableImage:
                pass  # find out which, one by one
        met: dict[int, UnreadableImage] = {}
        alone = [draws and draws[slot : slot + 1] for slot in range(len(indices))]
        rows = [self._read_one(int(index), met, own) for index, own in zip(indices, alone, strict=True)]
        return joined(rows), list(met.values()), sum(int(index) in met for index in indices)

    def _read_one(self, wanted: int, met: dict[int, UnreadableImage], draws: Draws | None) -> Batch:
        first, end = bucket_range(self._dataset, wanted)
        for step in range(min(end - first, MAX_UNREADABLE_IN_A_ROW)):
            index = first + (wanted - first + step) % (end - first)
            if index not in self._unreadable:
                try:
                    return read_checked(self._dataset, self._info, np.array([index]), draws)
                except UnreadableImage as error:
                    self._unreadable[index] = UnreadableImage(index, error.path, error.reason, error.damaged)
            met[index] = self._unreadable[index]
        raise DatasetError(
            f"dataset {_name(self._dataset)}: {step + 1} images in a row cannot be decoded, the first is {met[wanted]}"
        )


class _CorruptShare:
    """Share of replaced images, which ends a run that reads little else."""

    def __init__(self, largest: float, name: str) -> None:
        self._largest = largest
        self._name = name
        self._replaced = self._read = 0

    def add(self, replaced: int, read: int) -> None:
        self._replaced += replaced
        self._read += read
        if self._replaced > self._largest * SHARE_WINDOW:
            raise DatasetError(
                f"dataset {self._name}: {self._replaced} of the last {self._read} images read cannot be decoded; more "
                f"than {self._largest:g} of {SHARE_WINDOW} end the run"
            )
        if self._read >= SHARE_WINDOW:
            self._replaced = self._read = 0


def fetch(dataset: Dataset, indices: np.ndarray, draws: Draws | None) -> Batch:
    """Read images as training does, where there are draws; unchecked."""
    if draws is None or dataset.fetch_drawn is None:
        return dataset.fetch(indices)
    return dataset.fetch_drawn(indices, draws)


def read_checked(dataset: Dataset, info: DatasetInfo, indices: np.ndarray, draws: Draws | None = None) -> Batch:
    """Read images and their conditions by index, checked against the dataset's info.

    Raises:
        UnreadableImage: one of them cannot be decoded.
        DatasetError: any other exception of the dataset, or images that contradict its info.
    """
    try:
        wanted = info.batch_entries[_shape_of(dataset, info, indices)] | ({} if draws is None else info.training_entries)
        batch = fetch(dataset, indices, draws)
        _check(batch, len(indices), wanted, info)
    except UnreadableImage:
        raise
    except Exception as error:
        index, cause = _first_failure(dataset, info, indices) or (None, error)
        place = f"images {indices[0]}, ..." if index is None else f"image {index}"
        text = unwrapped(cause)
        text = text if isinstance(cause, DatasetError) else f"{type(cause).__name__}: {text}{_raised_at(cause)}"
        raise DatasetError(f"dataset {_name(dataset)}: {place} cannot be read: {text}") from error
    return dict(batch)


def _shape_of(dataset: Dataset, info: DatasetInfo, indices: np.ndarray) -> tuple[int, int, int]:
    """Shape (C, H, W) of images of one bucket. Raises DatasetError: they are of several."""
    if dataset.buckets is None:
        return info.image_shape
    buckets = np.unique(np.searchsorted(np.cumsum(dataset.buckets), indices, side="right"))
    if len(buckets) > 1:
        raise DatasetError(f"a batch is of one bucket, and these are of {len(buckets)}")
    return info.bucket_shapes[int(buckets[0])]


def _raised_at(error: BaseException) -> str:
    """File and line of an error in a dataset's code; "" for one of the system."""
    frames = [] if isinstance(error, OSError) else traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of the images of several."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _first_failure(dataset: Dataset, info: DatasetInfo, indices: np.ndarray) -> tuple[int, Exception] | None:
    for slot, index in enumerate(indices):
        try:
            alone = indices[slot : slot + 1]
            _check(dataset.fetch(alone), 1, info.batch_entries[_shape_of(dataset, info, alone)], info)
        except Exception as error:  # noqa: BLE001 (reported with the index of its image)
            return int(index), error
    return None


def _check(batch: Batch, count: int, wanted: Entries, info: DatasetInfo) -> None:
    if not isinstance(batch, dict):
        raise DatasetError(f"fetch gives a {type(batch).__name__}, not a mapping of names to tensors")
    if batch.keys() != wanted.keys() or batch.keys() & ADDED:
        raise DatasetError(f"a batch has {_unlike(batch, wanted)}")
    for name, (shape, dtype) in wanted.items():
        if not isinstance(found := batch[name], Tensor):
            raise DatasetError(f"{name}: is a {type(found).__name__}, not a tensor")
        if found.shape != (count, *shape) or found.dtype != dtype:
            raise DatasetError(f"{name}: {found.dtype} {list(found.shape)}, not {dtype} {[count, *shape]}")
    if problem := info.condition_kind.problem(batch):
        raise DatasetError(problem)


def _unlike(batch: Batch, wanted: Entries) -> str:
    """Name, in words, an entry that a batch lacks or must not have."""
    if missing := wanted.keys() - batch.keys():
        return f"{', '.join(batch)} and no {min(missing)}, which the dataset says it gives"
    if taken := batch.keys() & ADDED:
        return f"{min(taken)}, which the loader adds (give it another name)"
    advice = "add it to DatasetInfo.entries, with the shape and dtype of one image's"
    return f"{min(batch.keys() - wanted.keys())}, which the dataset does not say it gives ({advice})"


def _name(dataset: Dataset) -> str:
    return type(dataset).Config.name
