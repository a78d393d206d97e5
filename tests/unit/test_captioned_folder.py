"""Captioned images: buckets' golden sizes, pixels of a bucket, captions, splits, and what is refused."""

import hashlib
import json
import math
import os
import pickle
import unicodedata
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from tests.configurations import problems
from tests.encoded_images import decoded
from torchtitan.conditions import Unconditional
from torchtitan.data import DatasetError, UnreadableImage, captioned_folder
from torchtitan.data.aspect_buckets import BASE_SIZES, bucket_of, bucket_sizes, own_size
from torchtitan.data.captioned_folder import CaptionedFolder, CaptionedFolderConfig, content_digest
from torchtitan.data.captions import caption_line
from torchtitan.data.image_decoding import decode_whole, resize_and_crop, upright_size

NOISE = np.random.default_rng(0)


def write(folder, name, size=(80, 70), caption="a thing", **options):
    """Write an image of noise, and its caption unless that is None."""
    folder.mkdir(parents=True, exist_ok=True)
    width, height = size
    Image.fromarray(NOISE.integers(0, 256, (height, width, 3), np.uint8)).save(folder / name, **options)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption, "utf-8")


def config_of(path, **keys):
    sizes = {} if keys.keys() & {"image_size", "resolutions"} else {"resolutions": [64]}
    return CaptionedFolderConfig(path=str(path), **{"validation_fraction": 0} | sizes | keys)


def every_caption(dataset):
    return dataset.captions(np.arange(len(dataset)))


# --- buckets

GOLDEN = {  # facts of the reference trainer, (width, height) for resolutions 512, 768 and 1024
    (3024, 4032): [(448, 576), (640, 832), (832, 1152)],
    (4032, 3024): [(576, 448), (832, 640), (1152, 832)],
    (1920, 1080): [(640, 384), (960, 512), (1344, 768)],
    (1080, 1920): [(384, 640), (576, 960), (768, 1344)],  # 1344 x 704 alone is not in the table turned
}


@pytest.mark.parametrize("size", GOLDEN)
def test_buckets_of_photographs_are_those_of_the_reference(size):
    assert [bucket_of(*size, resolution) for resolution in (512, 768, 1024)] == GOLDEN[size]


def test_the_table_has_the_reference_s_42_sizes_of_about_one_area():
    assert len(BASE_SIZES) == len(set(BASE_SIZES)) == 42 and bucket_sizes(1024) == BASE_SIZES
    assert all(width % 64 == height % 64 == 0 for width, height in BASE_SIZES)
    assert all(0.87 * 2**20 < width * height <= 2**20 for width, height in BASE_SIZES)
    assert len(bucket_sizes(512)) == 24 and (4096, 64) in bucket_sizes(512)
    assert bucket_sizes(64) == ((64, 64),)


def share_kept(size, bucket):
    scale = max(Fraction(bucket[0], size[0]), Fraction(bucket[1], size[1]))
    return bucket[0] * bucket[1] / (size[0] * size[1] * scale**2)


def test_a_bucket_never_enlarges_an_image_and_keeps_most_of_it():
    sizes = NOISE.integers(200, 3000, (400, 2)).tolist()
    for width, height in sizes:
        for resolution in (256, 512, 1024):
            bucket = bucket_of(width, height, resolution)
            if width * height < resolution**2:
                assert bucket is None
                continue
            if bucket is None:  # longer than any bucket
                assert max(width / height, height / width) > 4
                continue
            assert bucket in bucket_sizes(resolution) and bucket[0] <= width and bucket[1] <= height
            fitting = [each for each in bucket_sizes(resolution) if each[0] <= width and each[1] <= height]
            cut = [math.prod(each) / share_kept((width, height), each) - math.prod(each) for each in fitting]
            assert math.isclose(cut[fitting.index(bucket)], min(cut), abs_tol=1e-6)


@pytest.mark.parametrize("size, resolution, bucket", [
    ((512, 512), 512, (512, 512)),
    ((512, 511), 512, None),  # by a row of pixels
    ((1030, 1024), 1024, (1024, 1024)),
    ((1030, 1019), 1024, (1024, 960)),  # (1024, 1024) would cut less, and is higher than the image
    ((4000, 300), 1024, None),  # its area would do, but no bucket is so flat and that small
    ((687, 687), 512, (512, 512)),
])  # fmt: skip
def test_images_at_the_limit_of_a_resolution(size, resolution, bucket):
    assert bucket_of(*size, resolution) == bucket


# --- pixels


def test_an_image_fills_its_bucket_from_the_middle():
    left, middle = np.full((64, 16, 3), 255, np.uint8), np.zeros((64, 128, 3), np.uint8)
    image = Image.fromarray(np.concatenate((left, middle, left), 1))  # 160 x 64
    assert np.asarray(resize_and_crop(image, 128, 64)).max() == 0
    assert np.asarray(resize_and_crop(image.transpose(Image.Transpose.TRANSPOSE), 64, 128)).max() == 0
    assert np.asarray(resize_and_crop(image, 130, 64))[:, [0, -1]].min() == 255


def test_a_large_image_is_halved_before_it_is_resized():
    pixels = NOISE.integers(0, 256, (256, 512, 3), np.uint8)
    boxes = pixels.reshape(128, 2, 256, 2, 3).mean((1, 3))
    assert np.abs(np.asarray(resize_and_crop(Image.fromarray(pixels), 256, 128)) - boxes).max() <= 1


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_of_an_image_is_that_of_its_upright_pixels(kind, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    write(tmp_path, f"a.{kind}", (30, 20), None, exif=exif)
    content = (tmp_path / f"a.{kind}").read_bytes()
    wanted = (30, 20) if orientation < 5 else (20, 30)
    assert upright_size(content) == wanted == decode_whole(content).shape[1::-1]


# --- the dataset


def test_every_image_is_an_entry_in_each_resolution_that_it_covers(tmp_path):
    write(tmp_path, "wide.png", (520, 130), "wide")
    write(tmp_path, "small.jpg", (70, 70), "small")
    write(tmp_path, "square.webp", (200, 190), "square", lossless=True)
    write(tmp_path / "inner", "tall.JPEG", (70, 270), "tall")
    (tmp_path / "ATTRIBUTION.md").write_text("by somebody")
    (tmp_path / ".DS_Store").write_bytes(b"\x00\xff")
    (tmp_path / "._wide.txt").write_bytes(b"\xff")
    config = config_of(tmp_path, resolutions=[64, 128])
    info, dataset = CaptionedFolder.info(config), CaptionedFolder(config, "train")
    assert info.condition_kind == Unconditional() and not info.has_validation
    assert info.bucket_shapes == ((3, 64, 64), (3, 256, 64), (3, 128, 128), (3, 64, 256))
    assert info.image_shape == (3, 64, 256)  # the last of those with most pixels
    assert dataset.buckets.tolist() == [4, 1, 1, 1] and len(dataset) == 7
    assert every_caption(dataset) == ["tall", "small", "square", "wide", "tall", "square", "wide"]
    assert dataset.captions(np.array([6, 0])) == ["wide", "tall"]


def test_the_pixels_of_an_entry_are_its_image_s(tmp_path):
    write(tmp_path, "a.png", (256, 64), "a")
    write(tmp_path, "b.png", (128, 128), "b")
    dataset = pickle.loads(pickle.dumps(CaptionedFolder(config_of(tmp_path, resolutions=[128]), "train")))
    assert every_caption(dataset) == ["b", "a"] and dataset.buckets.tolist() == [1, 1]
    for index, name in ((0, "b"), (1, "a")):
        batch = dataset.fetch(np.array([index]))
        assert batch.keys() == {"images"} and batch["images"].dtype == torch.float32
        assert torch.equal(batch["images"][0], decoded((tmp_path / f"{name}.png").read_bytes()))
    with pytest.raises(DatasetError, match="^images of 2 sizes in one batch, which is of one bucket$"):
        dataset.fetch(np.array([0, 1]))


def test_images_of_one_bucket_are_images_of_one_shape(tmp_path):
    for number in range(3):
        write(tmp_path, f"{number}.png", (70 + number, 70), str(number))
    for keys in ({"resolutions": [64]}, {"image_size": 50}):
        config = config_of(tmp_path, **keys)
        info, dataset = CaptionedFolder.info(config), CaptionedFolder(config, "train")
        side = keys.get("image_size", 64)
        assert info.image_shape == (3, side, side) and info.bucket_shapes == () and dataset.buckets is None
        assert dataset.fetch(np.arange(3))["images"].shape == (3, 3, side, side)


def test_an_image_is_held_out_in_all_of_its_sizes(tmp_path):
    for number in range(10):
        write(tmp_path, f"{number}.png", (130, 130), str(number))
    config = config_of(tmp_path, resolutions=[64, 128], validation_fraction=0.2)
    info = CaptionedFolder.info(config)
    train, held_out = (CaptionedFolder(config, split) for split in ("train", "validation"))
    assert info.has_validation and every_caption(held_out) == ["4", "9"] * 2
    assert every_caption(train) == list("01235678") * 2
    assert train.buckets.tolist() == [8, 8] and held_out.buckets.tolist() == [2, 2]


def test_buckets_are_those_of_both_splits(tmp_path):
    write(tmp_path / "train", "a.png", (128, 128), "a")
    write(tmp_path / "held_out", "b.png", (256, 64), "b")
    config = config_of(tmp_path / "train", resolutions=[128], validation_path=str(tmp_path / "held_out"))
    assert CaptionedFolder.info(config).bucket_shapes == ((3, 128, 128), (3, 64, 256))
    train, held_out = (CaptionedFolder(config, split) for split in ("train", "validation"))
    assert train.buckets.tolist() == [1, 0] and held_out.buckets.tolist() == [0, 1]
    assert held_out.fetch(np.array([0]))["images"].shape == (1, 3, 64, 256)


def test_the_listing_digest_tells_captions_and_sizes(tmp_path):
    def digest(**keys):
        return CaptionedFolder(config_of(tmp_path, **keys), "train").listing_digest()

    write(tmp_path, "a.png", (200, 200), "one")
    first = digest()
    assert first == digest() and len({first, digest(resolutions=[128]), digest(trigger_word="dog")}) == 3
    write(tmp_path.with_name("held_out"), "b.png", (256, 64), "b")
    assert digest(validation_path=str(tmp_path.with_name("held_out"))) == first


def test_pixels_that_end_too_early_are_an_unreadable_image(tmp_path):
    for name in ("a", "b"):
        write(tmp_path, f"{name}.png", (64, 64))
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:2000])
    config = config_of(tmp_path)
    assert CaptionedFolder.info(config).image_shape == (3, 64, 64)
    with pytest.raises(UnreadableImage, match="b.png") as caught:
        CaptionedFolder(config, "train").fetch(np.array([0, 1]))
    assert caught.value.index == 1


def test_a_deeper_folder_with_a_number_is_said_not_to_be_repeated(tmp_path, caplog):
    write(tmp_path / "img" / "10_sks dog", "a.png", caption="a dog")
    assert every_caption(CaptionedFolder(config_of(tmp_path), "train")) == ["a dog"]
    said = "images of img/10_sks dog are not repeated, as that is no folder directly in data.path"
    assert caplog.messages == [f"{tmp_path}: {said}"]


# --- captions


def test_none_is_no_trigger_word(tmp_path):
    with pytest.raises(DatasetError, match="would be the word "):
        CaptionedFolder.info(CaptionedFolderConfig(path=str(tmp_path), trigger_word="none", image_size=16))


@pytest.mark.parametrize("text, word, caption", [
    ("a [trigger] dog, the [trigger]", "zork", "a zork dog, the zork"),
    ("a [Trigger] dog", "zork", "a zork dog"),
    ("a dog", "zork", "zork a dog"),
    ("zork, a dog", "zork", "zork, a dog"),
    ("zorks at night", "zork", "zork zorks at night"),
    ("two bazork", "zork", "zork two bazork"),
    ("a  dog\n on\ttwo lines \r\n", "", "a dog on two lines"),
    ("ein [trigger] Hündchen", " c++  dog ", "ein c++ dog Hündchen"),
    ("a c++ dog", "c++", "a c++ dog"),
    ("[name], a [trigger] of [names]", r"\\1", r"\\1, a \\1 of [names]"),
])  # fmt: skip
def test_the_trigger_word_is_in_every_caption(text, word, caption):
    assert caption_line(text, word) == caption


@pytest.mark.parametrize("text", ["a [triger] dog", "a {trigger} dog", "[Triggger]"])
def test_a_misspelt_placeholder_is_refused(text):
    with pytest.raises(ValueError, match=r"is no placeholder \(write \[trigger\]\)"):
        caption_line(text, "zork")


def test_captions_of_a_folder_have_the_trigger_word_and_where_it_is_put_in_front_is_said(tmp_path, caplog):
    write(tmp_path, "a.png", caption="\ufeffa [trigger] dog\n")
    write(tmp_path, "b.png", caption="a cat")
    assert every_caption(CaptionedFolder(config_of(tmp_path, trigger_word="zork"), "train")) == ["a zork dog", "zork a cat"]
    said = f"{tmp_path}: the trigger word is put in front of 1 of 2 captions (b.txt for one; to keep some without it, write the "
    assert [line.startswith(said) for line in caplog.messages] == [True]
    (tmp_path / "a.txt").write_text("a dog")
    caplog.clear()
    assert every_caption(CaptionedFolder(config_of(tmp_path, trigger_word="sks"), "train")) == ["sks a dog", "sks a cat"]
    assert caplog.messages == []


# --- as other trainers have them


def test_captions_are_found_where_other_trainers_keep_them(tmp_path):
    def row(name, **fields):
        return json.dumps({"file_name": name} | fields) + "\n"

    write(tmp_path, "a.png", caption=None)
    (tmp_path / "a.caption").write_text("of kohya's ending")
    write(tmp_path, unicodedata.normalize("NFD", "bär.png"), caption=None)
    (tmp_path / unicodedata.normalize("NFC", "bär.txt")).write_text("of a Mac")
    for name in ("c.png", "d.png"):
        write(tmp_path / "deeper", name, caption=None)
    write(tmp_path / "other", "e.png", caption=None)
    rows = row("deeper/c.png", text="of a line", caption="of none") + row("./deeper/d.png", caption="d")
    (tmp_path / "metadata.jsonl").write_text(rows)
    (tmp_path / "other" / "metadata.csv").write_text('file_name;text\ne.png;"of two\nlines, quoted"\n')
    for name in ("README.txt", "LICENSE.txt", "Readme.roboflow.txt", "licence.caption", "masks/notes.md", "labels.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of nobody")
    for name in ("a-masklabel.png", "masks/a.png", "deeper/c-condlabel.png", "_controls/a.pose.png"):
        write(tmp_path / os.path.dirname(name), os.path.basename(name), caption=None)
    write(tmp_path, "credits.png", caption="of a picture by the name of credits")
    dataset = CaptionedFolder(config_of(tmp_path), "train")
    assert every_caption(dataset) == [
        "of kohya's ending", "of a Mac", "of a picture by the name of credits", "of a line", "d", "of two lines, quoted",
    ]  # fmt: skip


def test_what_is_ignored_replaced_and_repeated_is_said_in_a_line_each(tmp_path, caplog):
    for name, size, caption in (("a.png", (64, 64), None), ("b.png", (64, 64), " \n"), ("c.png", (64, 64), "a [name]")):
        write(tmp_path / "3_sks dog", name, size, caption)
    write(tmp_path, "d.png", (90, 130), "small")
    write(tmp_path, "d-masklabel.png", (90, 130), None)
    write(tmp_path, "e.png", (90, 130), "of that size too")
    config = config_of(tmp_path, resolutions=[128, 1024], trigger_word="sks", missing_caption="trigger", validation_fraction=0.25)
    info = CaptionedFolder.info(config)
    train, held_out = CaptionedFolder(config, "train"), CaptionedFolder(config, "validation")
    assert info.bucket_shapes == ((3, 64, 64), (3, 128, 64))
    assert every_caption(train) == ["sks"] * 6 + ["a sks"] * 3 + ["sks of that size too"] and train.buckets.tolist() == [9, 1]
    assert every_caption(held_out) == ["sks small"] and held_out.buckets.tolist() == [0, 1]
    assert caplog.messages == [f"{tmp_path}: {line}" for line in (
        "ignoring 1 mask beside images",
        "the trigger word alone is the caption of 2 of 5 images",
        "the trigger word is put in front of 2 of 5 captions (d.txt for one; to keep some without it, write the word in the "
        "others and leave data.trigger_word out)",
        "images are not enlarged, and 5 of 5 cover no bucket of 128, 5 of 5 cover no bucket of 1024 (data.resolutions); "
        "width x height of all sizes of these images: 64 x 64, 64 x 128",
        "5 images are repeated to 11: folders named N_name repeat theirs N times",
    )]  # fmt: skip


def test_the_only_image_of_a_size_is_not_held_out(tmp_path, caplog):
    for name, size in (("a.png", (64, 64)), ("b.png", (64, 64)), ("c.png", (64, 64)), ("d.png", (90, 130)), ("e.png", (64, 64))):
        write(tmp_path, name, size)
    config = config_of(tmp_path, resolutions=[128], validation_fraction=0.25)
    assert not CaptionedFolder.info(config).has_validation and len(CaptionedFolder(config, "train")) == 5
    assert f"{tmp_path}: trained, not held out, as the only ones of their size: 1 image" in caplog.messages


def test_a_held_out_image_of_another_size_than_those_of_training_is_named_for_a_store(tmp_path):
    write(tmp_path / "train", "a.png", (64, 64))
    write(tmp_path / "held", "b.png", (64, 64))
    write(tmp_path / "held", "c.png", (90, 130))
    config = config_of(tmp_path / "train", resolutions=[128], validation_path=str(tmp_path / "held"))
    with pytest.raises(DatasetError, match=r"data\.validation_path: .*c\.png: is seen in .*, and no image of training is"):
        captioned_folder.check_held_out_sizes(config)


@pytest.mark.parametrize("size, resolution, own", [
    ((90, 90), 128, (64, 64)), ((200, 130), 512, (192, 128)), ((63, 400), 512, None),
    ((4000, 300), 1024, (3712, 256)),  # 1.09 megapixels, shrunk by 0.935 to 3739 x 280
])  # fmt: skip
def test_the_own_size_of_an_image_is_of_the_resolution_s_area_at_most(size, resolution, own):
    assert bucket_of(*size, resolution) is None and own_size(*size, resolution) == own


def test_repeats_are_in_the_digest_of_a_cache_and_other_folders_keep_theirs(tmp_path):
    def digest(*more):
        contents = [hashlib.sha256((tmp_path / folder / "a.png").read_bytes()).digest()]
        return hashlib.sha256(repr([(folder.encode() + b"/a.png", ("a thing",), tuple(contents)), *more]).encode()).hexdigest()

    for folder, repeats in (("02_dog", ()), ("2024_dog", ()), ("1_dog", ()), ("2_dog", ((2,),))):
        write(tmp_path / folder, "a.png")
        assert content_digest(config_of(tmp_path)) == digest(*repeats)
        assert len(CaptionedFolder(config_of(tmp_path), "train")) == (2 if repeats else 1)
        for file in (tmp_path / folder).iterdir():
            file.unlink()
        captioned_folder._read_folder.cache_clear()


# --- what is refused


def without_caption(folder):
    write(folder, "b.png", caption=None)


def without_image(folder):
    (folder / "b.txt").write_text("a thing")


def not_utf8(folder):
    write(folder, "b.png")
    (folder / "b.txt").write_bytes(b"caf\xe9")


def two_images(folder):
    write(folder, "b.png")
    write(folder, "b.jpg")


def no_image_inside(folder):
    write(folder, "b.png")
    (folder / "b.png").write_bytes(b"no image")


def twice_captioned(folder):
    (folder / "metadata.csv").write_text("file_name,caption\nc.png,a thing\n")


REFUSED = {
    "no caption": (
        without_caption,
        r"b\.png: an image without a caption \(add b\.txt or its row in metadata\.csv, remove the image\)",
    ),
    "no image": (without_image, r"b\.txt: a caption without an image \(add the image, or remove the caption\)"),
    "empty": (lambda f: write(f, "b.png", caption=" \n"), r"b\.txt: the caption is empty \(write it\)"),
    "not UTF-8": (not_utf8, r"b\.txt: the caption is not UTF-8 \(byte 3\); save it as UTF-8"),
    "two images": (two_images, r"b\.jpg: this and b\.png are two images for one caption \(rename or remove one\)"),
    "too small": (
        lambda f: write(f, "b.png", (63, 64)),
        r"b\.png: 63 x 64 pixels cover no size of data\.resolutions = \[64\], .* never enlarged \(remove it: a side below 64 .*",
    ),
    "no trigger": (lambda f: write(f, "b.png", caption="a [trigger]"), r"b\.txt: \[trigger\] stands for a trigger word, and .*"),
    "two such images": (
        lambda f: (no_image_inside(f), (f / "a.png").write_bytes(b"none")),
        r"a\.png: not an image of a known format \(mend or remove it\); 1 more fail: b\.png",
    ),
    "no image inside": (no_image_inside, r"b\.png: not an image of a known format \(mend or remove it\)"),
    "a caption file and a table": (
        twice_captioned, r"metadata\.csv: row 2: c\.png: this and .*/c\.txt are two captions for one image \(remove one\)"
    ),
    "a table of no such image": (
        lambda f: (f / "metadata.csv").write_text("file_name,text\nb.png,a thing\n"),
        r"metadata\.csv: row 2: b\.png: a caption without an image \(add the image, or remove the caption\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_files_are_refused_with_their_place(case, tmp_path):
    spoil, message = REFUSED[case]
    write(tmp_path, "a.png")
    write(tmp_path, "c.png")
    spoil(tmp_path)
    with pytest.raises(DatasetError, match=f"^{tmp_path}/{message}$"):
        CaptionedFolder.info(config_of(tmp_path))


KEYS = {
    "both sizes": ({"resolutions": [64], "image_size": 64}, r"data\.image_size: is the side of squares, and .*"),
    "neither": ({"resolutions": []}, r"data\.resolutions: not given; captioned_folder needs .*"),
    "below a bucket": ({"resolutions": [128, 63]}, r"data\.resolutions: 63 is below 64, .* \(give at least 64\)"),
    "no word": ({"missing_caption": "trigger"}, r"data\.missing_caption: \"trigger\" needs data\.trigger_word, .*"),
    "no path": ({"path": ""}, r"data\.path: not given; captioned_folder needs a folder of images and captions"),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_do_not_fit_are_refused(case, tmp_path):
    keys, message = KEYS[case]
    write(tmp_path, "a.png")
    for read in (CaptionedFolder.info, content_digest):
        with pytest.raises(DatasetError, match=f"^{message}$"):
            read(CaptionedFolderConfig(**{"path": str(tmp_path), "resolutions": [64]} | keys))


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(DatasetError, match=r"^data\.path: '.*' has no images in it \(found 1 \.md\)$"):
        CaptionedFolder.info(config_of(tmp_path))


def test_a_run_s_configuration_is_refused_with_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "photographs", "a.png", caption=" ")
    words = ["--data.name=captioned_folder", "--data.path=photographs", "--data.image_size=64"]
    assert [line.partition("data.path")[2] for line in problems(arguments=words)] == [
        ': photographs/a.txt: the caption is empty (write it)'
    ]
