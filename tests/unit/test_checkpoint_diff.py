"""Differences between two checkpoints."""

import pytest
import torch
from safetensors.torch import save_file

from torchtitan.checkpoint.comparison import TensorSource
from torchtitan_dit.commands import checkpoint


def source(tensors) -> TensorSource:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return TensorSource(shapes, lambda names: {name: tensors[name] for name in names}, {"config": {}})


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


def test_a_file_and_a_checkpoint_are_not_compared(opened, tmp_path, capsys):
    opened["run"] = source(STATE)
    save_file({"blocks.0.w": torch.ones(2)}, tmp_path / "x.safetensors")
    assert checkpoint.main(["diff", "run", str(tmp_path / "x.safetensors")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a checkpoint and a file of weights" in line and "export RUN --format safetensors" in line


def test_counts_of_steps_are_no_largest_difference(opened, capsys):
    opened["a"] = source(STATE)
    opened["b"] = source(STATE | {"model.w": torch.tensor([1.0, 1.25]), "optimizer.w.step": torch.tensor(80.0)})
    assert checkpoint.main(["diff", "a", "b"]) == 1
    first, *rows = capsys.readouterr().out.splitlines()
    assert "2 different (max 0.25)" in first and any(row.startswith("optimizer.w.step: max 40") for row in rows)
