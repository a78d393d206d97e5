"""Raw sums of every step on disk, from which any later analysis can pool anew: <run>/gns/raw-<first>-<last>.parquet.

One row per step, in columns of lists (K bins; P parts x G geometries in the order of PARTS and GEOMETRIES, flattened):
count [K], square_losses [K], pairs [K K], squares [P G K], products [P G K K], and on measured steps all_pairs [K K],
sketched [P G K K] and corrections [P G K K] (null on others); see StepSums. Every file's metadata says K, the bins'
edges, parts and geometries.

A file is written at each checkpoint, and every ROWS_PER_FILE rows between: memory does not grow with the interval of
checkpoints. Rows beyond the checkpoint that a run resumes from are cut then.
"""

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from torchtitan.errors import one_line, reason
from torchtitan.files.durable import make_folder, replacing, sync
from torchtitan.files.optional import OptionalOutputs
from torchtitan.gns.step_sums import GEOMETRIES, PARTS, StepSums

logger = logging.getLogger(__name__)

_NAME = re.compile(r"raw-(\d{8})-(\d{8})\.parquet")
ROWS_PER_FILE = 1_000
_MOST_ROWS = 10_000  # in memory, while they cannot be written

_COLUMNS = ("count", "square_losses", "pairs", "squares", "products", "all_pairs", "sketched", "corrections")


class RawSumsError(Exception):
    """Raw sums that cannot be read; the message is one line."""


class RawSums:
    """Writer of the raw sums on the first rank; keeps rows in memory until they are flushed, or as many as a file has.

    A failing disk loses the oldest rows, and does not end the run.
    """

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
        self._lock = threading.Lock()  # of both
        self._writing = threading.Lock()  # of the files
        self._thread: threading.Thread | None = None
        self._outputs = OptionalOutputs()

    def add(self, step: int, sums: StepSums) -> None:
        """Add the sums of a step, on the host; a whole file's rows are written during training."""
        with self._lock:
            self._steps.append(step)
            self._rows.append(sums)
            whole = len(self._rows) % ROWS_PER_FILE == 0
        if whole and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.flush, name="raw sums")
            self._thread.start()

    def flush(self) -> None:
        """Flush the kept rows to one more file, on the disk when this returns; or keep them. Any thread may call it."""
        with self._writing:
            with self._lock:
                steps, rows = self._steps, self._rows
                self._steps, self._rows = [], []
            if not steps:
                return
            path = self._folder / f"raw-{steps[0]:08d}-{steps[-1]:08d}.parquet"
            kept = f"training continues, rows of the last {_MOST_ROWS:,} steps wait in memory"
            with self._outputs.attempt("the sums of the gradient noise scale", path, consequence=kept):
                make_folder(self._folder)
                with replacing(path) as unfinished:
                    pq.write_table(self._table(steps, rows), unfinished, compression="zstd")
                return
            with self._lock:
                self._steps, self._rows = (steps + self._steps)[-_MOST_ROWS:], (rows + self._rows)[-_MOST_ROWS:]

    def _table(self, steps: list[int], rows: list[StepSums]) -> pa.Table:
        columns = {"step": pa.array(steps, pa.int64())}
        for name in _COLUMNS:
            values = [getattr(row, name) for row in rows]
            lists = [None if value is None else value.flatten().tolist() for value in values]
            columns[name] = pa.array(lists, pa.list_(pa.float64()))
        return pa.table(columns).replace_schema_metadata(self._metadata)

    def cut(self, last_step: int) -> None:
        """Cut the rows after a step, when a run resumes from it; unwritten rows are dropped.

        A file that cannot be read, or holds something else, is set aside under another name, and does not count.
        """
        with self._writing:
            with self._lock:
                self._steps, self._rows = [], []
            for path in raw_files(self._folder):
                first, last = _steps_of(path)
                if last <= last_step:
                    continue
                try:
                    if b"parts" not in (pq.read_schema(path).metadata or {}):  # another program's
                        raise KeyError("it holds no raw sums of the gradient noise")
                    if first <= last_step:
                        self._shorten(path, first, last_step)
                    path.unlink()
                    sync(self._folder)
                except (OSError, pa.ArrowException, KeyError) as error:
                    logger.error(f"{path}: cannot be cut to step {last_step}: {reason(error)}; it is set aside")
                    with self._outputs.attempt("the name under which it is set aside", path, consequence="it stays"):
                        path.replace(path.with_name(f"{path.name}.aside"))

    def _shorten(self, path: Path, first: int, last_step: int) -> None:
        table = pq.read_table(path)
        kept = table.filter(pa.compute.less_equal(table["step"], last_step))
        with replacing(self._folder / f"raw-{first:08d}-{last_step:08d}.parquet") as unfinished:
            pq.write_table(kept, unfinished, compression="zstd")


def raw_files(folder: Path) -> list[Path]:
    """Files of a run's `gns` folder in the order of their steps."""
    return sorted(path for path in folder.glob("raw-*.parquet") if _NAME.fullmatch(path.name) and path.is_file())


def _steps_of(path: Path) -> tuple[int, int]:
    first, last = path.stem.split("-")[1:]
    return int(first), int(last)


def read_sums(folder: Path) -> Iterator[tuple[int, StepSums]]:
    """Yield (step, sums) of every step of a run, in order; of none without files. Raises RawSumsError: one cannot be read."""
    for path in raw_files(folder):
        with _reading(path):
            yield from _read_file(path)


def _read_file(path: Path) -> Iterator[tuple[int, StepSums]]:
    file = pq.ParquetFile(path)
    metadata = file.schema_arrow.metadata
    bins, geometries = len(json.loads(metadata[b"edges"])) + 1, len(json.loads(metadata[b"geometries"]))
    whole = (len(PARTS), geometries, bins, bins)
    shapes = ((bins,), (bins,), (bins, bins), whole[:3], whole, (bins, bins), whole, whole)
    for batch in file.iter_batches(256):
        for row in batch.to_pylist():
            values: list[Any] = [
                None if row[name] is None else torch.tensor(row[name], dtype=torch.float64).view(shape)
                for name, shape in zip(_COLUMNS, shapes, strict=True)
            ]
            yield row["step"], StepSums(*values)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise RawSumsError with the path for what a damaged or foreign file raises."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RawSumsError(f"{path}: cannot be read: {reason(error)}") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # no metadata, other columns, other lengths
        raise RawSumsError(f"{path}: holds no raw sums of the gradient noise: {one_line(error)}") from error
