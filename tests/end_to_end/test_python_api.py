"""`torchtitan_dit` in Python: docs/python_api.ipynb as it stands, and what it refuses."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import torchtitan_dit
from tests.forked import run_script
from torchtitan.training.config import ParameterGroupConfig
from torchtitan.training.optimizer import OptimizerError
from torchtitan_dit import api, load, sample, train
from torchtitan_dit.api import ConfigError, TrainingFailed, WeightsError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "python_api.ipynb"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Names after the notebook's cells were executed one after the other in an empty folder, with fewer steps."""
    folder, names, printed = tmp_path_factory.mktemp("notebook"), {"__name__": "notebook"}, io.StringIO()
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            for number, cell in enumerate(cells):
                text = "".join(cell["source"]).replace("STEPS = 300", "STEPS = 6")
                exec(compile(text, f"cell {number}", "exec"), names)
    finally:
        os.chdir(before)
    return names | {"folder": folder, "printed": printed.getvalue()}


def test_the_notebook_does_what_it_says(notebook):
    run, model = notebook["run"], notebook["model"]
    assert run.folder == Path("outputs/notebook") and run.summary["status"] == "completed"
    assert [step for step, _ in run.series()][-1] == 6
    assert isinstance(notebook["grid"], Image.Image) and notebook["grid"].width > 100
    assert notebook["tensor"].shape == (4, 1, 8, 8) and notebook["tensor"].dtype == torch.float32
    assert [image.size for image in notebook["images"]] == [(8, 8)] * 4
    assert model.class_names == tuple(str(digit) for digit in range(10)) and model.image_shape == (1, 8, 8)
    assert "step 6" in repr(model) and notebook["printed"].count("\n") >= 2
    assert notebook["small"].summary["status"] == "completed"


def test_images_are_those_of_the_command(notebook, tmp_path):
    run = notebook["folder"] / notebook["run"].folder
    options = {"ema": "none", "num_steps": 3, "guidance_scale": 2.0}
    images = sample(run, [3, 7], images_per_class=2, seed=5, **options)
    again = load(run, **options).sample([3, 7], images_per_class=2, seed=5)
    words = ["--classes", "3", "7", "--images-per-class", "2", "--seed", "5", "--files", "--output", str(tmp_path / "files")]
    words += ["--ema", "none", "--num-steps", "3", "--guidance-scale", "2"]
    done = run_script("scripts/sample.py", str(run), *words)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "files").glob("class-*.png"), key=lambda path: path.name.partition("image-")[2])
    drawn = [Image.open(path).convert("RGB").tobytes() for path in files]
    assert [image.tobytes() for image in images] == [image.tobytes() for image in again] == drawn and len(set(drawn)) == 4
    values = load(run, **options).sample(["3"], images_per_class=1, seed=5, output="tensor")
    assert torch.equal(((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)[0, 0].flatten(),
                       torch.frombuffer(bytearray(drawn[0]), dtype=torch.uint8)[::3])  # fmt: skip


@pytest.mark.parametrize(("options", "text"), [
    ({"classes": [10]}, "10 is not in 0..9"),
    ({"classes": "a dog"}, "classes: 'a dog' is no class (one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)"),
    ({"classes": ["a dog"]}, "classes: 'a dog' is no class (one of 0, 1, 2, "),
    ({"output": "jpeg"}, "output: must be \"pil\", \"tensor\" or \"latents\", is 'jpeg'"),
    ({"seed": -1}, "seed: must be in"),
    ({"encoders": {"text": "stub:32"}}, "encoders: has no effect without prompts"),
    ({"ema": "none"}, "ema: is an option of loading (give it to load)"),
    ({"prompts": []}, "prompts: is empty (leave it out to draw the run's)"),
    ({"classes": [1], "prompts": ["a dog"]}, "has no effect with prompts"),
    ({"prompts": ["a dog"]}, "--prompt: the model was trained on"),
    ({"solver": "hoin"}, "invalid choice: 'hoin'"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_an_exception_of_one_line(notebook, options, text):
    with pytest.raises(WeightsError) as refused:
        notebook["model"].sample(**options)
    assert text in str(refused.value) and "\n" not in str(refused.value)


def test_tensors_are_not_clipped_but_with_clip_x0(notebook):
    draw = partial(notebook["model"].sample, [3, 7], images_per_class=2, seed=1, num_steps=4, guidance_scale=2.0)
    assert draw(output="tensor").abs().max() > 1.05
    assert draw(output="tensor", clip_x0=True).abs().max() <= 1 + 1e-6


def test_integers_of_other_libraries_are_taken(notebook):
    draw = partial(notebook["model"].sample, num_steps=1, output="tensor")
    wanted = draw([3, 7], images_per_class=2, seed=5)
    assert torch.equal(draw(np.array([3, 7]), images_per_class=np.int64(2), seed=np.uint64(5)), wanted)
    assert torch.equal(draw(torch.tensor([3, 7]), images_per_class=2, seed=torch.tensor(5)), wanted)
    with pytest.raises(WeightsError, match="size: model.name = dit draws 8x8 only"):
        draw([3], size=(8, 16))
    guided = draw([3], guidance_scale=2.0, guidance_interval=np.array([0.25, 1.0]))
    assert torch.equal(guided, draw([3], guidance_scale=2.0, guidance_interval=[0.25, 1.0]))


def test_unknown_options_and_places_are_refused(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="'cfg' is no option \\(there are: atol, autoencoder, "):
        notebook["model"].sample(cfg=3)
    with pytest.raises(WeightsError, match="nowhere: no such run folder or weights file"):
        load("nowhere")
    with pytest.raises(ConfigError, match="^overrides: training.stepz: unknown key"):
        train("digits", {"training.stepz": 3}, progress=False)
    with pytest.raises(ConfigError, match="^config: training.steps: must be at least 1"):
        train({"data": {"name": "digits"}, "training": {"steps": -1}}, progress=False)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = torchtitan_dit.trian
    with pytest.raises(KeyError, match="loss: not measured in .* \\(there are: "):
        torchtitan_dit.Run(notebook["folder"] / notebook["run"].folder).series("loss")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "notes").write_text("mine")
    with pytest.raises(TrainingFailed, match="notes"):
        train("digits", {"job.name": "notes", "training.steps": 1, "lr_scheduler.warmup_steps": 0}, progress=False)
    assert (tmp_path / "outputs" / "notes").read_text() == "mine"


def test_importing_the_package_imports_no_torch():
    code = "import sys, torchtitan_dit as t\nassert set(t.__all__) <= set(dir(t)) and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_bar_that_no_terminal_shows_is_not_repeated_before_the_first_images(monkeypatch, capsys):
    def trained(config, processes, request, log, advance):
        for images in (0, 0, 64):
            time.sleep(0.15)  # longer than tqdm waits between two
            advance(images)

    monkeypatch.setattr(api, "train_to_the_end", trained)
    train("digits", {"job.name": "notes", "training.steps": 2, "lr_scheduler.warmup_steps": 0})
    assert capsys.readouterr().err.count(" 0%") == 1


def test_a_training_of_ones_own_process_leaves_why_it_failed(tmp_path, monkeypatch):
    config = torchtitan_dit.configure("digits", {
        "job.dump_folder": tmp_path, "job.name": "own", "model.flavor": "debug", "training.steps": np.int64(2),
        "sampling.enable": False, "evaluation.enable": False, "validation.enable": False, "gns.enable": False,
        "checkpoint.enable": False, "metrics.enable_tensorboard": False,
    })  # fmt: skip
    assert config.job.dump_folder == str(tmp_path)
    with pytest.raises(LookupError), torchtitan_dit.Trainer(config) as trainer:
        monkeypatch.setattr(trainer, "train_step", lambda: {}["loss"])
        trainer.train()
    left = json.loads((tmp_path / "own" / "status.json").read_text())
    assert (left["status"], left["reason"]) == ("failed", "step 1: KeyError: 'loss'")
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["n_images_seen"]) == ("failed", 0, 0)
    groups = [ParameterGroupConfig(pattern="no-such")]
    wrong = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, param_groups=groups))
    wrong.job = dataclasses.replace(config.job, allow_config_change=True)
    with pytest.raises(OptimizerError) as kept:  # with what it holds, which leaves the folder to the next
        torchtitan_dit.Trainer(wrong)
    with pytest.raises(ZeroDivisionError), torchtitan_dit.Trainer(config) as trainer, ThreadPoolExecutor(1) as pool:
        assert kept and not (tmp_path / "own" / "summary.json").exists()  # that of the failure
        assert pool.submit(trainer.train).result() == 0
        print(1 / 0)  # the training itself has ended
    assert json.loads((tmp_path / "own" / "summary.json").read_text())["status"] == "completed"
