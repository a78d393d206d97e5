"""Captions of images: one line of text each, with the place of a trigger word filled in."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from torchtitan.data.base import DatasetError
from torchtitan.data.image_files import ImageSource
from torchtitan.data.trigger_words import filled, has_trigger

MAX_CAPTION_BYTES = 1 << 16


class CaptionedSource(ImageSource, Protocol):
    """Images with a text each."""

    def text(self, position: int) -> str | None:
        """Caption of an image as it is stored; None where it has none. Raises UnicodeDecodeError, OSError, ValueError."""


def captions_of(source: CaptionedSource, positions: np.ndarray, trigger_word: str) -> list[str]:
    """Captions at positions [B] of a source, as `caption_at`. Raises DatasetError."""
    return [
        caption_at(source.shown(position), partial(source.text, position), trigger_word)
        for position in positions.tolist()
    ]


def caption_at(place: str, read: Callable[[], str | None], trigger_word: str = "") -> str:
    """Caption that a function reads, as `caption_line`. Raises DatasetError: unreadable, missing, or refused."""
    try:
        text = read()
        if text is None:
            raise ValueError("the caption is missing")
        return caption_line(text, trigger_word)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{place}: the caption is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{place}: {getattr(error, 'strerror', None) or error}") from error


def caption_line(text: str, trigger_word: str = "") -> str:
    """Caption as it is trained on: one line, spaces for all white space, with the trigger word.

    Args:
        trigger_word: as of `filled`, and put first where neither a placeholder nor the word itself occurs; "": none.

    Raises:
        ValueError: the caption is empty or too long, or has a placeholder without a word for it.
    """
    if len(text) > MAX_CAPTION_BYTES:
        raise ValueError(f"a caption of {len(text):,} characters, more than {MAX_CAPTION_BYTES:,}")
    if not text.split():
        raise ValueError("the caption is empty")
    caption = filled(text, trigger_word)
    return caption if has_trigger(caption, trigger_word) else f"{' '.join(trigger_word.split())} {caption}"
