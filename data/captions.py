"""Captions of images: one line of text each, with the place of a trigger word filled in."""

import re

TRIGGER = "[trigger]"
MAX_CAPTION_BYTES = 1 << 16


def caption_line(text: str, trigger_word: str = "") -> str:
    """Caption as it is trained on: one line, spaces for all white space, with the trigger word.

    Args:
        text: of the caption.
        trigger_word: replaces each "[trigger]", and is put first where neither that nor the word itself occurs; "": none.

    Raises:
        ValueError: the caption is empty, or has "[trigger]" without a word for it.
    """
    caption, word = " ".join(text.split()), " ".join(trigger_word.split())
    if not caption:
        raise ValueError("the caption is empty")
    if not word:
        if TRIGGER in caption:
            raise ValueError(
                f"the caption has {TRIGGER}, and data.trigger_word is not given (give the word, or write it in the caption)"
            )
        return caption
    caption = caption.replace(TRIGGER, word)
    return caption if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", caption) else f"{word} {caption}"
