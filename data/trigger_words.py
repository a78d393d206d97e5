"""Trigger words: a word that stands for what a network is fine-tuned on, in captions and prompts."""

import re

TRIGGER = "[trigger]"
TRIGGER_KEY = "word in place of [trigger] in captions, put first where a caption has neither"


def filled(text: str, trigger_word: str) -> str:
    """Text in one line, with the trigger word in place of each "[trigger]", and nowhere else.

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
    """Check whether a text has the trigger word as a word of its own; true where there is no trigger word."""
    word = " ".join(trigger_word.split())
    return not word or re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
