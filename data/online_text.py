"""Captions that are encoded while a network trains, in place of a store that holds them encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.conditions import CAPTION, POOLED, TEXT, Texts, letters_of
from torchtitan.data.base import Batch, DatasetError
from torchtitan.data.left_out import say_once
from torchtitan.data.trigger_words import filled
from torchtitan.distributed.mesh import compute_device
from torchtitan.settings import setting

MOST_BYTES = 4096  # of a caption: more than encoders read
_ENCODED = {"text_encoder": "set"}
_OPTIONS = {"--text-encoder": "data.text_encoder", "--pooled-encoder": "data.pooled_encoder", "--text-length": "data.text_length"}


@dataclass(kw_only=True)
class OnlineTextConfig:
    """Keys of datasets with captions; those with a trigger word declare it, in others there is none."""

    trigger_word = ""

    text_encoder: str = setting(
        "", "encode captions in training: their tokens by this folder or hub name of a T5 encoder or CLIP text model, or by "
        "stub:WIDTH; default: captions condition nothing, and a latent store encodes them", path=True,
    )  # fmt: skip
    pooled_encoder: str = setting("", "encoder of whole captions: a CLIP text model, or stub:WIDTH", applies=_ENCODED, path=True)
    text_length: int = setting(256, "tokens of every caption", ge=1, le=8192, applies=_ENCODED)
    null_caption: str = setting("", "caption that stands for no condition; may have [trigger]", applies=_ENCODED)
    prompts: list[str] = setting(
        [], "texts that grids of samples show, [trigger] filled in; default: the null caption, or with cache.enable the first "
        "captions", applies=_ENCODED,
    )  # fmt: skip

    def filled_texts(self) -> tuple[str, list[str]]:
        """Null caption and prompts with the trigger word. Raises DatasetError: one has "[trigger]", and there is no word."""
        found, keys = [], ["null_caption", *["prompts"] * len(self.prompts)]
        for key, text in zip(keys, (self.null_caption, *self.prompts), strict=True):
            try:
                found.append(filled(text, self.trigger_word))
            except ValueError as error:
                raise DatasetError(f"data.{key}: {error}") from error
        return found[0], found[1:]


@dataclass(frozen=True)
class OnlineEncoders:
    """Encoders, options of `open_encoder`, opened at first use: loader processes carry no weights."""

    text: str
    pooled: str
    length: int

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Embeddings TEXT [B, L, D] and POOLED [B, P] of texts, bfloat16 as a store keeps them. Raises DatasetError."""
        from torchtitan.texts import TextEncoderError, open_encoders  # which other data do not need

        try:
            encoders = open_encoders(self.text, self.pooled, self.length, torch.bfloat16, compute_device())
            found, cut = encoders.encode(texts)
        except TextEncoderError as error:
            raise DatasetError(in_keys(error)) from error
        if cut:
            say_once(f"captions longer than data.text_length = {self.length} tokens are cut there", always=True)
        return {name: value.to(torch.bfloat16) for name, value in found.items()}


def in_keys(error: Exception) -> str:
    """Message of a text encoder with keys of the configuration instead of options of a command."""
    option, colon, text = str(error).partition(":")
    return f"{_OPTIONS.get(option, option)}{colon}{text}"


def online_kind(config: OnlineTextConfig) -> Texts | None:
    """Kind of condition of captions that are encoded in training; None if they are not. Raises DatasetError."""
    if not config.text_encoder:
        return None
    if not config.pooled_encoder:
        raise DatasetError("data.pooled_encoder: not given; captions need an encoder of tokens and one of whole texts")
    encode = OnlineEncoders(config.text_encoder, config.pooled_encoder, config.text_length)
    null_caption, shown = config.filled_texts()
    found = encode([null_caption, *shown])
    nulls = {name: found[name][0] for name in (TEXT, POOLED)}
    prompts = {name: found[name][1:] for name in (TEXT, POOLED)} if shown else {}
    return Texts(nulls, prompts, tuple(shown), encode=encode, most_bytes=MOST_BYTES)


def with_captions(batch: Batch, captions: Sequence[str]) -> Batch:
    """Batch with the letters of its images' captions."""
    return {**batch, CAPTION: letters_of(captions, MOST_BYTES)}
