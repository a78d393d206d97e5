"""Images made to harm: what starts programs, what takes memory or time out of proportion, and what is no file."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.faults.confinement import bounded
from torchtitan.data import UnreadableImage, image_decoding
from torchtitan.data.image_decoding import (
    MAX_PIXELS,
    decode_square,
    decode_whole,
    open_image,
    to_rgb,
    upright_size,
    with_advice,
)
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


def jpeg_segments(*segments):
    """A good JPEG with segments put before its own."""
    good = encoded("JPEG")
    return good[:2] + b"".join(segments) + good[2:]


def exif_segment(content):
    return b"\xff\xe1" + struct.pack(">H", len(content) + 8) + b"Exif\0\0" + content


def jpeg_header(width, height):
    content = bytearray(encoded("JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def tiff(*tags):
    """Classic TIFF whose tags are (number, kind, count, value)."""
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


def tiff_tiles(side):
    size = (256, 4, 1, 16), (257, 4, 1, 16)
    pixels = (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)
    return tiff(*size, *pixels, (322, 4, 1, side), (323, 4, 1, side), (324, 4, 1, 8), (325, 4, 1, 100)) + bytes(100)


REFUSED = {
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image of a known format"),
    "binary postscript": (b"\xc5\xd0\xd3\xc6" + bytes(40), "not an image of a known format"),
    "pdf": (b"%PDF-1.4\n", "not an image of a known format"),
    "windows metafile": (b"\xd7\xcd\xc6\x9a" + bytes(60), "not an image of a known format"),
    "icons": (encoded("ICO"), "not an image of a known format"),
    "a long thin jpeg": (jpeg_header(60_000, 1), "60000 x 1 pixels: one side is more than 64 times the other"),
    "a wide png": (png(1 << 20, 64), "1048576 x 64 pixels: one side is more than 64"),
    "a large jpeg": (jpeg_header(9000, 9000), "9000 x 9000 pixels, more than 67,108,864"),
    "a large png": (png(30_000, 30_000), "more than 67,108,864 pixels"),
    "a png of 2^62 pixels": (png(2**31 - 1, 2**31 - 1), "more than 67,108,864 pixels"),
    "a large gif": (b"GIF89a" + struct.pack("<HH", 65535, 65535) + encoded("GIF")[10:], "more than 67,108,864 pixels"),
    "a large bmp": (
        encoded("BMP")[:18] + struct.pack("<ii", 30_000, 30_000) + encoded("BMP")[26:], "more than 67,108,864 pixels"
    ),
    "a large webp": (
        b"RIFF\x1e\0\0\0WEBPVP8L\x11\0\0\0\x2f" + struct.pack("<I", 16382 | 16382 << 14) + bytes(12),
        "more than 33,554,432 pixels",
    ),
    "a ppm of comments": (b"P5\n" + b"#" * (60 * MIB) + b"\n8 8 255\n" + bytes(64), "no whole header in its"),
    "a ppm of comments further on": (b"P5 8 8 25#" + b"#" * (60 * MIB) + b"\n5\n" + bytes(64), "no whole header"),
    "a ppm of spaces": (b"P4" + b" " * (60 * MIB) + b"8 8\n" + bytes(8), "no whole header in its first 4,096 bytes"),
    "a ppm of floating-point pixels": (b"Pf 4 4 -1.0\n" + bytes(64), "floating-point pixels"),
    "a large ppm": (b"P6 99999 99999 255\n", "more than 67,108,864 pixels"),
    "large tiles of a small tiff": (tiff_tiles(40_000), "tiles of 40000 x 40000 pixels"),
    "a bomb in a colour profile": (
        png(16, 16, chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(8 * MIB)))), "Decompressed data too large"
    ),
    "another size in a header": (png(16, 16, content=b"\0"), "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_made_to_harm_costs_its_image_and_little_else(case, monkeypatch):
    content, reason = REFUSED[case]
    decode_square(encoded("PNG"), SIDE)  # the decoders' own libraries
    monkeypatch.setattr(os, "posix_spawn", None)
    monkeypatch.setattr("subprocess.Popen", None)
    with bounded(20, 600 * MIB), pytest.raises((ValueError, OSError)) as caught:
        decode_square(content, SIDE)
    assert reason in str(caught.value)


def test_a_cut_jpeg_is_to_be_mended_and_a_large_one_to_be_shrunk():
    said = []
    for content in (encoded("JPEG", (64, 64), quality=100)[:-20], jpeg_header(9000, 8000)):
        with pytest.raises((ValueError, OSError)) as caught:
            decode_square(content, SIDE)
        said.append(with_advice(str(caught.value), "mend it"))
    assert said[0].startswith("image file is truncated (") and said[0].endswith("processed) (mend it)")
    assert said[1] == "9000 x 8000 pixels, more than 67,108,864 (shrink it)"


def test_text_that_unpacks_to_much_is_refused():
    bomb = png(16, 16, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(8 * MIB))), content=bytes(16 * 49))
    with bounded(20, 400 * MIB), pytest.raises(ValueError, match="Decompressed data too large"):
        decode_square(bomb, SIDE)


@pytest.mark.parametrize("content", [
    b"P6\n# of somebody\n4 4\n# and more\r255\n" + bytes(48), b"P4 4 4\n" + bytes(4), b"P1\n4 4\n" + b"0 1 " * 8,
    b"P2\t4\t4\t15\n" + b"7 " * 16, b"P5 4 4 65535\n" + bytes(32),
])  # fmt: skip
def test_headers_of_ppm_as_programs_write_them_are_read(content):
    assert decode_square(content, SIDE).shape == (SIDE, SIDE, 3)


def test_many_tags_on_the_same_data_take_no_memory_each():
    entries = b"".join(struct.pack("<HHII", 1000 + number, 1, 60_000, 8) for number in range(5000))
    exif = b"II*\0" + struct.pack("<IH", 8, 5000) + entries
    with bounded(20, 600 * MIB):
        assert decode_square(jpeg_segments(exif_segment(exif[:60_000])), SIDE).shape == (SIDE, SIDE, 3)


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


def test_a_video_behind_a_jpeg_is_no_part_of_the_image():
    video = b"\xff\xda" * 1000  # as often as in 65 MB of any bytes
    assert (decode_whole(encoded("JPEG") + video) == decode_whole(encoded("JPEG"))).all()


def test_the_name_of_a_file_decides_nothing(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded("BMP"))
    files = ImageList.of(bytes(tmp_path), [[b"a.png"]])
    images = SquareImages(files, np.arange(1), np.zeros(1, np.int64), SIDE).fetch(np.arange(1))["images"]
    assert images.shape == (1, 3, SIDE, SIDE)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_each_format_opens_as_itself(kind):
    assert open_image(encoded(kind)).format == kind


def one_file(tmp_path):
    return SquareImages(ImageList.of(bytes(tmp_path), [[b"a.png"]]), np.arange(1), np.zeros(1, np.int64), SIDE)


def test_a_pipe_a_device_and_an_endless_file_are_named_and_cost_their_image(tmp_path):
    path = tmp_path / "a.png"
    for make, reason in (
        (lambda: os.mkfifo(path), "is a pipe, not a regular file"),
        (lambda: path.symlink_to("/dev/zero"), "is a device, not a regular file"),
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


def test_memory_that_does_not_suffice_costs_the_image(tmp_path):
    (tmp_path / "a.png").write_bytes(png(8000, 8000, content=bytes(24_001)))
    reader = one_file(tmp_path)
    decode_square(encoded("PNG"), SIDE)
    with bounded(20, 60 * MIB), pytest.raises(UnreadableImage) as caught:
        reader.fetch(np.arange(1))
    assert str(caught.value) == f"{tmp_path}/a.png: not enough memory to decode it"
    assert not caught.value.damaged  # it may pass: an extraction shall not leave the image out for good


def test_the_limit_of_webp_is_lower(monkeypatch):
    monkeypatch.setattr(image_decoding, "MAX_PIXELS_WEBP", 255)
    with pytest.raises(ValueError, match="16 x 16 pixels, more than 255"):
        decode_square(encoded("WEBP"), SIDE)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I", "I;16"])
def test_bands_of_a_large_image_give_what_the_whole_gives(mode, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (37, 23, 4), np.uint8)
    if mode.startswith("I"):
        image = Image.fromarray(pixels.view({"I": np.int32, "I;16": np.uint16}[mode])[..., 0].copy())
    else:
        image = Image.fromarray(pixels).convert(mode)
    if mode == "P":
        image.info["transparency"] = 7
    whole = np.asarray(to_rgb(image))
    monkeypatch.setattr(image_decoding, "PIXELS_AT_A_TIME", 23 * 5)
    np.testing.assert_array_equal(np.asarray(to_rgb(image)), whole)


def test_the_largest_image_that_is_decoded_fits_what_a_camera_takes():
    assert MAX_PIXELS > 9504 * 6336  # 60 megapixels
