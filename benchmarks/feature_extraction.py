"""Time and memory of evaluated features against the bare extractor: python benchmarks/feature_extraction.py [--images N]

Inception with random weights, on images of 256 x 256 pixels. Bare is a loop of the extractor over batches that are in
memory. A folder of PNG files and an npz file are hashed, read, extracted, written chunk by chunk, and summed to moments,
as scripts/evaluate.py does. Each runs in a separate process, for its peak memory; rounds are interleaved, and the ratio is
taken round by round. Time is the processor's on the CPU, and the clock's on a GPU. Writes
benchmarks/results/feature_extraction.json.
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchtitan.distributed.mesh import compute_device
from torchtitan.evaluation.feature_files import BATCH_SIZE, FeatureFolder, extract_features, hash_images
from torchtitan.evaluation.image_sets import open_images
from torchtitan.features.inception import Inception2015, InceptionNetwork, published_shapes
from torchtitan.fidelity.moments import MomentsAccumulator
from torchtitan.runs.folder import versions
from torchtitan.statistics.interval import mean_interval
from torchtitan.training.hardware import device_name, peak_resident_gib

ROOT = Path(__file__).resolve().parent.parent
SIDE = 256
# (extractor, folder, batch size) -> seconds
Way = Callable[[Inception2015, Path, int], float]
FOLDER, NPZ = "images", "images.npz"
CLOCKS = {"cpu": "processor time of all threads", "cuda": "wall clock"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_images(folder, arguments.images)
        ways: dict[str, Way] = {"bare": bare, "folder": functools.partial(stored, FOLDER), "npz": functools.partial(stored, NPZ)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        peaks: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                taken, peak = in_own_process(way, folder, arguments.batch_size)
                seconds[name].append(taken)
                peaks[name].append(peak)
    ratios = {
        name: [one / other for one, other in zip(seconds[name], seconds["bare"], strict=True)] for name in ("folder", "npz")
    }
    result = {
        "extractor": "inception", "images": arguments.images, "side": SIDE, "batch_size": arguments.batch_size,
        "rounds": arguments.rounds,
        "clock": CLOCKS[compute_device().type],
        "images_per_second": {name: arguments.images / statistics.median(found) for name, found in seconds.items()},
        "time_over_bare": {name: {"mean": statistics.fmean(found), "all": found} | ends(found) for name, found in ratios.items()},
        "peak_gib": {name: statistics.median(found) for name, found in peaks.items()},
        "device": device_name(compute_device()), "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / "feature_extraction.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def ends(ratios: list[float]) -> dict[str, list[float]]:
    interval = mean_interval(ratios)
    return {"mean_95_percent": [interval.lower, interval.upper]} if interval.bounded else {}


def write_images(folder: Path, count: int) -> None:
    """Write smooth random images with a little noise, which compress about as photographs do."""
    generator = np.random.default_rng(0)
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    (folder / FOLDER).mkdir()
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float64)
        images[number] = (smooth + generator.normal(0, 4, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(images[number]).save(folder / FOLDER / f"{number:06d}.png", compress_level=1)
    np.savez(folder / NPZ, arr_0=images)


def open_random() -> Inception2015:
    """Inception with random weights, which takes the time of the published ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = published_shapes(InceptionNetwork())
    tensors = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    return Inception2015(tensors, "0" * 64, compute_device())


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Weight that keeps the features' size: normal by fan-in, norms without effect."""
    if len(shape) > 1:
        return torch.randn(shape, generator=generator) * (2 / math.prod(shape[1:])) ** 0.5
    return torch.ones(shape) if name.endswith(("bn.weight", "running_var")) else torch.zeros(shape)


def bare(extractor: Inception2015, folder: Path, batch_size: int) -> float:
    """Seconds to extract images that are in memory already."""
    with np.load(folder / NPZ) as content:
        images = torch.from_numpy(content["arr_0"].transpose(0, 3, 1, 2).copy())
    started = now()
    torch.cat([extractor.extract(batch)["pooled"] for batch in images.split(batch_size)]).cpu()
    return now() - started


def stored(name: str, extractor: Inception2015, folder: Path, batch_size: int) -> float:
    """Seconds of what the command does with a folder or a file."""
    started = now()
    hashed = hash_images(open_images(folder / name))
    features = FeatureFolder(folder / f"cache-{os.getpid()}", extractor)
    with features.opened():
        extract_features(hashed, ["pooled"], features, batch_size)
        moments = MomentsAccumulator(extractor.dims["pooled"])
        for rows in features.rows(hashed, "pooled"):
            moments.add(rows)
    return now() - started


def in_own_process(way: Way, folder: Path, batch_size: int) -> tuple[float, float]:
    """Seconds of a way, and the peak in GiB of a process that does only this."""
    context = multiprocessing.get_context("fork")  # this process has not touched a GPU
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(way, folder, batch_size, sender))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    return found


def measure(way: Way, folder: Path, batch_size: int, sender) -> None:
    seconds = way(open_random(), folder, batch_size)
    sender.send((seconds, peak_resident_gib()))


def now() -> float:
    """Seconds of the clock of the device."""
    return time.process_time() if compute_device().type == "cpu" else time.perf_counter()


if __name__ == "__main__":
    main()
