"""Lists, traces, sums, pictures and status whose place is taken or whose content is damaged: the run does without."""

import json
from contextlib import nullcontext

import pytest
import torch

from tests.unit.test_gns_pool import EDGES, GEOMETRIES, assert_rows, made_up, written
from tests.unit.test_profiling import CPU
from torchtitan.data import UnreadableImage
from torchtitan.errors import RunFolderError
from torchtitan.gns import raw_sums
from torchtitan.gns.raw_sums import RawSums, raw_files
from torchtitan.profiling.config import ProfilingConfig
from torchtitan.profiling.profiler import Profiler
from torchtitan.runs.status import remove_status, write_status
from torchtitan.training.corrupt_images import CORRUPT_IMAGES_FILE, CorruptImages


def test_corrupt_images_are_listed_once_their_list_can_be_written(tmp_path, caplog):
    path = tmp_path / CORRUPT_IMAGES_FILE
    path.mkdir()
    corrupt = CorruptImages(tmp_path)
    for name in ("a", "b"):
        corrupt.record([UnreadableImage(0, name, "empty")])
    assert corrupt.count() == 2 and sum("cannot be written" in message for message in caplog.messages) == 1
    path.rmdir()
    corrupt.record([UnreadableImage(0, "c", "empty")])
    corrupt.sync()
    assert path.read_text() == "a\tempty\nb\tempty\nc\tempty\n"
    CorruptImages(tmp_path)
    assert not path.exists()  # of an attempt that ended before its first checkpoint


def test_a_trace_that_cannot_be_written_leaves_nothing_and_the_next_one_is_made(tmp_path, caplog, capfd):
    config = ProfilingConfig(enable_profiling=True, profile_freq=4)
    profiler = Profiler(config, tmp_path, CPU, nullcontext)
    (tmp_path / "profile").write_text("in the way")
    for step in range(1, 13):
        if step == 9:
            (tmp_path / "profile").unlink()
        with profiler.step(step):
            torch.ones(2).mul(step)
    profiler.close()
    assert [path.parent.name for path in tmp_path.rglob("*.json.gz")] == ["step-00000012"]
    assert [message.split(": ")[1] for message in caplog.messages] == [
        "the trace cannot be written", "the trace can be written again",
    ]  # fmt: skip


def test_sums_that_cannot_be_written_wait_and_their_memory_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(raw_sums, "_MOST_ROWS", 4)
    folder = tmp_path / "gns"
    folder.write_text("in the way")
    raw = RawSums(folder, EDGES, GEOMETRIES)
    for step in range(1, 8):
        raw.add(step, made_up(step, measured=step % 3 == 0))
        raw.flush()
    folder.unlink()
    raw.flush()
    assert_rows(folder, [4, 5, 6, 7])
    assert [message.split(": ")[1] for message in caplog.messages] == [
        "the sums of the gradient noise scale cannot be written", "the sums of the gradient noise scale can be written again",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["zeros", "half"])
def test_sums_that_are_damaged_are_named_and_set_aside_where_they_must_be_cut(tmp_path, caplog, damage):
    written(tmp_path, 7, (4, 7))
    path = tmp_path / "raw-00000005-00000007.parquet"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)) if damage == "zeros" else content[: len(content) // 2])
    content = path.read_bytes()
    raw = RawSums(tmp_path, EDGES, GEOMETRIES)
    raw.cut(6)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{path}: cannot be cut to step 6: ")
    assert (tmp_path / f"{path.name}.aside").read_bytes() == content and len(raw_files(tmp_path)) == 1
    for step in (7, 8):
        raw.add(step, made_up(step, measured=step % 3 == 0))
    raw.flush()
    assert_rows(tmp_path, [1, 2, 3, 4, 7, 8])


def test_a_status_that_one_place_refuses_is_written_to_the_other(tmp_path, monkeypatch, caplog):
    (tmp_path / "status.json").mkdir()
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(tmp_path / "for the launcher"))
    write_status(tmp_path, "failed", 1, "it fell")
    assert json.loads((tmp_path / "for the launcher").read_text())["reason"] == "it fell"
    assert caplog.messages == [
        f"{tmp_path}/status.json: the status cannot be written: is a folder, not a regular file; the run has ended: failed"
    ]
    with pytest.raises(RunFolderError, match="status.json: cannot be removed: "):
        remove_status(tmp_path)
