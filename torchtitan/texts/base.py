"""Contract of a text encoder."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class TextEncoderError(Exception):
    """Text encoder that cannot be used as asked; the message is one line."""


@dataclass(frozen=True)
class EncodedTexts:
    """Encoded texts.

    Attributes:
        tokens: embedding of every token, padded to the length that was asked for, float [B, L, D] on the CPU.
        pooled: embedding of the whole text, float [B, P] on the CPU; None of an encoder that has none.
        cut: texts that were longer than that, and lost their ends.
    """

    tokens: Tensor
    pooled: Tensor | None
    cut: list[str]


class TextEncoder(ABC):
    """Text encoder, frozen: the same text gives the same embeddings.

    Attributes:
        width: D, of a token's embedding.
        pooled_width: P, of the embedding of the whole text; 0: it has none.
        most_tokens: longest length that it takes; None: any.
        pooled_length: tokens from which the embedding of the whole text is made; 0: it has none.
    """

    width: int
    pooled_width: int
    most_tokens: int | None
    pooled_length: int

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the embeddings: "name", and the rest, for JSON; equal for equal weights wherever they lie."""

    @abstractmethod
    def encode(self, texts: Sequence[str], length: int) -> EncodedTexts:
        """Encode texts [B] in `length` tokens each."""
