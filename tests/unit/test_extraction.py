"""scripts/extract_latents.py in one process: what the store holds, what is skipped, refused, and gone on with."""

import json
import shutil
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.extractions import SIDE, content, write_inputs, write_photographs
from tests.unit.test_full_disk import files_end_at
from torchtitan.autoencoders.base import Autoencoder
from torchtitan.autoencoders.base import Latents as Encoded
from torchtitan.autoencoders.identity import IdentityAutoencoder
from torchtitan.config.job import load_data_section
from torchtitan.data.base import DatasetError
from torchtitan.data.class_folders import list_class_folders
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.extraction import check_alike
from torchtitan.extraction.extraction_plan import plan_extraction
from torchtitan.extraction.image_source import ImageSource
from torchtitan.latents import LatentStore, verify_shards
from torchtitan.latents.index import PARTIAL_FOLDER, SKIPPED_FILE
from torchtitan_dit.commands.cosmos_latent_decoder import open_decoder
from torchtitan_dit.commands.extract_latents import main, options_of, parse_arguments

COUNT = 18
BAD = (1, 6, 7, 8, 17)  # of shards of three: one in the middle, all of the third, the very last


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return folder, write_inputs(folder, COUNT, bad=BAD) + ["--data.max_corrupt_share", "0.5"]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    store = tmp_path_factory.mktemp("whole") / "store"
    assert main(["--output", str(store), *inputs[1]]) == 0
    return store


def test_parts_of_a_store_make_the_bytes_of_one_start(inputs, whole, tmp_path, capsys):
    words = ["--output", str(tmp_path / "store"), *inputs[1]]
    assert main([*words, "--part", "2/2"]) == 0
    assert "part 2 of 2 is written; a start without --part writes the index" in capsys.readouterr().out
    assert not (tmp_path / "store" / "index.json").exists()
    assert main([*words, "--part", "1/2"]) == 0 and main(words) == 0
    assert "nothing was missing" in capsys.readouterr().out and content(tmp_path / "store") == content(whole)


def encoded_by_hand(folder, mirrored):
    """Latents [N, 16, 2, 2] of the good images as matrix products of 8x8 patches, and their labels."""
    matrix = load_matrix(folder)
    latents, labels = [], []
    for number, path in enumerate(sorted((folder / "photographs").rglob("*.png"))):
        if number not in BAD:
            pixels = np.asarray(Image.open(path)).astype(np.float64) / 127.5 - 1  # [H, W, 3]
            pixels = pixels[:, ::-1] if mirrored else pixels
            patches = pixels.reshape(2, 8, 2, 8, 3).transpose(0, 2, 4, 1, 3).reshape(2, 2, 192)
            latents.append((patches @ matrix.T).transpose(2, 0, 1))
            labels.append(number // (COUNT // 3))
    return np.stack(latents), labels


def load_matrix(folder):
    encoder = torch.jit.load(folder / "tokenizer" / "encoder.jit")
    return dict(encoder.named_parameters())["weight"].detach().double().reshape(16, 192).numpy()


def test_store_holds_what_the_autoencoder_gives_for_each_image_and_its_mirror_image(inputs, whole):
    store = LatentStore(whole)
    assert len(store) == COUNT - len(BAD) and store.index.num_source_images == COUNT
    assert [shard.num_images for shard in store.index.shards] == [2, 3, 0, 3, 3, 2]
    assert store.index.image_size == SIDE and store.index.class_names == ["class0", "class1", "class2"]
    for view in (0, 1):
        values, labels = store.read(np.arange(len(store)), np.full(len(store), view))
        wanted, wanted_labels = encoded_by_hand(inputs[0], mirrored=bool(view))
        np.testing.assert_allclose(values[:, 0].numpy(), wanted, rtol=2**-11, atol=2e-6)
        assert labels.tolist() == wanted_labels
    assert not any(verify_shards(whole, store.index))


def test_images_that_cannot_be_decoded_are_listed_without_where_they_lay(inputs, whole):
    lines = [json.loads(line) for line in (whole / SKIPPED_FILE).read_text().splitlines()]
    assert [line["image"] for line in lines] == list(BAD)
    assert [line["path"] for line in lines] == [f"class{number // 6}/{number:03d}.png" for number in BAD]
    assert all("truncated" in line["reason"] or "broken" in line["reason"] for line in lines)
    assert str(inputs[0]).encode() not in b"".join(content(whole).values())


def test_finished_shards_are_not_encoded_again_and_the_bytes_are_the_same(inputs, whole, tmp_path, monkeypatch, capsys):
    def stopping(images):
        if len(encoded) == 5:
            raise KeyboardInterrupt
        encoded.append(len(images))

    def counted(self, images):
        on_encode(images)
        return Encoded(encode(self, images).mean + len(images))  # so that the bytes show how batches are cut

    encode, encoded, on_encode = Autoencoder.encode, [], stopping
    monkeypatch.setattr(Autoencoder, "encode", counted)
    words = ["--output", str(tmp_path / "store"), *inputs[1], "--no-mirror"]
    assert main(words) == 130
    assert "interrupted; the same command resumes" in capsys.readouterr().err
    finished = list((tmp_path / "store" / PARTIAL_FOLDER).glob("shard-*"))
    # The first call was for the latents' shape; the first two shards take two each, the third none.
    assert len(finished) == 3
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("shard-*")}
    encoded.clear()
    on_encode = lambda images: encoded.append(len(images))  # noqa: E731
    assert main(words) == 0
    assert sum(encoded) == 1 + 3 + 3 + 2
    assert all((tmp_path / "store" / name).stat().st_mtime_ns == time for name, time in before.items())
    assert main(["--output", str(tmp_path / "straight"), *inputs[1], "--no-mirror"]) == 0
    assert content(tmp_path / "store") == content(tmp_path / "straight") != content(whole)
    capsys.readouterr()
    assert main(words) == 0
    assert "nothing was missing" in capsys.readouterr().out


def test_dataset_that_was_moved_goes_on_and_another_one_or_other_settings_are_refused(inputs, tmp_path, capsys):
    folder, words = inputs
    store = ["--output", str(tmp_path / "store"), "--no-mirror"]
    assert main([*store, *words]) == 0
    shutil.copytree(folder / "photographs", tmp_path / "elsewhere")
    assert main([*store, *words, "--data.path", str(tmp_path / "elsewhere")]) == 0
    image = tmp_path / "elsewhere" / "class0" / "000.png"
    Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(image)
    capsys.readouterr()
    for more, differing in (
        (["--data.path", str(tmp_path / "elsewhere")], "origin.sample"),
        (["--batch-size", "3"], "origin.encoding.batch_size = 2, this would be 3"),
        (["--store-dtype", "int8"], "dtype = 'float16', this would be 'int8'"),
        (["--mirror"], "mirrored = False, this would be True"),
        (["--data.validation_fraction", "0.5"], "num_source_images = 18, this would be 9"),
        (["--split", "all"], "origin.split = 'train', this would be 'all'"),
    ):
        assert main([*store, *words, *more]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and differing in said


def test_splits(tmp_path):
    words = write_inputs(tmp_path, 12, bad=(7,)) + ["--data.validation_fraction", "0.25"]
    words += ["--data.max_corrupt_share", "0.5"]
    for split, numbers in (("train", [0, 1, 2, 4, 5, 6, 8, 9, 10]), ("validation", [3, 11])):
        assert main(["--output", str(tmp_path / split), "--split", split, *words]) == 0
        labels = LatentStore(tmp_path / split).read(np.arange(len(numbers)))[1]
        assert labels.tolist() == [number // 4 for number in numbers]
    assert main(["--output", str(tmp_path / "all"), "--split", "all", *words]) == 0
    stores = {name: LatentStore(tmp_path / name) for name in ("train", "validation", "all")}
    everything = stores["all"].read(np.arange(11))[0]
    assert torch.equal(everything[:9], stores["train"].read(np.arange(9))[0])
    assert torch.equal(everything[9:], stores["validation"].read(np.arange(2))[0])
    skipped = {name: (tmp_path / name / SKIPPED_FILE) for name in stores}
    assert not skipped["train"].exists()
    assert json.loads(skipped["validation"].read_text())["image"] == 1
    assert json.loads(skipped["all"].read_text())["image"] == 9 + 1


def test_an_image_that_cannot_be_read_just_now_ends_the_work_instead_of_being_left_out(tmp_path, capsys):
    words = write_inputs(tmp_path, 9)
    config, info = load_data_section(words[words.index("--data.name") :])
    source = ImageSource(config, info, "train")
    lost = sorted((tmp_path / "photographs").rglob("*.png"))[4]
    lost.rename(lost.with_suffix(".away"))
    with pytest.raises(DatasetError, match=r"No such file or directory \(no damaged image; mend that\)"):
        source.read(range(9))
    lost.with_suffix(".away").rename(lost)
    assert source.read(range(9))[2] == []


def test_ranks_that_see_other_data_or_weights_are_refused(tmp_path):
    plans, words = [], write_inputs(tmp_path, 30)
    files = sorted((tmp_path / "photographs").rglob("*.png"))
    for name in ("as it was", "another file"):
        if name == "another file":  # one of which no sample is taken
            files[28].rename(files[28].with_name(f"{files[28].stem}x.png"))
            list_class_folders.cache_clear()
        arguments, data_words = parse_arguments(["--output", "store", *words])
        config, info = load_data_section(data_words)
        source = ImageSource(config, info, "train")
        plans.append(plan_extraction(source, open_decoder(arguments).autoencoder, options_of(arguments, config)))
    check_alike([plans[0], plans[0]])
    with pytest.raises(LatentStoreError, match="^rank 2: origin.listing is "):
        check_alike([plans[0], plans[0], plans[1]])
    other = plans[0].model_copy(update={"autoencoder": plans[0].autoencoder | {"sha256": "0" * 64}})
    with pytest.raises(LatentStoreError, match=f"^rank 1: autoencoder.sha256 is '{'0' * 64}' there and"):
        check_alike([plans[0], other])


def test_posterior_and_the_normalization_of_the_autoencoder_are_kept(tmp_path, monkeypatch):
    normalization = {"shift": [0.5, 0.0, -0.5], "scale": [2.0, 1.0, 0.5]}
    monkeypatch.setattr(IdentityAutoencoder, "_encode", lambda self, images: Encoded(images, images.abs() + 1))
    monkeypatch.setattr(IdentityAutoencoder, "normalization", normalization)
    write_photographs(tmp_path / "photographs", 6)
    words = ["--autoencoder", "identity", "--data.name", "image_folder", "--data.path", str(tmp_path / "photographs")]
    words += ["--data.image_size", "8", "--num-workers", "0"]
    words += ["--normalization", "autoencoder", "--store-dtype", "bfloat16"]
    assert main(["--output", str(tmp_path / "store"), *words]) == 0
    index = LatentStore(tmp_path / "store").index
    assert index.normalization.model_dump() == normalization | {"source": "autoencoder"}
    assert index.posterior and index.shape == (3, 8, 8)
    tensors = load_file(tmp_path / "store" / "shard-00000.safetensors")["latents"]
    torch.testing.assert_close(tensors[:, :, 1], tensors[:, :, 0].abs() + 1, rtol=2**-7, atol=0)
    assert torch.equal(tensors[:, 1, 0], tensors[:, 0, 0].flip(-1))


def test_too_many_bad_images_end_the_work_and_a_larger_share_goes_on(inputs, whole, tmp_path, capsys):
    path = inputs[1][inputs[1].index("--data.path") + 1]
    first = f"{path}/class0/001.png: image file is truncated (mend or remove it)"
    for share, problem in (
        ("0.2", "4 of 18 images cannot be decoded, more than a share of 0.2 (data.max_corrupt_share); the first is "), ("0", "")
    ):
        assert main(["--output", str(tmp_path / share), *inputs[1], "--data.max_corrupt_share", share]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == problem + first
    assert main(["--output", str(tmp_path / "0.2"), *inputs[1]]) == 0
    assert content(tmp_path / "0.2") == content(whole)


def test_disk_that_becomes_full_loses_nothing(inputs, whole, tmp_path, capsys):
    words = ["--output", str(tmp_path / "store"), *inputs[1], "--num-workers", "0"]  # they share files in memory
    largest = max(len(data) for name, data in content(whole).items() if name.startswith("shard"))
    with files_end_at(largest - 1):
        assert main(words) == 1
    assert "File too large; finished shards stay, and the same" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "store").rglob(".*"))  # drafts
    assert main(words) == 0
    assert content(tmp_path / "store") == content(whole)


def test_disk_that_is_too_small_is_seen_before_anything_is_written(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1000))
    assert main(["--output", str(tmp_path / "new" / "store"), *inputs[1]]) == 2
    assert "GiB are needed, 0.0 GiB free" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_bad_arguments_end_with_one_line_and_nothing_written(inputs, tmp_path, capsys):
    folder, words = inputs
    store = ["--output", str(tmp_path / "store")]
    config = tmp_path / "latents.toml"
    config.write_text('[data]\nname = "digits"\n[nonsense]\n')
    for more, message in (
        (["--data.imagesize", "16"], "--data.imagesize: unknown key (did you mean --data.image_size?)"),
        (["--data.image_size", "12"], "multiples of 8 pixels, not 12 x 12"),
        (["--data.num_workers", "3"], "--data.num_workers: is for training; here it is --num-workers"),
        (["--split", "validation"], "image_folder holds out no images here"),
        (["--path", str(tmp_path)], "no such file (encoder.jit and decoder.jit are needed)"),
        (["--tile", "12"], "the tile must be a multiple of 8 pixels, is 12"),
        (["--normalization", "autoencoder"], "cosmos has no normalization of its own"),
        (["--output", str(folder)], "which is not a latent store's; nothing was written (give a new or empty folder)"),
    ):
        try:
            code = main([*store, *words, *more])
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr().err
        assert code == 2 and message in said, (more, said)
        assert "Traceback" not in said
    base = [*store, "--autoencoder", "identity"]
    for more, message in (
        (["--data.name", "synthetic"], "images of shape [4, 32, 32]; those that autoencoders take have 3 channels"),
        (["--config", str(config)], "digits has images of shape [1, "),
        (["--config", str(config), "--data.name", "latents", "--data.path", "x"], "x: no such folder"),
    ):
        assert main([*base, *more]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, (more, said)
    assert not (tmp_path / "store").exists()


def test_section_of_a_file_is_taken_and_its_other_sections_are_left_alone(inputs, whole, tmp_path, capsys):
    folder, words = inputs
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\nname = "another"\n[data]\nname = "image_folder"\npath = "{folder / "photographs"}"\n'
        f"num_workers = 7\nimage_size = {SIDE}\nvalidation_fraction = 0.9\nmax_corrupt_share = 0.5\n"
    )
    own = words[: words.index("--data.name")]
    more = ["--config", str(config), "--data.validation_fraction", "0", "--num-workers", "0"]  # nor do they matter
    assert main(["--output", str(tmp_path / "store"), *own, *more]) == 0
    assert content(tmp_path / "store") == content(whole)
    assert f"{config}: keys of [data] for training, which have other options here: num_workers (--num" in (
        capsys.readouterr().err
    )
