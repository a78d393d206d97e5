"""Latent stores of images of several shapes: from a captioned folder through the command to batches of one bucket each."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.extractions import content
from torchtitan.conditions import POOLED, TEXT
from torchtitan.data.base import DatasetError
from torchtitan.data.captioned_folder import CaptionedFolder, CaptionedFolderConfig
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.latents.bucketed import BUCKETS_FILE, open_stores
from torchtitan.latents.statistics import ChannelMoments
from torchtitan.texts import open_encoder
from torchtitan.training.data_loading import TrainingData
from torchtitan_dit.commands.extract_latents import main

SIZES = [(192, 128), (128, 128), (200, 130), (130, 200), (140, 140), (128, 192), (129, 150)]
WORDS = "one two three four five six seven".split()


def write_folder(folder: Path, sizes=SIZES) -> Path:
    random = np.random.default_rng(0)
    folder.mkdir()
    for number, ((width, height), word) in enumerate(zip(sizes, WORDS, strict=False)):
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a photo of {word}\n")
    return folder


def words_of(store, folder, *more):
    return [
        "--output", str(store), "--autoencoder", "identity", "--num-workers", "0", "--data.name", "captioned_folder",
        "--data.path", str(folder), "--data.resolutions", "[128]", "--data.validation_fraction", "0",
        "--text-encoder", "stub:32", "--pooled-encoder", "stub:24", "--text-length", "6", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("inputs") / "folder")


@pytest.fixture(scope="module")
def store(folder, tmp_path_factory):
    store = tmp_path_factory.mktemp("bucketed") / "store"
    assert main(words_of(store, folder)) == 0
    return store


def config_of(store, **keys):
    return LatentsConfig(path=str(store), **({"validation_fraction": 0.0} | keys))


def test_every_image_is_in_the_store_of_its_shape_with_its_caption(store, folder):
    source = CaptionedFolder(CaptionedFolderConfig(path=str(folder), resolutions=[128], validation_fraction=0.0), "train")
    shapes = CaptionedFolder.info(CaptionedFolderConfig(path=str(folder), resolutions=[128])).bucket_shapes
    info, dataset = Latents.info(config_of(store)), Latents(config_of(store), "train")
    assert not any(part.index.mirrored for part in open_stores(store))  # captions may speak of left and right
    assert len(shapes) >= 3 and info.bucket_shapes == shapes and info.image_shape in shapes
    assert np.array_equal(dataset.buckets, source.buckets) and len(dataset) == len(source) == len(SIZES)
    scale = torch.tensor(open_stores(store)[0].index.normalization.scale)[:, None, None]
    shift = torch.tensor(open_stores(store)[0].index.normalization.shift)[:, None, None]
    seen = set()
    for index in range(len(source)):
        wanted, found = source.fetch(np.array([index])), dataset.fetch(np.array([index]))
        torch.testing.assert_close(found["images"] / scale + shift, wanted["images"], rtol=0, atol=1e-3)  # of float16
        (text,) = dataset.captions(np.array([index]))
        assert [text] == source.captions(np.array([index]))
        assert torch.equal(found[TEXT], open_encoder("stub:32").encode([text], 6).tokens.bfloat16())
        assert torch.equal(found[POOLED], open_encoder("stub:24").encode([text], 77).pooled.bfloat16())
        seen.add(text)
    assert len(seen) == len(SIZES)


def test_a_picture_in_several_sizes_or_repeats_is_not_held_out_in_one_and_trained_in_another(folder, tmp_path, caplog):
    repeated = tmp_path / "pictures"
    shutil.copytree(folder, repeated / "3_thing")
    for number in (4, 5):
        (repeated / "3_thing" / f"{number}.png").rename(repeated / f"{number}.png")
        (repeated / "3_thing" / f"{number}.txt").rename(repeated / f"{number}.txt")
    for name, place, sizes, alone in (("sizes", folder, "[64, 128]", 0), ("repeats", repeated, "[128]", 2)):
        assert main([*words_of(tmp_path / name, place), "--data.resolutions", sizes]) == 0
        config, texts = config_of(tmp_path / name, validation_fraction=0.9), {}
        for split in ("train", "validation")[: 1 + bool(alone)]:
            dataset = Latents(config, split)
            texts[split] = {dataset.captions(np.array([index]))[0] for index in range(len(dataset))}
        assert Latents.info(config).has_validation == bool(alone)
        assert "trained, not held out, as the same pictures are there again: " in caplog.text
        assert not texts["train"] & texts.get("validation", set()) and len(texts["train"]) == len(SIZES) - alone
        caplog.clear()


def test_different_pictures_of_one_caption_are_held_out(folder, tmp_path, caplog):
    same = shutil.copytree(folder, tmp_path / "same")
    for path in same.glob("*.txt"):
        path.write_text("a photo of a dog")
    for name, words in (("captions", ()), ("none", ("--text-encoder", "", "--pooled-encoder", ""))):
        given = [word for word in words_of(tmp_path / name, same) if not words or word not in ("--text-length", "6")]
        assert main([*given, *words]) == 0
        config = config_of(tmp_path / name, validation_fraction=0.9)
        held_out = [len(store) - 1 for store in open_stores(tmp_path / name)]  # of each, all but the first
        assert len(Latents(config, "validation")) == sum(held_out)
    assert "there again" not in caplog.text


def test_normalisation_is_of_all_images_together(store):
    stores = open_stores(store)
    parts = [ChannelMoments.of(part.read(np.arange(len(part)))[0][:, None]) for part in stores]
    total = parts[0]
    for part in parts[1:]:
        total = total.joined(part)
    for part in stores:
        assert part.index.normalization.shift == pytest.approx(total.mean.tolist(), rel=1e-7)
        assert part.index.normalization.scale == pytest.approx((1 / total.std).tolist(), rel=1e-7)


def test_batches_are_of_one_bucket_each_and_an_epoch_is_exact(store):
    config = config_of(store, num_workers=0)
    data = TrainingData(
        Latents(config, "train"), config, info=Latents.info(config), seed=3, end_sample=2 * len(SIZES), global_batch_size=1,
        local_batch_size=1, rank=0, world_size=1,
    )  # fmt: skip
    batches = [data.next_batch() for _ in range(2 * len(SIZES))]
    data.close()
    shapes = [tuple(batch["images"].shape[1:]) for batch in batches]
    for epoch in (shapes[: len(SIZES)], shapes[len(SIZES) :]):
        counts = dict(zip(Latents.info(config).bucket_shapes, Latents(config, "train").buckets.tolist(), strict=True))
        assert {shape: epoch.count(shape) for shape in set(epoch)} == counts


def test_extraction_resumes_to_the_same_store(store, folder, tmp_path):
    copy, parts = tmp_path / "copy", sorted(path for path in store.iterdir() if path.is_dir())
    copy.mkdir()
    shutil.copytree(parts[1], copy / parts[1].name)  # one was finished when it was killed
    assert main(words_of(copy, folder)) == 0
    assert content(copy) == content(store)
    before = content(store)
    assert main(words_of(store, folder)) == 0
    assert content(store) == before


def test_unfinished_store_is_refused(store, tmp_path):
    shutil.copytree(store, tmp_path / "copy")
    (tmp_path / "copy" / BUCKETS_FILE).unlink()
    with pytest.raises(DatasetError, match=r"^data.path: .*copy: not finished, though .* is; run the command"):
        Latents.info(config_of(tmp_path / "copy"))


def test_parts_that_are_missing_or_of_another_extraction_are_refused(store, folder, tmp_path, capsys):
    shutil.copytree(store, tmp_path / "copy")
    part = sorted(path for path in (tmp_path / "copy").iterdir() if path.is_dir())[0]
    shutil.rmtree(part)
    with pytest.raises(DatasetError, match=f"{part}: missing, though {BUCKETS_FILE} lists it"):
        Latents.info(config_of(tmp_path / "copy"))
    assert main(words_of(tmp_path / "other", folder, "--null-caption", "nothing")) == 0
    shutil.copytree(tmp_path / "other" / part.name, part)
    with pytest.raises(DatasetError, match=f"{part}: is not the store that {BUCKETS_FILE} lists"):
        Latents.info(config_of(tmp_path / "copy"))
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "copy"), str(store)]) == 1
    assert f"{store}: good" in capsys.readouterr().out
    assert main(["show", str(store)]) == 0
    assert capsys.readouterr().out.count("one for every image") == len(open_stores(store))


def test_held_out_images_of_fewer_shapes_validate_and_of_others_are_refused(store, folder, tmp_path):
    write_folder(tmp_path / "held", SIZES[:2])
    assert main(words_of(tmp_path / "held_out", tmp_path / "held")) == 0
    config = config_of(store, validation_path=str(tmp_path / "held_out"))
    info, dataset = Latents.info(config), Latents(config, "validation")
    assert sum(dataset.buckets) == 2 and len(dataset.buckets) == len(info.bucket_shapes)
    for index in range(2):
        bucket = int(np.searchsorted(np.cumsum(dataset.buckets), index, side="right"))
        assert tuple(dataset.fetch(np.array([index]))["images"].shape[1:]) == info.bucket_shapes[bucket]
    write_folder(tmp_path / "wide", [(400, 128)])
    assert main(words_of(tmp_path / "others", tmp_path / "wide", "--data.resolutions", "[128]")) == 0
    with pytest.raises(DatasetError, match=r"^data.validation_path: .*others.*: its shape is not that of"):
        Latents.info(config_of(store, validation_path=str(tmp_path / "others")))
