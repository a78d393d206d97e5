"""A file or folder that the user names for output is written over where the program wrote it before, and nowhere else."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.test_hostile_runs import write_run
from torchtitan.config.__main__ import write_schema
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.weight_files import WeightsError, written_whole
from torchtitan_dit.commands.compare import main as compare
from torchtitan_dit.commands.optimization_analysis import main as analyse
from torchtitan_dit.commands.sample import unused_name


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "run")


def refused(code: int, capsys, path: Path) -> bool:
    error = capsys.readouterr().err
    return code == 2 and error.count("\n") == 1 and str(path) in error and "move it away" in error


def test_only_a_plain_file_that_begins_as_the_programs_is_replaced(tmp_path):
    path, other = tmp_path / "page", tmp_path / "other"
    refuse_foreign_file(path, b"<!-- ours")
    other.write_text("<!-- ours and more")
    refuse_foreign_file(other, b"<!-- ours")
    path.symlink_to(other)
    for there in (path, tmp_path):
        with pytest.raises(FileExistsError):
            refuse_foreign_file(there, b"<!-- ours")
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        refuse_foreign_file(path, b"<!-- ours")


@pytest.mark.parametrize("name", ["results.csv", "mfu_over_batch.png"])
def test_an_analysis_replaces_an_analysis_only(run, tmp_path, capsys, name):
    output = tmp_path / "thesis"
    output.mkdir()
    (output / name).write_text("mine")
    assert refused(analyse([str(run), "--out", str(output)]), capsys, output)
    assert [path.name for path in output.iterdir()] == [name] and (output / name).read_text() == "mine"


def test_an_analysis_goes_beside_what_has_other_names_and_can_be_made_again(run, capsys):
    (run / "analysis").mkdir()
    (run / "analysis" / "notes.txt").write_text("mine")
    assert [analyse([str(run)]) for _ in range(2)] == [0, 0]
    assert (run / "analysis" / "notes.txt").read_text() == "mine"


def test_pages_and_schemas_of_somebody_else_are_refused(run, tmp_path, capsys):
    output = tmp_path / "index.html"
    output.write_text("<!DOCTYPE html><title>my page</title>")
    assert refused(compare([str(run), "--output", str(output)]), capsys, output)
    with pytest.raises(FileExistsError):
        write_schema(output)
    assert output.read_text() == "<!DOCTYPE html><title>my page</title>"
    output.unlink()
    assert [compare([str(run), "--output", str(output)]) for _ in range(2)] == [0, 0]
    for _ in range(2):
        write_schema(tmp_path / "schema.json")


def test_drawings_in_a_folder_of_the_users_are_not_replaced(tmp_path):
    file = SimpleNamespace(step=None, track="")
    (tmp_path / "latents-seed-3.safetensors").touch()
    assert unused_name(tmp_path, file, 3) == "seed-3-2"
    (tmp_path / "class-0001-image-000000-seed-3-2.png").touch()
    assert unused_name(tmp_path, file, 3) == "seed-3-3" and unused_name(tmp_path, file, 4) == "seed-4"


def export(folder: Path, *names: str, overwrite: bool = True) -> None:
    with written_whole(folder, overwrite) as path:
        path.mkdir()
        for name in names:
            save_file({"w": torch.zeros(1)}, path / name)


def test_an_exported_folder_replaces_plain_files_of_its_own_names_only(tmp_path):
    folder = tmp_path / "weights"
    export(folder, "a", "b")
    export(folder, "a", "b")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    with pytest.raises(WeightsError, match="exists already"):
        export(folder, "a", "b", overwrite=False)

    (folder / "b").unlink()
    (folder / "b").mkdir()
    (folder / "b" / "thesis.tex").write_text("mine")
    with pytest.raises(WeightsError, match=r"weights: holds other files \(b\); it was not replaced"):
        export(folder, "a", "b")
    assert (folder / "b" / "thesis.tex").read_text() == "mine" and load_file(folder / "a")

    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(WeightsError, match="link: is no folder; it was not replaced"):
        export(link, "a", "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "weights"] and link.is_symlink()
