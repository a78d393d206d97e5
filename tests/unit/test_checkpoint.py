"""Checkpoints come back bit for bit, and no damage passes for one."""

import hashlib
import random
import re
import shutil

import pytest
import torch

from torchtitan.checkpoint.checkpointer import (
    Checkpointer,
    CheckpointError,
    checkpoint_path,
    checkpoint_steps,
    newest_good,
    read_state,
    read_tensors,
    verify,
)
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.finding import BRANCHED_FROM
from torchtitan.checkpoint.manifest import read_manifest, write_manifest
from torchtitan.files.shard_files import Piece, write_shard
from torchtitan.files.shard_headers import DamagedShard, check_shards

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def saver(folder, **config) -> Checkpointer:
    return Checkpointer(folder / "checkpoint", CheckpointConfig(**config), rank=0)


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"part.{n}": torch.randn(3, n + 1, generator=generator) for n in range(3)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def content(folder) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def restore(folder, files: dict) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


# --- whole checkpoints


def test_tensors_and_state_come_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        values = torch.randint(0, 2 if name == "bool" else 100, (4, 5), generator=generator)
        tensors[f"matrix.{name}"] = values.to(dtype) / 7 if dtype.is_floating_point else values.to(dtype)
        tensors[f"scalar.{name}"] = values[0, 0].to(dtype)
        tensors[f"empty.{name}"] = torch.zeros(0, 3, dtype=dtype)
    tensors["special"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45, 3.4e38])
    state = {"step": 12, "nested": {"list": [1, 2.5, None, "ü"]}}
    keeper = saver(tmp_path)
    keeper.save(12, tensors, state)

    path = checkpoint_path(keeper.folder, 12)
    assert path.name == "step-00000012" and keeper.find() == 12 and verify(path) is None
    found = {name: torch.ones_like(value) for name, value in tensors.items()}
    addresses = {name: value.data_ptr() for name, value in found.items()}
    read_tensors(path, found)
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    assert {name: value.data_ptr() for name, value in found.items()} == addresses
    assert read_state(path) == state
    assert not any(path.suffix in (".pt", ".pkl", ".distcp") for path in path.iterdir())


@pytest.mark.parametrize(("wanted", "reason"), [
    ({"part.0": torch.zeros(3, 2)}, r"\[3, 1\].*\[3, 2\].*part\.0"),
    ({"part.1": torch.zeros(2, 3)}, r"part\.1"),
    ({"part.9": torch.zeros(3, 1)}, r"part\.9"),
])
def test_a_model_of_other_shapes_is_refused_in_one_line(tmp_path, wanted, reason):
    keeper = saver(tmp_path)
    keeper.save(1, some_tensors(), {})
    path = checkpoint_path(keeper.folder, 1)
    with pytest.raises(CheckpointError) as error:
        read_tensors(path, wanted)
    message = str(error.value)
    assert message.startswith(f"{path}: does not fit this model: ") and "\n" not in message
    assert re.search(reason, message), message


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [50, 40, 30, 20, 10]), (1, [50]), (3, [50, 40, 30]), (9, [50, 40, 30, 20, 10])]
)
def test_the_latest_k_are_kept(tmp_path, keep, left):
    keeper = saver(tmp_path, keep_latest_k=keep)
    for step in (10, 20, 30, 40, 50):
        keeper.save(step, some_tensors(step), {"step": step})
    assert checkpoint_steps(keeper.folder) == left
    assert sorted(path.name for path in keeper.folder.iterdir()) == [f"step-{step:08d}" for step in sorted(left)]
    assert all(verify(checkpoint_path(keeper.folder, step)) is None for step in left)


def test_the_checkpoint_just_saved_is_never_the_one_deleted(tmp_path):
    keeper = saver(tmp_path, keep_latest_k=1)
    keeper.save(37, some_tensors(), {})
    next(checkpoint_path(keeper.folder, 37).glob("*.safetensors")).write_bytes(b"")
    keeper.save(20, some_tensors(), {})
    keeper.save(33, some_tensors(), {})
    assert checkpoint_steps(keeper.folder) == [37, 33] and keeper.find() == 33
    # once it is passed, the damaged one goes too
    keeper.save(40, some_tensors(), {})
    assert checkpoint_steps(keeper.folder) == [40]


def test_a_step_is_written_again_in_place_of_a_damaged_one(tmp_path):
    keeper = saver(tmp_path)
    keeper.save(5, some_tensors(0), {"run": 0})
    (checkpoint_path(keeper.folder, 5) / "state.json").write_text("{}")
    keeper.save(5, some_tensors(1), {"run": 1})
    assert keeper.find() == 5 and read_state(checkpoint_path(keeper.folder, 5)) == {"run": 1}
    assert [path.name for path in keeper.folder.iterdir()] == ["step-00000005"]


# --- choosing one


def test_only_folders_of_the_right_name_count(tmp_path):
    keeper = saver(tmp_path)
    keeper.save(7, some_tensors(), {})
    for name in ("step-9", "step-00000008.tmp", "xstep-00000008", "step-0000000a", "old"):
        shutil.copytree(checkpoint_path(keeper.folder, 7), keeper.folder / name)
    assert checkpoint_steps(keeper.folder) == [7] and keeper.find() == 7


def test_partial_folders_are_cleaned_away(tmp_path):
    keeper = saver(tmp_path)
    keeper.save(7, some_tensors(), {})
    for name in (".step-00000009-0123abcd", ".deleted-step-00000001", ".replaced-step-00000007-0123abcd"):
        shutil.copytree(checkpoint_path(keeper.folder, 7), keeper.folder / name)
    assert keeper.find() == 7
    assert [path.name for path in keeper.folder.iterdir()] == ["step-00000007"]


def test_load_step_chooses_or_says_what_is_wrong(tmp_path):
    writer = saver(tmp_path)
    for step in (10, 20, 30):
        writer.save(step, some_tensors(), {})
    with pytest.raises(CheckpointError, match=r"^checkpoint\.load_step: 15: no such checkpoint \(.*30, 20, 10\)$"):
        saver(tmp_path, load_step=15).find()
    (checkpoint_path(writer.folder, 20) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"^checkpoint\.load_step: 20: state\.json is missing or unreadable"):
        saver(tmp_path, load_step=20).find()
    assert checkpoint_steps(writer.folder) == [30, 20, 10]
    assert saver(tmp_path, load_step=10).find() == 10
    with pytest.raises(CheckpointError, match=r"load_step: 3: .*: none\)$"):
        Checkpointer(tmp_path / "empty", CheckpointConfig(load_step=3), 0).find()


def branched(keeper: Checkpointer) -> int:
    """Step that a run resumes from, as it does: what is later is set aside once it has."""
    before, step = names(keeper.folder), keeper.find()
    assert names(keeper.folder) == before
    keeper.branch(step)
    return step


def test_restart_after_load_step_follows_the_new_branch(tmp_path):
    writer = saver(tmp_path, keep_latest_k=2)
    for step in (10, 20):
        writer.save(step, some_tensors(step), {"branch": "old"})
    old = content(checkpoint_path(writer.folder, 20))
    assert branched(saver(tmp_path, load_step=10)) == 10
    writer.save(15, some_tensors(15), {"branch": "new"})
    assert saver(tmp_path).find() == 15
    aside = [path for path in writer.folder.iterdir() if path.name.startswith("set-aside-step-00000020")]
    assert len(aside) == 1 and content(aside[0]) == old


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_load_step_is_applied_once_and_then_the_newest_checkpoint_is_resumed_from(tmp_path, caplog):
    writer = saver(tmp_path, keep_latest_k=1)
    for step in (10, 20):
        saver(tmp_path, keep_latest_k=0).save(step, some_tensors(step), {BRANCHED_FROM: None})
    assert [branched(saver(tmp_path, load_step=10)) for _ in range(2)] == [10, 10]  # nothing is saved between them
    writer.save(15, some_tensors(15), {BRANCHED_FROM: 10})
    writer.save(18, some_tensors(18), {BRANCHED_FROM: 10})
    before = names(writer.folder)
    assert branched(saver(tmp_path, load_step=10)) == 18 and names(writer.folder) == before
    assert "was applied before; resuming from the newest checkpoint, step 18 (to start from 10 again, move" in caplog.text
    (checkpoint_path(writer.folder, 18) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="load_step: 10: no such checkpoint"):  # nothing good is left of the branch
        saver(tmp_path, load_step=10).find()


def test_another_load_step_branches_also_from_within_a_branch(tmp_path):
    writer = saver(tmp_path)
    for step, branch in ((10, None), (20, 10), (30, 10)):
        writer.save(step, some_tensors(step), {BRANCHED_FROM: branch})
    assert branched(saver(tmp_path, load_step=20)) == 20
    assert checkpoint_steps(writer.folder) == [20, 10]
    writer.save(30, some_tensors(31), {BRANCHED_FROM: 20})
    assert saver(tmp_path, load_step=20).find() == 30
    assert saver(tmp_path, load_step=10).find() == 10


def test_a_branch_cut_off_between_two_later_checkpoints_is_completed(tmp_path, monkeypatch):
    keeper = saver(tmp_path, load_step=10)
    for step in (10, 20, 30):
        keeper.save(step, some_tensors(step), {})
    set_aside = keeper._store.set_aside
    monkeypatch.setattr(keeper._store, "set_aside", lambda step: set_aside(step) if step == 30 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        branched(keeper)
    assert checkpoint_steps(keeper.folder) == [20, 10]
    assert branched(saver(tmp_path, load_step=10)) == 10 and checkpoint_steps(keeper.folder) == [10]


# --- damage


@pytest.mark.parametrize("content", [b"", b'{"step": 1, "files": {"st', b"[]", b'{"files": {}}'], ids=str)
def test_a_manifest_that_is_something_else_is_damaged(tmp_path, content):
    keeper = saver(tmp_path)
    for step in (1, 2):
        keeper.save(step, some_tensors(), {})
    path = checkpoint_path(keeper.folder, 2)
    (path / "manifest.json").write_bytes(content)
    assert verify(path) == "manifest.json is damaged"
    assert newest_good(keeper.folder) == (1, [f"{path}: manifest.json is damaged; skipped"])
    assert keeper.find() == 1
    (checkpoint_path(keeper.folder, 1) / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{path}: manifest.json is damaged, and no older one is good .* the beginning"):
        keeper.find()  # a run from the beginning would write over what there is


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc/hostname", ".."])
def test_a_manifest_that_names_files_elsewhere_is_damaged(tmp_path, name):
    """By these names a checkpoint of a remote store is copied."""
    saver(tmp_path).save(1, some_tensors(), {})
    path = checkpoint_path(tmp_path / "checkpoint", 1)
    files = read_manifest(path) | {name: {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}}
    (path / "manifest.json").unlink()
    write_manifest(path, files)
    assert verify(path) == "manifest.json is damaged"


def damage(path, chance: random.Random) -> str:
    """Do one harm to a checkpoint; returns the file that has to be named."""
    file = chance.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    kind = chance.choice(["shorter", "missing"] if file.name == "manifest.json" else ["bit", "shorter", "missing", "swapped"])
    if kind == "bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    elif kind == "shorter":
        file.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "missing":
        file.unlink()
    else:  # good, but of another checkpoint
        shutil.copy(path.with_name("step-00000001") / file.name, file)
    return file.name


def test_every_damage_is_named_and_the_checkpoint_before_is_found(tmp_path):
    keeper, chance = saver(tmp_path), random.Random(0)
    for step in (1, 2):
        keeper.save(step, some_tensors(step), {"step": step, "text": "x" * 100})
    path = checkpoint_path(keeper.folder, 2)
    whole = content(path)
    for trial in range(60):
        named = damage(path, chance)
        step, skipped = newest_good(keeper.folder)
        assert step == 1 and len(skipped) == 1, (trial, named)
        assert skipped[0].startswith(f"{path}: ") and named in skipped[0], (trial, named, skipped)
        restore(path, whole)
        assert verify(path) is None


def test_pieces_must_fill_a_tensor_once(tmp_path):
    def check(*places: tuple[int, int]) -> None:
        paths = []
        for number, (row, rows) in enumerate(places):
            paths.append(tmp_path / f"{row}-{rows}-{number}.safetensors")
            paths[-1].unlink(missing_ok=True)
            write_shard(paths[-1], [Piece("a", torch.zeros(rows, 2), (row, 0))])
        check_shards(paths)

    check((0, 3))
    check((0, 3), (3, 3), (6, 1))
    for wrong in ([(1, 3)], [(0, 3), (4, 3)], [(0, 3), (2, 3)], [(0, 3), (0, 3)], [(0, 3), (3, 3), (3, 3)]):
        with pytest.raises(DamagedShard, match="leave a gap or overlap"):
            check(*wrong)
