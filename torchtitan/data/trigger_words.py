"""Trigger words: the name of the fine-tuned subject in captions and prompts."""

import re

TRIGGER = "[trigger]"
TRIGGER_KEY = "replaces [trigger] in captions, and begins a caption that has neither"


def filled(text: str, trigger_word: str) -> str:
    """Text in one line, with each "[trigger]" replaced by the trigger word.

    Raises:
        ValueError: the text has "[trigger]", and there is no word.
    """
    line, word = " ".join(text.split()), " ".join(trigger_word.split())
    if TRIGGER in line and not word:
        raise ValueError(
            f"the caption has {TRIGGER}, and data.trigger_word is not given (give the word, or write it in the caption)"
        )
    return line.replace(TRIGGER, word)


def has_trigger(text: str, trigger_word: str) -> bool:
    """Check whether a text has the trigger word between word boundaries; true without a trigger word."""
    word = " ".join(trigger_word.split())
    return not word or re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
