"""Small extractors: the package's weights, their network against float64, their training, and extractors from files."""

import math
import os
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from torchtitan.data.digits import Digits, DigitsConfig
from torchtitan.features.base import ExtractorError
from torchtitan.features.registry import EXTRACTORS, open_extractor
from torchtitan.features.small import (
    ARCHITECTURES,
    METADATA,
    SHIPPED_SHA256,
    SmallClassifier,
    open_small,
    read_weights,
    shipped_file,
    weights_metadata,
)
from torchtitan.statistics.interval import binomial_interval
from torchtitan_dit.commands import train_extractor

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 400_000  # bytes


def noise_images(count, channels, height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    return torch.from_numpy(pixels)


def digits(split):
    batch = Digits(DigitsConfig(), split).fetch(np.arange(297))
    return ((batch["images"] + 1) * 127.5).round().to(torch.uint8), batch["class"]


# ---------------------------------------------------------------------- what the package carries


@pytest.mark.parametrize("name", SHIPPED_SHA256)
def test_shipped_weights_are_pinned_small_and_tell_of_their_training(name):
    weights = read_weights(shipped_file(name))
    assert weights.sha256 == SHIPPED_SHA256[name]
    assert shipped_file(name).stat().st_size <= LARGEST
    accuracy = weights.training["held_out_accuracy"]
    assert 0.7 < accuracy["lower"] < accuracy["value"] < accuracy["upper"] < 1
    again = binomial_interval(round(accuracy["value"] * accuracy["count"]), accuracy["count"])
    assert (accuracy["lower"], accuracy["upper"]) == pytest.approx((again.lower, again.upper))
    recipe = train_extractor.RECIPES[name]
    assert {key: weights.training[key] for key in vars(recipe)} == vars(recipe)
    assert 64 <= open_extractor(name).dims["pooled"] <= 128


def test_the_recorded_accuracy_is_that_on_held_out_digits():
    extractor = open_extractor("digits")
    images, labels = digits("validation")
    found = extractor.extract(images)["logits"].argmax(dim=1)
    accuracy = (found == labels).double().mean().item()
    assert accuracy == pytest.approx(extractor.record()["training"]["held_out_accuracy"]["value"], abs=1e-12)


def test_every_file_of_the_library_that_is_no_module_is_declared_as_package_data():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["torchtitan"]
    package = ROOT / "torchtitan"
    others = [
        str(path.relative_to(package)) for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    ]  # fmt: skip
    assert len(others) >= 2 and not [path for path in others if not any(fnmatch(path, each) for each in declared)]


# ---------------------------------------------------------------------- the network


@pytest.mark.parametrize("name", SHIPPED_SHA256)
def test_outputs_are_those_of_the_convolutions_written_out_in_float64(name):
    architecture, extractor = ARCHITECTURES[name], open_extractor(name)
    images = noise_images(3, architecture.channels, architecture.side, architecture.side)
    tensors = {key: tensor.double() for key, tensor in load_file(shipped_file(name)).items()}
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


@pytest.mark.parametrize("name", SHIPPED_SHA256)
def test_features_of_an_image_depend_on_its_batch_by_rounding_only(name):
    extractor = open_extractor(name)
    images = noise_images(7, 3, 20, 24)
    together = extractor.extract(images)
    for number in range(len(images)):
        alone = extractor.extract(images[number : number + 1])
        for output, values in alone.items():
            torch.testing.assert_close(values[0], together[output][number], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("height, width", [(64, 64), (21, 50), (5, 7)])
def test_other_sizes_are_brought_to_the_classifiers_as_pillow_does_in_float(height, width):
    classifier = SmallClassifier(ARCHITECTURES["cifar10"])
    images = noise_images(1, 3, height, width)
    found = classifier.prepare(images)[0]
    for channel, pixels in enumerate(images[0].numpy().astype(np.float32)):
        resized = np.asarray(Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR))
        assert np.abs(found[channel].numpy() - (resized / 127.5 - 1)).max() < 1e-5


@pytest.mark.parametrize("name", SHIPPED_SHA256)
def test_gray_images_and_their_rgb_copies_have_equal_features(name):
    extractor = open_extractor(name)
    gray = noise_images(4, 1, 32, 32)
    both = extractor.extract(gray), extractor.extract(gray.expand(-1, 3, -1, -1))
    assert all(torch.equal(both[0][output], both[1][output]) for output in extractor.dims)


# ---------------------------------------------------------------------- training


@pytest.fixture
def short_training(monkeypatch):
    recipe = train_extractor.Recipe(epochs=1, batch_size=50, peak_lr=0.1, weight_decay=5e-4, shift=1, mirror=True)
    monkeypatch.setattr(train_extractor, "RECIPES", {"digits": recipe})
    threads = torch.get_num_threads()
    yield recipe
    torch.set_num_threads(threads)


def trained(path, *options):
    assert train_extractor.main(["digits", "--output", str(path), *options]) == 0
    return path


def test_training_repeats_by_its_seed_and_never_sees_held_out_images(tmp_path, short_training, monkeypatch, capsys):
    first, again = (trained(tmp_path / f"{name}.safetensors") for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()
    other = trained(tmp_path / "seed.safetensors", "--seed", "1")
    fetch = Digits.fetch

    def blacked_out(self, indices):
        batch = fetch(self, indices)
        return batch if len(self) == 1500 else {"images": -torch.ones_like(batch["images"]), "class": batch["class"]}

    monkeypatch.setattr(Digits, "fetch", blacked_out)
    blind = trained(tmp_path / "blind.safetensors")
    tensors = load_file(first)
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in load_file(blind).items())
    assert not all(torch.equal(tensor, tensors[key]) for key, tensor in load_file(other).items())
    accuracies = [read_weights(path).training["held_out_accuracy"]["value"] for path in (first, blind)]
    assert accuracies[0] > 0.5 > accuracies[1]
    assert "held-out accuracy" in capsys.readouterr().out


def test_augmentation_shifts_and_mirrors_whole_images(short_training):
    """Every image of a batch is one of the 18 that shifting by at most a pixel and mirroring makes."""
    images = noise_images(50, 3, 8, 8).permute(0, 2, 3, 1).numpy()
    (batch,) = train_extractor.augmented_batches(images, short_training, np.random.default_rng(0))
    chosen, pixels = batch
    assert sorted(chosen) == list(range(50))
    seen = set()
    for number, image in zip(chosen, pixels.permute(0, 2, 3, 1).numpy(), strict=True):
        padded = np.pad(images[number], ((1, 1), (1, 1), (0, 0)), mode="edge")
        ways = {
            (row, column, step): padded[row : row + 8, column : column + 8][:, ::step]
            for row in range(3) for column in range(3) for step in (1, -1)
        }  # fmt: skip
        seen |= {way for way, wanted in ways.items() if np.array_equal(wanted, image)}
    assert len(seen) >= 12


@pytest.mark.parametrize("words, said", [
    (["digits", "--output", "x.pt"], "must end in .safetensors"),
    (["digits", "--output", "x.safetensors", "--data", "folder"], "leave it out"),
    (["digits", "--output", "x.safetensors", "--seed", "-1"], "must not be negative"),
    (["cifar10", "--output", "x.safetensors"], "data.path: not given"),
    (["digits", "--output", "there.safetensors"], "exists already"),
])  # fmt: skip
def test_bad_input_of_the_training_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.safetensors").write_text("mine")
    try:
        code = train_extractor.main(words)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.safetensors"]
    assert (tmp_path / "there.safetensors").read_text() == "mine"


# ---------------------------------------------------------------------- files


class Features(nn.Module):
    """Features by the convention of TorchScript extractors."""

    def __init__(self, batch_norm: bool = False, flat: bool = False, side: int = 0, scale: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.batch_norm, self.flat = nn.Conv2d(3, 5, 3), batch_norm, flat
        self.side, self.scale = side, scale

    def forward(self, images):
        assert self.side == 0 or images.shape[2] == self.side
        maps = self.convolution(images.float() / 127.5 - 1) * self.scale
        if self.batch_norm:
            maps = functional.batch_norm(maps, None, None, training=True)
        return maps.mean() if self.flat else maps.mean(dim=(2, 3))


class Trap:
    """Pickle that leaves a file behind when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_torchscript_file_gives_its_modules_features(tmp_path):
    module = Features()
    torch.jit.script(module).save(tmp_path / "mine.pt")
    extractor = open_extractor(str(tmp_path / "mine.pt"))
    images = noise_images(3, 3, 19, 40)
    assert torch.equal(extractor.extract(images)["pooled"], module(images))
    gray = images[:, :1]
    assert torch.equal(extractor.extract(gray)["pooled"], module(gray.expand(-1, 3, -1, -1)))
    record = extractor.record()
    assert (record["name"], record["dims"], len(record["sha256"])) == ("mine.pt", {"pooled": 5}, 64)
    with pytest.raises(ExtractorError, match=r"mine.pt: fails on images \[1, 3, 2, 2\].*uint8 images \[B, 3, H, W\]"):
        extractor.extract(noise_images(1, 3, 2, 2))
    with pytest.raises(ExtractorError, match="leave --weights out"):
        open_extractor(str(tmp_path / "mine.pt"), tmp_path / "other.pt")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_torchscript_that_breaks_the_convention_is_refused(tmp_path):
    torch.jit.script(Features(batch_norm=True)).save(tmp_path / "training.pt")
    torch.jit.script(Features(flat=True)).save(tmp_path / "flat.pt")
    torch.jit.script(Features(side=8)).save(tmp_path / "asserting.pt")
    torch.jit.script(Features(scale=math.inf)).save(tmp_path / "infinite.pt")
    torch.jit.trace(nn.Conv2d(3, 5, 3), torch.zeros(1, 3, 8, 8)).save(tmp_path / "float.pt")
    for name, said in (
        ("training.pt", "depend on the rest of its batch"), ("flat.pt", r"gives \[\] for 2 images"),
        ("float.pt", r"float.pt: fails on images .* takes uint8 images"),
        ("asserting.pt", r"asserting.pt: fails on images .* takes uint8 images"),
        ("infinite.pt", r"gives noise features that are not finite"),
    ):  # fmt: skip
        with pytest.raises(ExtractorError, match=said) as refused:
            open_extractor(str(tmp_path / name))
        assert "\n" not in str(refused.value)


def test_pickles_are_refused_without_being_read(tmp_path):
    torch.save({"trap": Trap(tmp_path / "sprung")}, tmp_path / "trap.pt")
    torch.save(Features().state_dict(), tmp_path / "state.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    for name in ("trap.pt", "state.pt", "junk.pt"):
        with pytest.raises(ExtractorError, match=r"no TorchScript file; pickled modules .* are not opened"):
            open_extractor(str(tmp_path / name))
    assert not (tmp_path / "sprung").exists()


def test_own_weights_open_by_their_path_and_by_the_weights_of_a_name(tmp_path):
    path = tmp_path / "mine.safetensors"
    tensors = {key: tensor + 0.25 for key, tensor in load_file(shipped_file("digits")).items()}
    save_file(tensors, path, weights_metadata("digits", {"seed": 9}))
    images, _ = digits("validation")
    by_path, by_name = open_extractor(str(path)), open_extractor("digits", path)
    assert torch.equal(by_path.extract(images)["pooled"], by_name.extract(images)["pooled"])
    assert not torch.equal(by_path.extract(images)["pooled"], open_extractor("digits").extract(images)["pooled"])
    assert (by_path.name, by_path.weights_sha256) == ("mine.safetensors", by_name.weights_sha256)
    assert by_path.record()["training"] == {"seed": 9}
    with pytest.raises(ExtractorError, match="holds weights of digits, not of cifar10"):
        open_small("cifar10", path, torch.device("cpu"))


@pytest.mark.parametrize("change, metadata, said", [
    ({}, None, "metadata name no architecture"),
    ({}, weights_metadata("resnet", {}), "metadata name no architecture"),
    ({"head.bias": torch.zeros(9)}, weights_metadata("digits", {}), r"head.bias is \[9\] instead of \[10\]"),
    ({"more": torch.zeros(1)}, weights_metadata("digits", {}), "not of this model: more"),
    ({"head.bias": torch.full((10,), math.nan)}, weights_metadata("digits", {}), "weights head.bias are not finite"),
    ({}, {METADATA: "[1]"}, "metadata name no architecture"),
    ({}, {METADATA: "{"}, "no safetensors file of scripts/train_extractor.py"),
    ({}, {METADATA: "[" * 100_000}, "no safetensors file of scripts/train_extractor.py"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused(tmp_path, change, metadata, said):
    save_file(load_file(shipped_file("digits")) | change, tmp_path / "bad.safetensors", metadata)
    with pytest.raises(ExtractorError, match=said) as refused:
        open_extractor(str(tmp_path / "bad.safetensors"))
    assert "\n" not in str(refused.value)


def test_a_changed_or_missing_file_of_the_package_and_an_unknown_name_are_refused(tmp_path, monkeypatch):
    changed = tmp_path / "digits.safetensors"
    changed.write_bytes(shipped_file("digits").read_bytes()[:-1] + b"\0")
    monkeypatch.setattr("torchtitan.features.small.shipped_file", lambda name: changed)
    with pytest.raises(ExtractorError, match="is not the file of this version of the package"):
        open_small("digits", None, torch.device("cpu"))
    changed.unlink()
    with pytest.raises(ExtractorError, match="cannot be read: No such file"):
        open_small("digits", None, torch.device("cpu"))
    with pytest.raises(ExtractorError, match=f"neither a file nor a feature extractor.*{', '.join(EXTRACTORS)}"):
        open_extractor("inceptoin")
