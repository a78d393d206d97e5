"""What is not provably the program's own is neither removed nor written over, wherever results are asked to go."""

import json
import os

import pytest

from tests.extractions import content
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.experiments.record import SweepFolder
from torchtitan.files.durable import append_synced
from torchtitan.files.ownership import begins_with, foreign_entry

UNFINISHED = ".results.csv." + 32 * "a" + ".unfinished"


def test_a_folder_is_known_by_a_mark_with_its_content(tmp_path):
    marks = {"run.json": b"{"}
    assert not foreign_entry(tmp_path / "missing", marks) and not foreign_entry(tmp_path, marks)
    (tmp_path / ".lock").touch()
    (tmp_path / UNFINISHED).touch()
    assert not foreign_entry(tmp_path, marks)  # of a start that was killed
    (tmp_path / "thesis.tex").touch()
    assert foreign_entry(tmp_path, marks)
    (tmp_path / "run.json").write_text("my runs: ...")
    assert foreign_entry(tmp_path, marks)
    (tmp_path / "run.json").write_text("{}")
    assert not foreign_entry(tmp_path, marks)
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert not begins_with(tmp_path / "link", b"{") and not begins_with(tmp_path, b"")
    with pytest.raises(NotADirectoryError):
        foreign_entry(tmp_path / "thesis.tex", marks)


def test_a_sweep_leaves_a_folder_of_something_else_alone(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('[axes]\ntraining.steps = [1]\n')
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "config.toml").write_text("of a run")
    (folder / ".lock").write_text("somebody's")
    with pytest.raises(SweepError, match=r"results: holds config.toml, which is not a sweep's; nothing was written \(give"):
        SweepFolder(folder).check(read_sweep(path))
    assert content(folder) == {"config.toml": b"of a run", ".lock": b"somebody's"}
    (folder / "config.toml").unlink()
    SweepFolder(folder).check(read_sweep(path))
    with SweepFolder(folder).held(read_sweep(path)):
        pass
    assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()  # a lock is nobody's, and may be left behind
    SweepFolder(folder).check(read_sweep(path))


def test_what_does_not_fit_on_the_disk_leaves_the_file_as_it_was(tmp_path):
    from tests.unit.test_full_disk import files_end_at

    path = tmp_path / "rows"
    append_synced(path, b"first\n")
    with files_end_at(9), pytest.raises(OSError):
        append_synced(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    append_synced(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"
