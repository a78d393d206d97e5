"""Latents to images in a run: by hand, on several ranks, refused; names of classes in grids."""

import numpy as np
import pytest
import torch

from tests.configurations import problems
from tests.decoding import CLASS_NAMES, decoded_by_hand, write_encoded_store
from tests.launcher import run_on_ranks
from tests.unit.autoencoder_files import write_taef2, write_tokenizer
from torchtitan.autoencoders.base import AutoencoderError
from torchtitan.conditions import Classes, Embeddings
from torchtitan.config.job import load_config
from torchtitan.evaluation.config import AutoencoderConfig
from torchtitan.evaluation.decoding import held_out_picture, open_decoder
from torchtitan.evaluation.sampling import grid_labels
from torchtitan.latents import LatentStore
from torchtitan.pictures.grids import EMPTY, class_labels, image_grid

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded")
    index, matrix = write_encoded_store(folder / "store", folder / "tokenizer")
    return folder, index, matrix


def decoder_of(folder, **keys):
    config = AutoencoderConfig(name="cosmos", path=str(folder / "tokenizer"), **keys)
    return open_decoder(config, LatentStore(folder / "store").index, "store", CPU)


def drawn(count: int) -> torch.Tensor:
    return torch.randn(count, 16, 4, 4, generator=torch.Generator().manual_seed(3))


def test_latents_are_denormalised_and_decoded_in_batches(encoded):
    folder, index, matrix = encoded
    assert index.normalization.source == "measured" and max(index.normalization.scale) > 1.1
    images = decoder_of(folder, batch_size=3).decode(drawn(7))
    assert images.dtype == torch.float32 and images.shape == (7, 3, 32, 32)
    torch.testing.assert_close(images, decoded_by_hand(drawn(7), index, matrix), rtol=0, atol=1e-6)
    tiled = decoder_of(folder, tile=16).decode(drawn(7))
    torch.testing.assert_close(tiled, images, rtol=0, atol=1e-6)  # this decoder sees one position at a time
    with pytest.raises(AutoencoderError, match="made in float32"):
        decoder_of(folder, dtype="bfloat16")


def test_latents_are_decoded_without_the_autocast_that_they_are_drawn_in(encoded, monkeypatch):
    decoder, seen = decoder_of(encoded[0]), []
    decode = decoder._autoencoder.decode
    monkeypatch.setattr(decoder._autoencoder, "decode", lambda x: seen.append(torch.is_autocast_enabled("cpu")) or decode(x))
    with torch.autocast("cpu", torch.bfloat16):
        decoder.decode_alone(drawn(2))
    assert seen == [False]


def decode_on_rank(folder: str, count: int) -> list:
    from pathlib import Path

    return decoder_of(Path(folder), batch_size=1).decode(drawn(count)).flatten(1).tolist()


@pytest.mark.parametrize("count", [1, 5])
def test_ranks_share_the_work_and_all_have_the_same_images(encoded, count):
    folder, _, _ = encoded
    alone = decoder_of(folder, batch_size=1).decode(drawn(count)).flatten(1).tolist()
    arguments = {"folder": str(folder), "count": count}
    assert run_on_ranks("tests.unit.test_decoding:decode_on_rank", 2, arguments) == [alone, alone]


def test_another_autoencoder_than_the_stores_is_refused(encoded, tmp_path):
    folder, _, _ = encoded
    store = LatentStore(folder / "store")
    write_taef2(tmp_path / "taef2")
    with pytest.raises(AutoencoderError, match="made with the autoencoder 'cosmos', not 'taef2'"):
        open_decoder(AutoencoderConfig(name="taef2", path=str(tmp_path / "taef2")), store.index, "store", CPU)
    write_tokenizer(tmp_path / "other", torch.bfloat16)
    with pytest.raises(AutoencoderError, match="sha256 differ"):
        open_decoder(AutoencoderConfig(name="cosmos", path=str(tmp_path / "other")), store.index, "store", CPU)
    with pytest.raises(AutoencoderError, match="no such folder"):
        open_decoder(AutoencoderConfig(name="cosmos", path=str(tmp_path / "nowhere")), store.index, "store", CPU)
    anonymous = dict(autoencoder={"name": "unknown"})
    store.index = store.index.model_copy(update=anonymous)
    with pytest.raises(AutoencoderError, match="latents of 16 channels, and taef2 decodes 32"):
        open_decoder(AutoencoderConfig(name="taef2", path=str(tmp_path / "taef2")), store.index, "store", CPU)
    store.index = store.index.model_copy(update=anonymous | {"image_size": 64})
    with pytest.raises(AutoencoderError, match="images of 64 pixels, and cosmos decodes them to 32"):
        open_decoder(AutoencoderConfig(name="cosmos", path=str(folder / "tokenizer")), store.index, "store", CPU)


def test_keys_that_cannot_be_meant_are_refused_with_the_way_out(encoded):
    words = ["--data.name", "latents", "--data.path", str(encoded[0] / "store"), "--autoencoder.name"]
    (line,) = problems(None, [*words, "cosmos"])
    assert line.startswith("default: autoencoder.path: is missing") and "scripts/download.py" in line
    (line,) = problems(None, [*words, "identity", "--autoencoder.dtype", "bfloat16"])
    assert "autoencoder.dtype: has no effect when autoencoder.name = identity" in line
    (line,) = problems(None, ["--data.name", "digits", "--autoencoder.name", "identity"])
    assert "autoencoder.name: has no effect when data.name = digits: nothing encodes the images" in line
    assert "scripts/extract_latents.py" in line and "set data.name = latents" in line
    config = load_config([*words, "cosmos", "--autoencoder.path", "not looked at here"], 1)
    assert config.autoencoder.dtype is None and config.autoencoder.batch_size == 16


def test_classes_are_shown_by_the_first_of_their_names():
    assert class_labels([2, 0, 1], CLASS_NAMES) == ["great white shark", "tench", "goldfish"]
    assert class_labels([1, 0], ("n01484850_great_white_shark", "n02 tench")) == ["n02 tench", "great white shark"]
    assert class_labels([1], ()) is None
    dishes = ("fish, chips", "fish, raw", "soup, hot")
    assert class_labels([0, 1, 2, 0], dishes) == ["fish, chips", "fish, raw", "soup", "fish, chips"]
    assert grid_labels([2, 0], Classes(3, CLASS_NAMES)) == ["great white shark", "tench"]
    assert grid_labels([0], Classes(3)) is None


def test_prompts_are_shown_beyond_their_commas():
    prompts = ("a dog, sitting", "a dog, running")
    assert grid_labels([1, 0], Embeddings({}, names=prompts)) == ["a dog, running", "a dog, sitting"]


def test_captions_stand_below_their_images_and_within_their_width():
    images = torch.full((3, 3, 64, 64), -1.0)
    plain, named = (
        np.asarray(image_grid(images, 2, 2, captions=captions)) for captions in (None, ["tench", "W" * 40, "goldfish"])
    )
    line = (named.shape[0] - plain.shape[0]) // 2
    assert line > 10 and named.shape[1] == plain.shape[1]
    ink = named.min(axis=-1) > 60  # nothing else is as bright
    for row, column, shown in ((0, 0, True), (0, 1, True), (1, 0, True), (1, 1, False)):
        left, top = 12 + column * 68, 12 + row * (68 + line)
        assert (named[top : top + 64, left : left + 64] == (EMPTY if not shown else 0)).all()
        assert ink[top + 64 : top + 68 + line, left : left + 64].any() == shown
        assert not ink[:, left + 64 : left + 68].any()  # nothing between two columns


def test_the_picture_of_held_out_latents_is_spread_over_them(encoded):
    folder, index, matrix = encoded

    class HeldOut:
        buckets = None

        def __len__(self) -> int:
            return 70

        def fetch(self, indices):
            self.asked = indices
            return {"images": drawn(70)[indices], "class": torch.from_numpy(indices) % 3}

    dataset = HeldOut()
    picture = held_out_picture(dataset, decoder_of(folder), CLASS_NAMES)
    assert len(dataset.asked) == 32 and (dataset.asked[0], dataset.asked[-1]) == (0, 67)
    by_hand = image_grid(
        decoded_by_hand(drawn(70)[dataset.asked], index, matrix), 4, 8, title="held-out latents, decoded",
        captions=class_labels((dataset.asked % 3).tolist(), CLASS_NAMES),
    )  # fmt: skip
    assert np.abs(np.asarray(picture).astype(int) - np.asarray(by_hand)).max() <= 1
    dataset.buckets = [20, 40, 10]  # images of other shapes are in none of its batches
    held_out_picture(dataset, decoder_of(folder), CLASS_NAMES)
    assert len(dataset.asked) == 32 and (dataset.asked[0], dataset.asked[-1]) == (20, 58)
