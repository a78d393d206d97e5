"""Row groups of streamed tables: read once an epoch, again where a read fails, and shared by the processes of a machine."""

import os
import re
from functools import partial

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from tests.encoded_images import decoded, everything, image_bytes
from tests.faults.confinement import bounded
from tests.hub_tables import GROUP, ROWS, config_of, forget_tables, write_files
from torchtitan.data import DatasetError, UnreadableImage, huggingface, row_groups
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.node_cache import NodeCache
from torchtitan.data.row_groups import RowGroupImages
from torchtitan.training.sample_order import SampleOrder


@pytest.fixture(autouse=True)
def opened_anew(monkeypatch):
    forget_tables(monkeypatch)


def count_reads(monkeypatch) -> list[int]:
    reads, read = [], RowGroupImages._read
    monkeypatch.setattr(RowGroupImages, "_read", lambda self, group: reads.append(group) or read(self, group))
    return reads


def test_training_reads_each_row_group_once_an_epoch_and_keeps_a_window(tmp_path, monkeypatch):
    write_files(tmp_path)
    dataset = HuggingFace(config_of(tmp_path, streaming=True), "train")
    source, reads = dataset._source, count_reads(monkeypatch)
    indices = SampleOrder.of(dataset, 0, 0).indices(np.arange(len(dataset)))
    for first in range(0, len(indices), 6):
        dataset.fetch(indices[first : first + 6])
        assert len(source._kept) <= 4
    assert sorted(reads) == list(range(2 * -(-ROWS // GROUP)))
    assert reads != sorted(reads)
    assert dataset.blocks.sum() == 2 * ROWS and dataset.blocks_at_a_time == 4


def test_held_out_rows_are_left_out_of_the_blocks(tmp_path):
    write_files(tmp_path)
    dataset = HuggingFace(config_of(tmp_path, streaming=True, validation_fraction=0.5), "train")
    assert dataset.blocks.sum() == len(dataset) == ROWS and set(dataset.blocks.tolist()) <= {3, 4, 2}


class Failing:
    """A file system whose first `count` openings fail."""

    def __init__(self, storage, count, error):
        self.storage, self.left, self.error, self.tries = storage, count, error, 0

    def open(self, *arguments):
        self.tries += 1
        if self.tries <= self.left:
            raise self.error
        return self.storage.open(*arguments)


@pytest.mark.parametrize("count, tries", [(3, 4), (4, 4)])
def test_a_read_that_fails_is_tried_again_a_few_times(tmp_path, count, tries):
    write_files(tmp_path)
    dataset = HuggingFace(config_of(tmp_path, streaming=True), "train")
    failing = dataset._source._storage = Failing(fsspec.filesystem("file"), count, TimeoutError("no\nanswer"))
    if count < tries:
        assert torch.equal(dataset.fetch(np.array([0]))["images"][0], decoded(image_bytes(0)))
    else:
        message = r"00002.parquet: row group 0 cannot be read, tried 4 times \(TimeoutError: no answer\)$"
        with pytest.raises(DatasetError, match=message) as caught:
            dataset.fetch(np.array([0]))
        assert not isinstance(caught.value, UnreadableImage)
    assert failing.tries == tries


def test_a_damaged_row_group_ends_the_run_and_a_damaged_image_does_not(tmp_path, monkeypatch):
    def change(rows, labels):
        rows[3] = {"bytes": b"text", "path": None}
        rows[5] = {"bytes": None, "path": "elsewhere.png"}
        rows[6] = None
        labels[8] = None
        labels[9] = 5

    write_files(tmp_path, change=change, statistics=False)
    dataset = HuggingFace(config_of(tmp_path, streaming=True), "train")
    name = f"{tmp_path}/train-00000-of-00002.parquet: row group 0"
    for row, reason in ((3, "not an image of a known format"), (5, "the row has no image"), (6, "the row has")):
        with pytest.raises(UnreadableImage, match=re.escape(f"{name}, row {row}: {reason}")):
            dataset.fetch(np.array([0, row]))
    for row, label in ((8, None), (9, 5)):
        with pytest.raises(DatasetError, match=f"row group 1, row {row - GROUP}: label {label} is not in 0..4"):
            dataset.fetch(np.array([row]))
    file = tmp_path / "train-00001-of-00002.parquet"
    content = bytearray(file.read_bytes())
    content[4:4000] = b"\xff" * 3996
    file.write_bytes(content)
    monkeypatch.setattr(row_groups, "PAUSES", (60.0,))  # the file is here, and another try would find the same
    with pytest.raises(DatasetError, match="train-00001-of-00002.parquet: row group 0 cannot be read"):
        HuggingFace(config_of(tmp_path, streaming=True), "train").fetch(np.array([ROWS]))


def test_an_image_stored_once_and_repeated_fills_no_memory(tmp_path):
    image = image_bytes(0) + bytes(1 << 20)
    images = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), pa.array([image]))
    table = pa.table({"picture": pa.StructArray.from_arrays([images], ["bytes"]), "kind": [0] * 4000})
    path = tmp_path / "train-0.parquet"
    parquet.write_table(table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 26)
    assert path.stat().st_size < 100_000
    # 64 MiB for each of 4 row groups
    config = config_of(tmp_path, streaming=True, label_column="kind", window_gib=0.25)
    with bounded(20, 400 << 20), pytest.raises(DatasetError, match="row group 0: images of more than 65 MiB, which"):
        HuggingFace(config, "train").fetch(np.array([0]))


def test_processes_share_row_groups_through_a_folder_of_bounded_size(tmp_path, monkeypatch):
    write_files(tmp_path / "a")
    config = config_of(tmp_path / "a", streaming=True, cache_path=str(tmp_path / "cache"))
    reads = count_reads(monkeypatch)
    plain = everything(HuggingFace(config_of(tmp_path / "a", streaming=True), "train"))
    reads.clear()
    for _ in range(2):  # as two processes would
        huggingface._open_groups.cache_clear()
        images, labels = everything(HuggingFace(config, "train"))
        assert torch.equal(images, plain[0]) and labels == plain[1]
    assert len(reads) == len(set(reads)) == 26
    write_files(tmp_path / "a", change=lambda rows, labels: rows.reverse())  # of the same sizes
    huggingface._open_groups.cache_clear()
    assert torch.equal(everything(HuggingFace(config, "train"))[0][0], decoded(image_bytes(ROWS - 1)))
    (tmp_path / "file").write_text("")
    broken = config_of(tmp_path / "a", streaming=True, cache_path=str(tmp_path / "file"))
    with pytest.raises(DatasetError, match="data.cache_path: .*file: File exists"):
        HuggingFace.info(broken)


def test_the_shared_folder_drops_what_was_used_longest_ago_and_mends_what_is_damaged(tmp_path):
    tables = {f"{number:04x}": pa.table({"x": np.full(1000, number)}) for number in range(5)}
    made, size = [], 9000  # of one table's file, about

    def make(key):
        made.append(key)
        return tables[key]

    cache = NodeCache(tmp_path / "cache", 3 * size)
    for key in ("0000", "0001", "0002", "0000", "0003", "0000"):
        assert cache.get(key, partial(make, key)).equals(tables[key])
    assert made == ["0000", "0001", "0002", "0003"]
    assert sorted(path.stem for path in (tmp_path / "cache").glob("*.arrow")) == ["0000", "0002", "0003"]
    (tmp_path / "cache" / "0002.arrow").write_bytes(b"ARROW1")
    assert cache.get("0002", lambda: make("0002")).equals(tables["0002"]) and made[4:] == ["0002"]


def test_a_pipe_for_a_parquet_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "train-0.parquet")
    with bounded(20, 1 << 30), pytest.raises(DatasetError, match="train-0.parquet.* is a pipe, not a regular file"):
        HuggingFace.info(config_of(tmp_path, streaming=True))


def test_the_shared_folder_keeps_what_others_have_put_there(tmp_path):
    table, folder = pa.table({"x": np.full(1000, 1)}), tmp_path / "cache"
    folder.mkdir()
    with pa.ipc.new_file(str(folder / f"{'a' * 32}.arrow"), table.schema) as file:  # of such a name, without the mark
        file.write_table(table)
    for name in ("dataset-train.arrow", "notes.txt", f"{'b' * 32}.arrow"):
        (folder / name).write_bytes(b"of somebody")
    (folder / "cccc.arrow").symlink_to(tmp_path / "elsewhere")
    locked = f"lock-{int('0000', 16) % 64:02}"
    (folder / locked).write_bytes(b"of somebody, too")
    before = {path.name for path in folder.iterdir()}
    old, new = (folder / f".{key}.arrow.{'0' * 32}.unfinished" for key in ("dddd", "eeee"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    cache = NodeCache(folder, 1)
    for key in ("0000", "0001"):
        assert cache.get(key, lambda: table).equals(table)
    left = {path.name for path in folder.iterdir()} - {"lock-01", "lock-size"}
    assert left == before | {"0001.arrow", new.name}
    assert (folder / locked).read_bytes() == b"of somebody, too"
