"""Grids of samples as pictures, and their animation over training."""

import functools
import logging
import os
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from torchtitan.files.durable import replacing
from torchtitan.files.regular import open_regular

logger = logging.getLogger(__name__)

MARGIN = 12
GAP = 4
SMALLEST_CELL = 64

PAPER = (24, 27, 33)  # dark: white strokes on a light page run into each other across the gaps
INK = (224, 228, 234)
EMPTY = (44, 48, 56)
ACCENT = (86, 156, 240)
NOT_FINITE = (230, 30, 90)

LABEL_LETTERS = 24
WORDNET_NUMBER = re.compile(r"n\d{8}[ _]+")
MOST_FRAMES = 60
ANIMATION_SECONDS = 8.0
LAST_FRAME_SECONDS = 2.5


def image_grid(
    images: Tensor, rows: int, columns: int, row_labels: Sequence[str] | None = None, title: str = "",
    captions: Sequence[str] | None = None,
) -> Image.Image:  # fmt: skip
    """Lay images out in rows, the first row first.

    Small images are enlarged by a whole factor without smoothing, until their shorter side has 64 pixels. One
    channel is shown grey, three as RGB. Of any other number (latents) the first three channels are shown as RGB,
    or the first as grey where there are two; each is stretched over the whole grid so that its 1st and 99th
    percentiles become black and full colour, hence colours compare within one grid only. Pixels that are not
    finite are magenta, places without an image grey.

    Args:
        images: [N, C, H, W], N <= rows * columns, in [-1, 1] (clipped) for one or three channels.
        rows, columns: of the grid, >= 1.
        row_labels: one per row, written at its left in lines of 24 letters, cut at its height; "?" for those that the font
            lacks, after the number of the row, as such rows may look alike.
        captions: one per image, written below it, cut to its width.

    Returns:
        an RGB picture, with 4 pixels between cells and 12 below the last row.
    """
    pixels = _enlarge(to_rgb(images.detach().float().cpu().numpy()))  # [N, H * factor, W * factor, 3]
    height, width = pixels.shape[1:3]

    label_font = _font(_between(14, height // 3, 36))
    label_height = sum(label_font.getmetrics())
    legible = [(_legible(label), label) for label in row_labels or []]
    marked = [text if text.count("?") == label.count("?") else f"{n}: {text}" for n, (text, label) in enumerate(legible, 1)]
    labels = [_label(text, height // label_height) for text in marked]
    label_width = max((_text_width(line, label_font) for label in labels for line in label.split("\n")), default=0)
    left = MARGIN + (label_width + MARGIN if labels else 0)
    grid_width = columns * (width + GAP) - GAP
    title_font = _font(_between(15, height // 3, 36))
    title_lines = _wrap(_legible(title), title_font, max(grid_width, 240))
    line_height = sum(title_font.getmetrics()) + 2
    top = MARGIN + (len(title_lines) * line_height + 2 * GAP if title_lines else 0)

    caption_font = _font(_between(11, height // 14, 20))
    pitch = height + GAP + (sum(caption_font.getmetrics()) + GAP if captions else 0)

    title_width = max((_text_width(line, title_font) for line in title_lines), default=0)
    size = left + max(grid_width, title_width) + MARGIN, top + rows * pitch - GAP + MARGIN
    picture = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(picture)
    for line, text in enumerate(title_lines):
        draw.text((left, MARGIN + line * line_height), text, INK, title_font)
    for row, label in enumerate(labels):
        middle = top + row * pitch + height // 2
        draw.text((left - MARGIN, middle), label, INK, label_font, anchor="rm", align="right")
    for place in range(rows * columns):
        x, y = left + place % columns * (width + GAP), top + place // columns * pitch
        if place < len(pixels):
            picture.paste(Image.fromarray(pixels[place]), (x, y))
            if captions:
                draw.text((x, y + height + GAP), _fit(_legible(captions[place]), caption_font, width), INK, caption_font)
        else:
            draw.rectangle((x, y, x + width - 1, y + height - 1), EMPTY)
    return picture


def class_labels(labels: Sequence[int], class_names: Sequence[str]) -> list[str] | None:
    """Names of labels in pictures, without ImageNet's numbers, _ as a space; None: no names.

    Each is cut at its first comma, unless another's is equal then.
    """
    if not class_names:
        return None
    whole = {label: WORDNET_NUMBER.sub("", class_names[label], count=1).replace("_", " ").strip() for label in labels}
    cut = {label: name.split(",")[0].strip() for label, name in whole.items()}
    counts = Counter(cut.values())
    return [cut[label] if counts[cut[label]] == 1 else whole[label] for label in labels]


def to_rgb(images: np.ndarray) -> np.ndarray:
    """Pixels uint8 [N, H, W, 3] of images [N, C, H, W], as `image_grid` shows them."""
    finite = np.isfinite(images).all(axis=1)  # [N, H, W]
    images = np.where(np.isfinite(images), images, 0)
    channels = images.shape[1]
    if channels not in (1, 3):
        images = _stretch(images[:, : 3 if channels > 3 else 1])
    pixels = np.rint((images.clip(-1, 1) + 1) * 127.5).astype(np.uint8)
    pixels = np.broadcast_to(pixels, (len(pixels), 3, *pixels.shape[2:])).transpose(0, 2, 3, 1)  # [N, H, W, 3]
    return np.where(finite[..., None], pixels, np.array(NOT_FINITE, dtype=np.uint8))


def save_image(image: Tensor, path: Path) -> None:
    """Write one image [C, H, W] as PNG in its own size; values and channels are shown as in image_grid."""
    Image.fromarray(to_rgb(image[None].detach().float().cpu().numpy())[0]).save(path, "PNG")


def save_animation(frames: Sequence[tuple[int, str | os.PathLike]], path: str | os.PathLike) -> int:
    """Join pictures made during training into an animated GIF, with the step and a progress bar on each frame.

    The frames run in the order of their steps for about eight seconds in all, and the last is held for 2.5 more. Of
    more than 60 pictures 60 are shown, evenly chosen with the first and the last among them. A picture that is missing
    or damaged is left out, and a warning names it. The file appears whole or not at all.

    Args:
        frames: (step, path of a picture); of two with the same step the later one counts.

    Returns:
        the number of frames written; 0 means that no picture could be read and that nothing was written.
    """
    pictures = []
    for step, picture_path in _evenly(sorted(dict(frames).items()), MOST_FRAMES):
        try:
            # Other formats may start a program.
            with open_regular(picture_path) as content, Image.open(content, formats=("PNG",)) as file:
                pictures.append((step, file.convert("RGB")))
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
            logger.warning("left out of %s: %s (%s)", path, picture_path, error)
    if not pictures:
        return 0
    size = (max(picture.width for _, picture in pictures), max(picture.height for _, picture in pictures))
    last_step = pictures[-1][0]
    images = [_few_colours(_with_step(picture, size, step, last_step)) for step, picture in pictures]
    milliseconds = 10 * _between(6, round(100 * ANIMATION_SECONDS / len(images)), 60)  # GIF counts in 10 ms
    durations = [milliseconds] * (len(images) - 1) + [milliseconds + int(1000 * LAST_FRAME_SECONDS)]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        images[0].save(unfinished, format="GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    return len(images)


def _evenly(items: list, most: int) -> list:
    if len(items) <= most:
        return items
    return [items[round(place)] for place in np.linspace(0, len(items) - 1, most)]


def _stretch(images: np.ndarray) -> np.ndarray:
    low, high = np.percentile(images, (1, 99), axis=(0, 2, 3), keepdims=True)
    return (images - low) / np.maximum(high - low, 1e-12) * 2 - 1


def _enlarge(pixels: np.ndarray) -> np.ndarray:
    factor = max(1, -(-SMALLEST_CELL // min(pixels.shape[1:3])))
    return pixels.repeat(factor, axis=1).repeat(factor, axis=2)


def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_font_file(), size)


def _font_file() -> Path:
    import matplotlib  # a run that draws nothing does not wait for it

    return Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")  # Pillow's default font knows ASCII only


@functools.cache
def _letters() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(_font_file())).get_charmap())


def _legible(text: str) -> str:
    """Text in one line, accents joined to their letters, which names of macOS have apart, "?" for what the font lacks."""
    composed = " ".join(unicodedata.normalize("NFC", text).split())
    return "".join(letter if ord(letter) in _letters() else "?" for letter in composed)


def _with_step(picture: Image.Image, size: tuple[int, int], step: int, last_step: int) -> Image.Image:
    font = _font(_between(15, size[0] // 28, 32))
    strip = sum(font.getmetrics()) + MARGIN
    bar = max(4, strip // 8)
    frame = Image.new("RGB", (size[0], size[1] + strip), PAPER)
    frame.paste(picture, (0, 0))
    draw = ImageDraw.Draw(frame)
    draw.text((size[0] - MARGIN, size[1] + (strip - bar) // 2), f"step {step:,}", INK, font, anchor="rm")
    draw.rectangle((0, size[1] + strip - bar, size[0], size[1] + strip), EMPTY)
    if done := round(size[0] * step / max(last_step, 1)):
        draw.rectangle((0, size[1] + strip - bar, done - 1, size[1] + strip), ACCENT)
    return frame


def _few_colours(frame: Image.Image) -> Image.Image:
    # The palette comes from a coarse copy: as good to the eye as from all pixels, and ten times as fast. No
    # dithering: its dots would dance from frame to frame.
    coarse = frame.copy()
    coarse.thumbnail((256, 256), Image.Resampling.NEAREST)
    palette = coarse.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1)
    return frame.quantize(palette=palette, dither=Image.Dither.NONE)


def _label(label: str, most_lines: int) -> str:
    return "\n".join(textwrap.wrap(label, LABEL_LETTERS, max_lines=most_lines, placeholder="…"))


def _fit(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    cut = text
    while cut and _text_width(cut, font) > width:
        cut = cut[:-2].rstrip() + "…" if len(cut) > 2 else ""
    return cut


def _text_width(text: str, font: ImageFont.FreeTypeFont) -> int:
    return -int(-font.getlength(text) // 1)


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and _text_width(f"{lines[-1]} {word}", font) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _between(low: int, value: int, high: int) -> int:
    return min(max(low, value), high)
