"""Hostile tar archives: shards of the data set webdataset, ImageNet's archives, what lies beside them."""

import gzip
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.encoded_images import image_bytes
from tests.faults.hostile_case import REFUSED, SURVIVED, Place, device, hostile
from tests.faults.hostile_images import EPS, SMALL, named, zeros

BLOCK = 512
SHARDS = ("--data.name", "webdataset", "--data.validation_fraction", 0, *SMALL)


def number_field(value: int, width: int = 12) -> bytes:
    """A number as GNU's tar writes one that needs more than octal digits."""
    sign = b"\xff" if value < 0 else b"\x80"
    return sign + (value % (1 << 8 * (width - 1))).to_bytes(width - 1, "big")


def entry(name: bytes, size: int | bytes = 0, kind: bytes = b"0", link: bytes = b"",
          magic: bytes = b"ustar  \0") -> bytes:  # fmt: skip
    """One header block, its checksum right."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size if 0 <= size < 8**11 else number_field(size)
    head = name[:100].ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field.ljust(12, b"\0") + b"00000000000\0"
    rest = kind + link[:100].ljust(100, b"\0") + magic
    block = (head + b" " * 8 + rest).ljust(BLOCK, b"\0")
    total = sum(block)
    return block[:148] + b"%06o\0 " % total + block[156:]


def padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % BLOCK)


def file(name: bytes, content: bytes) -> bytes:
    return entry(name, len(content)) + padded(content)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """An extended header; the length of each record is what it should be."""
    lines = b""
    for key, value in records:
        length = len(key) + len(value) + 3
        length += len(str(length + len(str(length))))
        lines += b"%d %s=%s\n" % (length, key, value)
    return entry(b"././@PaxHeader", len(lines), kind) + padded(lines)


def raw_pax(lines: bytes, kind: bytes = b"x") -> bytes:
    return entry(b"././@PaxHeader", len(lines), kind) + padded(lines)


def good(count: int = 12) -> bytes:
    """Samples that can be read."""
    return b"".join(
        file(b"good%03d.png" % number, image_bytes(number)) + file(b"good%03d.cls" % number, b"%d" % (number % 2))
        for number in range(count)
    )


END = b"\0" * 1024


def shard(name: str, *verdicts: str, ending: bytes = END, bad: str = "", **options: object) -> Callable:
    """Register what makes part of an archive that stands after good samples; bad: listed as a corrupt image."""
    verdicts = verdicts or (REFUSED, SURVIVED)

    def register(make: Callable[[], bytes]) -> Callable:
        @hostile("tar archive", *verdicts, name=f"tar: {name}", check=named(bad) if bad else None, **options)
        def write(place: Place) -> tuple[str, ...]:
            (place.input / "x.tar").write_bytes(good() + make() + ending)
            return place.train(*SHARDS, "--data.path", place.input)

        return make

    return register


IMAGE = image_bytes(77)
SAMPLE = file(b"more.png", IMAGE) + file(b"more.cls", b"1")

shard("size -512 in base 256")(lambda: entry(b"a.png", -512) + SAMPLE)
shard("size -1024 in base 256, after a long name")(
    lambda: entry(b"l", 600, b"L") + padded(b"n" * 600) + entry(b"a", -1024)
)
shard("size -513 of an extended header")(lambda: entry(b"p", -513, b"x") + SAMPLE)
shard("size -1000 in octal")(lambda: entry(b"a.png", b"-0000001000\0") + SAMPLE)
shard("size in words")(lambda: entry(b"a.png", b"hostile size") + SAMPLE)
shard("size 2^62", REFUSED)(lambda: entry(b"a.png", 1 << 62) + SAMPLE)
shard("size 2^87 in base 256", REFUSED)(lambda: entry(b"a.png", 1 << 86) + SAMPLE)
shard("a name of 4 TB", REFUSED)(lambda: entry(b"././@LongLink", 4 << 40, b"L") + SAMPLE)
shard("a link's name of 4 TB", REFUSED)(lambda: entry(b"././@LongLink", 4 << 40, b"K") + SAMPLE)
shard("an extended header of 4 TB", REFUSED)(lambda: entry(b"p", 4 << 40, b"x") + SAMPLE)
shard("3,000 long names in a row")(lambda: (entry(b"l", 8, b"L") + padded(b"name.png")) * 3000 + SAMPLE)
shard("3,000 extended headers in a row")(lambda: pax((b"path", b"a.png")) * 3000 + SAMPLE)
shard("3,000 global headers in a row")(lambda: pax((b"comment", b"a"), kind=b"g") * 3000 + SAMPLE)
shard("a long name of nothing")(lambda: entry(b"l", 0, b"L") + SAMPLE)
shard("a long name of NULs")(lambda: entry(b"l", 512, b"L") + b"\0" * 512 + SAMPLE)
shard("extended size -512")(lambda: pax((b"size", b"-512")) + SAMPLE)
shard("extended size 10^20", REFUSED)(lambda: pax((b"size", b"1" + b"0" * 20)) + SAMPLE)
shard("extended size of 10^5 digits")(lambda: pax((b"size", b"9" * 10**5)) + SAMPLE)
shard("extended size nan")(lambda: pax((b"size", b"nan")) + SAMPLE)
shard("extended size for all of 2^40", REFUSED)(lambda: pax((b"size", b"%d" % (1 << 40)), kind=b"g") + SAMPLE)
shard("extended name with a NUL")(lambda: pax((b"path", b"a\0b.png")) + SAMPLE)
shard("extended name of 8 MiB")(lambda: pax((b"path", b"n" * (8 << 20) + b".png")) + SAMPLE)
shard("extended record of length 0")(lambda: raw_pax(b"0 path=a\n") + SAMPLE)
shard("extended record of length 10^15")(lambda: raw_pax(b"999999999999999 path=a.png\n") + SAMPLE)
shard("extended record of length -5")(lambda: raw_pax(b"-5 path=a.png\n") + SAMPLE)
shard("extended header without any record")(lambda: raw_pax(b"\xff" * 5000) + SAMPLE)
shard("sparse map of words")(lambda: pax((b"GNU.sparse.map", b"1,a,2"), (b"GNU.sparse.size", b"9")) + SAMPLE)
shard("sparse map with a hole of 2^60")(
    lambda: pax((b"GNU.sparse.map", b"0,1,%d,1" % (1 << 60)), (b"GNU.sparse.size", b"%d" % (1 << 61)),
                (b"GNU.sparse.name", b"a.png")) + SAMPLE
)  # fmt: skip
shard("sparse map in the content, endless")(
    lambda: pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"9"))
    + entry(b"a.png", 1024) + padded(b"99999999999\n" + b"1\n" * 400)
)  # fmt: skip
shard("sparse map in the content, -1 entries")(
    lambda: pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", b"a.png"))
    + entry(b"a.png", 512) + padded(b"-1\n") + SAMPLE
)  # fmt: skip
shard("old sparse header that is never complete")(
    lambda: entry(b"a.png", 512, b"S")[:482] + b"\x01" + b"\0" * 29 + (b"\0" * 504 + b"\x01" + b"\0" * 7) * 4000
)  # fmt: skip
shard("sparse image", SURVIVED, REFUSED)(
    lambda: entry(b"more.png", 512, b"S") + padded(IMAGE) + file(b"more.cls", b"1")
)
shard("hard link to another's file", REFUSED)(lambda: entry(b"a.png", 0, b"1", b"/etc/passwd") + SAMPLE)
shard("link to another's file", REFUSED)(lambda: entry(b"a.png", 0, b"2", b"../../precious/thesis.txt") + SAMPLE)
shard("link and a file written through it")(
    lambda: entry(b"out", 0, b"2", b"../precious") + file(b"out/more.png", IMAGE) + file(b"out/more.cls", b"1")
)  # fmt: skip
shard("device named as an image")(lambda: entry(b"a.png", 0, b"3") + entry(b"b.png", 0, b"4") + SAMPLE)
shard("pipe named as an image")(lambda: entry(b"a.png", 0, b"6") + SAMPLE)
shard("unknown kind of member")(lambda: entry(b"a.png", 512, b"\xfe") + b"\0" * 512 + SAMPLE)
shard("cut in a member", REFUSED, ending=b"")(lambda: SAMPLE[:700])
shard("cut in a header", REFUSED, ending=b"")(lambda: SAMPLE[:200])
shard("not ended", REFUSED, ending=b"")(lambda: SAMPLE)
shard("a wrong checksum", REFUSED)(lambda: SAMPLE.replace(b"more.png", b"mere.png", 1) + SAMPLE)
shard("two archives in one file")(lambda: END + good() + END + b"#!/bin/sh\nhostile\n")
shard("noise after the end")(lambda: END + b"\xff" * 10240)
shard("one name 2,000 times", SURVIVED, bad="more")(lambda: SAMPLE * 2000)
shard("an absolute name", SURVIVED, bad="etc")(
    lambda: file(b"/etc/cron.d/x.png", b"no image") + file(b"/etc/cron.d/x.cls", b"1")
)
shard("a name that climbs", SURVIVED, bad="precious")(
    lambda: file(b"../../precious/x.png", b"no image") + file(b"../../precious/x.cls", b"1")
)  # fmt: skip
shard("a name of escape sequences", SURVIVED, bad="evil")(
    lambda: file(b"\x1b]0;evil\x07\x1b[2J\x9b31m.png", b"no image") + file(b"\x1b]0;evil\x07\x1b[2J\x9b31m.cls", b"1")
)  # fmt: skip
shard("a name of carriage returns and lines", SURVIVED, bad="evil")(
    lambda: file(b"evil\rhidden\n17:00:00 completed\b\b.png", b"no image")
    + file(b"evil\rhidden\n17:00:00 completed\b\b.cls", b"1")
)  # fmt: skip
shard("a name that turns the line round", SURVIVED, bad="evil")(
    lambda: file("evil\u202egnp.\u2066\u200b.png".encode(),
                 b"no image") + file("evil\u202egnp.\u2066\u200b.cls".encode(), b"1")  # fmt: skip
)  # fmt: skip
shard("a name that is no UTF-8", SURVIVED, bad="evil")(
    lambda: file(b"evil\xff\xfe\xc0\x80.png", b"no image") + file(b"evil\xff\xfe\xc0\x80.cls", b"1")
)  # fmt: skip
shard("a link whose name is an escape sequence", REFUSED)(
    lambda: entry(b"\x1b[2Jevil\n\x07.png", 0, b"2", b"x") + SAMPLE
)
shard("a cut member whose name is an escape sequence", REFUSED)(lambda: entry(b"\x1b[2Jevil\n\x07.png", 1 << 30))
shard("one label of 999,999", REFUSED, SURVIVED)(lambda: file(b"stray.png", IMAGE) + file(b"stray.cls", b"999999"))
shard("a label of 10^6 digits", SURVIVED, bad="more")(
    lambda: file(b"more.png", IMAGE) + file(b"more.cls", b"9" * 10**6)
)
shard("labels in Arabic digits, NUL and UTF-16", SURVIVED, bad="more")(
    lambda: file(b"more.png", IMAGE) + file(b"more.cls", "\u0663".encode())
    + file(b"nul.png", IMAGE) + file(b"nul.cls", b"1\0")
    + file(b"wide.png", IMAGE) + file(b"wide.cls", "1".encode("utf-16"))
)  # fmt: skip
shard("an image of no bytes", SURVIVED, bad="more")(lambda: file(b"more.png", b"") + file(b"more.cls", b"1"))
shard("PostScript as an image", SURVIVED, bad="more")(lambda: file(b"more.png", EPS) + file(b"more.cls", b"1"))
shard("50,000 members", SURVIVED, long=True)(
    lambda: b"".join(file(b"%0250d.txt" % number, b"") for number in range(50000))
)


@hostile("tar archive", REFUSED, SURVIVED, name="tar: a label of 3 GiB")
def _(place: Place) -> tuple[str, ...]:
    with open(place.input / "x.tar", "wb") as archive:
        archive.write(good() + file(b"more.png", IMAGE) + entry(b"more.cls", 3 << 30))
        archive.seek(3 << 30, os.SEEK_CUR)
        archive.write(END)
    return place.train(*SHARDS, "--data.path", place.input)


@hostile("tar archive", REFUSED, name="tar: a long name of 3 GiB that is there")
def _(place: Place) -> tuple[str, ...]:
    with open(place.input / "x.tar", "wb") as archive:
        archive.write(good() + entry(b"l", 3 << 30, b"L"))
        archive.seek(3 << 30, os.SEEK_CUR)
        archive.write(SAMPLE + END)
    return place.train(*SHARDS, "--data.path", place.input)


@hostile("tar archive", REFUSED, SURVIVED, name="tar: an image of 3 GiB")
def _(place: Place) -> tuple[str, ...]:
    with open(place.input / "x.tar", "wb") as archive:
        archive.write(good() + file(b"more.cls", b"1") + entry(b"more.png", 3 << 30) + IMAGE)
        archive.seek((3 << 30) - len(IMAGE), os.SEEK_CUR)
        archive.write(END)
    return place.train(*SHARDS, "--data.path", place.input)


JSON_LABELS = {
    "nested": b'{"label": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "infinite": b'{"label": 1e999}',
    "NaN": b'{"label": NaN}', "of 5,000 digits": b'{"label": ' + b"9" * 5000 + b"}", "true": b'{"label": true}',
    "given twice": b'{"label": 1, "label": -1}', "in UTF-16": '{"label": 1}'.encode("utf-16"),
    "no UTF-8": b'{"label": "\xff"}',
    "of 10^5 keys": json.dumps({str(n): n for n in range(10**5)} | {"label": 1}).encode(),
}  # fmt: skip


@hostile("tar archive", SURVIVED, name="tar: JSON labels that are none", check=named("nested"))
def _(place: Place) -> tuple[str, ...]:
    content = b"".join(
        file(b"good%03d.png" % number, image_bytes(number)) + file(b"good%03d.json" % number,
                                                                   b'{"label": %d}' % (number % 2))  # fmt: skip
        for number in range(80)
    )
    for name, text in JSON_LABELS.items():
        key = name.replace(" ", "-").encode()
        content += file(key + b".png", IMAGE) + file(key + b".json", text)
    (place.input / "x.tar").write_bytes(content + END)
    return place.train(*SHARDS, "--data.path", place.input, "--data.label_key", "label", "--training.steps", 8)


def other_archive(name: str, *verdicts: str) -> Callable:
    """Register what is put in an archive's place."""

    def register(make: Callable[[Path, Place], None]) -> Callable:
        @hostile("tar archive", *(verdicts or (REFUSED,)), name=f"tar: {name}")
        def write(place: Place) -> tuple[str, ...]:
            make(place.input / "x.tar", place)
            return place.train(*SHARDS, "--data.path", place.input)

        return make

    return register


other_archive("a folder")(lambda path, place: path.mkdir())
other_archive("a pipe")(lambda path, place: os.mkfifo(path))
other_archive("a link to /dev/zero")(lambda path, place: path.symlink_to(device(place, "zero")))
other_archive("a link to /proc/self/mem")(lambda path, place: path.symlink_to("/proc/self/mem"))
other_archive("a link to itself")(lambda path, place: path.symlink_to("x.tar"))
other_archive("gzip'ed")(lambda path, place: path.write_bytes(gzip.compress(good() + END)))
other_archive("of no bytes")(lambda path, place: path.write_bytes(b""))
other_archive("of zeros")(lambda path, place: path.write_bytes(END * 10))
other_archive("of one sample with label -1 in JSON's place")(
    lambda path, place: path.write_bytes(file(b"a.png", IMAGE) + END)
)


@hostile("tar archive", REFUSED, name="tar: shards as {0..99999999999}")
def _(place: Place) -> tuple[str, ...]:
    return place.check(*SHARDS, "--data.path", f"{place.input}/{{0..99999999999}}.tar")


@hostile("tar archive", REFUSED, name="tar: shards as {a,b} 40 times")
def _(place: Place) -> tuple[str, ...]:
    return place.check(*SHARDS, "--data.path", f"{place.input}/" + "{a,b}" * 40 + ".tar")


@hostile("tar archive", REFUSED, name="tar: a URL and a command")
def _(place: Place) -> tuple[str, ...]:
    return place.check(*SHARDS, "--data.path", "pipe:hostile; touch /tmp/hostile")


# ---------------------------------------------------------------------- the index beside an archive


def forged_index(name: str, **changes: object) -> None:
    """Register an index whose marks and checksum are right; None leaves a table out."""

    @hostile("index of a tar archive", REFUSED, SURVIVED, name=f"index: {name}")
    def write(place: Place) -> tuple[str, ...]:
        path = place.input / "x.tar"
        path.write_bytes(good() + END)
        table = {
            "letters": np.frombuffer(b"".join(b"n%02d" % n for n in range(12)),
                                     np.uint8), "letter_counts": np.full(12, 3),  # fmt: skip
            "offsets": np.arange(12) * 2048 + 512, "sizes": np.full(12, len(image_bytes(0))),
            "labels": np.arange(12) % 2,
            "problems": np.zeros(12, np.uint8),
        } | changes  # fmt: skip
        table = {key: np.ascontiguousarray(value) for key, value in table.items() if value is not None}
        sums = {key: zlib.crc32(value) for key, value in table.items()}
        status = path.stat()
        mark = {
            "kind": json.dumps(["webdataset", "",
                                ""]), "size": str(status.st_size), "modified": str(status.st_mtime_ns),  # fmt: skip
            "crc32": str(zlib.crc32(json.dumps(sums, sort_keys=True).encode())),
        }  # fmt: skip
        save_file(table, place.input / ".x.tar.index", metadata=mark)
        return place.train(*SHARDS, "--data.path", place.input)


forged_index("a table is missing", sizes=None)
forged_index("negative offsets", offsets=np.full(12, -(1 << 40)))
forged_index("offsets of 2^62", offsets=np.full(12, 1 << 62))
forged_index("sizes of 2^40", sizes=np.full(12, 1 << 40))
forged_index("negative sizes", sizes=np.full(12, -1))
forged_index("labels of 2^62", labels=np.full(12, 1 << 62))
forged_index("negative labels", labels=np.full(12, -5))
forged_index("unknown problems", problems=np.full(12, 200, np.uint8))
forged_index("fewer labels than images", labels=np.zeros(3, np.int64))
forged_index("names of 2^62 letters", letter_counts=np.full(12, 1 << 62))
forged_index("names of escape sequences", letters=np.frombuffer(b"\x1b[2" * 12, np.uint8),
             problems=np.eye(12, dtype=np.uint8)[0])  # fmt: skip
forged_index("numbers that are none", offsets=np.full(12, np.nan))
forged_index("text for numbers", sizes=np.zeros((12, 2), np.uint8))


@hostile("index of a tar archive", SURVIVED, REFUSED, name="index: a pipe")
def _(place: Place) -> tuple[str, ...]:
    (place.input / "x.tar").write_bytes(good() + END)
    os.mkfifo(place.input / ".x.tar.index")
    return place.train(*SHARDS, "--data.path", place.input)


@hostile("index of a tar archive", SURVIVED, name="index: a link to something of the user's")
def _(place: Place) -> tuple[str, ...]:
    (place.input / "x.tar").write_bytes(good() + END)
    (place.input / ".x.tar.index").symlink_to(place.precious / "thesis.txt")
    return place.train(*SHARDS, "--data.path", place.input)


# ---------------------------------------------------------------------- ImageNet's archives


def imagenet(place: Place, *more: object) -> tuple[str, ...]:
    return place.train("--data.name", "imagenet", *SMALL, "--data.path", place.input, *more)


def class_tar(wnid: bytes, first: int, extra: bytes = b"") -> bytes:
    images = b"".join(file(b"%s_%d.JPEG" % (wnid, number), image_bytes(first + number, "JPEG")) for number in range(6))
    return file(wnid + b".tar", images + extra + END)


def train_archive(name: str, *verdicts: str, bad: str = "") -> Callable:
    def register(make: Callable[[], bytes]) -> Callable:
        @hostile("tar archive", *(verdicts or (REFUSED,)), name=f"ImageNet's tar: {name}", check=named(bad) if bad
                 else None)  # fmt: skip
        def write(place: Place) -> tuple[str, ...]:
            (place.input / "ILSVRC2012_img_train.tar").write_bytes(class_tar(b"n00000001", 0) + make() + END)
            return imagenet(place, "--data.validation_fraction", 0)

        return make

    return register


GOOD_CLASS = class_tar(b"n00000002", 6)
train_archive("a class whose member goes beyond it")(
    lambda: class_tar(b"n00000002", 6, entry(b"x.JPEG", 1 << 20)) + GOOD_CLASS
)
train_archive("a class with a member of size -512", REFUSED, SURVIVED)(
    lambda: class_tar(b"n00000002", 6, entry(b"x.JPEG", -512))
)
train_archive("a class that holds a class", REFUSED, SURVIVED)(
    lambda: class_tar(b"n00000002", 6, class_tar(b"n00000003", 6))
)
train_archive("a class named as an escape sequence")(lambda: class_tar(b"n0000\x1b[2J\n02", 6))
train_archive("a class named ../n00000002", REFUSED, SURVIVED)(lambda: class_tar(b"../n00000002", 6))
train_archive("a class of no archive")(lambda: file(b"n00000002.tar", b"%!PS"))


def devkit(name: str, make: Callable[[], bytes]) -> None:
    """Register a development kit beside held-out images in no folders."""

    @hostile("ImageNet's kit", REFUSED, name=f"ImageNet's kit: {name}")
    def write(place: Place) -> tuple[str, ...]:
        (place.input / "ILSVRC2012_img_train.tar").write_bytes(class_tar(b"n00000001", 0) + GOOD_CLASS + END)
        images = b"".join(file(b"ILSVRC2012_val_%08d.JPEG" % n, image_bytes(n, "JPEG")) for n in range(1, 5))
        (place.input / "ILSVRC2012_img_val.tar").write_bytes(images + END)
        (place.input / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(make())
        return imagenet(place)


KIT = b"ILSVRC2012_devkit_t12/data/"
TRUTH = file(KIT + b"ILSVRC2012_validation_ground_truth.txt", b"1\n1\n2\n2\n")
ELEMENT = b"MATLAB 5.0".ljust(124) + b"\x00\x01IM"


def _zipped_gibibytes(head: bytes, count: int) -> bytes:
    block = gzip.compress(bytes(64 << 20), 9)
    return gzip.compress(head) + block * (count * 16)


devkit("a table of 3 GiB of zeros", lambda: _zipped_gibibytes(TRUTH + entry(KIT + b"meta.mat", 3 << 30), 3))
devkit("a table that unpacks to 3 GiB", lambda: gzip.compress(TRUTH + file(KIT + b"meta.mat", ELEMENT
       + struct.pack("<II", 15, len(zeros(1 << 30)) * 3) + zeros(3 << 30))))  # fmt: skip
devkit("a table with a matrix of 2^60 numbers", lambda: gzip.compress(TRUTH + file(KIT + b"meta.mat", ELEMENT
       + struct.pack("<II", 14, 1 << 31) + struct.pack("<IIIIIIii", 6, 8, 6, 0, 5, 8, 2**30,
                                                       2**30) + b"\0" * 64)))  # fmt: skip
devkit("a table that is a link", lambda: gzip.compress(TRUTH + entry(KIT + b"meta.mat", 0, b"2", b"/etc/passwd")))
devkit("a table that is a device", lambda: gzip.compress(TRUTH + entry(KIT + b"meta.mat", 0, b"3")))
devkit("members of size -512", lambda: gzip.compress(entry(b"x", -512) + TRUTH))
devkit("no archive", lambda: b"\x1f\x8b\x08\0\0\0\0\0\0\x03hostile")


@hostile("ImageNet's kit", REFUSED, name="ImageNet's kit: a list of 3 GiB")
def _(place: Place) -> tuple[str, ...]:
    (place.input / "ILSVRC2012_img_train.tar").write_bytes(class_tar(b"n00000001", 0) + GOOD_CLASS + END)
    (place.input / "ILSVRC2012_img_val.tar").write_bytes(file(b"a.JPEG", image_bytes(1, "JPEG")) + END)
    with open(place.input / "LOC_val_solution.csv", "wb") as solution:
        solution.truncate(3 << 30)
    return imagenet(place)


@hostile("ImageNet's kit", REFUSED, name="ImageNet's kit: a list that is a pipe")
def _(place: Place) -> tuple[str, ...]:
    (place.input / "ILSVRC2012_img_train.tar").write_bytes(class_tar(b"n00000001", 0) + GOOD_CLASS + END)
    (place.input / "ILSVRC2012_img_val.tar").write_bytes(file(b"a.JPEG", image_bytes(1, "JPEG")) + END)
    os.mkfifo(place.input / "LOC_val_solution.csv")
    return imagenet(place)


