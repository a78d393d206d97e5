"""Stand-in for a text encoder where there are no weights: a fixed random vector for every word.

It knows nothing of language, but tells texts apart by their words, enough for tests and data of few captions.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan import philox
from torchtitan.texts.base import EncodedTexts, TextEncoder

_SEED = 0
_WORD = re.compile(r"\w+|[^\w\s]")


class StubEncoder(TextEncoder):
    """Vectors [D] of standard normal numbers by word, whatever its case; the rest of the tokens is zero.

    The embedding of the whole text is the words' sum over the square root of their number, and of no words zero.
    """

    most_tokens = None

    def __init__(self, width: int) -> None:
        self.width = self.pooled_width = width
        self.pooled_length = 77  # as of the encoders that it stands for

    def identity(self) -> dict[str, Any]:
        return {"name": "stub", "width": self.width}

    def encode(self, texts: Sequence[str], length: int) -> EncodedTexts:
        words = [_WORD.findall(text.lower()) for text in texts]
        table = self._table(sorted({word for text in words for word in text}))
        tokens, pooled = torch.zeros(len(texts), length, self.width), torch.zeros(len(texts), self.width)
        for place, text in enumerate(words):
            for slot, word in enumerate(text[:length]):
                tokens[place, slot] = table[word]
            if whole := text[: self.pooled_length]:
                pooled[place] = torch.stack([table[word] for word in whole]).sum(0) / len(whole) ** 0.5
        return EncodedTexts(tokens, pooled, [text for text, found in zip(texts, words, strict=True) if len(found) > length])

    def _table(self, words: Sequence[str]) -> dict[str, Tensor]:
        if not words:
            return {}
        digests = [hashlib.sha256(word.encode()).digest() for word in words]
        numbers = torch.tensor([int.from_bytes(digest[:8], "little") >> 1 for digest in digests])
        return dict(zip(words, philox.normal(_SEED, "stub_words", numbers, (self.width,)), strict=True))
