"""Laws of cost with the number of ranks, images, steps and parameters: python benchmarks/scale.py [LAW ...]

Each law is measured at three sizes, as it was ("before": one rank does it for all, or every rank everything) and as it is
("after": a rank's share), and log(cost) is fitted to log(size): an exponent of 0 is a cost that does not grow. Of many
ranks one is simulated: its share of real files, or a fake process group of 1,024 on fake tensors. Seconds are of the
processor. Writes benchmarks/results/scale.json.
"""

import argparse
import json
import math
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.checkpoint.shared_reading import Found, Wanted, _KnownTensor
from torchtitan.checkpoint.shared_verification import shares_of
from torchtitan.conditions import Classes
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.shard_drawing import draw_shards, own_rows
from torchtitan.estimate.live_storages import LiveStorages
from torchtitan.files.shard_files import Piece, check_filled, check_shards, read_places, write_shard
from torchtitan.gns import raw_sums
from torchtitan.gns.capture import GEOMETRIES, PARTS, StepSums
from torchtitan.gns.pictures import is_drawn
from torchtitan.gns.raw_sums import ROWS_PER_FILE, RawSums
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapters import add_trained_adapter, is_adapter_parameter
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.frozen_network import cast_base
from torchtitan.models.adapters.targets import find_targets
from torchtitan.runs.folder import versions
from torchtitan.supervision import heartbeat
from torchtitan.supervision.heartbeat import Heartbeats
from torchtitan.training.hardware import device_name
from torchtitan.training.metric_points import GrowingPoints, iter_points
from torchtitan.training.sample_order import SampleOrder
from torchtitan.weights.initial_weights import inspect, share_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"
RANKS, RANKS_OF_A_MACHINE = 1024, 8
NAMES = [f"layers.{number}.weight" for number in range(480)]  # of the checkpoint under verification
Costs = tuple[float, float]  # before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("laws", nargs="*", metavar="LAW", help=f"of {', '.join(LAWS)}; default: all")
    wanted = parser.parse_args().laws or list(LAWS)
    if unknown := sorted({*wanted} - {*LAWS}):
        parser.error(f"{unknown[0]}: no such law (there are {', '.join(LAWS)})")
    found = json.loads(RESULTS.read_text())["laws"] if RESULTS.exists() else {}
    for name in wanted:
        size, cost, sizes, measure = LAWS[name]
        with tempfile.TemporaryDirectory() as folder:
            costs = [measure(Path(folder) / str(number), number) for number in sizes]
        named = list(map(parameters_of, sizes)) if size == "parameters" else sizes
        found[name] = {"size": size, "cost": cost, "sizes": named}
        for column, values in zip(("before", "after"), zip(*costs, strict=True), strict=True):
            found[name] |= {column: list(values), f"{column}_exponent": exponent(named, values)}
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        about = {"device": device_name(torch.device("cpu")), "date": date.today().isoformat(), "versions": versions()}
        RESULTS.write_text(json.dumps({"laws": found} | about, indent=1) + "\n")


def exponent(sizes: list[int], costs: tuple[float, ...]) -> float:
    """Slope of log(cost) over log(size), by least squares."""
    return round(float(np.polyfit(np.log(sizes), np.log(costs), 1)[0]), 2)


def seconds_of(work: Callable[[], object]) -> float:
    """Processor time of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


# ---------------------------------------------------------------------- checkpoints


def shards_of_ranks(folder: Path, ranks: int) -> list[Path]:
    """Shards with a row of each tensor."""
    folder.mkdir()
    paths = [folder / f"shard-{rank:05d}.safetensors" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        write_shard(path, [Piece(name, torch.zeros(1, 2), (rank, 0)) for name in NAMES])
    return paths


def headers(folder: Path, ranks: int) -> Costs:
    """Check of the shards at a save, on the rank that does most."""
    paths, share = shards_of_ranks(folder, ranks), NAMES[::ranks]
    received = [dict.fromkeys(share, ((rank, 0), (1, 2))) for rank in range(ranks)]

    def own_share() -> None:
        read_places(paths[0])
        check_filled(received)

    return seconds_of(lambda: check_shards(paths)), min(seconds_of(own_share) for _ in range(5))


def reading(folder: Path, ranks: int) -> Costs:
    """Finding the pieces to read at a resume, on every rank: before, by torch.distributed.checkpoint."""
    paths, share = shards_of_ranks(folder, ranks), NAMES[::ranks]
    pieces = {name: [Found(name, path.name, ((rank, 0), (1, 2))) for rank, path in enumerate(paths)] for name in share}
    asked = [Wanted(name, (ranks, 2), ((rank, 0), (1, 2))) for name in share for rank in range(ranks)]

    def own_share() -> None:
        read_places(paths[0])
        here = {name: _KnownTensor(of_one) for name, of_one in pieces.items()}
        for part in asked:
            here[part.name].answer(part)

    return seconds_of(HuggingFaceStorageReader(str(folder)).read_metadata), min(seconds_of(own_share) for _ in range(5))


def hashing(folder: Path, ranks: int) -> Costs:
    """GiB hashed at a resume by the rank that hashes most, 7.1 billion parameters with AdamW and one average."""
    files = {f"shard-{rank:05d}.safetensors": {"size": 16 * 7_100_000_000 // ranks} for rank in range(ranks)}
    most = max(sum(files[name]["size"] for name in share) for share in shares_of(files, ranks))
    return sum(entry["size"] for entry in files.values()) / 2**30, most / 2**30


# ---------------------------------------------------------------------- parameters


FLAVORS = ("DiT-S/2", "DiT-XL/2", "TorchDiTan-7B")


def meta_model(flavor: str):
    """Network on the meta device."""
    family = MODELS["dit"]
    with torch.device("meta"):
        return family.build(family.flavors[flavor], (4, 32, 32), Classes(1000, ()))


def parameters_of(number: int) -> int:
    """Parameters of a flavor, by its number."""
    return meta_model(FLAVORS[number]).num_parameters()


def drawing(folder: Path, number: int) -> Costs:
    """Peak GiB of drawing the parameters on one of 1,024 ranks."""
    return drawn(number, None)


def frozen(folder: Path, number: int) -> Costs:
    """Peak GiB of a frozen network in bfloat16 and its adapters of rank 16, on one of 1,024 ranks."""
    return drawn(number, LoRAConfig(enable=True, rank=16, base_dtype="bfloat16"))


def drawn(number: int, lora: LoRAConfig | None) -> Costs:
    """Peak GiB of a network's start on one of 1,024 ranks."""
    peaks = []
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        layout = Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=RANKS))
        for sharded in (False, True):
            model = meta_model(FLAVORS[number])
            if lora:
                cast_base(model, lora)
            rows_of = partial(own_rows, layout=layout) if sharded else lambda shape: slice(0, shape[0])
            with FakeTensorMode(allow_non_fake_inputs=True), LiveStorages() as live:
                live.open_window("start")
                kept = draw_shards(model, model.init_weights, rows_of, torch.device("cpu"))
                if lora:
                    add_trained_adapter(model, find_targets(model, lora, {}), lora, torch.device("cpu"))
            peaks.append(live.windows["start"].total() / 2**30)
            del kept
    finally:
        dist.destroy_process_group()
    # Drawn whole, a tensor needs no second place, as `draw_shards` gives it.
    largest = max(p.nbytes for name, p in model.named_parameters() if not is_adapter_parameter(name)) / 2**30
    return peaks[0] - largest, peaks[1]


def initial(folder: Path, ranks: int) -> Costs:
    """Seconds in which one rank checks and hashes its part of frozen initial weights, 256 tensors of 1 MiB."""
    folder.mkdir()
    path = folder / "weights.safetensors"
    save_file({f"layers.{number}.weight": torch.rand(512, 512) for number in range(256)}, path)
    names = share_of(path, 0, 1)

    def own_share() -> None:
        inspect(path, share_of(path, ranks - 1, ranks), hashed=True)

    return seconds_of(lambda: inspect(path, names, hashed=True)), min(seconds_of(own_share) for _ in range(3))


# ---------------------------------------------------------------------- data


def order(folder: Path, images: int) -> Costs:
    """Seconds to the first batch of an epoch, on every rank."""
    batch, found = np.arange(32), SampleOrder(images, 1, 0)
    return seconds_of(lambda: found._table(0)[batch]), min(seconds_of(lambda: found._computed(0)(batch)) for _ in range(5))


# ---------------------------------------------------------------------- a run's files


def sums(bins: int) -> StepSums:
    """Sums of a measured step."""
    whole = (len(PARTS), len(GEOMETRIES), bins, bins)
    shapes = ((bins,), (bins,), (bins, bins), whole[:3], whole, (bins, bins), whole, whole)
    return StepSums(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))


def raw_rows(folder: Path, interval: int) -> Costs:
    """GiB of raw sums in memory between two checkpoints, 64 bins; rows are counted with one bin."""
    values = [value for value in vars(sums(64)).values() if value is not None]
    of_row = sum(value.nbytes for value in values) / 2**30
    small, most = sums(1), 0
    writer = RawSums(folder, torch.empty(0), len(GEOMETRIES))
    with patch.object(raw_sums.pq, "write_table", lambda table, path, **more: Path(path).touch()):
        for step in range(interval):
            writer.add(step, small)
            most = max(most, len(writer._rows))
            if writer._thread:
                writer._thread.join()
    return interval * of_row, min(most, ROWS_PER_FILE) * of_row


def pictures(folder: Path, points: int) -> Costs:
    """Seconds of reading for all pictures of a run, one in 100 points of 10 bins."""
    folder.mkdir()
    path, before, after = folder / "metrics.jsonl", 0.0, 0.0
    tags = [
        f"gns/{geometry}/{estimator}/{k}/{name}"
        for geometry in GEOMETRIES for estimator in ("composite", "sketch", "pairs")
        for k in range(10) for name in ("signal", "noise", "b_simple", "lower", "upper", "samples")
    ]  # fmt: skip
    reader = GrowingPoints(path, '"gns/', is_drawn)
    for step in range(1, points + 1):
        with open(path, "a") as file:
            file.write(json.dumps({"step": step, **dict.fromkeys(tags, 1.0 / step)}) + "\n")
        if step % 100 == 0:
            before += seconds_of(lambda: list(iter_points(path, '"gns/')))
            after += seconds_of(reader.read)
    return before, after


def heartbeats(folder: Path, ranks: int) -> Costs:
    """Files replaced on the shared disk in an interval, 8 ranks a machine."""
    replaced, replace = [], heartbeat._replace

    def noted(path: Path, content: dict | list) -> None:
        if folder / "run" in path.parents:
            replaced.append(path)
        replace(path, content)

    with on_machines(folder), patch.object(heartbeat, "_replace", noted):
        beats = [Heartbeats(folder / "run", rank, ranks, 5.0, RANKS_OF_A_MACHINE) for rank in range(ranks)]
        for _ in range(2):  # the second time all have found one another
            replaced.clear()
            for rank in beats:
                rank.beat(1, "forward", 1)
    return float(ranks), float(len(replaced))


@contextmanager
def on_machines(folder: Path) -> Iterator[None]:
    """Let every eighth Heartbeats be on another machine."""
    made = iter(range(10**6))

    def place(run: Path, is_used: Callable[[Path], bool]) -> Path:
        machine = folder / f"machine-{next(made) // RANKS_OF_A_MACHINE}"
        machine.mkdir(parents=True, exist_ok=True)
        return machine

    with patch.object(heartbeat, "node_folder", place), patch.object(socket, "gethostname", lambda: "machine"):
        yield


LAWS: dict[str, tuple[str, str, list[int], Callable[[Path, int], Costs]]] = {
    "headers": ("ranks", "seconds of a save's check", [16, 64, 256], headers),
    "reading": ("ranks", "seconds to find what to read at a resume", [16, 64, 256], reading),
    "hashing": ("ranks", "GiB hashed at a resume", [16, 128, 1024], hashing),
    "drawing": ("parameters", "GiB on one of 1,024 ranks", [0, 1, 2], drawing),
    "frozen": ("parameters", "GiB on one of 1,024 ranks", [0, 1, 2], frozen),
    "initial": ("ranks", "seconds to check and hash initial weights", [4, 16, 64], initial),
    "order": ("images", "seconds to an epoch's first batch", [1 << 20, 1 << 22, 1 << 24], order),
    "raw_rows": ("steps between checkpoints", "GiB in memory", [1_000, 10_000, 50_000], raw_rows),
    "pictures": ("points", "seconds of reading for all pictures", [500, 1_000, 2_000], pictures),
    "heartbeats": ("ranks", "files replaced in an interval", [64, 256, 1024], heartbeats),
}


if __name__ == "__main__":
    assert math.isclose(exponent([1, 2, 4], (3.0, 12.0, 48.0)), 2.0)
    main()
