"""What scripts/sample.py opens, and where it writes pictures, under which names."""

import sys
from types import SimpleNamespace

import pytest

from torchtitan.sampling.setup import beside, open_setup
from torchtitan.weights.trained_model import WeightsError
from torchtitan_dit.commands.sample import parse_arguments, unused_name


def parsed(monkeypatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["sample.py", *words])
    return parse_arguments()


def test_a_grid_never_has_the_name_of_an_earlier_one(tmp_path):
    run, file = SimpleNamespace(step=200, track="ema"), SimpleNamespace(step=None, track="")
    for wanted in ("step-200-ema-seed-0", "step-200-ema-seed-0-2", "step-200-ema-seed-0-3"):
        assert unused_name(tmp_path, run, 0) == wanted
        (tmp_path / f"grid-{wanted}.png").touch()
    assert unused_name(tmp_path, run, 1) == "step-200-ema-seed-1"
    assert unused_name(tmp_path, file, 0) == "seed-0"


def test_a_configuration_beside_a_run_is_refused(monkeypatch, tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(WeightsError, match=r"^other.toml: is of a file of weights; .* is a folder of a run \(leave it out\)$"):
        open_setup(parsed(monkeypatch, str(tmp_path), "--config", "other.toml"))


def test_a_folder_above_runs_is_called_no_run(monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(WeightsError, match=r"is no run folder, it has no config.toml \(give the folder of one run\)$") as refused:
        open_setup(parsed(monkeypatch, str(tmp_path)))
    assert str(refused.value).startswith(f"{tmp_path}: ")


def test_nothing_is_drawn_into_the_folder_of_a_checkpoint(tmp_path):
    step, copied = tmp_path / "run" / "checkpoint" / "step-00000006", tmp_path / "copied"
    for checkpoint in (step, copied):
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    drawn = [beside(place, "drawn") for place in (tmp_path / "run", step, step.parent)]
    assert drawn == [tmp_path / "run" / "samples" / "drawn"] * 3
    assert beside(copied, "set") == tmp_path / "copied-drawn" / "samples" / "set"
    assert beside(tmp_path / "weights.safetensors", "drawn") == tmp_path / "weights-samples" / "drawn"
