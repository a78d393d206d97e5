"""The start of a branch, and what is removed when it is measured."""

from pathlib import Path

from research.branch_training import begin_branch, remove_checkpoints


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_of_a_branch_go_and_what_else_lies_there_stays(tmp_path):
    start, branch = tmp_path / "start" / "step-00000000", tmp_path / "branch"
    start.mkdir(parents=True)
    for name in ("state.json", "manifest.json", "shard-00000.safetensors"):
        (start / name).write_text(name)
    cut_off = branch / "checkpoint" / ".step-00000000"
    cut_off.mkdir(parents=True)
    (cut_off / "state.json").write_text("half")
    begin_branch(start, branch)
    assert content_of(branch / "checkpoint" / "step-00000000") == content_of(start)
    assert sorted(path.name for path in (branch / "checkpoint").iterdir()) == ["step-00000000"]
    (branch / "checkpoint" / "notes.txt").write_text("mine")
    remove_checkpoints(branch / "checkpoint")
    assert content_of(branch) == {"checkpoint/notes.txt": b"mine"}
    remove_checkpoints(tmp_path / "start")
    assert not (tmp_path / "start").exists()
    remove_checkpoints(tmp_path / "never there")
