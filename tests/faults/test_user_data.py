"""Nothing that is a user's is changed or removed, wherever a run is pointed at."""

import hashlib
import logging
import os
import re
from pathlib import Path

import pytest

from torchtitan.checkpoint.checkpointer import Checkpointer, newest_good
from torchtitan.config.job import JobConfig, load_config
from torchtitan.errors import RunFolderError
from torchtitan.run import run
from torchtitan.runs.folder import RunFolder

CONFIG = """
[model]
flavor = "debug"
num_layers = 1
dim = 16
num_heads = 2
mlp_hidden_dim = 16
[data]
name = "synthetic"
shape = [1, 8, 8]
num_classes = 3
[lr_scheduler]
warmup_steps = 1
[training]
steps = 6
local_batch_size = 2
[metrics]
enable_tensorboard = false
log_freq = 1
[checkpoint]
interval = 2
[sampling]
enable = false
[validation]
enable = false
"""
TEXT = "a user's own\n"
UNIQUE, LONG_UNIQUE = "0123abcd", "0123456789abcdef" * 2

# What a home folder may hold that looks like the program's own; to files of such names.
LOOKALIKES = [
    ".ssh/id_ed25519", ".config/application/settings.json", ".cache/thumbnails/1.png", ".git/config",
    ".git/objects/ab/cdef", "code/project/.git/HEAD", "code/project/.venv/pyvenv.cfg",
    ".step-00000010-notes/notes.txt", f".step-00000010-{UNIQUE}/notes.txt", ".step-00000010/notes.txt",
    f".step-00000012-{UNIQUE}/deep/shard-00001.safetensors", ".step-00000011", f".step-00000013-{UNIQUE}",
    "step-00000001/thesis.txt", "step-00000001/deep/thesis.txt", "step-00000000/thesis.txt", "step-00000003",
    "step-00000002.bak/shard-00001.safetensors", "step-2/thesis.txt",
    ".replaced-mine/photo.jpg", f".replaced-step-00000005-{UNIQUE}/photo.jpg", f".replaced-step-00000007-{UNIQUE}",
    f".deleted-step-00000005-{UNIQUE}/photo.jpg", ".deleted-letters/letter.txt", ".deleted-items",
    f"set-aside-step-00000004-{UNIQUE}/photo.jpg", "set-aside/photo.jpg",
    "checkpoint_owner.json.bak", "config.toml.tmp", "metrics.jsonl.tmp", "status.json.1.tmp", "summary.json.1.tmp",
    ".config.toml.unfinished", ".notes.unfinished", ".letter.0123abcd.unfinished", "notes.partial", ".mine.tmp",
    "wandb_id.old",
]  # fmt: skip
# Names of the program's own files, of another program or of another run.
RECORDS = [
    "config.toml", "metrics.jsonl", "summary.json", "status.json", "samples/step-00000001.png", "samples/training.gif",
    "samples/held-out.png", "gns/raw-00000001-00000010.parquet", "gns/raw-notes.parquet", "gns/noise_scale.png",
    "faults/notes.txt", "tb/events.out.tfevents.mine",
    "checkpoint/thesis.txt", "checkpoint/.git/config", "checkpoint/step-00000001/thesis.txt", "corrupt_images.jsonl",
    "wandb_id", "checkpoint_owner.json", "analysis/analysis.md", ".lock",
]  # fmt: skip


def start(place: Path, *more: str) -> int:
    """Train two steps in this process; the exit code."""
    logging.getLogger().setLevel(logging.WARNING)
    return run(configuration(place, *more))


def configuration(place: Path, *more: str) -> JobConfig:
    (place / "small.toml").write_text(CONFIG)
    arguments = [
        "--job.config_file", str(place / "small.toml"), "--job.dump_folder", str(place / "outputs"),
        "--job.name", "project", "--training.steps", "2", "--checkpoint.interval", "1",
    ]  # fmt: skip
    return load_config([*arguments, *more], world_size=1)


def write(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TEXT)


def link(folder: Path, elsewhere: Path) -> None:
    """Links from names like the program's to a folder and to a file elsewhere."""
    write(elsewhere, ["valuable/step-00000001/data.txt", "valuable/data.txt", "valuable/.step-1/data.txt"])
    for name in (
        ".elsewhere", "elsewhere", f".step-00000020-{UNIQUE}", f".deleted-step-00000020-{UNIQUE}",
        f".replaced-step-00000020-{UNIQUE}", "step-00000004",
    ):  # fmt: skip
        (folder / name).symlink_to(elsewhere / "valuable", target_is_directory=True)
    for name in (f".link.{LONG_UNIQUE}.unfinished", ".step-00000021", f".deleted-step-00000021-{UNIQUE}"):
        (folder / name).symlink_to(elsewhere / "valuable" / "data.txt")


def listing(*folders: Path) -> dict[str, str]:
    """Everything below folders, links not followed: what it is, and its content."""
    found = {}
    for folder in folders:
        for parent, names, files in os.walk(folder):
            for path in (Path(parent) / name for name in (*names, *files)):
                found[str(path)] = _content(path)
    return found


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


def changed(before: dict[str, str], *folders: Path) -> dict[str, str | None]:
    """What is gone or another, and what it is now; a folder may have been set aside, in sight, for one of its name."""
    after = listing(*folders)
    kept = {_plain_name(path): content for path, content in after.items() if "kept-" in path}
    return {
        path: after.get(path) for path, content in before.items()
        if after.get(path) != content and kept.get(_plain_name(path)) != content
    }  # fmt: skip


def _plain_name(path: str) -> str:
    """A path without what its folder is called more when it is set aside."""
    return re.sub(r"kept-(?:deleted-|replaced-)?(step-\d{8})-[0-9a-f]{8}", r"\1", path)


# ---------------------------------------------------------------------- a home folder


def populate(folder: Path, elsewhere: Path) -> dict[str, str]:
    write(folder, [*LOOKALIKES, *RECORDS])
    link(folder, elsewhere)
    return listing(folder, elsewhere)


@pytest.mark.parametrize("option", ["--checkpoint.folder", "--job.dump_folder"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_home_folder_or_a_link_to_it_is_refused_and_nothing_there_changes(tmp_path, capsys, option, linked):
    home, elsewhere = tmp_path / "home" / "project", tmp_path / "elsewhere"
    before, place = populate(home, elsewhere), tmp_path / ("links" if linked else "home")
    if linked:
        place.mkdir()
        (place / "project").symlink_to(home, target_is_directory=True)
    assert start(tmp_path, option, str(place)) == 2
    assert listing(home, elsewhere) == before
    assert "project" in capsys.readouterr().err


def test_a_single_file_of_a_users_survives_in_a_folder_that_a_run_opens(tmp_path):
    """Refused or not: it is there afterwards, in a folder of checkpoints and in a run's folder."""
    for number, name in enumerate(LOOKALIKES):
        for option in ("--checkpoint.folder", "--job.dump_folder"):
            folder = tmp_path / f"{option}_{number}" / "project"
            write(folder, [name])
            before = listing(folder)
            config = configuration(
                tmp_path, "--job.dump_folder", str(tmp_path / f"outputs_{number}"), option, str(folder.parent)
            )
            opened = RunFolder(config)
            try:
                opened.open()
                Checkpointer(opened.checkpoints, config.checkpoint, rank=0).find()
            except RunFolderError as error:
                assert str(folder) in str(error)
            finally:
                opened.close()
            assert changed(before, folder) == {}, (option, name)


# ---------------------------------------------------------------------- the run's own folder


@pytest.fixture
def own_run(tmp_path) -> Path:
    assert start(tmp_path) == 0
    return tmp_path / "outputs" / "project"


def _further(place: Path, *more: str) -> int:
    return start(place, "--training.steps", "6", "--job.allow_config_change", "true", *more)


def test_what_a_user_puts_into_a_run_stays_there_when_it_resumes(tmp_path, own_run):
    elsewhere = tmp_path / "elsewhere"
    write(own_run, [*LOOKALIKES, "samples/mine.png", "gns/raw-mine.parquet", "faults/notes.txt"])
    write(own_run / "checkpoint", [*LOOKALIKES, "step-00000002/notes.txt"])
    link(own_run, elsewhere)
    for path in (own_run / "checkpoint" / "step-00000003", own_run / "checkpoint" / ".step-00000011"):
        path.unlink()
    link(own_run / "checkpoint", elsewhere)
    before = _of_the_user(own_run) | listing(elsewhere)
    assert _further(tmp_path, "--checkpoint.keep_latest_k", "1") == 0
    assert changed(before, own_run, elsewhere) == {}
    assert newest_good(own_run / "checkpoint")[0] == 6


def test_a_users_file_in_a_checkpoint_stays_when_the_checkpoint_goes(tmp_path, own_run):
    for place, name in ((1, "notes.txt"), (2, "weights.bin")):
        write(own_run / "checkpoint" / f"step-{place:08d}", [name, f"deep/{name}"])
    assert _further(tmp_path, "--checkpoint.keep_latest_k", "1") == 0
    kept = [path for path in own_run.rglob("*") if path.is_file() and path.read_bytes() == TEXT.encode()]
    assert sorted(path.name for path in kept) == ["notes.txt", "notes.txt", "weights.bin", "weights.bin"]


def _of_the_user(folder: Path) -> dict[str, str]:
    ours = hashlib.sha256(TEXT.encode()).hexdigest()
    return {path: content for path, content in listing(folder).items() if content == ours or content.startswith("link")}


# ---------------------------------------------------------------------- what is the program's own does go


def test_what_the_program_left_itself_is_removed(tmp_path, own_run):
    """The other side: a save that was cut off does not stay for ever."""
    left = [own_run / "checkpoint" / name for name in (f".step-00000002-{UNIQUE}", f".deleted-step-00000001-{UNIQUE}")]
    for folder in left:
        folder.mkdir()
        for file in (own_run / "checkpoint" / "step-00000002").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    assert _further(tmp_path) == 0
    assert not any(folder.exists() for folder in left)
