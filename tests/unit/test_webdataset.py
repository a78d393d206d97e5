"""Tar shards: samples by key, labels, damage, and exact resume."""

import pickle
import re

import numpy as np
import pytest
import torch

from tests.encoded_images import SIDE, assert_resumes_in_mid_epoch, decoded, everything, image_bytes, write_tar
from torchtitan.conditions import Unconditional
from torchtitan.data import DatasetError, UnreadableImage, webdataset
from torchtitan.data.webdataset import WebDataset, WebDatasetConfig, expand_braces

PER_SHARD = 25


def members_of(shard):
    members = {}
    for number in range(PER_SHARD * shard, PER_SHARD * (shard + 1)):
        key = f"part.one/{number:05}"  # a dot in a folder's name belongs to no ending
        members |= {f"{key}.cls": f"{number % 7}\n".encode(), f"{key}.PNG": image_bytes(number), f"{key}.seg.png": b"mask"}
    return members


def write_shards(folder, count=4):
    for shard in range(count):
        write_tar(folder / f"train-{shard:03}.tar", members_of(shard))
    return folder


def config_of(path, **keys):
    defaults = {"image_size": SIDE, "horizontal_flip": False, "validation_fraction": 0.0}
    return WebDatasetConfig(path=str(path), **defaults | keys)


def test_images_and_labels_are_those_of_the_samples_in_order(tmp_path):
    write_shards(tmp_path)
    config = config_of(tmp_path)
    info = WebDataset.info(config)
    assert (info.num_classes, info.class_names, info.has_validation) == (7, (), False)
    images, labels = everything(WebDataset(config, "train"))
    assert torch.equal(images, torch.stack([decoded(image_bytes(number)) for number in range(100)]))
    assert labels == [number % 7 for number in range(100)]


def test_a_folder_a_pattern_and_braces_name_the_same_shards(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    for path in ("", "/train-*.tar", "/train-{000..003}.tar", "/{train-000,train-001}.tar", "/train-00?.tar"):
        dataset = WebDataset(config_of(f"{tmp_path}{path}"), "train")
        assert len(dataset) == (50 if "," in path else 100)
    assert expand_braces("{a,b}-{8..10}") == ["a-8", "a-9", "a-10", "b-8", "b-9", "b-10"]
    assert expand_braces("x-{098..101}.tar") == ["x-098.tar", "x-099.tar", "x-100.tar", "x-101.tar"]


def test_held_out_samples_are_spread_or_have_shards_of_their_own(tmp_path):
    write_shards(tmp_path / "train", 3)
    write_tar(tmp_path / "val" / "a.tar", members_of(3))
    spread = config_of(tmp_path / "train", validation_fraction=0.1)
    assert WebDataset.info(spread).has_validation
    held_out = [number for number in range(75) if (number + 1) // 10 > number // 10]
    assert everything(WebDataset(spread, "validation"))[1] == [number % 7 for number in held_out]
    assert len(WebDataset(spread, "train")) == 75 - len(held_out)
    own = config_of(tmp_path / "train", validation_path=str(tmp_path / "val"))
    assert len(WebDataset(own, "train")) == 75 and len(WebDataset(own, "validation")) == 25
    assert torch.equal(WebDataset(own, "validation").fetch(np.array([3]))["images"][0], decoded(image_bytes(78)))


def test_a_classes_file_names_the_labels(tmp_path):
    write_shards(tmp_path / "train", 1)
    classes = tmp_path / "classes.txt"
    classes.write_text("".join(f"n{number} name {number}\n" for number in range(9)))
    info = WebDataset.info(config_of(tmp_path / "train", classes_file=str(classes)))
    assert info.num_classes == 9 and info.class_names[8] == "name 8"


def test_shards_resume_in_mid_epoch_on_other_ranks_and_loader_processes(tmp_path):
    assert_resumes_in_mid_epoch(WebDataset, config_of(write_shards(tmp_path)))


def test_a_copy_reads_the_same_and_is_small(tmp_path):
    dataset = WebDataset(config_of(write_shards(tmp_path)), "train")
    images = everything(dataset)[0]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 100 * 100
    assert torch.equal(everything(pickle.loads(pickled))[0], images)


ODD = {
    "no image": ({"cls": b"1"}, "the sample has no image"),
    "no label": ({"png": b"a"}, "the sample has no label (data.labels = false"),
    "a word for a label": ({"png": b"a", "cls": b"cat"},
        "the sample's label is no whole number from 0 to 999999 (write numbers, which data.classes_file names, or set"),
    "not an image": ({"png": b"a", "cls": b"1"}, "not an image of a known format"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_a_sample_that_lacks_something_is_an_unreadable_image(tmp_path, case):
    files, reason = ODD[case]
    members = members_of(0)
    members |= {"README.md": b"no sample", "__meta.json": b"{}"}
    members |= {f"odd.{extension}": content for extension, content in files.items()}
    write_tar(tmp_path / "a.tar", members)
    config = config_of(tmp_path)
    assert WebDataset.info(config).num_classes == 7
    dataset = WebDataset(config, "train")
    assert len(dataset) == PER_SHARD + 1
    with pytest.raises(UnreadableImage) as caught:
        dataset.fetch(np.arange(PER_SHARD + 1))
    assert caught.value.index == PER_SHARD and str(caught.value).startswith(f"{tmp_path}/a.tar: odd: {reason}")


def test_labels_that_are_left_aside_need_not_be_there(tmp_path):
    files = {f"{number}.png": image_bytes(number) for number in range(4)}
    write_tar(tmp_path / "a.tar", files | {"0.cls": b"-1", "1.cls": b"cat", "2.cls": b"999999"})
    config = config_of(tmp_path, labels=False)
    assert WebDataset.info(config).condition_kind == Unconditional()
    batch = WebDataset(config, "train").fetch(np.arange(4))
    assert set(batch) == {"images"} and torch.equal(batch["images"][3], decoded(image_bytes(3)))


def damage(folder, name="train-001.tar", keep=None, at=None, text=b""):
    content = bytearray((folder / name).read_bytes())
    if at is not None:
        content[at : at + len(text)] = text
    (folder / name).write_bytes(content[:keep])


BAD = {
    "missing shards": (
        {"path": "{}/train-{{000..006}}.tar"}, {}, "data.path: 3 of 7 shards do not exist, first {}/train-004.tar"
    ),
    "a held-out shard that is trained on": (
        {"validation_path": "{}/train-001.tar"}, {}, "data.validation_path: {}/train-001.tar is a shard of data.path too, which w"
    ),
    "remote": ({"path": "s3://a/{{0..9}}.tar"}, {}, "is not on this machine; webdataset reads local shards (copy them"),
    "label beyond the file": (
        {"classes_file": "{}/classes.txt"}, {}, "train-000.tar: part.one/00002: label 2 is not in 0..1, those of data"
    ),
    "cut": ({}, {"keep": 10_000}, "{}/train-001.tar: no tar archive, or damaged or cut short: "),
    "damaged": ({}, {"at": 1024, "text": b"\xff" * 100}, "{}/train-001.tar: damaged or cut short at byte 1024: no tar h"),
    "compressed": ({}, {"at": 0, "text": b"\x1f\x8b\x08" + bytes(300)}, "{}/train-001.tar: is compressed (gzip); decompress it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, case):
    keys, harm, message = BAD[case]
    write_shards(tmp_path)
    (tmp_path / "classes.txt").write_text("a\nb\n")
    if harm:
        damage(tmp_path, **harm)
    keys = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in keys.items()}
    config = WebDatasetConfig(**{"path": str(tmp_path), "image_size": SIDE} | keys)
    with pytest.raises(DatasetError, match=re.escape(message.format(tmp_path))) as caught:
        WebDataset.info(config)
    assert "\n" not in str(caught.value)


# --- captions


def captioned(texts, first=0):
    """Members of a shard: of each key an image and, unless it is None, a text."""
    members = {}
    for number, text in enumerate(texts, first):
        members[f"{number:05}.jpg"] = image_bytes(number)
        members |= {} if text is None else {f"{number:05}.txt": text}
    return members


def test_captions_are_read_instead_of_labels(tmp_path):
    for shard in range(2):
        texts = [f"picture\nof {number} ü".encode() for number in range(5 * shard, 5 * shard + 5)]
        write_tar(tmp_path / f"{shard}.tar", captioned(texts, 5 * shard))
    config = config_of(tmp_path, captions=True, validation_fraction=0.2)
    info = WebDataset.info(config)
    assert info.condition_kind == Unconditional() and info.has_validation
    train, held_out = (pickle.loads(pickle.dumps(WebDataset(config, split))) for split in ("train", "validation"))
    assert held_out.captions(np.arange(2)) == ["picture of 4 ü", "picture of 9 ü"]
    assert train.captions(np.array([7, 0, 4])) == [f"picture of {number} ü" for number in (8, 0, 5)]
    batch = train.fetch(np.array([4, 0]))
    assert batch.keys() == {"images"}
    assert torch.equal(batch["images"], torch.stack([decoded(image_bytes(number)) for number in (5, 0)]))


def test_captions_and_labels_of_the_same_shards_are_read_apart(tmp_path):
    write_tar(tmp_path / "a.tar", captioned([b"a [trigger]", b"\xef\xbb\xbfb"]) | {"00000.cls": b"3"})
    with_labels, with_captions = config_of(tmp_path), config_of(tmp_path, captions=True, trigger_word="zork")
    assert WebDataset(with_labels, "train").fetch(np.array([0]))["class"].tolist() == [3]
    assert WebDataset(with_captions, "train").captions(np.arange(2)) == ["a zork", "zork b"]
    with pytest.raises(DatasetError, match="^data.captions: false, so that captions are not read"):
        WebDataset(with_labels, "train").captions(np.array([0]))


WRONG_CAPTIONS = {
    "no caption": ([b"a", None], "00001: the sample has no caption (pack the shard again with its .txt, or "),
    "not UTF-8": ([b"a", b"caf\xe9"], "00001: the caption is not UTF-8"),
    "trigger": ([b"a", b"a [trigger]"], "00001: [trigger] stands for a trigger word, and there is none"),
}


@pytest.mark.parametrize("case", WRONG_CAPTIONS)
def test_samples_without_a_proper_caption_are_refused_with_shard_and_key(tmp_path, case):
    texts, message = WRONG_CAPTIONS[case]
    write_tar(tmp_path / "a.tar", captioned(texts))
    for _ in range(2):  # read from the shard, and from its index
        webdataset._open_shards.cache_clear()
        with pytest.raises(DatasetError, match=re.escape(f"{tmp_path}/a.tar: {message}")) as caught:
            WebDataset.info(config_of(tmp_path, captions=True))
        assert "\n" not in str(caught.value)
