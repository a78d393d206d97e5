"""Tiny ImageNet: numbers, names and splits, and an incomplete folder."""

import re

import numpy as np
import pytest
from PIL import Image

from tests.unit.test_data import write_tinyimagenet
from torchtitan.data import DatasetError
from torchtitan.data.tinyimagenet import TinyImageNet, TinyImageNetConfig


def test_tinyimagenet_numbers_names_and_splits(tmp_path):
    write_tinyimagenet(tmp_path / "tiny-imagenet-200")
    config = TinyImageNetConfig(path=str(tmp_path))
    info = TinyImageNet.info(config)
    assert info.class_names == ("first", "second") and info.image_shape == (3, 64, 64)
    train, held_out = TinyImageNet(config, "train"), TinyImageNet(config, "validation")
    assert [each.fetch(np.arange(len(each)))["class"].tolist() for each in (train, held_out)] == [[0, 0, 1, 1], [1, 0, 1]]
    stored = [Image.open(tmp_path / "tiny-imagenet-200" / "val" / "images" / f"{i}.JPEG") for i in range(3)]
    pixels = ((held_out.fetch(np.arange(3))["images"] + 1) * 127.5).round().permute(0, 2, 3, 1)
    np.testing.assert_array_equal(pixels, np.stack([np.asarray(image) for image in stored]))  # nothing resized


TINY_PROBLEMS = {
    "wnids.txt": (None, "data.path: '{}' has no wnids.txt"),
    "val/val_annotations.txt": ("0.JPEG\tn7\t0\n", "{}/val/val_annotations.txt: line 1: class 'n7' is not in wnids"),
    "train/n1/images/0.JPEG": (None, "{}: train/n1/images has no images"),
}


@pytest.mark.parametrize("name", TINY_PROBLEMS)
def test_an_incomplete_tinyimagenet_is_refused_in_one_line(tmp_path, name):
    write_tinyimagenet(tmp_path)
    (tmp_path / "train/n1/images/1.JPEG").unlink()
    text, message = TINY_PROBLEMS[name]
    if text:
        (tmp_path / name).write_text(text)
    else:
        (tmp_path / name).rename(tmp_path / "moved")
    with pytest.raises(DatasetError, match=re.escape(message.format(tmp_path))) as caught:
        TinyImageNet.info(TinyImageNetConfig(path=str(tmp_path)))
    assert "\n" not in str(caught.value)
