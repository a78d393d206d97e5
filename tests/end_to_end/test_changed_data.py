"""A run resumes on the classes that it was trained on: a folder may have been renamed, added or removed meanwhile."""


import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.faults.forked import ForkedRun
from torchtitan.conditions import Classes, Unconditional
from torchtitan.data.base import DatasetInfo
from torchtitan.errors import CheckpointError
from torchtitan.sampling.setup import chosen_classes
from torchtitan.weights.data_changes import IMAGES, data_changes
from torchtitan.weights.initial_weights import _check_classes
from torchtitan.weights.model_record import RECORD
from torchtitan.weights.trained_model import WeightsError, load_run

CONFIG = """
[model]
flavor = "debug"
num_layers = 1
[data]
name = "image_folder"
path = "DATA"
image_size = 8
validation_fraction = 0.0
[lr_scheduler]
warmup_steps = 0
[training]
global_batch_size = 4
local_batch_size = 4
[metrics]
enable_tensorboard = false
[sampling]
enable = false
"""


def write_class(folder, count: int = 4) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)).save(folder / f"{number}.png")


def test_a_run_is_not_resumed_on_other_classes(tmp_path):
    data, config = tmp_path / "data", tmp_path / "small.toml"
    config.write_text(CONFIG.replace("DATA", str(data)))
    for name in ("cat", "dog", "owl"):
        write_class(data / name)
    ForkedRun(config, "run", "--training.steps", "2").finish()
    checkpoint = tmp_path / "outputs" / "run" / "checkpoint" / "step-00000002"
    longer = ("--training.steps", "4")
    (data / "dog").rename(data / "wolf")
    (code,), (output,) = ForkedRun(config, "run", *longer).wait()
    assert code == 2 and "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if str(checkpoint) in line and "reading" not in line]
    changed = f"{checkpoint}: was trained on other classes than the data have now: class 1 was 'dog' and is 'owl'"
    advice = "restore the classes, or give another --job.name, or --job.allow_config_change true to resume it nevertheless"
    assert line == f"{changed} ({advice})"

    (data / "wolf").rename(data / "dog")
    Image.new("RGB", (8, 8)).save(data / "owl" / "another.png")
    (output,) = ForkedRun(config, "run", *longer).finish()
    assert "resumed after step 2" in output
    assert output.count("was trained on 12 images, and the data have 13 now; the order within an epoch is another, ") == 1
    (output,) = ForkedRun(config, "run", "--training.steps", "5").finish()
    assert "resumed after step 4" in output and "was trained on" not in output
    (data / "cat" / "0.png").rename(data / "cat" / "9.png")
    (output,) = ForkedRun(config, "run", "--training.steps", "6").finish()
    assert "as many images as it was trained on have other names, labels or captions now" in output


def info_of(kind) -> DatasetInfo:
    return DatasetInfo((3, 8, 8), kind)


@pytest.mark.parametrize(("record", "kind"), [
    (None, Classes(2, ("a", "b"))),  # of an earlier version
    ({}, Classes(2, ("a", "b"))),  # conditioned by captions
    ({"num_classes": 2, "class_names": ["a", "b"]}, Classes(2)),
])  # fmt: skip
def test_data_that_are_the_same_as_far_as_is_known_are_no_change(record, kind):
    assert data_changes({} if record is None else {RECORD: record}, "step", info_of(kind), 9, tolerated=False) == []


def test_other_names_are_tolerated_on_demand_and_another_number_of_classes_never():
    state = {RECORD: {"num_classes": 2, "class_names": ["a", "b"]}, IMAGES: 9}
    line = "step: was trained on other classes than the data have now: class 1 was 'b' and is 'c'"
    assert data_changes(state, "step", info_of(Classes(2, ("a", "c"))), 9, tolerated=True) == [line]
    for kind, text in ((Classes(1, ("a",)), "1 now: class 1 was 'b' and is none"), (Unconditional(), "0 now")):
        with pytest.raises(CheckpointError, match=rf"was trained on 2 classes, and the data have {text} \(restore"):
            data_changes(state, "step", info_of(kind), 9, tolerated=True)


def test_a_store_that_was_made_anew_is_said():
    record = {"num_classes": 0, "shift": [0.0, 1.0], "scale": [2.0, 2.0], "encoder": '{"name": "a"}'}
    found = {
        key: data_changes({RECORD: record | {key: value}}, "step", info_of(Unconditional()), 9, tolerated=False, record=record)
        for key, value in {"shift": [0.0, 1.5], "scale": [1.0, 2.0], "encoder": '{"name": "b"}', "labels": True}.items()
    }
    assert found.pop("labels") == []
    said = "step: was trained on latents of another {}: of another store, or of one that was made anew since"
    assert found == {key: [f"{said.format(key)} (restore it, or train anew)"] for key in ("shift", "scale", "encoder")}


def test_classes_in_another_order_are_never_exchanged():
    numbered = info_of(Classes(3, ("0", "2", "10")))
    recorded = {RECORD: {"num_classes": 3, "class_names": ["0", "10", "2"]}}
    with pytest.raises(CheckpointError, match=r"class 1 was '10' and is '2' \(data.classes_file with a line for each class"):
        data_changes(recorded, "step", numbered, 9, tolerated=True)


def test_a_run_of_classes_in_another_order_draws_those_that_it_was_trained_on(tmp_path):
    data, config = tmp_path / "data", tmp_path / "small.toml"
    config.write_text(CONFIG.replace("DATA", str(data)))
    for name in ("0", "2", "10"):
        write_class(data / name)
    (output,) = ForkedRun(config, "run", "--training.steps", "1").finish()
    assert "12 images to train on, in 3 classes, chosen by name: 2 is class 1, 10 is class 2" in output
    run = tmp_path / "outputs" / "run"
    assert "page: .venv/bin/python scripts/compare.py " in output and "outputs/run --watch\n" in output
    assert load_run(run, "none", None, torch.device("cpu")).warnings == ()
    listed = tmp_path / "classes.txt"  # the order of text
    listed.write_text("0\n10\n2\n")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('classes_file = ""', f'classes_file = "{listed}"'))
    trained = load_run(run, "none", None, torch.device("cpu"))
    assert trained.info.class_names == ("0", "2", "10") and trained.record.elsewhere
    assert "class 1 was '2' and is '10' (the checkpoint's record of the data is used)" in trained.warnings[0]
    assert chosen_classes(["10"], trained) == [2]
    weights = run / "exported.safetensors"
    save_file({"x": torch.zeros(1)}, weights, {"config": '[data]\nclass_names = ["0", "10", "2"]'})
    with pytest.raises(WeightsError, match="class 1 is '10' there and '2' in the data"):
        _check_classes(weights, info_of(Classes(3, ("0", "2", "10"))))
