"""Saves beside training, saves that fail, and processes that die while saving."""

import errno
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.launcher import run_on_ranks
from tests.unit.test_checkpoint import saver
from torchtitan.checkpoint import checkpointer as checkpoint
from torchtitan.checkpoint import store as checkpoint_store
from torchtitan.checkpoint.checkpointer import (
    CheckpointError,
    checkpoint_path,
    checkpoint_steps,
    newest_good,
    read_state,
    read_tensors,
)
from torchtitan.files import shard_files


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"part.{n}": torch.randn(300, n + 1, generator=generator) for n in range(3)}


def read(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    read_tensors(checkpoint_path(folder, step), found)
    return found


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- beside training


class SlowWriter:
    """Holds every write until it is let go on, and counts how many are under way."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.under_way = self.most = 0

    def __call__(self, path, pieces):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.entered.set()
        assert self.go_on.wait(60)
        self.under_way -= 1
        return shard_files.write_shard(path, pieces)


def test_values_that_change_during_the_write_do_not_leak_into_it(tmp_path, monkeypatch):
    slow = SlowWriter()
    monkeypatch.setattr(checkpoint, "write_shard", slow)
    keeper, tensors, state = saver(tmp_path, async_mode="async"), some_tensors(), {"step": 1, "list": [1]}
    keeper.save(1, tensors, state)
    assert slow.entered.wait(60)
    for tensor in tensors.values():
        tensor.zero_()
    state["list"].append(2)
    assert checkpoint_steps(keeper.folder) == []
    slow.go_on.set()
    assert keeper.wait() is None
    assert equal(read(keeper.folder, 1), some_tensors())
    assert read_state(checkpoint_path(keeper.folder, 1)) == {"step": 1, "list": [1]}
    keeper.close()


def test_there_are_never_two_saves_at_once_and_close_awaits_the_last(tmp_path, monkeypatch):
    slow = SlowWriter()
    monkeypatch.setattr(checkpoint, "write_shard", slow)
    keeper = saver(tmp_path, async_mode="async")
    threading.Timer(0.3, slow.go_on.set).start()
    for step in (1, 2, 3):  # the buffers are used again: each must hold the values of its own step
        keeper.save(step, some_tensors(step), {"step": step})
    keeper.close()
    assert slow.most == 1 and checkpoint_steps(keeper.folder) == [3, 2, 1]
    assert all(equal(read(keeper.folder, step), some_tensors(step)) for step in (1, 2, 3))


# --- saves that fail


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device\nand more lines")


PLACES = {
    "tensors": (checkpoint, "write_shard"), "state": (checkpoint, "write_synced"), "back": (checkpoint, "read_back"),
    "manifest": (checkpoint_store, "write_manifest"), "fsync": (os, "fsync"), "rename": (Path, "rename"),
    "folder": (Path, "mkdir"),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_is_logged_and_the_next_one_tries_again(tmp_path, monkeypatch, caplog, mode):
    keeper = saver(tmp_path, keep_latest_k=1, async_mode=mode)
    keeper.save(1, some_tensors(1), {"step": 1})
    for count, (where, name) in enumerate(PLACES.values(), start=1):
        caplog.clear()
        with monkeypatch.context() as patched:
            keeper.wait()
            patched.setattr(where, name, full)
            keeper.save(2, some_tensors(2), {"step": 2})
            problem = keeper.wait()
        assert problem.startswith(f"{checkpoint_path(keeper.folder, 2)}: cannot be written: ")
        assert "No space left on device" in problem and "\n" not in problem
        assert [record.message for record in caplog.records if problem in record.message], name
        assert keeper.failures == count
        assert [path.name for path in keeper.folder.iterdir()] == ["step-00000001"], name
        assert newest_good(keeper.folder) == (1, [])
    with pytest.raises(CheckpointError, match=r"not saved \(.* goes on from step 1, the newest good one\): .*No space left"):
        keeper.require_saved()
    keeper.save(3, some_tensors(3), {"step": 3})
    keeper.require_saved()
    assert checkpoint_steps(keeper.folder) == [3] and equal(read(keeper.folder, 3), some_tensors(3))
    keeper.close()


def test_a_rank_lost_after_the_checkpoint_counts_is_not_told_as_nothing_kept(tmp_path, monkeypatch, caplog):
    keeper = saver(tmp_path)
    answer = checkpoint.from_first_rank

    def lost(function, *arguments, **keys):
        found = answer(function, *arguments, **keys)
        if function == keeper._conclude:
            raise RuntimeError("Connection reset by peer")
        return found

    monkeypatch.setattr(checkpoint, "from_first_rank", lost)
    keeper.save(1, some_tensors(1), {})
    assert "Connection reset by peer; a resume uses it where it is whole, and the next save tries again" in caplog.text
    assert newest_good(keeper.folder) == (1, [])


def test_a_file_that_cannot_grow_is_a_full_disk(tmp_path):
    keeper = saver(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        keeper.save(1, some_tensors(), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in keeper.wait() and list(keeper.folder.iterdir()) == []


def test_a_disk_that_keeps_other_bytes_is_found_out_before_anything_is_deleted(tmp_path, monkeypatch):
    def forgetful(path, pieces):
        entry = shard_files.write_shard(path, pieces)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return entry

    keeper = saver(tmp_path, keep_latest_k=1)
    keeper.save(1, some_tensors(1), {})
    monkeypatch.setattr(checkpoint, "write_shard", forgetful)
    keeper.save(2, some_tensors(2), {})
    assert "shard-00001.safetensors is damaged right after it was written" in keeper.wait()
    assert checkpoint_steps(keeper.folder) == [1] and newest_good(keeper.folder) == (1, [])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_checkpoints_damaged_after_they_were_saved_push_out_no_good_one(tmp_path, caplog):
    keeper = saver(tmp_path, keep_latest_k=2)
    for step in (1, 2, 3, 4):
        keeper.save(step, some_tensors(step), {})
        if step > 1:
            flip_a_bit(checkpoint_path(keeper.folder, step) / "manifest.json")
    assert newest_good(keeper.folder)[0] == 1  # beyond keep_latest_k, but the only good one
    with pytest.raises(CheckpointError, match="step-00000004: manifest.json is damaged, though it was written"):
        keeper.require_saved()
    for step in (5, 6):
        keeper.save(step, some_tensors(step), {})
    assert checkpoint_steps(keeper.folder) == [6, 5] and keeper.wait() is None
    assert "step-00000002: manifest.json is damaged; an older one is kept instead" in caplog.text


def test_what_lies_beside_a_run_is_on_the_disk_before_its_checkpoint_counts(tmp_path):
    keeper, seen = saver(tmp_path), []
    keeper.save(1, some_tensors(1), {}, before=lambda: seen.append(checkpoint_steps(keeper.folder)))
    assert seen == [[]] and checkpoint_steps(keeper.folder) == [1]


# --- files of others


def test_a_users_files_among_checkpoints_are_never_removed(tmp_path, caplog):
    keeper = saver(tmp_path, keep_latest_k=1)
    users = [
        ".git/config", ".ssh/id", ".step-00000010-notes/a", ".step-00000009-0123abcd/a", ".replaced-mine/a", "step-00000001/a",
        ".deleted-step-00000003-0123abcd/nested/shard-00001.safetensors", "step-00000007/shard-00001.safetensors",
    ]  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "state.json").write_text("mine")
    for name in users:
        path = keeper.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (keeper.folder / ".step-00000008-0123abcd").symlink_to(tmp_path / "elsewhere")
    assert keeper.find() is None
    assert [name for name in users if (keeper.folder / name).read_text() != "mine"] == []
    for step in (1, 2, 3):  # the first in the place of a folder of the user's
        keeper.save(step, some_tensors(step), {})
        (checkpoint_path(keeper.folder, step) / "notes.txt").write_text("mine")
    assert checkpoint_steps(keeper.folder) == [7, 3] and (tmp_path / "elsewhere" / "state.json").read_text() == "mine"
    (moved,) = keeper.folder.glob("kept-step-00000001-*")
    assert (moved / "a").read_text() == "mine" and f"it is kept as {moved.name}" in caplog.text
    notes = [path.relative_to(keeper.folder).parts[0][:26] for path in keeper.folder.glob("kept-deleted-*/notes.txt")]
    assert sorted(notes) == ["kept-deleted-step-00000001", "kept-deleted-step-00000002"]
    assert (keeper.folder / "step-00000007" / "shard-00001.safetensors").read_text() == "mine"
    assert [name for name in users if name != "step-00000001/a" and (keeper.folder / name).read_text() != "mine"] == []


def test_old_checkpoints_go_only_when_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    order: list[str] = []

    def noted(where, name, label):
        original = getattr(where, name)

        def call(*given):
            order.append(label(*given))
            return original(*given)

        monkeypatch.setattr(where, name, call)

    keeper = saver(tmp_path, keep_latest_k=1)
    keeper.save(1, some_tensors(1), {})
    noted(os, "fsync", lambda file: f"fsync {Path(os.readlink(f'/proc/self/fd/{file}')).name.split('-')[0]}")
    noted(checkpoint, "read_back", lambda path, entry: f"read {path.name.split('-')[0]}")
    noted(Path, "rename", lambda path, target: f"rename {path.name.split('-')[0]}")
    keeper.save(2, some_tensors(2), {})
    assert order == [
        "fsync shard", "fsync state.json", "read shard", "read state.json", "fsync manifest.json", "fsync .step",
        "rename .step", "fsync checkpoint", f"fsync {tmp_path.name.split('-')[0]}", "rename step",
    ]  # fmt: skip


# --- processes that die

KILL_POINTS = {  # where a process dies when saving step 2, and the newest good step it leaves
    "write_shard": 1, "write_synced": 1, "read_back": 1, "check_content": 1, "write_manifest": 1, "rename 1": 1,
    "after rename 1": 2, "rename 2": 2, "after rename 2": 2, "remove_folder": 2, "after remove_folder": 2,
}  # fmt: skip


def die_at(point: str) -> None:
    """Let this process be killed when it comes to a point of a save."""
    name = point.removeprefix("after ").split(" ")[0]
    where = {"rename": Path, "remove_folder": checkpoint_store, "write_manifest": checkpoint_store}.get(name, checkpoint)
    original, wanted, calls = getattr(where, name), int(point[-1]) if point[-1].isdigit() else 1, []

    def dies(*given, **more):
        calls.append(name)
        if len(calls) < wanted:
            return original(*given, **more)
        if point.startswith("after") or name == "write_shard":  # a shard that lies there, but counts nowhere
            original(*given, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(where, name, dies)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_process_killed_anywhere_in_a_save_leaves_the_newest_good_state(tmp_path, mode):
    found = run_on_ranks("tests.unit.test_checkpoint_saving:killed_in_saves", 1, {"folder": str(tmp_path), "mode": mode})
    assert found == [{point: [signal.SIGKILL, step, True] for point, step in KILL_POINTS.items()}]


def killed_in_saves(folder: str, mode: str) -> dict[str, list]:
    """For each point: the signal that ended the process, the step found, whether its values are right."""
    found = {}
    for point in KILL_POINTS:
        run = Path(folder) / point
        saver(run).save(1, some_tensors(1), {"step": 1})
        child = os.fork()
        if child == 0:
            die_at(point)
            keeper = saver(run, keep_latest_k=1, async_mode=mode)
            keeper.save(2, some_tensors(2), {"step": 2})
            keeper.wait()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        keeper = saver(run, keep_latest_k=1)
        step = keeper.find()
        right = equal(read(keeper.folder, step), some_tensors(step))
        keeper.save(3, some_tensors(3), {"step": 3})
        assert keeper.find() == 3 and [path.name for path in keeper.folder.iterdir()] == ["step-00000003"]
        found[point] = [-code, step, right]
    return found
