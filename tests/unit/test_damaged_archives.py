"""Tar archives and label files that are damaged: refused by name, in one line."""

import io
import os
import tarfile

import numpy as np
import pytest

from tests.encoded_images import SIDE, image_bytes, write_tar
from torchtitan.data import DatasetError, webdataset
from torchtitan.data.derived_classes import num_classes_of
from torchtitan.data.image_folder import ImageFolder, ImageFolderConfig
from torchtitan.data.tar_files import Member, read_members
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


DAMAGED = {
    "another sum": (header().replace(b"a.png", b"b.png") + END, "no tar archive, or damaged"),
    "another sum of the second": (member() + header().replace(b"a.png", b"b.png") + END, "damaged or cut short at byte 512"),
    "half a block": (member(content=b"x" * 600)[:-10], "cut short"),
    "no last block": (member(content=b"x" * 512), "cut short at byte 1024"),
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
def test_names_of_every_format_are_read(tmp_path, form):
    names = ["short.png", "f" * 120 + "/" + "g" * 90 + ".png", "ä/ü.png", "d" * 30 + "/x.cls"]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type, folder.size = tarfile.DIRTYPE, 0
        archive.addfile(folder)
        for number, name in enumerate(names):
            entry = tarfile.TarInfo(name)
            entry.size = 700 * number
            archive.addfile(entry, io.BytesIO(bytes([number]) * entry.size))
    content, found = (tmp_path / "a.tar").read_bytes(), list(read_members(tmp_path / "a.tar"))
    assert [member.name for member in found] == [os.fsencode(name) for name in names]
    assert [content[offset : offset + size] for _, offset, size in found] == [bytes([i]) * 700 * i for i in range(4)]


def test_a_name_that_is_no_utf8_is_kept(tmp_path):
    (tmp_path / "a.tar").write_bytes(member(b"\xe4.png", b"abc") + END)
    assert list(read_members(tmp_path / "a.tar")) == [Member(b"\xe4.png", 512, 3)]


# --- labels and class files


def shards(folder, count=6):
    members = {}
    for number in range(count):
        members |= {f"{number}.png": image_bytes(number), f"{number}.cls": b"%d" % (number % 3)}
    write_tar(folder / "a.tar", members)
    return WebDatasetConfig(path=str(folder), image_size=SIDE, validation_fraction=0.0)


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
