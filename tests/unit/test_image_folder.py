"""Image folders: layouts, classes, and files that cannot be decoded."""

import io
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from tests.encoded_images import everything
from tests.launcher import run_on_ranks
from tests.refusals import one_line
from torchtitan.data import DATASETS, DatasetError, dataset_info
from torchtitan.data.class_folders import list_class_folders
from torchtitan.data.image_files import is_image_name, list_files
from torchtitan.data.image_folder import ImageFolder, ImageFolderConfig, _looks_classed
from torchtitan.state.resume import load_position
from torchtitan.training.corrupt_images import CorruptImages
from torchtitan.training.data_loading import TrainingData, validation_batches


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def write_class(folder, names, colour=0):
    for number, name in enumerate(names):
        save(folder / name, Image.new("RGB", (16, 16), (10 * number, colour, 0)))


def folder_of(tmp_path, classes=("a", "b"), count=10):
    for number, name in enumerate(classes):
        write_class(tmp_path / name, [f"{index:03}.png" for index in range(count)], 10 * number)
    return tmp_path


def config_of(path, **keys):
    return ImageFolderConfig(**{"path": str(path), "image_size": 8, "horizontal_flip": False} | keys)


# --- folders


def test_classes_and_files_are_sorted_nested_files_found_and_others_left_out(tmp_path):
    write_class(tmp_path / "b", ["z.png", "inner/deep/a.JPG"])
    write_class(tmp_path / "B", ["1.jpeg"])
    write_class(tmp_path / "a", [f"{index}.png" for index in range(2)])
    write_class(tmp_path / ".hidden", ["x.png"])
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "a" / ".x.png").write_text("no image")
    (tmp_path / "labels.csv").touch()
    (tmp_path / "b" / "round").symlink_to(tmp_path / "b", target_is_directory=True)
    config = config_of(tmp_path, validation_fraction=0.0)
    info = ImageFolder.info(config)
    assert info.class_names == ("B", "a", "b") and info.image_shape == (3, 8, 8) and not info.has_validation
    assert everything(ImageFolder(config, "train"))[1] == [0, 1, 1, 2, 2]
    whole = config_of(tmp_path, class_folders=False, validation_fraction=0.0)
    assert ImageFolder.info(whole).num_classes == 0
    assert set(ImageFolder(whole, "train").fetch(np.arange(5))) == {"images"}


def test_linked_folders_are_read_after_the_others_each_once_and_dead_links_said(tmp_path, caplog):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "pictures"
    write_class(elsewhere, ["e.png"])
    write_class(folder / "mid", ["m.png"])
    targets = {"aa": folder / "mid", "zz": elsewhere, "more": elsewhere, "up": folder, "loop": folder / "loop", "gone": "x"}
    for name, target in targets.items():
        (folder / name).symlink_to(target, target_is_directory=True)
    assert list_files(bytes(folder), is_image_name) == [b"mid/m.png", b"more/e.png"]
    assert caplog.messages == [f"{folder}: leaving out 2 links that cannot be followed, first of all gone"]


def test_the_last_images_of_each_class_are_held_out(tmp_path, caplog):
    caplog.set_level("INFO")
    write_class(tmp_path / "a", [f"{i}.png" for i in range(7)])
    write_class(tmp_path / "b", [f"{i}.png" for i in range(3)], 100)
    write_class(tmp_path / "c", ["0.png"], 200)
    config = config_of(tmp_path, validation_fraction=0.3)
    train, held_out = ImageFolder(config, "train"), ImageFolder(config, "validation")

    def contents(dataset):
        images, labels = dataset.fetch(np.arange(len(dataset))).values()
        reds = ((images[:, 0, 0, 0] + 1) * 127.5 / 10).round().int().tolist()
        return list(zip(labels.tolist(), reds, strict=True))

    # floor(0.3 x 7) = 2, floor(0.3 x 10) = 3, floor(0.3 x 11) = 3 images in the first 1, 2, 3 classes.
    assert contents(held_out) == [(0, 5), (0, 6), (1, 2)]
    assert contents(train) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (2, 0)]
    assert ImageFolder.info(config).has_validation and not caplog.messages
    single = tmp_path.parent / f"{tmp_path.name}-single"
    for name in ("a", "b", "c", "d"):
        write_class(single / name, ["0.png"])
    assert ImageFolder.info(config_of(single, validation_fraction=0.3)).has_validation
    advice = "data.validation_fraction = 0 trains on them"
    assert caplog.messages == [f"{single}: all images of 1 class are among the held-out ones ({advice})"]
    classes = tmp_path.parent / f"{tmp_path.name}-classes.txt"
    classes.write_text("".join(f"{name}\n" for name in "abcdef"))
    ImageFolder.info(config_of(single, validation_fraction=0.0, classes_file=str(classes)))
    assert caplog.messages[1].startswith(f"{single}: 2 of 6 classes are without images (--classes of ")
    assert not ImageFolder.info(config_of(tmp_path, validation_fraction=0.05)).has_validation
    with pytest.raises(DatasetError, match="data.validation_fraction: 0.05 leaves no image for validation"):
        ImageFolder(config_of(tmp_path, validation_fraction=0.05), "validation")


def test_a_validation_folder_is_numbered_as_the_training_folder(tmp_path, caplog):
    folder_of(tmp_path / "train", ("a", "b", "c"), 2)
    folder_of(tmp_path / "val", ("b", "c"), 1)
    config = config_of(tmp_path / "train", validation_path=str(tmp_path / "val"))
    assert ImageFolder.info(config).has_validation
    assert everything(ImageFolder(config, "train"))[1] == [0, 0, 1, 1, 2, 2]
    assert everything(ImageFolder(config, "validation"))[1] == [1, 2]
    write_class(tmp_path / "val", ["loose.png"])
    list_class_folders.cache_clear()
    assert ImageFolder.info(config).has_validation and len(ImageFolder(config, "validation")) == 2
    assert caplog.messages == [f"{tmp_path / 'val'}: leaving out 1 image beside its folders"]


@pytest.mark.parametrize("keys", [{}, {"labels": False}, {"class_folders": False}])
def test_held_out_images_without_classes_lie_in_any_folder(tmp_path, keys):
    write_class(tmp_path / "flat", ["0.png"])
    train = folder_of(tmp_path / "classed", ("a", "b"), 2)
    if not keys:
        write_class(train := tmp_path / "other", ["0.png"])
    config = config_of(train, validation_path=str(tmp_path / "flat"), **keys)
    assert ImageFolder.info(config).num_classes == 0
    assert len(ImageFolder(config, "train")) == (4 if keys else 1) and len(ImageFolder(config, "validation")) == 1


NESTED = [("", "image_folder"), ("val", "image_folder"), ("val", "captioned_folder"), ("..", "image_folder")]


@pytest.mark.parametrize("place", [".val", "../val", "../a.val/b"])
def test_held_out_images_apart_are_taken(tmp_path, place):
    write_class(tmp_path / "train", ["0.png"])
    write_class(tmp_path / "train" / place, ["1.png"])
    config = config_of(tmp_path / "train", validation_path=str(tmp_path / "train" / place))
    assert dataset_info(config).has_validation and len(ImageFolder(config, "train")) == 1


@pytest.mark.parametrize(("inside", "name"), NESTED)
def test_held_out_images_that_are_trained_on_are_refused(tmp_path, inside, name):
    config = DATASETS[name].Config(name=name, path=str(tmp_path / "."), validation_path=str(tmp_path / inside))
    with pytest.raises(DatasetError, match=r"^data.validation_path: .* and data.path have images in common"):
        dataset_info(config)


def test_labels_that_are_left_aside_ask_for_no_classes(tmp_path):
    listed, root = tmp_path / "classes.txt", tmp_path / "images"
    listed.write_text("b\n")
    write_class(root / "a", ["1.png", "2.png"])
    config = config_of(root, labels=False, classes_file=str(listed), validation_fraction=0.0)  # one class, of no line
    assert ImageFolder.info(config).num_classes == 0 and set(ImageFolder(config, "train").fetch(np.arange(2))) == {"images"}
    list_class_folders.cache_clear()
    _looks_classed.cache_clear()
    write_class(root, ["0.png"])  # an image beside the folder
    assert len(ImageFolder(config_of(root, labels=False, validation_fraction=0.0), "train")) == 3


def test_numbered_folders_are_classes_in_the_order_of_their_numbers(tmp_path):
    config = config_of(folder_of(tmp_path, ("0", "1", "10", "2"), 2), validation_fraction=0.0)
    assert ImageFolder.info(config).class_names == ("0", "1", "2", "10")
    assert everything(ImageFolder(config, "train"))[1] == [0, 0, 1, 1, 3, 3, 2, 2]  # images keep the order of earlier versions
    write_class(tmp_path / "other", ["a.png"])
    list_class_folders.cache_clear()
    assert ImageFolder.info(config).class_names == ("0", "1", "10", "2", "other")


def test_splits_that_are_taken_for_classes_are_said(tmp_path, caplog):
    assert ImageFolder.info(config_of(folder_of(tmp_path, ("train", "val"), 2))).class_names == ("train", "val")
    assert f"{tmp_path}: its classes are train, val (give the folder of training images, and another as" in caplog.text


def test_a_classes_file_may_begin_with_a_mark_and_end_with_an_empty_line(tmp_path):
    folder_of(tmp_path / "images", ("b", "caf\xe9"), 2)
    file = tmp_path / "classes.txt"
    file.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9 Caf\xc3\xa9\r\nb B\r\n\r\n")
    config = config_of(tmp_path / "images", classes_file=str(file), validation_fraction=0.0)
    assert ImageFolder.info(config).class_names == ("Caf\xe9", "B")
    assert everything(ImageFolder(config, "train"))[1] == [1, 1, 0, 0]
    file.write_text("cafe\u0301\nb\n")
    with pytest.raises(DatasetError, match="'caf\xe9' is not in it; 'cafe\u0301' looks the same, in another Unicode form"):
        ImageFolder.info(config)


def test_a_classes_file_numbers_and_names_the_folders(tmp_path):
    folder_of(tmp_path / "images", ("n1", "n3"), 1)
    (tmp_path / "classes.txt").write_text("n3 big cat\nn2 dog\nn1\n")
    config = config_of(tmp_path / "images", classes_file=str(tmp_path / "classes.txt"), validation_fraction=0.0)
    assert ImageFolder.info(config).class_names == ("big cat", "dog", "n1")
    assert everything(ImageFolder(config, "train"))[1] == [2, 0]
    folder_of(tmp_path / "dishes", ("fish & chips", "n3"), 1)
    config = config_of(tmp_path / "dishes", classes_file=str(tmp_path / "classes.txt"), validation_fraction=0.0)
    with pytest.raises(DatasetError, match=r"'fish & chips' is not in it \(a tab follows a folder with spaces\)"):
        ImageFolder.info(config)
    (tmp_path / "classes.txt").write_text("n3 big cat\nfish & chips\tFish\n")
    assert ImageFolder.info(config).class_names == ("big cat", "Fish")


def empty_class(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "c").mkdir()


def unreadable(tmp_path):
    for name in ("a/0.jpg", "b/0.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("text")


def other_files(tmp_path):
    for name in ("a.HEIC", "b/c.heic", "b/notes.txt", ".hidden/d.svg", ".e.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")


BAD_FOLDERS = {
    "empty": (lambda tmp_path: None, {}, "data.path: '{}' has no images, neither here nor in folders"),
    "telephone": (other_files, {}, "neither here nor in folders (found 2 .heic, 1 .txt, not read: convert to jpg)"),
    "loose": (
        lambda folder: write_class(folder, ["0.png"]), {"class_folders": True},
        "data.path: '{}' has images, but not in folders, one per class",
    ),
    "one class": (
        lambda folder: write_class(folder / "train", ["0.png"]), {},
        "data.path: '{}' has one class folder only, 'train' (give the folder with one",
    ),
    "empty class": (empty_class, {}, "data.path: 1 of the 3 class folders have no images, first {}/c"),
    "unreadable": (
        unreadable, {}, "data.path: none of 2 of its 2 images can be read; the first is {}/a/0.jpg: not an image of"
    ),
    "no path": (folder_of, {"path": ""}, "data.path: not given; image_folder needs a folder of images"),
    "classes file missing": (
        folder_of, {"classes_file": "{}/none"}, "data.classes_file: {}/none: cannot be read: No such file or directory"
    ),
    "class not in file": (
        lambda folder: (folder_of(folder) / "classes.txt").write_text("a x\nc"), {"classes_file": "{}/classes.txt"},
        "class folder 'b' is not in it",
    ),
    "validation missing": (folder_of, {"validation_path": "{}/none"}, "data.validation_path: '{}/none' does not exist"),
    "validation class unknown": (
        lambda folder: write_class(folder_of(folder) / ".val" / "c", ["0.png"]), {"validation_path": "{}/.val"},
        "data.validation_path: class folder 'c' is not in '{}'",
    ),
}  # fmt: skip


def test_a_missing_folder_is_refused_with_the_place_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path, place in (("pictures", tmp_path / "pictures"), ("~/pictures", tmp_path / "home" / "pictures")):
        said = one_line(DatasetError, ImageFolder.info, config_of(path=path))
        assert said == f"data.path: '{path}' does not exist (looked for {place})"


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_one_line(tmp_path, case):
    write, keys, message = BAD_FOLDERS[case]
    write(tmp_path)
    keys = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in keys.items()}
    assert message.format(tmp_path) in one_line(DatasetError, ImageFolder.info, config_of(**{"path": tmp_path} | keys))


# --- files that cannot be decoded

CORRUPT = ("a/003.png", "a/004.png", "b/009.png", "b/010.jpg", "b/011.png")


def truncated(kind):
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, kind)
    return file.getvalue()[:-400]


def damaged_folder(tmp_path):
    """60 images of three classes, five of which cannot be decoded, each for another reason."""
    folder_of(tmp_path, ("a", "b", "c"), 20)
    (tmp_path / "a" / "003.png").write_bytes(b"")
    (tmp_path / "a" / "004.png").write_bytes(truncated("PNG"))
    (tmp_path / "b" / "009.png").write_text("text")
    (tmp_path / "b" / "010.png").unlink()
    (tmp_path / "b" / "010.jpg").write_bytes(truncated("JPEG"))
    (tmp_path / "b" / "011.png").unlink()
    (tmp_path / "b" / "011.png").mkdir()
    return tmp_path


def data_of(folder, rank, world_size, found, num_workers=0, **keys):
    config = config_of(folder, num_workers=num_workers, validation_fraction=0.0, **keys)
    return TrainingData(
        ImageFolder(config, "train"), config, info=ImageFolder.info(config), seed=5, end_sample=240,
        global_batch_size=12, local_batch_size=3, rank=rank, world_size=world_size, on_unreadable=found,
    )  # fmt: skip


def read(data, steps):
    batches = [data.next_batch() for _ in range(steps * data.microbatches_per_step)]
    assert set(batches[0]) == {"images", "class", "samples"}
    assert all(len(batch["images"]) == 3 for batch in batches)
    data.close()
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def read_on_a_rank(folder, num_workers, report):
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    corrupt = CorruptImages(Path(report))
    data = data_of(folder, rank, ranks, corrupt.record, num_workers)
    batch = read(data, steps=10)
    images = (batch["images"][:, :, 0, 0] * 127.5).round().int().tolist()
    return [batch["samples"].tolist(), batch["class"].tolist(), images, corrupt.count(), corrupt.state_dict()]


def test_ranks_and_workers_read_the_same_and_count_each_corrupt_file_once(tmp_path):
    damaged_folder(tmp_path / "images")
    runs = {}
    for ranks, num_workers in ((1, 0), (1, 2), (2, 2)):
        report = tmp_path / f"{ranks}{num_workers}"
        report.mkdir()
        arguments = {"folder": str(tmp_path / "images"), "num_workers": num_workers, "report": str(report)}
        if ranks == 1:
            results = [read_on_a_rank(**arguments)]
        else:
            results = run_on_ranks("tests.unit.test_image_folder:read_on_a_rank", ranks, arguments)
        rows = sorted(row for result in results for row in zip(*result[:3], strict=True))
        runs[ranks, num_workers] = json.dumps(rows)
        assert [result[3] for result in results] == [5] * ranks
        listed = [line.split("\t") for line in (report / "corrupt_images.txt").read_text().splitlines()]
        assert sorted(path for path, _ in listed) == [str(tmp_path / "images" / name) for name in CORRUPT]
        assert all(result[4] == dict(sorted(listed)) for result in results)
    assert len(set(runs.values())) == 1
    # Two epochs of 60: the next readable image stands in, over any number of bad ones, with its own label.
    samples, labels, images = zip(*json.loads(runs[1, 0]), strict=True)
    assert list(samples) == list(range(120))
    reds_of_b = [round((image[0] + 127.5) / 10) for image, label in zip(images, labels, strict=True) if label == 1]
    assert {number: reds_of_b.count(number) for number in (8, 9, 10, 11, 12, 13)} == {
        8: 2, 9: 0, 10: 0, 11: 0, 12: 8, 13: 2,
    }  # fmt: skip


def test_the_reasons_are_one_line_and_name_the_file(tmp_path, caplog):
    damaged_folder(tmp_path)
    corrupt = CorruptImages(tmp_path)
    read(data_of(tmp_path, 0, 1, corrupt.record), steps=10)
    reasons = {path.removeprefix(f"{tmp_path}/"): reason for path, reason in corrupt.state_dict().items()}
    assert reasons["a/003.png"] == "the file is empty"
    assert reasons["b/009.png"] == "not an image of a known format"
    assert reasons["b/011.png"] == "is a folder, not a regular file"
    assert "truncated" in reasons["b/010.jpg"] and "truncated" in reasons["a/004.png"]
    assert len(caplog.messages) == 5 and not any("\n" in message for message in caplog.messages)


def test_a_resume_in_mid_epoch_reads_and_counts_as_the_straight_run(tmp_path):
    damaged_folder(tmp_path)
    straight = read(data_of(tmp_path, 0, 1, lambda found: None), steps=10)
    corrupt = CorruptImages(tmp_path)
    before = data_of(tmp_path, 0, 1, corrupt.record, num_workers=2)
    first = read(before, steps=2)  # 24 of 60 samples
    state = json.loads(json.dumps([before.state_dict(), corrupt.state_dict()]))
    assert 0 < len(state[1]) < 5
    read(before, steps=3)  # lost to the interruption
    resumed = CorruptImages(tmp_path)
    resumed.load_state_dict(state[1])
    after = data_of(tmp_path, 0, 1, resumed.record, num_workers=2)
    load_position(after, state[0])
    second = read(after, steps=8)
    assert torch.equal(torch.cat((first["images"], second["images"])), straight["images"])
    assert torch.equal(torch.cat((first["class"], second["class"])), straight["class"])
    assert resumed.count() == 5 and len((tmp_path / "corrupt_images.txt").read_text().splitlines()) == 5


def test_held_out_images_are_replaced_and_reported_too(tmp_path):
    damaged_folder(tmp_path)
    config = config_of(tmp_path, validation_fraction=0.0)
    dataset, found = ImageFolder(config, "train"), []
    batches = list(validation_batches(dataset, ImageFolder.info(config), 60, 16, 0, 1, found.extend))
    images = torch.cat([batch["images"] for batch in batches])
    assert sorted({error.path for error in found}) == [str(tmp_path / name) for name in CORRUPT]
    assert {error.index for error in found} == {3, 4, 29, 30, 31}
    assert torch.equal(images[3], images[5]) and torch.equal(images[29], images[32])


def test_a_dataset_with_nothing_readable_ends_the_run(tmp_path):
    known = set(multiprocessing.active_children())
    folder_of(tmp_path)
    data = data_of(tmp_path, 0, 1, lambda found: None, num_workers=1)
    for path in tmp_path.glob("*/*"):
        path.write_bytes(b"")
    message = "^dataset image_folder: 20 images in a row cannot be decoded, the first is .*png: the file is empty$"
    with pytest.raises(DatasetError, match=message):
        data.next_batch()
    data.close()
    assert set(multiprocessing.active_children()) <= known


def test_too_large_a_corrupt_share_ends_the_run_and_a_smaller_does_not(tmp_path):
    damaged_folder(tmp_path)  # 5 of 60: 20 of 240 samples
    read(data_of(tmp_path, 0, 1, lambda found: None, max_corrupt_share=0.02), steps=20)
    data = data_of(tmp_path, 0, 1, lambda found: None, max_corrupt_share=0.019)
    with pytest.raises(DatasetError, match="image_folder: 20 of the last 2.. images read cannot be decoded; more than"):
        read(data, steps=20)


def test_a_flat_folder_has_no_classes_and_folders_have_without_a_key(tmp_path):
    write_class(tmp_path / "flat", [f"{index}.png" for index in range(6)])
    flat = config_of(tmp_path / "flat", validation_fraction=0.0)
    assert ImageFolder.info(flat).num_classes == 0 and len(ImageFolder(flat, "train")) == 6
    assert set(ImageFolder(flat, "train").fetch(np.arange(2))) == {"images"}
    classed = config_of(folder_of(tmp_path / "classed"), validation_fraction=0.0)
    assert ImageFolder.info(classed).class_names == ("a", "b") and everything(ImageFolder(classed, "train"))[1][-1] == 1
    write_class(tmp_path / "classed", ["loose.png", ".hidden.png"])
    mixed = config_of(tmp_path / "classed")
    _looks_classed.cache_clear()  # a run's folder does not change
    with pytest.raises(DatasetError, match=r"has 1 image beside 2 folders \(set data.class_folders = true to"):
        ImageFolder.info(mixed)
    assert ImageFolder.info(config_of(tmp_path / "classed", class_folders=True)).num_classes == 2
    assert ImageFolder.info(config_of(tmp_path / "classed", class_folders=False)).num_classes == 0
