"""Checkpoints in remote stores: the same files, no half of one that counts, and no good one lost to a store that fails."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from tests.configurations import problems
from tests.unit.test_checkpoint import content, some_tensors
from torchtitan.checkpoint import reading as checkpoint_reading
from torchtitan.checkpoint.checkpointer import (
    Checkpointer,
    CheckpointError,
    StoreError,
    checkpoint_path,
    checkpoint_steps,
    newest_good,
    read_state,
    read_tensors,
    verify,
)
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.location import folder_problem, run_checkpoints
from torchtitan.checkpoint.owner import OWNER_FILE, claim, read_owner
from torchtitan.config.job import load_config
from torchtitan.errors import RunFolderError
from torchtitan.files.remote_path import RemotePath
from torchtitan.runs.folder import RunFolder
from torchtitan.settings.record import dump_config
from torchtitan_dit.commands.checkpoint import main as checkpoint_tool


class ClientError(Exception):
    """As packages raise them: no OSError, several lines."""


class Unreliable:
    """A file system that counts the calls that reach its store, and refuses those it is told to."""

    def __init__(self, store) -> None:
        self._store = store
        self.calls: list[str] = []
        self.refuses = lambda number: False

    def __getattr__(self, name: str):
        found = getattr(self._store, name)
        if name in ("unstrip_protocol", "invalidate_cache"):
            return found
        return lambda *given, **more: self.call(name, found, *given, **more)

    def call(self, name: str, function, *given, **more):
        self.calls.append(name)
        if self.refuses(len(self.calls)):
            raise ClientError(f"SlowDown ({name})\nand more lines")
        result = function(*given, **more)
        return UnreliableFile(self, result) if name == "open" else result


class UnreliableFile:
    """An open file whose reads, writes and closing are such calls."""

    def __init__(self, store: Unreliable, file) -> None:
        self._store, self._file = store, file

    def __getattr__(self, name: str):
        return lambda *given: self._store.call(name, getattr(self._file, name), *given)


@pytest.fixture
def memory():
    """A folder of a store that lives in this process."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield RemotePath.from_url("memory://bucket/runs/one")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def saver(folder: RemotePath, **config) -> Checkpointer:
    return Checkpointer(folder, CheckpointConfig(**config), rank=0)


def read(folder: RemotePath, step: int) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in some_tensors().items()}
    read_tensors(checkpoint_path(folder, step), found)
    return found


def is_step(folder: RemotePath, step: int) -> bool:
    found, wanted = read(folder, step), some_tensors(step)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def names(folder: RemotePath) -> list[str]:
    return [path.name for path in folder.iterdir()]


# --- whole checkpoints


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_holds_the_same_bytes_as_a_folder(tmp_path, memory, kind, mode):
    folder = memory if kind == "memory" else RemotePath.from_url(f"file://{tmp_path}/remote/run")
    keepers = [saver(tmp_path / "local"), saver(folder, async_mode=mode)]
    for keeper in keepers:
        keeper.save(1, some_tensors(1), {"step": 1})
        keeper.require_saved()
        keeper.close()
    local, remote = (checkpoint_path(keeper.folder, 1) for keeper in keepers)
    assert content(local) == content(remote)
    assert keepers[1].find() == 1 and verify(remote) is None
    assert is_step(folder, 1) and read_state(remote) == {"step": 1}


def test_the_latest_k_are_kept_and_a_step_is_written_over_a_damaged_one(memory):
    keeper = saver(memory, keep_latest_k=2)
    for step in (1, 2, 3):
        keeper.save(step, some_tensors(step), {})
    assert names(memory) == ["step-00000002", "step-00000003"]
    (checkpoint_path(memory, 3) / "state.json").write_bytes(b"[]")
    assert keeper.find() == 2
    keeper.save(3, some_tensors(3), {"again": True})
    assert keeper.find() == 3 and read_state(checkpoint_path(memory, 3)) == {"again": True}


def test_what_a_save_left_that_was_cut_off_does_not_count_and_goes_at_the_next_start(memory):
    keeper = saver(memory)
    for step in (1, 2):
        keeper.save(step, some_tensors(step), {})
    (checkpoint_path(memory, 2) / "manifest.json").unlink()
    (memory / "notes.txt").write_bytes(b"the user's own")
    assert checkpoint_steps(memory) == [1] and keeper.find() == 1
    assert names(memory) == ["notes.txt", "step-00000001"]


def test_load_step_keeps_later_checkpoints_whole_under_names_that_do_not_count(memory):
    keeper = saver(memory)
    for step in (10, 20):
        keeper.save(step, some_tensors(step), {})
    old = content(checkpoint_path(memory, 20))
    keeper = saver(memory, load_step=10)
    assert keeper.find() == 10 and checkpoint_steps(memory) == [20, 10]
    keeper.branch(10)
    assert checkpoint_steps(memory) == [10] and saver(memory).find() == 10
    (aside,) = [path for path in memory.iterdir() if path.name.startswith("set-aside-step-00000020-")]
    assert content(aside) == old and verify(aside) is None
    with pytest.raises(CheckpointError, match=r"load_step: 15: no such checkpoint \(checkpoints in memory:.*: 10\)$"):
        saver(memory, load_step=15).find()


def test_a_copy_is_checked_while_it_is_made_and_nothing_of_it_is_left(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(checkpoint_reading.tempfile, "tempdir", str(tmp_path))
    saver(memory).save(1, some_tensors(1), {})
    shard = checkpoint_path(memory, 1) / "shard-00001.safetensors"
    assert is_step(memory, 1) and list(tmp_path.iterdir()) == []
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)  # after it was verified
    with pytest.raises(CheckpointError, match=r"memory://.*step-00000001: shard-00001\.safetensors is damaged$"):
        read(memory, 1)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(checkpoint_reading.tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="TMPDIR"):
        read(memory, 1)


# --- stores that fail


def prepared(memory: RemotePath) -> tuple[RemotePath, Unreliable, dict]:
    """The folder with step 1 in it, through a store that may fail; and what the store then holds."""
    saver(memory).save(1, some_tensors(1), {})
    store = Unreliable(memory.fs)
    files = {name: bytes(file.getvalue()) for name, file in memory.fs.store.items()}
    return RemotePath(store, memory.path), store, files


def reset(memory: RemotePath, files: dict[str, bytes], store: Unreliable) -> None:
    memory.fs.store.clear()
    memory.fs.pseudo_dirs[:] = [""]
    for name, data in files.items():
        memory.fs.pipe_file(name, data)
    store.calls.clear()


def test_a_process_that_dies_between_any_two_calls_leaves_the_newest_good_state(memory):
    unreliable, store, files = prepared(memory)
    found = []
    for last in range(1000):
        reset(memory, files, store)
        store.refuses = lambda number, last=last: number > last  # nothing reaches the store any more
        saver(unreliable, keep_latest_k=1).save(2, some_tensors(2), {})
        whole = len(store.calls) <= last
        keeper = saver(memory, keep_latest_k=1)
        found.append(keeper.find())
        assert is_step(memory, found[-1]), last
        assert all(verify(path) is None for path in memory.iterdir()), (last, names(memory))
        keeper.save(3, some_tensors(3), {})
        assert names(memory) == ["step-00000003"] and keeper.find() == 3
        if whole:
            break
    assert found == sorted(found) and set(found) == {1, 2} and len(found) > 20


def test_a_call_that_fails_costs_one_checkpoint_at_most_and_training_goes_on(memory, caplog):
    unreliable, store, files = prepared(memory)
    failures = 0
    for failing in range(1, 1000):
        reset(memory, files, store)
        store.refuses = lambda number, failing=failing: number == failing
        keeper, caplog.records[:] = saver(unreliable, keep_latest_k=1), []
        keeper.save(2, some_tensors(2), {})
        if len(store.calls) < failing:
            break
        problem = keeper.wait()
        assert problem is None or "ClientError: SlowDown" in problem and "\n" not in problem
        failures += problem is not None
        assert caplog.records, failing
        newest = newest_good(memory)[0]
        assert newest == (2 if problem is None else 1), failing
        keeper.save(3, some_tensors(3), {})
        assert keeper.wait() is None and newest_good(memory) == (3, []) and is_step(memory, 3)
    assert failures > 20 and problem is None


def test_a_store_that_does_not_answer_is_not_taken_for_one_without_checkpoints(memory):
    unreliable, store, files = prepared(memory)
    for failing in range(1, 1000):
        reset(memory, files, store)
        store.refuses = lambda number, failing=failing: number >= failing
        try:
            assert saver(unreliable).find() == 1
            break
        except StoreError as error:
            assert "ClientError: SlowDown" in str(error) and "\n" not in str(error)
    assert failing > 8


def test_a_store_that_keeps_other_bytes_is_found_out(memory, monkeypatch):
    keeper = saver(memory, keep_latest_k=1)
    keeper.save(1, some_tensors(1), {})
    unreliable = Unreliable(memory.fs)
    monkeypatch.setattr(
        UnreliableFile, "write", lambda file, data: file._file.write(bytes(data)[:-1] + b"\1"), raising=False
    )
    other = saver(RemotePath(unreliable, memory.path), keep_latest_k=1)
    other.save(2, some_tensors(2), {})
    assert "shard-00001.safetensors is damaged right after it was written" in other.wait()
    assert names(memory) == ["step-00000001"] and newest_good(memory) == (1, [])


# --- whose folder it is, and where


def test_a_folder_belongs_to_one_run_and_to_its_newest_launch(tmp_path, memory):
    runs = [tmp_path / name for name in "ab"]
    for run in runs:
        run.mkdir()
    assert claim(runs[0], memory) is None
    first = saver(memory)
    assert first.find() is None
    first.save(1, some_tensors(1), {})
    refused = claim(runs[1], memory)
    assert "holds the checkpoints of another run, started " in refused and "\n" not in refused
    assert OWNER_FILE in refused and not (runs[1] / OWNER_FILE).exists()
    # what the line advises
    (runs[1] / OWNER_FILE).write_bytes((memory / OWNER_FILE).read_bytes())
    assert claim(runs[1], memory) is None and read_owner(memory)["run"] == read_owner(runs[0])["run"]
    first.save(2, some_tensors(2), {})
    assert "another launch of this run has taken the folder over: started " in first.wait()
    assert checkpoint_steps(memory) == [1] and saver(memory).find() == 1
    (memory / OWNER_FILE).write_bytes(b"[")
    assert f"whose {OWNER_FILE} is damaged" in claim(runs[0], memory)


@pytest.mark.parametrize(("url", "words"), [
    ("s4://bucket/x", "s4 is no protocol"),
    ("sftp://user:secret@host/x", "password"),
    ("abfs://box/x?sig=secret", "nothing else"),
    ("s3:/bucket/x", "two slashes, protocol://bucket/prefix"),
    ("nowhere://bucket/x", "needs the package no_such_package, which is not installed ("),
])  # fmt: skip
def test_a_folder_that_cannot_be_used_is_refused_with_the_configuration(monkeypatch, url, words):
    monkeypatch.setitem(known_implementations, "nowhere", {"class": "no_such_package.Files"})
    assert words in folder_problem(url)
    (line,) = problems(None, ["--data.name", "synthetic", "--checkpoint.folder", url])
    assert words in line and "secret" not in line


def run_at(folder: Path, checkpoints: str) -> RunFolder:
    arguments = ["--job.dump_folder", str(folder), "--job.name", "one", "--data.name", "synthetic"]
    return RunFolder(load_config([*arguments, *(["--checkpoint.folder", checkpoints] if checkpoints else [])], 1))


@pytest.mark.parametrize("prefix", ["file://", ""])
def test_tools_find_the_checkpoints_that_a_run_has_elsewhere(tmp_path, capsys, prefix):
    run = run_at(tmp_path / "outputs", f"{prefix}{tmp_path}/elsewhere")
    run.open()
    run.record()
    run.close()
    for step in (1, 2):
        Checkpointer(run.checkpoints, CheckpointConfig(), 0).save(step, some_tensors(step), {})
    assert str(run_checkpoints(run.path)) == str(run.checkpoints) == f"{prefix}{tmp_path}/elsewhere/one"
    assert checkpoint_tool(["list", str(run.path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "1", "2"]
    assert checkpoint_tool(["verify", str(run.path), str(run.checkpoints / "step-00000001")]) == 0
    assert checkpoint_tool(["diff", str(run.path), str(run.checkpoints / "step-00000002")]) == 0
    assert checkpoint_tool(["diff", str(run.path), str(run.checkpoints / "step-00000001")]) == 1
    (tmp_path / "elsewhere/one/step-00000002/state.json").write_text("[]")
    assert checkpoint_tool(["verify", str(run.path)]) == 1
    assert "a resume skips it and uses step 1" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "elsewhere")
    assert checkpoint_tool(["list", str(run.path)]) == 2
    assert f"(looked in {run.checkpoints})" in capsys.readouterr().err
    (run.path / "config.toml").write_text("=")
    assert checkpoint_tool(["list", str(run.path)]) == 2
    assert "config.toml: is damaged, and names the checkpoints' folder" in capsys.readouterr().err


def test_a_run_does_not_begin_anew_because_its_checkpoints_are_looked_for_elsewhere(tmp_path):
    before = run_at(tmp_path, "")
    before.open()
    before.close()
    Checkpointer(before.checkpoints, CheckpointConfig(), 0).save(1, some_tensors(1), {})
    refused = r"^checkpoint\.folder: file://.*: has none of the run's checkpoints: they are in"
    with pytest.raises(RunFolderError, match=refused):
        run_at(tmp_path, f"file://{tmp_path}/elsewhere").open()
    shutil.copytree(before.checkpoints, tmp_path / "elsewhere/one")
    run = run_at(tmp_path, f"file://{tmp_path}/elsewhere")
    run.open()
    run.close()
    assert Checkpointer(run.checkpoints, CheckpointConfig(), 0).find() == 1
    assert "file://" in dump_config(run._config) and json.loads((run.path / OWNER_FILE).read_bytes()).keys() == {"run"}


@pytest.mark.parametrize(("prefix", "error"), [("file://", StoreError), ("", RunFolderError)])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, prefix, error):
    (tmp_path / "file").touch()
    with pytest.raises(error, match=rf"{prefix}{tmp_path}/file/one"):
        run_at(tmp_path / "outputs", f"{prefix}{tmp_path}/file").open()


def test_a_bucket_that_is_missing_is_no_missing_file(tmp_path, memory, monkeypatch):
    def missing(*given, **more):
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(memory.fs, "pipe_file", missing)
    with pytest.raises(StoreError, match=r"^memory://.*/checkpoint_owner\.json: .*The specified bucket does not exist$"):
        claim(tmp_path, memory)
    keeper = saver(memory)
    keeper.save(1, some_tensors(1), {})
    assert "The specified bucket does not exist" in keeper.wait() and names(memory) == []
