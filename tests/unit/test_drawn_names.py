"""Names of drawn pictures, and options that a run has no use for."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan.conditions import Classes
from torchtitan.evaluation.config import SamplingConfig
from torchtitan.runs.drawing import beside, open_drawing
from torchtitan.runs.drawn_names import drawn_name
from torchtitan.runs.trained_model import WeightsError
from torchtitan_dit.commands.sample import GRID_OPTIONS, parse_arguments, refuse_unused


def parsed(monkeypatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["sample.py", *words])
    arguments = parse_arguments()
    refuse_unused(arguments)
    return arguments


def named(monkeypatch, *words: str, step: int | None = 200, track: str = "ema") -> str:
    arguments = parsed(monkeypatch, "outputs/run", *words)
    arguments.classes = [int(word) for word in arguments.classes or []]
    info = SimpleNamespace(condition_kind=Classes(10))
    trained = SimpleNamespace(step=step, track=track, info=info, config=SimpleNamespace(sampling=SamplingConfig()))
    return drawn_name(arguments, trained, GRID_OPTIONS)


def test_every_setting_of_a_picture_has_its_own_name(monkeypatch):
    names = [named(monkeypatch), named(monkeypatch, step=100), named(monkeypatch, track="none")]
    names.append(named(monkeypatch, "--seed", "1"))
    for words in (
        ["--guidance-scale", "3"], ["--guidance-scale", "0"], ["--solver", "heun"], ["--num-steps", "3"], ["--classes", "3"],
        ["--classes", "3", "1"], ["--images-per-class", "2"], ["--clip-x0", "false"], ["--clip-x0", "true"], ["--guide", "none"],
        ["--guide", "a/b"], ["--guide", "a_b"], ["--prompt", "a b"], ["--prompt", "a", "b"], ["--prompt", "a,b"],
        ["--prompt", *"abcdefghijklmnopqrstuvwxyz"], ["--size", "16x32"], ["--lora", "x.safetensors"], ["--dtype", "bfloat16"],
    ):  # fmt: skip
        names.append(named(monkeypatch, *words))
        assert names[-1] == named(monkeypatch, *words, "--batch-size", "3", "--output", "x")
    assert len(set(names)) == len(names)
    assert all(len(name) < 200 and Path(name).name == name for name in names)
    assert names[:2] == ["step-200-ema-seed-0", "step-100-ema-seed-0"]
    assert named(monkeypatch, "--guidance-scale", "3", step=None, track="") == "guidance_scale-3-seed-0"


def test_a_configuration_beside_a_run_is_refused(monkeypatch, tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(WeightsError, match=r"--config: is of a file of weights; .* is a folder of a run \(leave it out\)$"):
        open_drawing(parsed(monkeypatch, str(tmp_path), "--config", "other.toml"))


def test_a_folder_above_runs_is_called_no_run(monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(WeightsError, match=r"is no run folder, it has no config.toml \(give the folder of one run\)$") as refused:
        open_drawing(parsed(monkeypatch, str(tmp_path)))
    assert str(refused.value).startswith(f"{tmp_path}: ")


def test_nothing_is_drawn_into_the_folder_of_a_checkpoint(tmp_path):
    step, copied = tmp_path / "run" / "checkpoint" / "step-00000006", tmp_path / "copied"
    for checkpoint in (step, copied):
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    assert beside(tmp_path / "run", "drawn") == beside(step, "drawn") == tmp_path / "run" / "samples" / "drawn"
    assert beside(copied, "set") == tmp_path / "copied-drawn" / "samples" / "set"
    assert beside(tmp_path / "weights.safetensors", "drawn") == tmp_path / "weights"
