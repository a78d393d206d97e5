"""Configuration that goes with weights of runs that drew no samples."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.configurations import load
from torchtitan.data import dataset_info
from torchtitan.runs import portable
from torchtitan.runs.portable import config_of_weights, config_without_data, data_record, header_config
from torchtitan.settings.record import effective

RUN = """
[data]
name = "image_folder"
path = "pictures"
image_size = 16
[sampling]
enable = false
[validation]
enable = false
"""
EARLIER = """
[data]
name = "recorded"
shape = [3, 16, 16]
num_classes = 2
[sampling]
enable = false
"""


@pytest.fixture
def unsampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cats", "dogs"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "pictures" / name / "0.png")
    return load(RUN)


def test_a_file_of_a_run_without_samples_is_read(unsampled):
    save_file({"x": torch.zeros(1)}, "weights.safetensors", header_config(unsampled, dataset_info(unsampled.data)))
    found = config_of_weights(Path("weights.safetensors"))
    assert (found.data.name, found.data.num_classes) == ("recorded", 2)


def test_a_header_names_no_place_that_is_opened(unsampled, tmp_path):
    path = tmp_path / "weights.safetensors"
    text = EARLIER + '[objective.timesteps]\nname = "slots"\nedges = [0.0, 0.5, 1.0]\nedges_path = "edges.json"\n'
    text += '[lora]\nenable = true\ninitial_adapter = "a.safetensors"\n[checkpoint]\ninitial_weights = "b.safetensors"\n'
    save_file({"x": torch.zeros(1)}, path, {portable.CONFIG: text})
    found = config_of_weights(path)
    assert not (found.lora.enable or found.checkpoint.initial_weights or found.objective.timesteps.edges_path)
    for data in ('name = "image_folder"\npath = "pictures"', 'name = "huggingface"\npath = "owner/name"', 'name = ["recorded"]'):
        save_file({"x": torch.zeros(1)}, path, {portable.CONFIG: f"[data]\n{data}\n"})
        assert config_of_weights(path) is None


@pytest.mark.parametrize("with_folder", [True, False])
def test_a_checkpoint_of_a_run_without_samples_is_read_where_its_data_are_gone(unsampled, monkeypatch, tmp_path, with_folder):
    tables = effective(unsampled)
    state = {portable.RECORD: data_record(unsampled, dataset_info(unsampled.data)), "config": tables}
    monkeypatch.setattr(portable, "read_state", lambda checkpoint: state)
    shutil.rmtree("pictures")
    if with_folder:
        (tmp_path / "config.toml").write_text(tomli_w.dumps({name: table for name, table in tables.items() if table}))
    found = config_without_data(tmp_path, tmp_path / "step-2")
    assert (found.data.name, found.data.num_classes) == ("recorded", 2)
