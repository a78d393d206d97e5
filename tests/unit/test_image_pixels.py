"""Pixels of image files: formats and modes, orientation, and the resize."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.test_image_folder import save
from tests.unit.test_resizing import bicubic_matrix
from torchtitan.data import UnreadableImage
from torchtitan.data.image_decoding import decode_cropped, resize_and_crop
from torchtitan.data.image_files import ImageList, SquareImages, list_images


def read_square(path: bytes, image_size: int) -> np.ndarray:
    return decode_cropped(Path(path.decode()).read_bytes(), image_size, image_size)


def box_half(size, count):
    """Weights of a box filter from `size` samples to `count`: those whose centres lie in each output's interval."""
    centres = (np.arange(size) + 0.5) * count / size
    weights = np.array([(centres > i) & (centres <= i + 1) for i in range(count)], float)
    return weights / weights.sum(axis=1, keepdims=True)


def resample(pixels, filter_weights, height, width):
    def rounded(values):
        return np.floor(values.clip(0, 255) + 0.5)

    across = rounded(np.einsum("ow,hwc->hoc", filter_weights(pixels.shape[1], width), pixels))
    return rounded(np.einsum("oh,hwc->owc", filter_weights(pixels.shape[0], height), across))


def square_by_hand(pixels, size):
    pixels = pixels.astype(float)
    while min(pixels.shape[:2]) >= 2 * size:
        pixels = resample(pixels, box_half, pixels.shape[0] // 2, pixels.shape[1] // 2)
    height, width = pixels.shape[:2]
    if height < width:
        height, width = size, int(np.rint(width * size / height))
    else:
        height, width = int(np.rint(height * size / width)), size
    pixels = resample(pixels, bicubic_matrix, height, width)
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size]


@pytest.mark.parametrize("width, height", [(150, 97), (33, 70), (16, 16), (5, 9), (64, 129), (31, 32), (1, 3)])
def test_squares_equal_an_independent_box_and_bicubic_filter(width, height):
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    square = np.asarray(resize_and_crop(Image.fromarray(pixels), 16, 16)).astype(float)
    assert square.shape == (16, 16, 3)
    assert np.abs(square - square_by_hand(pixels, 16)).max() <= 1


MODES = {
    "L.png": (Image.new("L", (16, 16), 200), (200, 200, 200)),
    "1.png": (Image.new("1", (16, 16), 1), (255, 255, 255)),
    "I16.png": (Image.fromarray(np.full((16, 16), 200 * 257, np.uint16)), (200, 200, 200)),
    "LA.png": (Image.new("LA", (16, 16), (100, 0)), (255, 255, 255)),
    "RGBA.png": (Image.new("RGBA", (16, 16), (200, 0, 100, 51)), (244, 204, 224)),
    "RGBA.webp": (Image.new("RGBA", (16, 16), (200, 0, 100, 255)), (200, 0, 100)),
    "P.gif": (Image.new("RGB", (16, 16), (0, 0, 255)).convert("P"), (0, 0, 255)),
    "CMYK.jpg": (Image.new("CMYK", (16, 16), (255, 0, 0, 0)), (0, 255, 255)),
    "RGB.TIFF": (Image.new("RGB", (16, 16), (1, 2, 3)), (1, 2, 3)),
    "RGB.Bmp": (Image.new("RGB", (16, 16), (1, 2, 3)), (1, 2, 3)),
    "RGB.ppm": (Image.new("RGB", (16, 16), (1, 2, 3)), (1, 2, 3)),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb_and_transparency_white(tmp_path, name):
    image, colour = MODES[name]
    save(tmp_path / name, image, **{"lossless": True} if name.endswith("webp") else {})
    assert list_images(bytes(tmp_path)).names[0] == name.encode()
    square = read_square(bytes(tmp_path / name), 4)
    assert np.abs(square.astype(int) - np.array(colour)).max() <= (3 if name.endswith("jpg") else 0)


@pytest.mark.parametrize("name, most", [("a.tif", 1), ("b.TIFF", 255), ("c.ppm", 1)])
def test_floating_point_pixels_are_refused_with_what_to_do(tmp_path, name, most):
    save(tmp_path / name, Image.fromarray(np.linspace(0, most, 256, dtype=np.float32).reshape(16, 16)))
    assert list_images(bytes(tmp_path)).names[0] == name.encode()
    files = ImageList.of(bytes(tmp_path), [[name.encode()]])
    reader = SquareImages(files, np.arange(1), np.zeros(1, np.int64), 4)
    with pytest.raises(UnreadableImage, match=r"floating-point pixels, .* \(convert it to 8 or 16 bits\)$") as caught:
        reader.fetch(np.arange(1))
    assert caught.value.damaged  # as at every later try


def test_pixels_of_32_bits_are_refused_and_those_of_16_are_scaled(tmp_path):
    for kind in (np.int32, np.uint16):
        save(tmp_path / f"{np.dtype(kind)}.tif", Image.fromarray(np.full((16, 16), 200 * 257, kind)))
    assert (read_square(bytes(tmp_path / "uint16.tif"), 4) == 200).all()
    with pytest.raises(ValueError, match=r"^32-bit integer pixels, of unknown black and white \(convert it to 8 or 16 bits\)$"):
        read_square(bytes(tmp_path / "int32.tif"), 4)


def test_exif_orientation_is_obeyed_and_broken_exif_ignored(tmp_path, monkeypatch):
    image = Image.new("RGB", (16, 16), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 16, 8))  # white above
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned left: shown with what was above on the right
    save(tmp_path / "turned.png", image, exif=exif)
    save(tmp_path / "broken.jpg", image, exif=b"Exif\x00\x00MX\x00\x2a\xff\xff\xff\xff")
    turned = read_square(bytes(tmp_path / "turned.png"), 16)
    assert (turned[:, 8:] == 255).all() and (turned[:, :8] == 0).all()
    assert read_square(bytes(tmp_path / "broken.jpg"), 16)[:6].min() > 240

    def fail(image):
        raise SyntaxError("not a TIFF header")

    monkeypatch.setattr(Image.Image, "getexif", fail)
    assert (read_square(bytes(tmp_path / "turned.png"), 16)[:8] == 255).all()
