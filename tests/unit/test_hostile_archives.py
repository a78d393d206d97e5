"""Tar archives, their indexes and label files made to harm: refused in one line, soon, in little memory."""

import io
import json
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
from safetensors.numpy import load, load_file, save_file

from tests.encoded_images import SIDE, image_bytes, write_tar
from tests.faults.confinement import bounded
from torchtitan.data import DatasetError, class_folders, imagenet_metadata, webdataset
from torchtitan.data.derived_classes import num_classes_of
from torchtitan.data.image_folder import ImageFolder, ImageFolderConfig
from torchtitan.data.imagenet_metadata import find_validation_wnids
from torchtitan.data.saved_index import _checksum
from torchtitan.data.tar_files import read_members
from torchtitan.data.tar_headers import Entry, TarError, walk
from torchtitan.data.webdataset import WebDataset, WebDatasetConfig, find_shards

MIB = 1 << 20
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


def pax(**records):
    """A header of records, whose lengths count themselves."""
    text = b""
    for key, value in records.items():
        body = b" " + key.replace("_", ".").encode() + b"=" + value + b"\n"
        length = len(body) + 2 if len(body) < 98 else len(body) + 3 if len(body) < 997 else len(body) + 4
        text += b"%d" % length + body
    return member(b"pax", text, b"x")


def entries(content):
    return list(walk(lambda offset, count: content[offset : offset + count], 0, len(content)))


HOSTILE = {
    "a size of -512": (header(size=b"\xff" * 10 + b"\xfe\0") + END, "no number of bytes"),
    "a size of -1": (header(size=b"-1\0") + END, "no number of bytes"),
    "a size of 2^88": (header(size=b"\x80" + b"\xff" * 11) + END, "extends past byte"),
    "a size in words": (header(size=b"many") + END, "no number of bytes"),
    "a name of 4 TB": (header(b"././@LongLink", b"\x80" + (4 << 40).to_bytes(11, "big"), b"L") + END, "than 4,097"),
    "a name of 4 TB by pax": (header(b"pax", b"\x80" + (4 << 40).to_bytes(11, "big"), b"x") + END, "than 1,048,576"),
    "a name past the end": (header(b"././@LongLink", octal(4000), b"L") + END, "a header extends past byte"),
    "3,000 long names": (member(b"././@LongLink", b"x" * 200, b"L") * 3000 + END, "more than 16 headers of one member"),
    "3,000 pax headers": (pax(path=b"x") * 3000 + END, "more than 16 headers of one member"),
    "a size of -512 by pax": (pax(size=b"-512") + member() + END, "no number of bytes"),
    "a size of 1e99 by pax": (pax(size=b"9" * 99) + member() + END, "no number of bytes"),
    "a long name by pax": (pax(path=b"x" * 5000) + member() + END, "a name of 5,000 bytes"),
    "a record of no length": (member(b"pax", b"0 a=b\n", b"x") + member() + END, "no record of a pax header"),
    "a record of a huge length": (member(b"pax", b"9" * 400 + b" a=b\n", b"x") + member() + END, "no record of a pax"),
    "a record longer than the rest": (member(b"pax", b"60 a=b\n", b"x") + member() + END, "no record of a pax header"),
    "another sum": (header().replace(b"a.png", b"b.png") + END, "no tar archive, or damaged"),
    "nothing": (b"", "cut short at byte 0: a tar's last block is missing"),
    "half a block": (member(content=b"x" * 600)[:-10], "cut short"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_soon_and_in_little_memory(tmp_path, case):
    content, reason = HOSTILE[case]
    (tmp_path / "a.tar").write_bytes(content)
    with bounded(10, 100 * MIB), pytest.raises(DatasetError) as caught:
        list(read_members(tmp_path / "a.tar"))
    assert reason in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("kind, called", [
    (b"1", "a link"), (b"2", "a link"), (b"3", "a device"), (b"4", "a device"), (b"6", "a pipe"),
    (b"S", "a sparse file"),
])  # fmt: skip
def test_what_is_no_plain_member_is_refused_by_name(tmp_path, kind, called):
    (tmp_path / "a.tar").write_bytes(member(b"x\n\x1b[31m.txt", kind=kind) + END)
    with pytest.raises(DatasetError) as caught:
        list(read_members(tmp_path / "a.tar"))
    assert f"is {called}, which cannot be read in place" in str(caught.value) and "\n" not in str(caught.value)


def test_a_sparse_file_of_pax_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(pax(GNU_sparse_map=b"0,1") + member(content=b"x") + END)
    with pytest.raises(DatasetError, match="'a.png' is a sparse file"):
        list(read_members(tmp_path / "a.tar"))


def test_a_pipe_for_an_archive_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with bounded(5, 100 * MIB), pytest.raises(DatasetError, match="a.tar: cannot be read: is a pipe, not a regular"):
        WebDataset.info(WebDatasetConfig(path=str(tmp_path), image_size=SIDE))


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


def test_every_walk_advances_or_ends():
    generator = np.random.default_rng(0)
    good = pax(path=b"x/y") + member(content=b"abc") + member(b"././@LongLink", b"name\0", b"L") + member() + END
    for _ in range(2000):
        content = bytearray(good)
        for place in generator.integers(0, len(content), 3):
            content[place] = generator.integers(256)
        block = int(generator.integers(len(content) // 512)) * 512
        content[block + 148 : block + 156] = b" " * 8  # so that the sum does not give the damage away
        content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
        try:
            found = entries(bytes(content))
        except TarError:
            continue
        assert all(0 <= entry.offset <= entry.offset + entry.size <= len(content) for entry in found)


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


def changed(path, change):
    """Another table under the same marks and with its own sum right."""
    content = path.read_bytes()
    marks = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])["__metadata__"]
    table = load_file(path)
    change(table)
    save_file(table, path, marks | {"crc32": _checksum(table)})


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("change", [
    lambda table: table.pop("labels"),
    lambda table: table.update(labels=table["labels"].astype(np.float64)),
    lambda table: table.update(labels=table["labels"][:5]),
    lambda table: table.update(labels=table["labels"] + 10**9),
    lambda table: table.update(offsets=table["offsets"] - 10**12),
    lambda table: table.update(sizes=table["sizes"] + 10**12),
    lambda table: table.update(letters=table["letters"][:-1]),
    lambda table: table.update(letter_counts=table["letter_counts"] + 2**62),
    lambda table: table.update(problems=table["problems"] + np.uint8(99)),
    lambda table: table.update(offsets=table["offsets"][:, None]),
])  # fmt: skip
def test_an_index_that_is_not_whole_is_made_anew(tmp_path, change):
    config = shards(tmp_path)
    assert labels_of(config) == [0, 1, 2, 0, 1, 2]
    index = tmp_path / ".a.tar.index"
    good = load_file(index)
    changed(index, change)
    assert labels_of(config) == [0, 1, 2, 0, 1, 2]
    assert_equal(load_file(index), good)


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
    index.unlink()
    os.mkfifo(index)
    with bounded(10, 500 * MIB):
        assert labels_of(config)[1] == 1
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".unfinished")]


# --- labels and class files


def test_a_label_file_of_any_size_is_no_label(tmp_path):
    members = {"0.png": image_bytes(0), "0.cls": b"1", "1.png": image_bytes(1), "1.cls": b" " * 2 * MIB}
    write_tar(tmp_path / "a.tar", members)
    dataset = WebDataset(WebDatasetConfig(path=str(tmp_path), image_size=SIDE, validation_fraction=0.0), "train")
    with pytest.raises(DatasetError, match="the sample's label is no whole number"):
        dataset.fetch(np.array([1]))


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


def test_classes_are_at_most_a_million():
    labels = np.array([*range(900), *(1000 * 3**k // 2**k for k in range(30))])
    with pytest.raises(DatasetError, match=f"^929: label {labels[-1]} is not below 1,000,000$"):
        num_classes_of(labels, str, "")


@pytest.mark.parametrize("file, reason", [
    ("/dev/zero", "is a device, not a regular file"), ("folder", "is a folder, not"), ("pipe", "is a pipe, not"),
    ("large", "1,099,511,627,776 bytes, more than 16,777,216"), ("binary", "not a text file"),
    ("absent", "No such file"), ("~nobody-of-this-name/classes.txt", "No such file"), ("a\0b", "not a text file"),
])  # fmt: skip
def test_a_file_of_classes_that_is_none_is_refused_in_one_line(tmp_path, file, reason):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    path = file if file.startswith(("/", "~")) else str(tmp_path / file)
    config = ImageFolderConfig(path=str(tmp_path / "images"), image_size=SIDE, classes_file=path)
    with bounded(10, 200 * MIB), pytest.raises(DatasetError) as caught:
        ImageFolder.info(config)
    assert f"data.classes_file: {path}: cannot be read: {reason}" in str(caught.value)


def test_a_file_of_countless_classes_is_refused_and_one_of_many_is_read_once(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(image_bytes(0))
    path = tmp_path / "classes.txt"
    config = ImageFolderConfig(
        path=str(tmp_path / "images"), image_size=SIDE, classes_file=str(path), validation_fraction=0.0
    )
    path.write_text("a\nb\n" + "".join(f"{number}\n" for number in range(10**6)))
    with bounded(5, 200 * MIB), pytest.raises(DatasetError, match="1,000,002 lines, more than 1,000,000 classes"):
        ImageFolder.info(config)
    path.write_text("b\na\nc\n")
    class_folders._parsed.cache_clear()
    assert ImageFolder.info(config).class_names == ("b", "a", "c")
    assert ImageFolder(config, "train").fetch(np.array([0, 1]))["class"].tolist() == [1, 0]
    assert class_folders._parsed.cache_info().misses == 1
    path.write_text("a\nb\n")
    assert ImageFolder.info(config).class_names == ("a", "b")


def test_braces_of_countless_names_are_refused(tmp_path):
    for pattern in ("{0..999999999999}.tar", "{a,b}" * 40):
        with bounded(30, 300 * MIB), pytest.raises(DatasetError, match="stands for more than 262,144 names"):
            find_shards("data.path", str(tmp_path / pattern))


def test_a_devkit_that_unpacks_to_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet_metadata, "MAX_FILE_BYTES", 1 * MIB)
    packer = zlib.compressobj(wbits=31)
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(packer.compress(bytes(9 * MIB)) + packer.flush())
    with pytest.raises(DatasetError, match="unpacked it has more than 1,048,576 bytes"):
        find_validation_wnids([tmp_path])


@pytest.mark.parametrize("case, reason", [
    ("packed", "unpacked it has more than 1,048,576 bytes"), ("rows", "a table of 2,147,483,647 classes"),
])  # fmt: skip
def test_a_table_of_classes_that_is_large_unpacked_is_refused(tmp_path, case, reason, monkeypatch):
    savemat = pytest.importorskip("scipy.io").savemat
    monkeypatch.setattr(imagenet_metadata, "MAX_FILE_BYTES", 1 * MIB)
    file = io.BytesIO()
    rows = np.zeros((300, 1), [("ILSVRC2012_ID", "O"), ("WNID", "O")])
    if case == "packed":
        savemat(file, {"synsets": rows, "more": np.zeros(9 * MIB, np.uint8)}, do_compression=True)
        content = file.getvalue()
    else:
        savemat(file, {"synsets": rows})
        content = file.getvalue().replace(struct.pack("<II", 300, 1), struct.pack("<II", 2**31 - 1, 1), 1)
    folder = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    (folder / "meta.mat").write_bytes(content)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n")
    with bounded(10, 200 * MIB), pytest.raises(DatasetError, match=f"meta.mat is damaged .*{reason}"):
        find_validation_wnids([tmp_path])
