"""Mistakes with a folder of pictures, each answered by what to do."""

import pytest
from PIL import Image

from tests.configurations import problems

MY_IMAGES = "(its pictures train with train_configs/my_images.toml --data.path FOLDER)"


@pytest.mark.parametrize(("words", "line"), [
    (["--job.config_file", "{}"], "{}: is a folder, not a regular file (give a TOML file)"),
    (["--job.config_file", "digits", "--data.path", "{}"], "command line: --data.path: unknown key"),
    (["--job.config_file", "cifar10", "--data.path", "{}"],
     "command line: --data.path: '{}' holds neither parquet files nor CIFAR-10's python batches"),
], ids=["as the file", "with digits", "as CIFAR-10"])  # fmt: skip
def test_a_folder_of_pictures_given_elsewhere_is_answered_with_the_configuration_for_it(tmp_path, words, line):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "0.JPG").write_bytes(b"")
    given = [word.format(tmp_path) for word in words]
    assert problems(arguments=given)[0] == f"{line.format(tmp_path)} {MY_IMAGES}"
    (tmp_path / "cats" / "0.JPG").rename(tmp_path / "cats" / "0.txt")
    assert not any("my_images" in problem for problem in problems(arguments=given))


def test_a_missing_folder_is_not_said_to_be_a_default():
    found = problems(arguments=["--job.config_file", "my_images"])
    assert found == ["data.path: not given; image_folder needs a folder of images"]


@pytest.mark.parametrize(("size", "advice"), [
    ("250", "model.patch_size: 4 does not divide the image of 250 x 250 (take --data.image_size 248 or 252)"),
    ("3", "model.patch_size: 4 does not divide the image of 3 x 3 (take --data.image_size 4)"),
])  # fmt: skip
def test_a_side_that_patches_do_not_divide_is_answered_with_the_nearest(tmp_path, size, advice):
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    words = ["--data.path", str(tmp_path), "--data.validation_fraction", "0", "--data.image_size", size]
    (found,) = problems(arguments=["--job.config_file", "my_images", *words])
    assert found.endswith(advice)
