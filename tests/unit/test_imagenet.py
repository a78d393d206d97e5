"""ImageNet's layouts: class folders, Kaggle's tree and the original archives give the same images and labels."""

import io
import pickle

import numpy as np
import pytest
import torch

from tests.encoded_images import SIDE, assert_resumes_in_mid_epoch, decoded, everything, image_bytes, write_tar
from tests.refusals import one_line
from torchtitan.data import DatasetError, UnreadableImage
from torchtitan.data.imagenet import ImageNet, ImageNetConfig

WNIDS = ("n00000007", "n00000003", "n00000005")
PER_CLASS = 30
HELD_OUT = {f"ILSVRC2012_val_{number:08}": WNIDS[number % 3] for number in range(1, 8)}


def train_files():
    """wnid -> file name -> content."""
    return {
        wnid: {f"{wnid}_{number}.JPEG": image_bytes(100 * place + number) for number in range(PER_CLASS)}
        for place, wnid in enumerate(WNIDS)
    }


def validation_files():
    return {f"{name}.JPEG": image_bytes(1000 + number) for number, name in enumerate(HELD_OUT)}


def write_files(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_folders(folder):
    for wnid, files in train_files().items():
        write_files(folder / "train" / wnid, files)
    for name, content in validation_files().items():
        write_files(folder / "val" / HELD_OUT[name.removesuffix(".JPEG")], {name: content})


def write_kaggle(folder):
    images = folder / "ILSVRC" / "Data" / "CLS-LOC"
    for wnid, files in train_files().items():
        write_files(images / "train" / wnid, files)
    write_files(images / "val", validation_files())
    lines = [f"{name},{wnid} 1 2 3 4 {wnid} 5 6 7 8\n" for name, wnid in HELD_OUT.items()]
    (folder / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "".join(lines))
    (folder / "LOC_synset_mapping.txt").write_text("n00000003 three, drei\nn00000005 five\nn00000007 seven, sieben\n")


def write_archives(folder):
    folder.mkdir(parents=True, exist_ok=True)
    inner = {}
    for wnid, files in train_files().items():  # in another order than the names'
        inner[f"{wnid}.tar"] = write_tar(folder / "x.tar", dict(reversed(files.items()))).read_bytes()
    write_tar(folder / "ILSVRC2012_img_train.tar", inner)
    write_tar(folder / "ILSVRC2012_img_val.tar", validation_files())
    (folder / "x.tar").unlink()
    write_devkit(folder)


def write_devkit(folder):
    """As the original: a MATLAB table of classes in an order of their own, and a class number a line."""
    savemat = pytest.importorskip("scipy.io").savemat
    numbers = {"n00000005": 1, "n00000007": 2, "n00000003": 3}
    words = {"n00000003": "three, drei", "n00000005": "five", "n00000007": "seven, sieben"}
    synsets = np.zeros((3, 1), [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")])
    for row, (wnid, number) in enumerate(numbers.items()):
        synsets[row, 0] = (np.array([[float(number)]]), wnid, words[wnid])
    table = io.BytesIO()
    savemat(table, {"synsets": synsets})
    truth = "".join(f"{numbers[wnid]}\n" for wnid in HELD_OUT.values())
    write_tar(folder / "ILSVRC2012_devkit_t12.tar.gz", {
        "ILSVRC2012_devkit_t12/data/meta.mat": table.getvalue(),
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
    })  # fmt: skip


WRITERS = {"folders": write_folders, "kaggle": write_kaggle, "archives": write_archives}


def config_of(path, **keys):
    return ImageNetConfig(path=str(path), image_size=SIDE, horizontal_flip=False, **keys)


def test_labels_follow_the_sorted_wnids_and_pixels_are_the_files(tmp_path):
    write_folders(tmp_path)
    config = config_of(tmp_path)
    info = ImageNet.info(config)
    assert info.class_names == tuple(sorted(WNIDS)) and info.image_shape == (3, SIDE, SIDE) and info.has_validation
    images, labels = everything(ImageNet(config, "train"))
    files = train_files()
    names = [(wnid, name) for wnid in sorted(WNIDS) for name in sorted(files[wnid])]
    assert labels == [sorted(WNIDS).index(wnid) for wnid, _ in names]
    assert torch.equal(images, torch.stack([decoded(files[wnid][name]) for wnid, name in names]))


@pytest.mark.parametrize("layout", ["kaggle", "archives"])
def test_every_layout_gives_what_the_folders_give(tmp_path, layout):
    write_folders(tmp_path / "folders")
    WRITERS[layout](tmp_path / layout)
    whole, other = config_of(tmp_path / "folders"), config_of(tmp_path / layout)
    assert ImageNet.info(other).class_names == ("three", "five", "seven")
    images, labels = everything(ImageNet(whole, "train"))
    other_images, other_labels = everything(ImageNet(other, "train"))
    assert torch.equal(images, other_images) and labels == other_labels
    # A flat val is in the order of its names, folders are in that of classes.
    images, labels = everything(ImageNet(whole, "validation"))
    other_images, other_labels = everything(ImageNet(other, "validation"))
    order = np.argsort(other_labels, kind="stable")
    assert torch.equal(images, other_images[order]) and labels == sorted(other_labels)
    assert other_labels == [sorted(WNIDS).index(wnid) for wnid in HELD_OUT.values()]


def test_kaggles_inner_folder_finds_the_lists_above_it(tmp_path):
    write_kaggle(tmp_path)
    config = config_of(tmp_path / "ILSVRC" / "Data" / "CLS-LOC")
    assert ImageNet.info(config).class_names == ("three", "five", "seven")
    assert len(ImageNet(config, "validation")) == 7


def test_part_of_imagenet_keeps_the_numbers_of_a_classes_file_or_has_its_own(tmp_path, caplog):
    write_kaggle(tmp_path)
    images = tmp_path / "ILSVRC" / "Data" / "CLS-LOC" / "train"
    (images / "n00000005").rename(tmp_path / "away")
    own = config_of(tmp_path)
    assert ImageNet.info(own).class_names == ("three", "seven")
    assert set(everything(ImageNet(own, "train"))[1]) == {0, 1}
    assert caplog.messages == [f"{tmp_path}: 2 images of val left out: train has none of their 1 class"]
    assert everything(ImageNet(own, "validation"))[1] == [0, 1, 0, 1, 0]
    classes = tmp_path / "classes.txt"
    classes.write_text("n00000001 one\nn00000003 three\nn00000005 five\nn00000007 seven\n")
    numbered = config_of(tmp_path, classes_file=str(classes))
    assert ImageNet.info(numbered).class_names == ("one", "three", "five", "seven")
    assert set(everything(ImageNet(numbered, "train"))[1]) == {1, 3}
    assert everything(ImageNet(numbered, "validation"))[1] == [1, 3, 1, 3, 1]


def test_without_val_the_last_images_of_each_class_are_held_out(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "val").rename(tmp_path / "away")
    config = config_of(tmp_path, validation_fraction=0.1)
    assert ImageNet.info(config).has_validation
    held_out = ImageNet(config, "validation")
    assert everything(held_out)[1] == [0, 0, 0, 1, 1, 1, 2, 2, 2] and len(ImageNet(config, "train")) == 81
    last = sorted(train_files()["n00000003"].items())[-1][1]
    assert torch.equal(held_out.fetch(np.array([2]))["images"][0], decoded(last))
    assert len(ImageNet(config_of(tmp_path), "validation")) == 4  # floor(0.05 x 90)


def test_archives_resume_in_mid_epoch_on_other_ranks_and_loader_processes(tmp_path):
    write_archives(tmp_path)
    assert_resumes_in_mid_epoch(ImageNet, config_of(tmp_path))


def test_a_copy_of_an_open_archive_reads_the_same_and_is_small(tmp_path):
    write_archives(tmp_path)
    dataset = ImageNet(config_of(tmp_path), "train")
    before = dataset.fetch(np.arange(90))["images"]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 200 * 90
    assert torch.equal(pickle.loads(pickled).fetch(np.arange(90))["images"], before)


def test_a_damaged_image_in_an_archive_is_named(tmp_path):
    write_archives(tmp_path)
    config = config_of(tmp_path)
    dataset = ImageNet(config, "train")
    source = dataset._source
    position = int(dataset._positions[4])
    with open(tmp_path / "ILSVRC2012_img_train.tar", "r+b") as file:
        file.seek(int(source.offsets[position]))
        file.write(b"text")
    said = one_line(UnreadableImage, dataset.fetch, np.arange(10))
    member = "n00000003.tar/n00000003_12.JPEG"  # the fifth by name: 0, 1, 10, 11, 12
    assert said == f"{tmp_path}/ILSVRC2012_img_train.tar: {member}: not an image of a known format"


def cut(name, count):
    def change(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:count])

    return change


def overwrite(name, content, offset=0):
    def change(folder):
        whole = bytearray((folder / name).read_bytes())
        whole[offset : offset + len(content)] = content
        (folder / name).write_bytes(whole)

    return change


def add(name, content=b""):
    def change(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return change


def flatten(folder):
    (folder / "val").rename(folder / "away")
    write_files(folder / "val", validation_files())


TRAIN, VALIDATION, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
SECOND = 512 + 512 * -(-len(image_bytes(1000)) // 512)  # where the second member of the held-out archive begins

BAD = {
    "no train": (
        "folders", lambda folder: (folder / "train").rename(folder / "away"), {},
        "data.path: '{}' has neither train/ nor ILSVRC2012_img_train.tar",
    ),
    "no wnid": ("folders", add("train/dogs/1.png"), {}, "data.path: {}/train: its class 'dogs' is no wnid (n and 8"),
    "fraction and val": (
        "folders", None, {"validation_fraction": 0.1}, "data.validation_fraction: val holds held-out images already;"
    ),
    "flat val without labels": (
        "folders", flatten, {}, "data.path: the held-out images of {} are in no class folders, and neither LOC_val"
    ),
    "unknown held-out image": (
        "kaggle", add("ILSVRC/Data/CLS-LOC/val/odd.JPEG"), {},
        "data.path: 1 held-out images are in no list of classes, first odd.JPEG",
    ),
    "damaged solution": (
        "kaggle", add("LOC_val_solution.csv", b"ImageId,PredictionString\na,b\n"), {},
        "{}/LOC_val_solution.csv: line 2: not an image's name, a comma and a wnid",
    ),
    "cut": ("archives", cut(VALIDATION, 600), {}, "{}/ILSVRC2012_img_val.tar: cut short: 'ILSVRC2012_val_0000000"),
    "damaged header": (
        "archives", overwrite(VALIDATION, b"\xff" * 100, SECOND), {}, f"damaged or cut short at byte {SECOND}: no tar header"
    ),
    "compressed": ("archives", overwrite(TRAIN, b"\x1f\x8b\x08" + bytes(300)), {},
                   "img_train.tar: is compressed (gzip); decompress it"),
    "damaged devkit": (
        "archives", cut(DEVKIT, 100), {}, "{}/ILSVRC2012_devkit_t12.tar.gz: ILSVRC2012_devkit_t12/data/ILSVRC2012_val"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, case):
    layout, change, keys, message = BAD[case]
    WRITERS[layout](tmp_path)
    if change:
        change(tmp_path)
    config = ImageNetConfig(**{"path": str(tmp_path), "image_size": SIDE} | keys)
    assert message.format(tmp_path) in one_line(DatasetError, ImageNet.info, config)
