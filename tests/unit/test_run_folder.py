"""A run's folder: nobody else's is written into, and what a power cut leaves of it is enough to resume."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtitan.checkpoint.checkpointer import Checkpointer
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.config.job import load_config
from torchtitan.errors import RunFolderError
from torchtitan.files import durable
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file, replacing
from torchtitan.files.run_lock import LOCK_FILE, Busy
from torchtitan.run import run
from torchtitan.runs.folder import RunFolder
from torchtitan.settings.record import effective

ROOT = Path(__file__).resolve().parent.parent.parent


def run_at(folder: Path, *more: str) -> RunFolder:
    arguments = ["--job.dump_folder", str(folder), "--job.name", "one", "--data.name", "synthetic"]
    return RunFolder(load_config([*arguments, *more], 1))


def opened(run: RunFolder) -> RunFolder:
    run.open()
    run.record()
    run.close()
    return run


def contents(folder: Path) -> dict[str, str | None]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }


def save(run: RunFolder, step: int) -> None:
    state = {"config": effective(run._config)}
    Checkpointer(run.checkpoints, CheckpointConfig(), 0).save(step, {"a": torch.ones(2)}, state)


# --- folders of others


@pytest.mark.parametrize("name", [
    "notes.txt", ".git/config", "config.toml", "metrics.jsonl", "summary.json", ".config.toml.tmp", "samples/step-00000001.png",
    "checkpoint/thesis.txt", "checkpoint/step-00000001/thesis.txt", "checkpoints/step-00000001/state.json",
])  # fmt: skip
def test_a_folder_that_a_user_has_filled_is_refused_and_left_as_it_was(tmp_path, name):
    path = tmp_path / "one" / name
    path.parent.mkdir(parents=True)
    path.write_text("[package]\nname = 'mine'\n")
    (tmp_path / "one" / LOCK_FILE).write_text("a lock of another program")
    before = contents(tmp_path)
    with pytest.raises(RunFolderError, match=rf"/one: holds {name.split('/')[0]}, which is not a run's; nothing was written"):
        run_at(tmp_path).open()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["notes.txt", ".cache/weights", "step-one/state.json", ".step-00000001-mine/a"])
def test_a_folder_of_checkpoints_that_a_user_has_filled_is_refused_and_left_as_it_was(tmp_path, name):
    path = tmp_path / "elsewhere" / "one" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = contents(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=rf"^checkpoint.folder: .*/elsewhere/one: holds {name.split('/')[0]}, which is no"):
        run_at(tmp_path / "outputs", "--checkpoint.folder", str(tmp_path / "elsewhere")).open()
    assert contents(tmp_path / "elsewhere") == before


def test_a_users_files_may_lie_in_a_folder_that_is_a_runs(tmp_path):
    opened(run_at(tmp_path, "--checkpoint.folder", str(tmp_path / "elsewhere")))
    for folder in (tmp_path / "one", tmp_path / "elsewhere" / "one"):
        (folder / "notes.txt").write_text("mine")
    run = opened(run_at(tmp_path, "--checkpoint.folder", str(tmp_path / "elsewhere")))
    assert (run.path / "notes.txt").read_text() == "mine"


def test_a_run_with_checkpoints_that_are_not_there_is_refused_until_they_are_back(tmp_path):
    place, unmounted = tmp_path / "elsewhere", tmp_path / "unmounted"
    words = "--checkpoint.folder", str(place)
    run = opened(run_at(tmp_path, *words))
    save(run, 1)
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    place.rename(unmounted)
    for more in (words, (), ("--checkpoint.folder", str(tmp_path / "another"))):
        with pytest.raises(RunFolderError, match=r"/elsewhere/one: is not there, where the run .*/one kept its"):
            run_at(tmp_path, *more).open()
    unmounted.rename(place)
    opened(run_at(tmp_path, *words))
    linked = opened(run_at(tmp_path / "linked"))
    (linked.path / "metrics.jsonl").write_text('{"step": 1}\n')
    (linked.path / "checkpoint").symlink_to(unmounted)
    with pytest.raises(RunFolderError, match="/linked/one/checkpoint: is not there"):
        run_at(tmp_path / "linked").open()
    for more in (("--checkpoint.folder", str(tmp_path / "ever")), (), ()):  # which has no checkpoint yet
        early = opened(run_at(tmp_path / "early", *more))
        (early.path / "metrics.jsonl").write_text('{"step": 1}\n')


def test_a_copy_of_a_run_waits_for_the_checkpoints_of_both(tmp_path):
    words = "--checkpoint.folder", str(tmp_path / "elsewhere")
    run = run_at(tmp_path, *words)
    run.open()
    owner = (run.checkpoints / "checkpoint_owner.json").read_bytes()
    shutil.copytree(run.path, tmp_path / "copy" / "one")
    with pytest.raises(Busy, match="^.*/elsewhere/one: this process writes here already"):
        run_at(tmp_path / "copy", *words).open()
    assert (run.checkpoints / "checkpoint_owner.json").read_bytes() == owner
    run.close()
    itself = "--checkpoint.folder", str(tmp_path)
    opened(run_at(tmp_path, *itself, "--job.name", "within"))
    opened(run_at(tmp_path / "copy", *words))


def test_a_second_attempt_of_this_process_leaves_the_lock_to_the_first(tmp_path):
    run = run_at(tmp_path)
    run.open()
    with pytest.raises(Busy):
        run_at(tmp_path).open()
    asked = "import sys, pathlib, torchtitan.files.run_lock as r; sys.exit(not r.is_locked(pathlib.Path(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", asked, str(run.path)], cwd=ROOT, check=True)
    run.close()


def test_a_refusal_while_a_run_is_built_is_its_status(tmp_path):
    config = run_at(tmp_path, "--optimizer.param_groups", '[{"pattern": "no-such"}]')._config
    assert run(config) == 2
    assert json.loads((tmp_path / "one" / "status.json").read_text())["reason"].startswith("optimizer.param_groups[0]")


# --- what a power cut leaves


@pytest.mark.parametrize("left", [b"", b"\0" * 700, b"[job]\ndump_fol", None])
def test_a_configuration_cut_off_is_restored_from_the_newest_good_checkpoint(tmp_path, left, caplog):
    run = opened(run_at(tmp_path))
    before = (run.path / "config.toml").read_bytes()
    save(run, 10)
    save(run, 20)
    (run.checkpoints / "step-00000020" / "state.json").write_text("{")
    (run.path / LOCK_FILE).write_bytes(b"")
    if left is None:
        (run.path / "config.toml").unlink()
    else:
        (run.path / "config.toml").write_bytes(left)
    with pytest.raises(RunFolderError, match=r"another configuration(.|\n)*optimizer\.lr: 0\.0001 -> 0\.5"):
        run_at(tmp_path, "--optimizer.lr", "0.5").open()
    run = opened(run_at(tmp_path))
    assert (run.path / "config.toml").read_bytes() == before
    assert "read from the checkpoint of step 10" in caplog.text


@pytest.mark.parametrize("left", [b"", b"\0" * 700])
def test_a_first_start_cut_off_before_its_configuration_begins_anew(tmp_path, left):
    run = run_at(tmp_path)
    run.path.mkdir()
    for name in (LOCK_FILE, f".config.toml.{'0' * 32}.unfinished"):
        (run.path / name).write_bytes(left)
    opened(run)
    assert [path.name for path in sorted(run.path.iterdir())] == [LOCK_FILE, "config.toml"]


def test_a_configuration_cut_off_beside_checkpoints_without_a_record_is_refused(tmp_path):
    run = opened(run_at(tmp_path))
    Checkpointer(run.checkpoints, CheckpointConfig(), 0).save(10, {"a": torch.ones(2)}, {})
    (run.path / "config.toml").write_bytes(b"")
    with pytest.raises(RunFolderError, match="config.toml: is empty, and no checkpoint has a record of the configuration"):
        run_at(tmp_path).open()
    allowed = opened(run_at(tmp_path, "--job.allow_config_change", "true"))
    allowed.record()
    assert "allow_config_change = true" not in (allowed.path / "config.toml").read_text()  # a later start asks again


# --- durable files


def test_a_file_is_replaced_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: order.append(os.readlink(f"/proc/self/fd/{number}")) or fsync(number))
    monkeypatch.setattr(Path, "replace", lambda path, target: order.append("rename") or replace(path, target))
    replace_file(tmp_path / "a.json", "one")
    first, *rest = order
    assert first.startswith(f"{tmp_path}/.a.json.") and rest == ["rename", str(tmp_path)]
    order.clear()
    make_folder(tmp_path / "b" / "c")
    assert sorted(order) == [str(tmp_path), str(tmp_path / "b")]


@pytest.mark.parametrize("fault", ["write", "sync", "rename"])
def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path, monkeypatch, fault):
    def broken(*given):
        raise OSError(5, "Input/output error")

    replace_file(tmp_path / "a.json", "one")
    if fault != "write":
        monkeypatch.setattr(*{"sync": (durable, "sync", broken), "rename": (Path, "replace", broken)}[fault])
    with pytest.raises(OSError, match="Input/output error"), replacing(tmp_path / "a.json") as unfinished:
        unfinished.write_text("two")
        if fault == "write":
            broken()
    assert contents(tmp_path) == {"a.json": "one"}


def test_only_what_a_replacement_left_is_removed(tmp_path):
    left = f".a.json.{'0a' * 16}.unfinished"
    users = [".a.unfinished", "a.unfinished", f".a.{'0' * 31}.unfinished", f".b.{'1' * 32}.unfinished/c"]
    for name in (left, *users):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(name))
    remove_unfinished(tmp_path)
    assert not (tmp_path / left).exists() and all((tmp_path / name).exists() for name in users)


@pytest.mark.parametrize(("schedule", "more", "longer"), [
    ("constant", ("--training.steps", "30"), True), ("inverse_sqrt", ("--training.steps", "30"), True),
    ("constant", ("--training.steps", "10"), False), ("cosine", ("--training.steps", "30"), True),
    ("constant", ("--training.steps", "30", "--optimizer.lr", "0.5"), False),
])  # fmt: skip
def test_a_run_is_made_longer_by_more_steps_alone(tmp_path, schedule, more, longer):
    words = ("--lr_scheduler.decay_type", schedule, "--lr_scheduler.warmup_steps", "2")
    first = opened(run_at(tmp_path, *words, "--training.steps", "20"))
    save(first, 20)
    again = run_at(tmp_path, *words, *more)
    if not longer:
        with pytest.raises(RunFolderError, match="another configuration"):
            again.open()
        return
    opened(again)
    (tmp_path / "one" / "summary.json").touch()
    shutil.rmtree(tmp_path / "one" / "checkpoint")
    with pytest.raises(RunFolderError, match="has no checkpoint from which more steps go on"):
        run_at(tmp_path, *words, "--training.steps", "40").open()
    assert "steps = 30" in (tmp_path / "one" / "config.toml").read_text()
