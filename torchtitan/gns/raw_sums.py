"""The sums of every step on disk, so that any later analysis can pool them anew: <run>/gns/raw-<first>-<last>.parquet.

One row per step, in columns of lists (K bins; P parts x G geometries in the order of PARTS and GEOMETRIES, flattened):
count [K], square_losses [K], pairs [K K], squares [P G K], products [P G K K], and on measured steps all_pairs [K K], sketched [P G K K]
and corrections [P G K K] (null on others); see StepSums. Every file's metadata says K, the bins' edges, parts and geometries.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from torchtitan.gns.capture import GEOMETRIES, PARTS, StepSums

logger = logging.getLogger(__name__)

_COLUMNS = ("count", "square_losses", "pairs", "squares", "products", "all_pairs", "sketched", "corrections")


class RawSums:
    """Writer of the first rank; keeps rows in memory until they are flushed."""

    def __init__(self, folder: Path, edges: Tensor, num_geometries: int) -> None:
        """`edges`: inner edges in t, [K - 1]."""
        self._folder = folder
        self._metadata = {
            "edges": json.dumps(edges.tolist()),
            "parts": json.dumps(PARTS),
            "geometries": json.dumps(GEOMETRIES[:num_geometries]),
        }
        self._steps: list[int] = []
        self._rows: list[StepSums] = []

    def add(self, step: int, sums: StepSums) -> None:
        """Keep the sums of a step; on the host."""
        self._steps.append(step)
        self._rows.append(sums)

    def flush(self) -> None:
        """Write what is kept as one more file."""
        if not self._steps:
            return
        columns = {"step": pa.array(self._steps, pa.int64())}
        for name in _COLUMNS:
            values = [getattr(row, name) for row in self._rows]
            lists = [None if value is None else value.flatten().tolist() for value in values]
            columns[name] = pa.array(lists, pa.list_(pa.float64()))
        table = pa.table(columns).replace_schema_metadata(self._metadata)
        path = self._folder / f"raw-{self._steps[0]:08d}-{self._steps[-1]:08d}.parquet"
        temporary = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, temporary, compression="zstd")
            temporary.replace(path)
        except OSError as error:  # kept in memory: the next flush tries again
            logger.error(f"{path}: cannot be written: {' '.join(str(error).split())}; training goes on")
            return
        self._steps, self._rows = [], []

    def cut(self, last_step: int) -> None:
        """Drop what is of steps after one, when a run goes on from there; what is not written yet is."""
        self._steps, self._rows = [], []
        for path in sorted(self._folder.glob("raw-*.parquet")):
            first, last = (int(number) for number in path.stem.split("-")[1:])
            if first > last_step:
                path.unlink()
            elif last > last_step:
                table = pq.read_table(path)
                kept = table.filter(pa.compute.less_equal(table["step"], last_step))
                shorter = self._folder / f"raw-{first:08d}-{last_step:08d}.parquet"
                pq.write_table(kept, temporary := shorter.with_suffix(".tmp"), compression="zstd")
                temporary.replace(shorter)
                path.unlink()


def raw_files(folder: Path) -> list[Path]:
    """Files of a run's `gns` folder in the order of their steps."""
    return sorted(folder.glob("raw-*.parquet"))


def read_edges(folder: Path) -> Tensor:
    """Inner edges in t, float64 [K - 1]."""
    metadata = pq.read_schema(raw_files(folder)[0]).metadata
    return torch.tensor(json.loads(metadata[b"edges"]), dtype=torch.float64)


def read_sums(folder: Path) -> Iterator[tuple[int, StepSums]]:
    """Yield (step, sums) of every step of a run, in order."""
    for path in raw_files(folder):
        file = pq.ParquetFile(path)
        metadata = file.schema_arrow.metadata
        bins, geometries = len(json.loads(metadata[b"edges"])) + 1, len(json.loads(metadata[b"geometries"]))
        whole = (len(PARTS), geometries, bins, bins)
        shapes = ((bins,), (bins,), (bins, bins), whole[:3], whole, (bins, bins), whole, whole)
        for batch in file.iter_batches(256):
            for row in batch.to_pylist():
                values = [
                    None if row[name] is None else torch.tensor(row[name], dtype=torch.float64).view(shape)
                    for name, shape in zip(_COLUMNS, shapes, strict=True)
                ]
                yield row["step"], StepSums(*values)
