"""Decode the bytes of an image file, from any source, to RGB pixels of a given size: for all images of users.

A decoder only gets files that begin as one of a few formats, none of which starts a program; the file's name is
ignored. Memory is bounded before decoding, by the size in the header.
"""

import io
import re
import warnings
from typing import TYPE_CHECKING, cast

import numpy as np

from torchtitan.errors import unwrapped

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FILE_BYTES = 512 << 20
MAX_PIXELS = 1 << 26  # decoded, four bytes each at least: 256 MiB
MAX_ASPECT_RATIO = 64  # resized to S on the shorter side, the longer has at most 64 S

FORMATS = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WEBP": rb"RIFF....WEBP",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM",
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "PPM": rb"P[1-6f]\s",
}
_BEGINNINGS = re.compile(b"|".join(b"(?P<%s>%s)" % (name.encode(), text) for name, text in FORMATS.items()), re.DOTALL)

_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange width and height
_PNG_ORIENTATIONS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")  # chunks that may follow the pixels
_BITS = 258  # of TIFF


def open_image(content: bytes) -> "Image":
    """Open an image: read its header; no pixel is decoded.

    Raises:
        ValueError: it is of another format than FORMATS, larger than allowed, or of floating-point pixels.
        (and the decoder's own exceptions)
    """
    # Their import makes the formats known; by itself the package would load every format it has.
    from PIL import (  # noqa: F401
        BmpImagePlugin,
        GifImagePlugin,
        Image,
        JpegImagePlugin,
        PngImagePlugin,
        PpmImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    if not content:
        raise ValueError("the file is empty")
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{len(content):,} bytes, more than {MAX_FILE_BYTES:,}")
    kind = _BEGINNINGS.match(content)
    if kind is None:
        raise ValueError("not an image of a known format")
    try:
        image = Image.open(io.BytesIO(content), formats=(str(kind.lastgroup),))
    except Image.DecompressionBombError as error:  # the package's own limit is higher
        raise ValueError(f"more than {MAX_PIXELS:,} pixels (shrink it)") from error
    _check_size(*image.size)
    if image.mode == "F":  # as RGB it would be clipped to 0..255, and 0..1 become black
        raise ValueError("floating-point pixels, of unknown black and white (convert it to 8 or 16 bits)")
    if kind.lastgroup == "TIFF" and image.mode == "I":
        if cast(TiffImagePlugin.TiffImageFile, image).tag_v2.get(_BITS, (1,))[0] == 32:
            raise ValueError("32-bit integer pixels, of unknown black and white (convert it to 8 or 16 bits)")
    return image


def decode_cropped(content: bytes, width: int, height: int) -> np.ndarray:
    """Decode a file's content to pixels uint8 [height, width, 3] as `resize_and_crop`. Raises as `open_image`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a decoder's words on a large or odd file; it is read, or it raises
        with open_image(content) as image:
            return np.asarray(resize_and_crop(to_rgb(upright(image)), width, height))


def decode_whole(content: bytes) -> np.ndarray:
    """Decode a file's content to pixels uint8 [H, W, 3] in the image's own size. Raises as `open_image`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_image(content) as image:
            return np.asarray(to_rgb(upright(image)))


def upright_size(content: bytes) -> tuple[int, int]:
    """Width and height of a file's image as it is shown, if possible by its header alone. Raises as `open_image`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_image(content) as image:
            if image.format == "TIFF" or any(chunk in content for chunk in _PNG_ORIENTATIONS if image.format == "PNG"):
                return upright(image).size  # known with the pixels alone
            sideways = image.format != "PNG" and _orientation(image) in _SIDEWAYS
            return (image.height, image.width) if sideways else image.size


def upright(image: "Image") -> "Image":
    """Apply the EXIF orientation; damaged EXIF data do not lose the image."""
    from PIL.Image import Transpose

    image.load()  # a damaged image shall fail here, not below
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
    }  # fmt: skip
    turn = turns.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def to_rgb(image: "Image") -> "Image":
    """Convert any mode to RGB: transparent pixels are laid on white, 16-bit grey is scaled to 8 bits."""
    if image.mode.startswith("I"):
        return _scaled_grey(image)
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        return _on_white(image)
    return image.convert("RGB")


def resize_and_crop(image: "Image", width: int, height: int) -> "Image":
    """Resize an image to cover a size and keep its middle; of a square, the preprocessing of ADM.

    Halve both sides with a box filter while each is at least twice the target's; resize with a bicubic filter to the
    smallest size that covers the target; keep the middle of the side that is longer.

    Source: Dhariwal and Nichol, "Diffusion Models Beat GANs on Image Synthesis", the training data of its code.
    """
    from PIL.Image import Resampling

    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def decoding_problem(error: Exception) -> str:
    """Problem of an image, from the exception of reading or decoding it; one line."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its own text shows where in memory the bytes were
        return "not an image of a known format"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return unwrapped(error) or type(error).__name__


def with_advice(problem: str, advice: str) -> str:
    """Problem of an image with the advice on it, unless the problem has a better one."""
    return problem if "(shrink" in problem or "(convert" in problem else f"{problem} ({advice})"


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, more than {MAX_PIXELS:,} (shrink it)")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other")


def _orientation(image: "Image") -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 (a damaged tag fails in any way)
        return 1


def _scaled_grey(image: "Image") -> "Image":
    from PIL import Image

    values = np.asarray(image)
    grey = (values.astype(np.float32) / 257).round().clip(0, 255).astype(np.uint8)
    if isinstance(clear := image.info.get("transparency"), int):
        grey[values == clear] = 255
    return Image.fromarray(grey).convert("RGB")


def _on_white(image: "Image") -> "Image":
    from PIL import Image

    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")
