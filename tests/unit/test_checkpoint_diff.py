"""Differences between a file of weights and a checkpoint, and between two checkpoints."""

import pytest
import torch
from safetensors.torch import save_file

from torchtitan.checkpoint.comparison import TensorSource
from torchtitan_dit.commands import checkpoint


def source(tensors, track="ema") -> TensorSource:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    config = {"sampling": {"ema_track": track} if track else {"enable": False}}
    return TensorSource(shapes, lambda names: {name: tensors[name] for name in names}, {"config": config})


STATE = {
    "model.w": torch.ones(2), "ema.ema.w": torch.full((2,), 3.0), "model.buffer": torch.zeros(1),
    "optimizer.w.exp_avg": torch.ones(2), "optimizer.w.step": torch.tensor(40.0),
}  # fmt: skip


@pytest.fixture
def opened(monkeypatch):
    """Sources by name; others are files."""
    sources: dict[str, TensorSource] = {}
    files = checkpoint.open_source
    monkeypatch.setattr(checkpoint, "open_source", lambda path: sources.get(str(path)) or files(path))
    return sources


@pytest.mark.parametrize("track, value, said", [
    ("ema", 3.0, "weights of the EMA track ema"), ("", 3.0, "weights of the EMA track ema"), ("none", 1.0, "trained weights"),
])  # fmt: skip
def test_a_file_is_compared_with_the_weights_that_a_run_samples_with(opened, tmp_path, capsys, track, value, said):
    opened["run"] = source(STATE, track)
    file = str(tmp_path / "x.safetensors")
    save_file({"w": torch.full((2,), value), "buffer": torch.zeros(1)}, file)
    assert checkpoint.main(["diff", file, "run"]) == checkpoint.main(["diff", "run", file]) == 0
    output, note = capsys.readouterr()
    assert output == 2 * "equal bit for bit: 2 tensors\n" and f"run: only its {said} are compared" in note
    save_file({"w": torch.full((2,), value + 0.5), "buffer": torch.zeros(1)}, file)
    assert checkpoint.main(["diff", file, "run"]) == 1
    assert "1 different (max 0.5), 0 of another shape or dtype, 0 only in A, 0 only in B" in capsys.readouterr().out


def test_a_file_of_another_layout_is_refused(opened, tmp_path, capsys):
    opened["run"] = source(STATE)
    save_file({"blocks.0.w": torch.ones(2)}, tmp_path / "x.safetensors")
    assert checkpoint.main(["diff", "run", str(tmp_path / "x.safetensors")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds no tensor of the network of run" in line and "export RUN --format safetensors" in line


def test_counts_of_steps_are_no_largest_difference(opened, capsys):
    opened["a"] = source(STATE)
    opened["b"] = source(STATE | {"model.w": torch.tensor([1.0, 1.25]), "optimizer.w.step": torch.tensor(80.0)})
    assert checkpoint.main(["diff", "a", "b"]) == 1
    first, *rows = capsys.readouterr().out.splitlines()
    assert "2 different (max 0.25)" in first and any(row.startswith("optimizer.w.step: max 40") for row in rows)
