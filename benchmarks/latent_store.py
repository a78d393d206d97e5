"""Throughput of the latent store: python benchmarks/latent_store.py [--images N] [--rounds N]

Latents 4x32x32, mean and standard deviation in float16, in random order and batches of 256, from memory (each image is
read once before). Two processes read at once; rounds of the store, of samples drawn from it and of one .npy file per image
take turns, and the ratio is taken round by round. Then the time to open a store of ImageNet's size. Writes
benchmarks/results/latent_store.json.
"""

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks import shared
from torchtitan.data.base import Draws
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.latents import LatentStore, Normalization, StorePlan, StoreWriter, images_per_shard
from torchtitan.latents.index import INDEX_FILE, ShardRecord, StoreIndex, shard_name, write_sealed

SHAPE = (4, 32, 32)
BATCH = 256
PROCESSES = 2
IMAGENET = 1_281_167
UNIT = Normalization(shift=[0.0] * 4, scale=[1.0] * 4, source="given")


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, files, large = (Path(folder) / name for name in ("store", "npy", "large"))
        write_both(store, files, arguments.images)
        ways = {"stored": read_stored, "samples": read_samples, "npy": read_npy}
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(arguments.rounds + 1):
            for way, read in ways.items():
                rate = images_per_second(read, files if way == "npy" else store, arguments.images)
                if number:  # the first round brings everything to memory
                    rates[way].append(rate)
        result = {
            "latents": "4x32x32, mean and standard deviation, float16", "images": arguments.images, "batch": BATCH,
            "processes": PROCESSES, "rounds": arguments.rounds,
            "images_per_second": {way: statistics.median(found) for way, found in rates.items()},
            "store_over_npy": statistics.median(a / b for a, b in zip(rates["stored"], rates["npy"], strict=True)),
            "seconds_to_open_imagenet": seconds_to_open(large), **shared.conditions(torch.device("cpu")),
        }  # fmt: skip
    print(json.dumps(result, indent=1))
    shared.write_results("latent_store", result)


def plan_of(num_images: int) -> StorePlan:
    return StorePlan(
        num_source_images=num_images, images_per_shard=images_per_shard(num_images), shape=SHAPE, posterior=True,
        mirrored=False, dtype="float16", num_classes=1000, autoencoder={"name": "unknown"}, normalization=UNIT,
    )


def write_both(store: Path, files: Path, num_images: int) -> None:
    writer = StoreWriter(store, plan_of(num_images))
    files.mkdir()
    for number in writer.pending():
        images = writer.plan.source_images_of(number)
        values = torch.rand(len(images), 1, 2, *SHAPE)
        writer.write(number, values, torch.arange(images.start, images.stop) % 1000)
        for image, moments in zip(images, values[:, 0].half().numpy(), strict=True):
            np.save(files / f"{image}.npy", moments)
    writer.finish()


# ---------------------------------------------------------------------- ways of reading: folder -> (images -> anything)


def read_stored(folder: Path) -> Callable[[np.ndarray], object]:
    return LatentStore(folder).read_stored


def read_samples(folder: Path) -> Callable[[np.ndarray], object]:
    dataset = Latents(LatentsConfig(path=str(folder), validation_fraction=0.0), "train")
    return lambda images: dataset.fetch_drawn(images, Draws(0, torch.from_numpy(images)))


def read_npy(folder: Path) -> Callable[[np.ndarray], object]:
    return lambda images: np.stack([np.load(folder / f"{image}.npy") for image in images])


# ---------------------------------------------------------------------- measurements


def images_per_second(way: Callable, folder: Path, num_images: int) -> float:
    """Images per second of processes that share the images in random order, from the moment that all are ready."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES + 1)
    readers = [
        context.Process(target=read_share, args=(way, folder, num_images, rank, barrier)) for rank in range(PROCESSES)
    ]
    for reader in readers:
        reader.start()
    barrier.wait()
    started = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - started
    for reader in readers:
        reader.join()
    return num_images / seconds


def read_share(way: Callable, folder: Path, num_images: int, rank: int, barrier) -> None:
    torch.set_num_threads(1)
    read = way(folder)
    order = np.random.default_rng(0).permutation(num_images)[rank::PROCESSES]
    barrier.wait()
    for first in range(0, len(order), BATCH):
        read(order[first : first + BATCH])
    barrier.wait()


def seconds_to_open(folder: Path) -> float:
    """Seconds to open an index and files of the right sizes that take no room on the disk."""
    plan = plan_of(IMAGENET)
    folder.mkdir()
    shards = []
    for number in range(plan.num_shards):
        count = len(plan.source_images_of(number))
        size = 200 + count * (2 * 2 * int(np.prod(SHAPE)) + 8)
        with open(folder / shard_name(number), "wb") as file:
            file.truncate(size)
        shards.append(ShardRecord(num_images=count, size=size, sha256="0" * 64))
    index = StoreIndex(**plan.model_dump() | {"normalization": UNIT, "num_images": IMAGENET}, shards=shards)
    write_sealed(folder / INDEX_FILE, index.model_dump(mode="json"))
    started = time.perf_counter()
    LatentStore(folder)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
