"""Small extractors: the package's weights, and their network against float64."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional

from tests.unit.published_state_dicts import noise_images
from torchtitan.data.digits import Digits, DigitsConfig
from torchtitan.errors import EvaluationError
from torchtitan.fidelity import small
from torchtitan.fidelity.extractors import EXTRACTORS, open_extractor
from torchtitan.fidelity.small import ARCHITECTURES, SmallClassifier

WEIGHTS = Path(small.__file__).with_name("weights")
ROOT = Path(__file__).resolve().parents[2]


def digits(split):
    batch = Digits(DigitsConfig(), split).fetch(np.arange(297))
    return ((batch["images"] + 1) * 127.5).round().to(torch.uint8), batch["class"]


# ---------------------------------------------------------------------- what the package carries


def test_held_out_digits_are_recognised():
    images, labels = digits("validation")
    found = open_extractor("digits").extract(images)["logits"].argmax(dim=1)
    assert (found == labels).double().mean().item() == pytest.approx(295 / 297, abs=1e-12)


def test_every_file_of_the_library_that_is_no_module_is_declared_as_package_data():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["torchtitan"]
    package = ROOT / "torchtitan"
    others = [
        str(path.relative_to(package)) for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    ]  # fmt: skip
    assert len(others) >= 2 and not [path for path in others if not any(fnmatch(path, each) for each in declared)]


# ---------------------------------------------------------------------- the network


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_are_those_of_the_convolutions_written_out_in_float64(name):
    architecture, extractor = ARCHITECTURES[name], open_extractor(name)
    images = noise_images(3, architecture.channels, architecture.side, architecture.side)
    tensors = {key: tensor.double() for key, tensor in load_file(WEIGHTS / f"{name}.safetensors").items()}
    maps, place = images.double() / 127.5 - 1, 0
    for number, stage in enumerate(architecture.stages):
        if number:
            maps = maps.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax(dim=(3, 5))
            place += 1
        for _ in stage:
            key, norm = f"convolutions.{place}.weight", f"convolutions.{place + 1}"
            maps = functional.conv2d(maps, tensors[key], padding=1)
            mean, variance = (tensors[f"{norm}.running_{each}"].view(-1, 1, 1) for each in ("mean", "var"))
            weight, bias = (tensors[f"{norm}.{each}"].view(-1, 1, 1) for each in ("weight", "bias"))
            maps = ((maps - mean) / (variance + 1e-5).sqrt() * weight + bias).clamp(min=0)
            place += 3
    pooled = maps.mean(dim=(2, 3))
    logits = pooled @ tensors["head.weight"].T + tensors["head.bias"]
    features = extractor.extract(images)
    for found, wanted in ((features["pooled"], pooled), (features["logits"], logits)):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("height, width", [(64, 64), (21, 50)])
def test_other_sizes_are_brought_to_the_classifiers_as_pillow_does_in_float(height, width):
    classifier = SmallClassifier(ARCHITECTURES["cifar10"])
    images = noise_images(1, 3, height, width)
    found = classifier.prepare(images)[0]
    for channel, pixels in enumerate(images[0].numpy().astype(np.float32)):
        resized = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR))
        assert np.abs(found[channel].numpy() - (resized / 127.5 - 1)).max() < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gray_images_and_their_rgb_copies_have_equal_features(name):
    extractor = open_extractor(name)
    gray = noise_images(4, 1, 32, 32)
    both = extractor.extract(gray), extractor.extract(gray.expand(-1, 3, -1, -1))
    assert all(torch.equal(both[0][output], both[1][output]) for output in extractor.dims)


def test_weights_that_do_not_serve_are_refused(tmp_path, monkeypatch):
    for name, weights, said in (
        ("digits", tmp_path / "mine.safetensors", "the weights of digits come with the package"),
        ("nothing", None, f"'nothing' is no feature extractor (there are {', '.join(EXTRACTORS)})"),
    ):
        with pytest.raises(EvaluationError, match=re.escape(said)):
            open_extractor(name, weights)
    monkeypatch.setattr(small, "__file__", str(tmp_path / "small.py"))
    with pytest.raises(EvaluationError, match="is not the file of this version of the package"):
        open_extractor("digits")
