"""Hostile images among good ones in a folder of classes: 2 steps of training meet each of them."""

import io
import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.encoded_images import image_bytes
from tests.faults.hostile_case import REFUSED, SURVIVED, Place, device, hostile
from tests.faults.hostile_process import Outcome

GOOD = 12
FOLDER = ("--data.name", "image_folder", "--data.validation_fraction", 0)
SMALL, LARGE = ("--data.image_size", 8), ("--data.image_size", 256, "--model.patch_size", 32)


def folder_of(place: Place, *more: object) -> tuple[str, ...]:
    return place.train(*FOLDER, "--data.path", place.input, *more)


def write_good(place: Place) -> None:
    for number in range(GOOD):
        path = place.input / "ab"[number % 2] / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image_bytes(number))


def named(name: str) -> Callable[[Place, Outcome], None]:
    """The image is listed as one that was replaced."""

    def check(place: Place, outcome: Outcome) -> None:
        listed = (place.run / "corrupt_images.txt").read_text()
        assert name in listed, f"not listed: {listed!r}"
        assert b"another image takes its place" in outcome.error

    return check


def counted(place: Place, outcome: Outcome) -> None:
    assert (place.run / "summary.json").is_file()


def bad_image(
    make: Callable[[], bytes], name: str, suffix: str = "png", decodes: bool = False, long: bool = False,
    size: tuple = SMALL,
) -> None:
    """Register one image that must be named and replaced; decodes: or may be used."""
    file = f"bad.{suffix}"

    @hostile("image", SURVIVED, name=f"image: {name}", check=None if decodes else named(file), long=long)
    def write(place: Place) -> tuple[str, ...]:
        write_good(place)
        (place.input / "a" / file).write_bytes(make())
        return folder_of(place, *size)


# ---------------------------------------------------------------------- other formats under an image's name

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%touch hostile) (w) file\n%%EOF\n"
FORMATS = {
    "PostScript": EPS,
    "PostScript in a DOS frame": b"\xc5\xd0\xd3\xc6" + struct.pack("<6IH", 32, len(EPS), 0, 0, 0, 0,
                                                                   0xFFFF) + b"\0\0" + EPS,  # fmt: skip
    "PDF": b"%PDF-1.4\n1 0 obj<</Type/Catalog/OpenAction<</S/Launch/F(/bin/sh)>>>>endobj\ntrailer<</Root 1 0 R>>\n",
    "WMF": b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<4hHI", 0, 0, 99, 99, 96,
                                                 0) + b"\0\0" + b"\x01\0\t\0\0\x03" + b"\0" * 64,  # fmt: skip
    "EMF": b"\x01\0\0\0" + struct.pack("<I8i", 108, 0, 0, 9, 9, 0, 0, 99, 99) + b" EMF" + b"\0" * 64,
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/><script>alert(1)</script></svg>',
    "SVG of nested entities": b'<!DOCTYPE l [<!ENTITY a "aaaa">'
    + b"".join(b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 10) for n in range(1, 10)) + b"]><svg>&a9;</svg>",
    "HTML": b"<html><script>alert(1)</script></html>",
    "shell script": b"#!/bin/sh\nhostile\n",
    "ICNS": b"icns" + struct.pack(">I", 1 << 31) + b"ic10" + struct.pack(">I", 1 << 30) + b"\0" * 64,
    "DDS": b"DDS " + struct.pack("<7I", 124, 0x1007, 60000, 60000, 0, 0, 0) + b"\0" * 44
    + struct.pack("<2I4s5I", 32, 4, b"DXT1", 0, 0, 0, 0, 0) + b"\0" * 20,
    "PSD": b"8BPS\0\x01" + b"\0" * 6 + struct.pack(">HIIHH", 3, 30000, 30000, 8, 3) + b"\0" * 12 + b"\0\x01",
    "FLI": struct.pack("<IHHHHHHI", 1 << 20, 0xAF12, 65535, 60000, 60000, 8, 3, 0) + b"\0" * 108
    + struct.pack("<IH", 1 << 31, 0xF1FA) + b"\0" * 64,
    "GRIB": b"GRIB\0\0\0\x01" + b"\0" * 64,
    "HDF5": b"\x89HDF\r\n\x1a\n" + b"\0" * 64,
    "JPEG 2000 of 2^31 pixels a side": b"\xff\x4f\xff\x51" + struct.pack(">HHIIIIIIIIH", 41, 0, 2**31 - 1, 2**31 - 1,
                                                                         0, 0,  # fmt: skip
    2**31 - 1, 2**31 - 1, 0, 0, 1) + b"\x07\x01\x01" + b"\0" * 64,
    "IM": b"Image type: L\r\nImage size (x*y): 60000*60000\r\nFile size (no of images): 1\r\n\x1a".ljust(512, b"\0"),
    "XPM": b'/* XPM */\nstatic char *x[] = {\n"99999 99999 2 1",\n"a c #000000",\n"b c #FFFFFF",\n"aa"};',
    "MSP of 60,000 rows": b"LinS" + struct.pack("<HH", 60000, 60000) + b"\0" * 24 + b"\xff" * 64,
    "QOI of 2^32 pixels a side": b"qoif" + struct.pack(">IIBB", 2**32 - 1, 2**32 - 1, 4, 0) + b"\xc0" * 16,
    "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + b"\0" * 32,
    "pickle": b"cposix\nsystem\n(S'hostile'\ntR.",
    "ELF": b"\x7fELF\x02\x01\x01" + b"\0" * 64,
    "byte order mark": b"\xff\xfe\xff\xfe",
}  # fmt: skip
for _name, _content in FORMATS.items():
    bad_image(lambda content=_content: content, f"{_name} named .png", decodes=_name == "WMF")


# ---------------------------------------------------------------------- PNG

PNG = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, depth: int, colour: int, *chunks: bytes, rows: bytes | None = None) -> bytes:
    data = zlib.compress(b"\0" * 64, 9) if rows is None else rows
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return PNG + header + b"".join(chunks) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zeros(count: int) -> bytes:
    """A zlib stream of so many bytes of zeros: the same block again and again, and the checksum in closed form."""

    def block(size: int) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return packer.compress(bytes(size)) + packer.flush(zlib.Z_FULL_FLUSH)

    blocks = block(1 << 20) * (count >> 20) + block(count % (1 << 20))
    return b"\x78\xda" + blocks + b"\x03\0" + struct.pack(">HH", count % 65521, 1)


def png_cut_at_each_chunk(place: Place) -> tuple[str, ...]:
    for number in range(120):
        (place.input / "b" / f"more{number:03}.png").write_bytes(image_bytes(100 + number))
    good = image_bytes(0)
    for length in (1, 7, 8, 12, 16, 20, 24, 29, 33, 37, 41, 45, len(good) - 13, len(good) - 12, len(good) - 4):
        (place.input / "a" / f"bad{length}.png").write_bytes(good[:length])
    return folder_of(place, *SMALL, "--training.steps", 13, "--training.local_batch_size", 12)


@hostile("image", SURVIVED, name="image: PNGs cut at each chunk", check=named("bad16.png"))
def _(place: Place) -> tuple[str, ...]:
    write_good(place)
    return png_cut_at_each_chunk(place)


def _animated(frames: int) -> bytes:
    return png(8, 8, 8, 2, chunk(b"acTL", struct.pack(">II", frames, 0)), rows=zlib.compress(b"\0" * 200))


bad_image(lambda: png(2**31 - 1, 1, 8, 2), "PNG of 2^31 - 1 by 1")
bad_image(lambda: png(1, 2**31 - 1, 8, 2), "PNG of 1 by 2^31 - 1")
bad_image(lambda: png(0, 0, 8, 2), "PNG of no pixels")
bad_image(lambda: png(4, 4, 8, 9), "PNG of an unknown colour type")
bad_image(lambda: png(13300, 13300, 1, 3, chunk(b"PLTE", b"\0\0\0\xff\xff\xff"), chunk(b"tRNS", b"\0\x80"),
          rows=zeros(13300 * 1664)), "transparent PNG of 177 megapixels, 30 kB", decodes=True)  # fmt: skip
bad_image(lambda: png(40000, 4400, 16, 4, rows=zeros(4400 * 160001)), "PNG of 176 megapixels, 16 bits and alpha",
          decodes=True, long=True)  # fmt: skip
bad_image(lambda: png(8, 8, 8, 2, chunk(b"zTXt", b"Comment\0\0" + zeros(1 << 30)), rows=zlib.compress(b"\0" * 200)),
          "PNG with a zTXt of 1 GiB", decodes=True)  # fmt: skip
bad_image(lambda: png(8, 8, 8, 2, *[chunk(b"zTXt", b"k%d\0\0" % n + zeros(1 << 20)) for n in range(200)],
          rows=zlib.compress(b"\0" * 200)), "PNG with 200 zTXt of 1 MiB", decodes=True)  # fmt: skip
bad_image(lambda: png(8, 8, 8, 2, chunk(b"iCCP", b"icc\0\0" + zeros(1 << 30)), rows=zlib.compress(b"\0" * 200)),
          "PNG with an iCCP of 1 GiB", decodes=True)  # fmt: skip
bad_image(lambda: png(8, 8, 8, 2, chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zeros(1 << 30)),
          rows=zlib.compress(b"\0" * 200)), "PNG with an iTXt of 1 GiB", decodes=True)  # fmt: skip
bad_image(lambda: png(8, 8, 8, 2, chunk(b"eXIf", b"MM\0*\0\0\0\x08" + struct.pack(">HHHII", 1, 0x8769, 4, 1, 8)
                                        + b"\0" * 4),  # fmt: skip
          rows=zlib.compress(b"\0" * 200)), "PNG whose EXIF directory holds itself", decodes=True)  # fmt: skip
bad_image(lambda: _animated(2**32 - 1), "APNG of 2^32 - 1 frames", decodes=True)
bad_image(lambda: png(8, 8, 8, 3, chunk(b"PLTE", b"\xff\0\0"), rows=zlib.compress(b"\0" + b"\xc8" * 8 * 9)),
          "PNG with palette indices out of range", decodes=True)  # fmt: skip
bad_image(lambda: png(8, 8, 8, 3, rows=zlib.compress(b"\0" * 100)), "PNG of a palette, without one", decodes=True)
bad_image(lambda: png(8, 8, 16, 2, rows=zlib.compress(b"\0" * 8 * 49)), "PNG of 16 bits and three colours",
          decodes=True)  # fmt: skip
bad_image(lambda: PNG + struct.pack(">I", 2**31 - 1) + b"IDAT" + b"\0" * 64, "PNG with a chunk of 2 GiB")
bad_image(lambda: image_bytes(0) + b"PK\x03\x04<script>alert(1)</script>", "PNG and archive and page at once",
          decodes=True)  # fmt: skip


# ---------------------------------------------------------------------- JPEG, GIF, WebP


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gif(width: int, height: int, frames: int, left: int = 0) -> bytes:
    header = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"," + struct.pack("<HHHHB", left, 0, 1, 1, 0) + b"\x02\x02D\x01\0"
    return header + frame * frames + b";"


bad_image(lambda: saved(Image.new("L", (60000, 1)), "JPEG"), "JPEG of 60,000 by 1", "jpg", decodes=True, size=LARGE)
bad_image(lambda: saved(Image.new("L", (1, 60000)), "JPEG"), "JPEG of 1 by 60,000", "jpg", decodes=True, size=LARGE)
bad_image(lambda: saved(Image.new("RGB", (65500, 2)), "JPEG"), "JPEG of 65,500 by 2", "jpeg", decodes=True)
bad_image(lambda: saved(Image.new("CMYK", (8, 8)), "JPEG"), "JPEG in CMYK", "jpg", decodes=True)
bad_image(lambda: saved(Image.new("RGB", (8, 8)), "JPEG").replace(b"\0\x11\x08\0\x08\0\x08",
                                                                  b"\0\x11\x08\xff\xdc\xff\xdc"),  # fmt: skip
          "JPEG that says 65,500 by 65,500", "jpg")  # fmt: skip
bad_image(lambda: saved(Image.new("RGB", (8, 8)), "JPEG", exif=b"Exif\0\0MM\0*" + b"\xff" * 60000),
          "JPEG with EXIF of noise",  # fmt: skip
          "jpg", decodes=True)  # fmt: skip
bad_image(lambda: saved(Image.new("RGB", (8, 8)), "JPEG")[:-2] + b"\xff\xdd\0\4\0\1" * 10**5, "JPEG of 10^5 markers",
          "jpg",  # fmt: skip
          decodes=True)  # fmt: skip
bad_image(lambda: gif(8, 8, 10**5), "GIF of 10^5 frames", "gif", decodes=True)
bad_image(lambda: gif(65535, 65535, 1), "GIF of a screen of 65,535 by 65,535", "gif", decodes=True)
bad_image(lambda: gif(13000, 13000, 1), "GIF of a screen of 13,000 by 13,000", "gif", decodes=True)
bad_image(lambda: gif(8, 8, 1, left=60000), "GIF whose frame lies outside", "gif", decodes=True)
bad_image(lambda: saved(Image.new("RGB", (8, 8)), "WEBP", save_all=True,
          append_images=[Image.new("RGB", (8, 8), (n, 0, 0))
                         for n in range(200)]), "animated WebP", "webp", decodes=True)  # fmt: skip
bad_image(lambda: b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\x12\0\0\0\xff\xff\xff\xff\xff\xffANMF",
          "WebP of 2^24 pixels a side",  # fmt: skip
          "webp")  # fmt: skip


# ---------------------------------------------------------------------- TIFF, BMP, PPM


def tiff(entries: list[tuple[int, int, int, int]], following: int = 0, more: bytes = b"") -> bytes:
    """One directory of (tag, type, count, value)."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + packed + struct.pack("<I", following) + more


def flat_tiff(width: int, height: int, **changes: int) -> bytes:
    tags = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: 64}
    tags |= {int(tag[1:]): value for tag, value in changes.items()}
    return tiff([(tag, 4, 1, value) for tag, value in tags.items()], more=b"\0" * 64)


bad_image(lambda: tiff([(256, 4, 1, 8), (257, 4, 1, 8)], following=8), "TIFF whose directory follows itself", "tif")
bad_image(lambda: tiff([(256, 4, 1, 8), (257, 4, 1, 8), (0x8769, 4, 1, 8), (0x014A, 4, 1, 8)]),
          "TIFF whose directory is in itself",  # fmt: skip
          "tif")  # fmt: skip
bad_image(lambda: flat_tiff(2**31, 2**31), "TIFF of 2^31 pixels a side", "tif")
bad_image(lambda: flat_tiff(8, 8, _322=2**30, _323=2**30, _324=8, _325=64), "TIFF of tiles of 2^30 pixels a side",
          "tif", decodes=True)  # fmt: skip
bad_image(lambda: flat_tiff(13000, 13000, _259=5), "TIFF of 169 megapixels in 100 bytes", "tif")
bad_image(lambda: tiff([(256, 4, 1, 8), (257, 4, 1, 8), (273, 4, 2**30, 8), (279, 4, 2**30, 8)]),
          "TIFF of 2^30 strips", "tif")  # fmt: skip
bad_image(lambda: saved(Image.fromarray(np.full((8, 8), np.nan, np.float32)), "TIFF"), "TIFF of NaN", "tiff",
          decodes=True)  # fmt: skip
bad_image(lambda: b"BM" + struct.pack("<IIIIiiHHIIIIII", 999, 0, 54, 40, 8, -(2**31), 1, 24, 0, 0, 0, 0, 0, 0),
          "BMP of a height of -2^31",  # fmt: skip
          "bmp")  # fmt: skip
bad_image(lambda: b"BM" + struct.pack("<IIIIiiHHIIIIII", 1 << 20, 0, 58, 40, 9999, 9999, 1, 8, 1, 0, 0, 0, 1, 0)
          + b"\0" * 4  # fmt: skip
          + b"\0\2\xff\xff" * 1000, "BMP of run lengths that jump", "bmp", decodes=True)  # fmt: skip
bad_image(lambda: b"BM" + struct.pack("<III", 1 << 20, 0, 54) + struct.pack("<I", 2**31), "BMP with a header of 2 GiB",
          "bmp")  # fmt: skip
bad_image(lambda: b"P6 " + b"9" * 10**6 + b" 1 255\n", "PPM of a width of 10^6 digits", "ppm")
bad_image(lambda: b"P2 13000 13000 255\n" + b"0 " * 1000, "PGM in words of 169 megapixels", "pgm", decodes=True)
bad_image(lambda: b"P5\n" + b"#" * (60 << 20) + b"\n8 8 255\n" + b"\0" * 64, "PGM with a comment of 60 MiB", "pgm",
          decodes=True)  # fmt: skip
bad_image(lambda: b"P6 1 1 0\n\0\0\0", "PPM of a maximum of 0", "ppm")


# ---------------------------------------------------------------------- what is no plain file


def other_file(name: str, make: Callable[[Path, Place], None], decodes: bool = False) -> None:
    """Register something that is no plain file, named as an image among good ones: refused, or named and replaced."""

    def check(place: Place, outcome: Outcome) -> None:
        if outcome.code == 0 and not decodes:
            named("bad.png")(place, outcome)
        elif outcome.code == 2:
            assert b"bad.png" in outcome.error

    @hostile("file", SURVIVED, REFUSED, name=f"file: {name}", check=check)
    def write(place: Place) -> tuple[str, ...]:
        write_good(place)
        make(place.input / "a" / "bad.png", place)
        return folder_of(place, *SMALL)


def _sparse(path: Path, place: Place) -> None:
    with open(path, "wb") as file:
        file.write(PNG)
        file.truncate(3 << 30)


def _socket(path: Path, place: Place) -> None:
    folder = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


other_file("empty", lambda path, place: path.write_bytes(b""))
other_file("of 3 GiB", _sparse)
other_file("folder", lambda path, place: path.mkdir())
other_file("pipe", lambda path, place: os.mkfifo(path))
other_file("socket", _socket)
other_file("link to /dev/zero", lambda path, place: path.symlink_to(device(place, "zero")))
other_file("link to /dev/stdin", lambda path, place: path.symlink_to("/dev/stdin"))
other_file("link to /proc/self/mem", lambda path, place: path.symlink_to("/proc/self/mem"))
other_file("link to a terminal", lambda path, place: path.symlink_to(device(place, "ptmx")))
other_file("link to itself", lambda path, place: path.symlink_to(path.name))
other_file("link to nothing", lambda path, place: path.symlink_to("nothing.png"))
other_file("link to something else of the user's", lambda path, place: path.symlink_to(place.precious / "thesis.txt"))
