"""Weights taken elsewhere: a file, a checkpoint or a run without its data draws the same pictures as the run with them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.forked import ROOT, run_script

DRAWN = ("--classes", "0", "1", "--images-per-class", "2", "--num-steps", "3", "--guidance-scale", "2", "--files")
CONFIG = {
    "job": {"name": "run"},
    "model": {"flavor": "debug", "mlp": "gelu", "norm": "layernorm", "qk_norm": False, "position": "sincos"},
    "data": {"name": "image_folder", "path": "pictures", "image_size": 16},
    "training": {"steps": 3, "local_batch_size": 4}, "lr_scheduler": {"warmup_steps": 1}, "gns": {"enable": False},
    "checkpoint": {"enable": True, "interval": 3}, "validation": {"enable": False},
}  # fmt: skip


def drawn(place: Path, source: str, *words: str) -> list[bytes]:
    done = run_script(f"{ROOT}/scripts/sample.py", source, *DRAWN, *words, "--output", "drawn", folder=place)
    assert done.returncode == 0, done.stderr
    files = sorted((place / "drawn").glob("class-*.png"))
    assert len(files) == 4
    found = [file.read_bytes() for file in files]
    shutil.rmtree(place / "drawn")
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folder with a run on two classes of pictures, `expected` (what it draws), and then without the pictures."""
    folder = tmp_path_factory.mktemp("place")
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.png")
    (folder / "run.toml").write_text(tomli_w.dumps(CONFIG))
    done = run_script(f"{ROOT}/train.py", "--job.config_file", "run.toml", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def expected(place) -> list[bytes]:
    pictures = drawn(place, "outputs/run")
    assert len(set(pictures)) == 4
    shutil.rmtree(place / "pictures")
    return pictures


def test_a_run_without_its_data_draws_the_same(place, expected):
    assert drawn(place, "outputs/run") == expected
    said = run_script(f"{ROOT}/scripts/sample.py", "outputs/run", *DRAWN, "--output", "said", folder=place).stderr
    assert "pictures" in said and "(the checkpoint's record of the data is used)" in said


def test_a_checkpoint_alone_draws_the_same(place, expected, tmp_path):
    (checkpoint,) = (place / "outputs" / "run" / "checkpoint").glob("step-*")
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    assert drawn(tmp_path, checkpoint.name) == expected
    (tmp_path / checkpoint.name).rename(tmp_path / "weights")
    refused = run_script(f"{ROOT}/scripts/sample.py", "weights", folder=tmp_path)
    assert refused.returncode == 2 and "rename it to step- and eight digits" in refused.stderr


@pytest.mark.parametrize("layout", ["dit"])
def test_an_exported_file_alone_draws_the_same(place, expected, tmp_path, layout):
    words = ("export", "outputs/run", "--format", layout, "--output", str(tmp_path / "weights.safetensors"))
    done = run_script(f"{ROOT}/scripts/checkpoint.py", *words, folder=place)
    assert done.returncode == 0, done.stderr
    assert drawn(tmp_path, "weights.safetensors") == expected
    words = ("export", "weights.safetensors", "--format", "sit", "--output", "again.safetensors")
    done = run_script(f"{ROOT}/scripts/checkpoint.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert drawn(tmp_path, "again.safetensors") == expected
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as file:
        header = file.metadata()
    assert header["layout"] == layout and "cats" in header["config"] and "outputs" not in header["config"]


def test_what_a_header_lacks_or_spoils_is_said_in_one_line(place, expected, tmp_path):
    run_script(f"{ROOT}/scripts/checkpoint.py", "export", "outputs/run", "--format", "safetensors", "--output",
               str(tmp_path / "weights.safetensors"), folder=place)  # fmt: skip
    tensors = load_file(tmp_path / "weights.safetensors")
    for name, extra, text in (("weights", ("--ema", "none"), "--ema: is for runs"), ("other", (), "no header names its layout")):
        save_file(tensors, tmp_path / "other.safetensors")
        words = ("export", f"{name}.safetensors", "--format", "dit", "--output", "x.safetensors", *extra)
        refused = run_script(f"{ROOT}/scripts/checkpoint.py", *words, folder=tmp_path)
        assert refused.returncode == 2 and text in refused.stderr and len(refused.stderr.splitlines()) == 1, refused.stderr
    for metadata, text in (
        ({"layout": "safetensors"}, "which model is this? (add CONFIG, its configuration)"),
        ({"config": "[model]\nflavour = 'x'\n[data]\nshape = [3, 16, 16]"}, "model.flavour: unknown key"),
    ):
        save_file(tensors, tmp_path / "bad.safetensors", metadata)
        refused = run_script(f"{ROOT}/scripts/sample.py", "bad.safetensors", folder=tmp_path)
        assert refused.returncode == 2 and text in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr and "/tmp/tmp" not in refused.stderr
        assert all(line.startswith("bad.safetensors") for line in refused.stderr.splitlines())
    (tmp_path / "lost.toml").write_text('[data]\nname = "image_folder"\nimage_size = 16\n')
    refused = run_script(f"{ROOT}/scripts/sample.py", "weights.safetensors", "lost.toml", folder=tmp_path)
    *_, advice = refused.stderr.splitlines()
    assert advice == "weights.safetensors: describes its model in its header (leave lost.toml out)"
