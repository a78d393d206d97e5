"""Trigger words: the name of the fine-tuned subject in captions and prompts."""

import re

PLACEHOLDER = re.compile(r"\[(?:trigger|name)\]", re.IGNORECASE)  # the second is ai-toolkit's
TRIGGER_KEY = "replaces [trigger] and [name] in captions, and begins a caption without them and without the word"


def filled(text: str, trigger_word: str) -> str:
    """Text in one line, placeholders replaced by the trigger word. Raises ValueError: there is none for them."""
    line, word = " ".join(text.split()), " ".join(trigger_word.split())
    if (found := PLACEHOLDER.search(line)) and not word:
        raise ValueError(
            f"the caption has {found[0]}, and data.trigger_word is not given (give the word, or write it in the caption)"
        )
    return PLACEHOLDER.sub(lambda place: word, line)


def has_trigger(text: str, trigger_word: str) -> bool:
    """Check whether a text has the trigger word between word boundaries; true without a trigger word."""
    word = " ".join(trigger_word.split())
    return not word or re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
