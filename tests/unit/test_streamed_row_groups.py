"""Row groups of streamed tables: read once an epoch, and again where a read fails."""

import os
import re

import fsspec
import numpy as np
import pytest
import torch

from tests.encoded_images import decoded, image_bytes
from tests.faults.confinement import bounded
from tests.hub_tables import GROUP, ROWS, config_of, forget_tables, write_files
from torchtitan.data import DatasetError, UnreadableImage, row_groups
from torchtitan.data.huggingface import HuggingFace
from torchtitan.data.row_groups import RowGroupImages
from torchtitan.training.sample_order import sample_order


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
    indices = sample_order(dataset, 0, 0, 1).indices(np.arange(len(dataset)))
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


def test_a_pipe_for_a_parquet_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "train-0.parquet")
    with bounded(20, 1 << 30), pytest.raises(DatasetError, match="train-0.parquet.* is a pipe, not a regular file"):
        HuggingFace.info(config_of(tmp_path, streaming=True))
