"""Trigger words: the name of the fine-tuned subject in captions and prompts."""

import re

from torchtitan.settings.schema import nearest

_IN_BRACKETS = re.compile(r"[\[{](\w+)[\]}]")
PLACEHOLDER = re.compile(r"\[(?:trigger|name)\]", re.IGNORECASE)  # the second is ai-toolkit's
TRIGGER_KEY = "replaces [trigger] and [name] in captions, and begins a caption without them and without the word"


def filled(text: str, trigger_word: str) -> str:
    """Text in one line, placeholders replaced by the trigger word. Raises ValueError: no word for them; a misspelt one."""
    for found in _IN_BRACKETS.finditer(text):
        if nearest(found[1].lower(), ["trigger"]) and not PLACEHOLDER.fullmatch(found[0]):
            raise ValueError(f"{found[0]} is no placeholder (write [trigger])")
    line, word = " ".join(text.split()), " ".join(trigger_word.split())
    if (place := PLACEHOLDER.search(line)) and not word:
        advice = "write the word, or train with data.trigger_word"
        raise ValueError(f"{place[0]} stands for a trigger word, and there is none ({advice})")
    return PLACEHOLDER.sub(lambda place: word, line)


def has_trigger(text: str, trigger_word: str) -> bool:
    """Check whether a text has the trigger word between word boundaries; true without a trigger word."""
    word = " ".join(trigger_word.split())
    return not word or re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None
