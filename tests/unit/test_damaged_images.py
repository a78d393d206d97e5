"""Images that are damaged or too large, and what is no image file: each costs its image alone."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.faults.confinement import bounded
from torchtitan.data import UnreadableImage
from torchtitan.data.image_decoding import decode_cropped, decode_whole, open_image, upright_size, with_advice
from torchtitan.data.image_files import ImageList, SquareImages

SIDE = 8
MIB = 1 << 20


def encoded(kind, size=(16, 16), mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, size, 1).save(file, kind, **options)
    return file.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, before=b"", depth=8, colour=2, content=b""):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")


def exif_segment(content):
    return b"\xff\xe1" + struct.pack(">H", len(content) + 8) + b"Exif\0\0" + content


def jpeg_header(width, height):
    content = bytearray(encoded("JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(content)


REFUSED = {
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known format"),
    "a long thin jpeg": (jpeg_header(60_000, 1), "60000 x 1 pixels: one side is more than 64 times the other"),
    "a large jpeg": (jpeg_header(9000, 9000), "9000 x 9000 pixels, more than 67,108,864"),
    "a large png": (png(30_000, 30_000), "more than 67,108,864 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_made_to_harm_costs_its_image_and_little_else(case, monkeypatch):
    content, reason = REFUSED[case]
    decode_cropped(encoded("PNG"), SIDE, SIDE)  # the decoders' own libraries
    monkeypatch.setattr(os, "posix_spawn", None)
    monkeypatch.setattr("subprocess.Popen", None)
    with bounded(20, 600 * MIB), pytest.raises((ValueError, OSError)) as caught:
        decode_cropped(content, SIDE, SIDE)
    assert reason in str(caught.value)


def test_a_cut_jpeg_is_to_be_mended_and_a_large_one_to_be_shrunk():
    said = []
    for content in (encoded("JPEG", (64, 64), quality=100)[:-20], jpeg_header(9000, 8000)):
        with pytest.raises((ValueError, OSError)) as caught:
            decode_cropped(content, SIDE, SIDE)
        said.append(with_advice(str(caught.value), "mend it"))
    assert said[0].startswith("image file is truncated (") and said[0].endswith("processed) (mend it)")
    assert said[1] == "9000 x 8000 pixels, more than 67,108,864 (shrink it)"


def exif_of(content_bytes, orientation):
    """EXIF with an orientation behind a maker's note of that size, as TIFF."""
    tags = (0x0112, 3, 1, orientation), (0x927C, 7, content_bytes, 38)
    return b"II*\0" + struct.pack("<IH", 8, 2) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4 + content_bytes)


def test_exif_of_several_segments_of_a_jpeg_and_of_a_long_profile_of_a_png_turns_the_image():
    exif = exif_of(150_000, 6)
    parts = [exif_segment(exif[start : start + 60_000]) for start in range(0, len(exif), 60_000)]
    jpeg = encoded("JPEG", (32, 16))
    jpeg = jpeg[:2] + b"".join(parts) + jpeg[2:]
    text = f"Raw profile type exif\0\nexif\n{len(exif):8}\n".encode() + exif.hex().encode()
    for content in (jpeg, png(32, 16, chunk(b"tEXt", text), content=bytes(16 * 97))):
        assert upright_size(content) == (16, 32) == decode_whole(content).shape[1::-1]


def one_file(tmp_path):
    return SquareImages(ImageList.of(bytes(tmp_path), [[b"a.png"]]), np.arange(1), np.zeros(1, np.int64), SIDE)


def test_the_name_of_a_file_decides_nothing(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded("BMP"))
    assert one_file(tmp_path).fetch(np.arange(1))["images"].shape == (1, 3, SIDE, SIDE)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_each_format_opens_as_itself(kind):
    assert open_image(encoded(kind)).format == kind


def test_a_pipe_a_device_and_an_endless_file_are_named_and_cost_their_image(tmp_path):
    path = tmp_path / "a.png"
    for make, reason in (
        (lambda: os.mkfifo(path), "is a pipe, not a regular file"),
        (lambda: path.mkdir(), "is a folder, not a regular file"),
        (lambda: (path.touch(), os.truncate(path, 1 << 40)), "1,099,511,627,776 bytes, more than 536,870,912"),
    ):
        make()
        with bounded(5, 200 * MIB), pytest.raises(UnreadableImage) as caught:
            one_file(tmp_path).fetch(np.arange(1))
        assert (str(caught.value), caught.value.damaged) == (f"{path}: {reason}", True)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_link_to_an_image_is_the_image(tmp_path):
    (tmp_path / "stored").write_bytes(encoded("PNG"))
    (tmp_path / "a.png").symlink_to("stored")
    assert len(one_file(tmp_path).fetch(np.arange(1))["images"]) == 1
