"""Warning of many pixels: once, with tokens, memory, hours and the two ways out; and none for others."""

import re

import pytest
from PIL import Image

from torchtitan.config.job import load_config
from torchtitan.estimate import pixels
from torchtitan.estimate.devices import DEVICES
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.estimate.pixels import pixel_warning
from torchtitan.estimate.roofline import Efficiency, estimate_step_time, training_flops_per_image
from torchtitan_dit.commands import train


@pytest.fixture
def config(tmp_path):
    (tmp_path / "pictures").mkdir()
    for number in range(30):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "pictures" / f"{number}.png")

    def load(*words):
        path = str(tmp_path / "pictures")
        return load_config(["--job.config_file", "my_images", "--data.path", path, "--model.flavor", "debug", *words], 1)

    return load


def test_the_numbers_are_those_of_the_estimate(config, monkeypatch):
    monkeypatch.setattr(pixels.torch.cuda, "is_available", lambda: True)
    given = config("--data.image_size", "256", "--model.patch_size", "2")
    said = pixel_warning(given, 1)
    memory = estimate_memory(given, 1)
    time = estimate_step_time(given, model_on_meta(given), memory, DEVICES["H100"], Efficiency())
    pattern = r"are ([\d,]+) tokens .* about ([\d,]+) GiB a device and ([\d,.]+) hours on H100 \(.*--model.patch_size (\d+)\)"
    found = re.search(pattern, said)
    assert found and "\n" not in said and "docs/latents.md" in said
    tokens, gib, hours, patch = found.groups()
    assert (tokens, gib, patch) == ("16,384", f"{memory.total / 2**30:,.0f}", "8") and float(hours) == round(time.hours, 1)


def test_without_a_gpu_the_hours_on_the_processor_are_said_too(config, monkeypatch):
    given = config("--data.image_size", "256", "--model.patch_size", "2", "--training.steps", "1000")
    monkeypatch.setattr(pixels.torch.cuda, "is_available", lambda: False)
    flops = 1000 * given.training.global_batch_size * training_flops_per_image(given, model_on_meta(given))
    monkeypatch.setattr(pixels, "_processor_flops", lambda: flops / (0.45 * 3600 * 1234))
    assert "hours on H100 (speed assumed), about 1,234.0 on this machine's processor (train on latents" in pixel_warning(given, 1)


@pytest.mark.parametrize("words", [(), ("--data.image_size", "256", "--model.patch_size", "8")])
def test_few_tokens_need_no_warning(config, words):
    assert pixel_warning(config(*words), 1) == ""


@pytest.mark.parametrize(("environment", "count"), [({}, 1), ({train.CHECKED: "1"}, 0)])
def test_it_is_said_once_with_the_check_or_the_training(config, environment, count, monkeypatch, capsys):
    monkeypatch.delenv(train.CHECKED, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    path = config("--data.image_size", "128", "--model.patch_size", "2").data.path
    words = ["--job.config_file", "my_images", "--data.path", path, "--model.flavor", "debug", "--data.image_size", "128"]
    assert train.main([*words, "--model.patch_size", "2", "--check-only"]) == 0
    assert capsys.readouterr().err.count("warning: 128 x 128 pixels in patches of 2 are 4,096 tokens") == count
