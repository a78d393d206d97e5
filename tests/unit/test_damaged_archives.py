"""Tar archives, their indexes and label files that are damaged: refused by name, in one line."""

import io
import os
import tarfile

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from tests.encoded_images import SIDE, image_bytes, write_tar
from torchtitan.data import DatasetError, webdataset
from torchtitan.data.derived_classes import num_classes_of
from torchtitan.data.image_folder import ImageFolder, ImageFolderConfig
from torchtitan.data.tar_files import read_members
from torchtitan.data.tar_headers import Entry, walk
from torchtitan.data.webdataset import WebDataset, WebDatasetConfig

END = bytes(1024)


def header(name=b"a.png", size=b"00000000000\0", kind=b"0", magic=b"ustar\x0000", prefix=b""):
    """One block; `size` is the field as it is stored."""
    block = bytearray(512)
    block[: len(name)] = name
    block[124 : 124 + len(size)] = size
    block[156:157] = kind
    block[257:265] = magic
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def octal(number):
    return b"%011o\0" % number


def member(name=b"a.png", content=b"", kind=b"0", **fields):
    return header(name, octal(len(content)), kind, **fields) + content + bytes(-len(content) % 512)


def entries(content):
    return list(walk(lambda offset, count: content[offset : offset + count], 0, len(content)))


DAMAGED = {
    "another sum": (header().replace(b"a.png", b"b.png") + END, "no tar archive, or damaged"),
    "half a block": (member(content=b"x" * 600)[:-10], "cut short"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_archive_is_refused_by_name(tmp_path, case):
    content, reason = DAMAGED[case]
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        list(read_members(tmp_path / "a.tar"))
    assert f"{tmp_path}/a.tar: " in str(caught.value) and reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind, called", [(b"2", "a link"), (b"S", "a sparse file")])
def test_what_is_no_plain_member_is_refused_by_name(tmp_path, kind, called):
    (tmp_path / "a.tar").write_bytes(member(b"x\n\x1b[31m.txt", kind=kind) + END)
    with pytest.raises(DatasetError) as caught:
        list(read_members(tmp_path / "a.tar"))
    assert f"is {called}, which cannot be read in place" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_the_library_finds(tmp_path, form):
    names = ["short.png", "f" * 120 + "/" + "g" * 90 + ".png", "ä/ü.png", "d" * 30 + "/x.cls"]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type, folder.size = tarfile.DIRTYPE, 0
        archive.addfile(folder)
        for number, name in enumerate(names):
            entry = tarfile.TarInfo(name)
            entry.size = 700 * number
            archive.addfile(entry, io.BytesIO(bytes(entry.size)))
    with tarfile.open(tmp_path / "a.tar", errors="surrogateescape") as archive:
        wanted = [(os.fsencode(each.name), each.offset_data, each.size) for each in archive if each.isreg()]
    assert [tuple(found) for found in read_members(tmp_path / "a.tar")] == wanted
    assert [name for name, _, _ in wanted] == [os.fsencode(name) for name in names]


def test_numbers_and_names_of_other_writers_are_read():
    content = header(b"a.png", b"\x80" + (3).to_bytes(11, "big")) + b"abc" + bytes(509)
    assert entries(content + END) == [Entry(b"a.png", b"0", 512, 3)]
    assert entries(header(b"b", b"       3\0   ", b"\0", prefix=b"a") + b"abc" + bytes(509) + END)[0].name == b"a/b"
    # GNU keeps times where ustar has the first part of a name, and the oldest format marks folders by a slash.
    assert entries(member(b"b", magic=b"ustar  \0", prefix=b"14000000000") + END)[0].name == b"b"
    assert entries(header(b"folder/", b"", b"\0", magic=bytes(8)) + END) == [Entry(b"folder", b"5", 512, 0)]
    signed = bytearray(header(b"\xe4.png"))
    signed[148:156] = b"%06o\0 " % (sum(signed[:148]) + sum(signed[156:]) + 8 * 32 - 256)
    assert entries(bytes(signed) + END)[0].name == b"\xe4.png"


# --- indexes


def shards(folder, count=6):
    members = {}
    for number in range(count):
        members |= {f"{number}.png": image_bytes(number), f"{number}.cls": b"%d" % (number % 3)}
    write_tar(folder / "a.tar", members)
    return WebDatasetConfig(path=str(folder), image_size=SIDE, validation_fraction=0.0)


def labels_of(config):
    webdataset._open_shards.cache_clear()
    WebDataset.info(config)
    return WebDataset(config, "train").fetch(np.arange(6))["class"].tolist()


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_damaged_or_empty_index_is_replaced_and_another_file_of_its_name_is_left(tmp_path, caplog):
    config = shards(tmp_path)
    labels_of(config)
    index = tmp_path / ".a.tar.index"
    good = index.read_bytes()
    for damaged in (b"", good[: len(good) // 2], good[:-1] + b"x"):
        index.write_bytes(damaged)
        assert labels_of(config)[1] == 1
        assert_equal(load_file(index), load(good))
    index.write_bytes(b"notes of somebody")
    assert labels_of(config)[1] == 1
    assert index.read_bytes() == b"notes of somebody"
    assert f"{index} is no index of this program (move it away)" in caplog.text
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".unfinished")]


# --- labels and class files


def test_a_stray_label_is_refused_with_its_place(tmp_path):
    config = shards(tmp_path)
    write_tar(tmp_path / "b.tar", {"odd.png": image_bytes(7), "odd.cls": b"999999"})
    webdataset._open_shards.cache_clear()
    with pytest.raises(DatasetError) as caught:
        WebDataset.info(config)
    assert str(caught.value) == (
        f"{tmp_path}/b.tar: odd: label 999999 stands far beyond the others, and would make 1000000 classes (mend it; "
        "if it is meant, data.classes_file declares the classes)"
    )


@pytest.mark.parametrize("labels, classes", [
    ([0], 1), ([3, 981], 982), ([1500], 1501), ([5, 1999], 2000), (range(30_000), 30_000), ([0, 1500, 2900], 2901),
    ([5, 2000], None), ([999_999], None), ([*range(1000), 5000], None), ([1, 999_998, 999_999], None),
])  # fmt: skip
def test_classes_of_a_data_set_without_a_declaration(labels, classes):
    labels = np.array(labels)
    if classes:
        assert num_classes_of(labels, str, "") == classes
    else:
        with pytest.raises(DatasetError, match="stands far beyond the others"):
            num_classes_of(labels, str, "")


@pytest.mark.parametrize("file, reason", [
    ("folder", "is a folder, not"), ("binary", "not a text file"), ("absent", "No such file"),
])  # fmt: skip
def test_a_file_of_classes_that_is_none_is_refused_in_one_line(tmp_path, file, reason):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    path = str(tmp_path / file)
    config = ImageFolderConfig(path=str(tmp_path / "images"), image_size=SIDE, classes_file=path)
    with pytest.raises(DatasetError) as caught:
        ImageFolder.info(config)
    assert f"data.classes_file: {path}: cannot be read: {reason}" in str(caught.value)
