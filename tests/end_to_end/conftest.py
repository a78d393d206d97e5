"""What tests of several commands share."""

import io

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.decoding import write_encoded_store
from tests.encoded_images import image_bytes
from tests.unit.test_data import write_tinyimagenet
from tests.unit.test_latent_cache import write_pictures
from torchtitan_dit.commands.extract_latents import main as extract_latents


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """Forty images of noise in CIFAR-10's layout."""
    folder, draw = tmp_path_factory.mktemp("cifar10"), np.random.default_rng(0)
    rows = []
    for number in range(40):
        buffer = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, format="PNG")
        rows.append({"img": {"bytes": buffer.getvalue(), "path": ""}, "label": number % 10, "fine_label": number})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """A store of tiny latents in Cosmos' number of channels, and keys that put it and its tokenizer in place."""
    folder = tmp_path_factory.mktemp("latents")
    write_encoded_store(folder / "store", folder / "tokenizer", num_images=100)
    tokenizer = str(folder / "tokenizer")
    return [
        "--data.path", str(folder / "store"), "--data.num_workers", "0",
        "--autoencoder.name", "cosmos", "--autoencoder.path", tokenizer,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folders(cifar10, tmp_path_factory):
    """Folder of each dataset that is not latents, and a store of captioned images."""
    tiny, imagenet = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("imagenet")
    write_tinyimagenet(tiny)
    for number in range(40):
        place = imagenet / "train" / f"n0000000{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(image_bytes(number))
    captions = tmp_path_factory.mktemp("captions") / "store"
    assert extract_latents([
        "--output", str(captions), "--autoencoder", "identity", "--text-encoder", "stub:16", "--pooled-encoder", "stub:8",
        "--text-length", "5", "--class-captions", "a photo of a {}", "--data.name", "cifar10", "--data.path", str(cifar10),
    ]) == 0  # fmt: skip
    pictures = write_pictures(tmp_path_factory.mktemp("captioned") / "pictures")
    return {
        "captioned_folder": pictures, "cifar10": cifar10, "cifar100": cifar10, "tinyimagenet": tiny, "imagenet": imagenet,
        "captions": captions,
    }  # fmt: skip
