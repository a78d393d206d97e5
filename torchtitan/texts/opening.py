"""Text encoders by the words of a command line."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.conditions import POOLED, TEXT
from torchtitan.texts.base import TextEncoder, TextEncoderError
from torchtitan.texts.stub import StubEncoder
from torchtitan.texts.transformers_encoders import TransformersEncoder

MOST_TOKENS = 8192
MOST_STUB_WIDTH = 65536
_STUB = "stub:"
# Options of the programs that open encoders, by the entry that they make.
OPTIONS = {TEXT: "--text-encoder", POOLED: "--pooled-encoder"}


class TextEncoders:
    """The two encoders of a text condition: one embeds the tokens, one the whole text."""

    def __init__(self, tokens: TextEncoder, pooled: TextEncoder, length: int) -> None:
        """Raises TextEncoderError: they do not fit their parts."""
        if not pooled.pooled_width:
            name = pooled.identity()["name"]
            raise TextEncoderError(f"--pooled-encoder: {name} has no embedding of a whole text (give a CLIP text model)")
        most = MOST_TOKENS if tokens.most_tokens is None else tokens.most_tokens
        if not 1 <= length <= most:
            raise TextEncoderError(f"--text-length: {length} is not in 1..{most}, which the encoder of tokens takes")
        self._tokens, self._pooled, self.length = tokens, pooled, length

    @property
    def identities(self) -> dict[str, dict[str, Any]]:
        return {TEXT: self._tokens.identity(), POOLED: self._pooled.identity()}

    @property
    def text_shape(self) -> tuple[int, int]:
        return self.length, self._tokens.width

    @property
    def pooled_shape(self) -> tuple[int]:
        return (self._pooled.pooled_width,)

    def encode(self, texts: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
        """Encode texts [B]: TEXT [B, L, D] and POOLED [B, P] on the CPU; the texts that lost their ends."""
        tokens = self._tokens.encode(texts, self.length)
        pooled = tokens.pooled if self._pooled is self._tokens else self._pooled.encode(texts, self._pooled.pooled_length).pooled
        assert pooled is not None  # of an encoder with a pooled width
        return {TEXT: tokens.tokens, POOLED: pooled}, tokens.cut


@functools.lru_cache(maxsize=4)
def open_encoder(option: str, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> TextEncoder:
    """Open "stub:WIDTH", or a folder or hub name as of `TransformersEncoder`. Raises TextEncoderError."""
    if option.startswith(_STUB):
        width = option.removeprefix(_STUB)
        if not width.isdecimal() or not 1 <= int(width) <= MOST_STUB_WIDTH:
            raise TextEncoderError(f"{option}: give a width in 1..{MOST_STUB_WIDTH}, as stub:64")
        return StubEncoder(int(width))
    return TransformersEncoder(option, dtype, torch.device(device))


def open_encoders(
    tokens: str, pooled: str, length: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> TextEncoders:
    """Open the encoder of tokens and that of whole texts; see `open_encoder`. Raises TextEncoderError."""
    opened = {}
    for entry, place in ((TEXT, tokens), (POOLED, pooled)):
        try:
            opened[entry] = open_encoder(place, dtype, device)
        except TextEncoderError as error:
            raise TextEncoderError(f"{OPTIONS[entry]}: {error}") from error
    return TextEncoders(opened[TEXT], opened[POOLED], length)


def reopen_encoders(
    identities: Mapping[str, Mapping[str, Any]], places: Mapping[str, str], length: int, device: torch.device | str = "cpu"
) -> TextEncoders:
    """Open encoders again, to add texts to those that others of the same identities have encoded.

    Args:
        places: option of `open_encoder` by entry; a stub needs none.

    Raises:
        TextEncoderError: a place is missing, or its encoder is another one.
    """
    dtypes = {identity["dtype"] for identity in identities.values() if "dtype" in identity}
    words = {}
    for entry, identity in identities.items():
        own = f"{_STUB}{identity.get('width')}" if identity["name"] == "stub" else ""
        words[entry] = places.get(entry) or own
        if not words[entry]:
            raise TextEncoderError(f"{OPTIONS[entry]}: give the {identity['name']} encoder of {identity['weights_sha256'][:12]}")
    dtype = getattr(torch, dtypes.pop()) if dtypes else torch.float32
    encoders = open_encoders(words[TEXT], words[POOLED], length, dtype, device)
    for entry, found in encoders.identities.items():
        wanted = identities[entry]
        differing = [key for key in sorted(found.keys() | wanted.keys()) if key != "device" and found.get(key) != wanted.get(key)]
        if differing:
            key = differing[0]
            raise TextEncoderError(
                f"{OPTIONS[entry]}: {words[entry]} is another encoder than that of the captions trained on: {key} is "
                f"{found.get(key)}, not {wanted.get(key)}"
            )
    return encoders
