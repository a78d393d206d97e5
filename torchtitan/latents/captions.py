"""Captions of a latent store: texts by number with their embeddings, in safetensors files of their own.

    text     [n, L, D]  embeddings of the tokens       letters  uint8 [bytes]  the texts in UTF-8, one after the other
    pooled   [n, P]     embedding of the whole text    ends     int64 [n]      where each text ends in them
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from torchtitan.conditions import POOLED, TEXT
from torchtitan.errors import LatentStoreError
from torchtitan.latents.index import CaptionPlan, caption_shard_name
from torchtitan.latents.shards import map_tensors

CAPTION_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NULL_CAPTION = 0
_LETTERS, _ENDS = "letters", "ends"


class CaptionReader:
    """Reader of a store's captions; files are mapped when they are first read. Survives pickling."""

    def __init__(self, folder: Path, plan: CaptionPlan) -> None:
        self.plan = plan
        self._folder = folder
        self._shards: dict[int, dict[str, Tensor]] = {}
        self._numbers: dict[str, int] | None = None

    def __len__(self) -> int:
        return self.plan.num_texts

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_shards": {}}

    def read(self, numbers: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Read embeddings in the stored dtype: TEXT [B, L, D] and POOLED [B, P]. Raises LatentStoreError."""
        places = [divmod(int(number), self.plan.texts_per_shard) for number in numbers]
        shards = {shard: self._shard(shard) for shard in sorted({shard for shard, _ in places})}
        return {name: torch.stack([shards[shard][name][row] for shard, row in places]) for name in (TEXT, POOLED)}

    def text(self, number: int) -> str:
        """A text. Raises LatentStoreError."""
        shard, row = divmod(number, self.plan.texts_per_shard)
        return texts_of(self._shard(shard))[row]

    def number_of(self, text: str) -> int | None:
        """Number of a text; None if the store does not hold it. Raises LatentStoreError."""
        if self._numbers is None:
            found = (text for shard in range(self.plan.num_shards) for text in texts_of(self._shard(shard)))
            self._numbers = {text: number for number, text in enumerate(found)}
        return self._numbers.get(text)

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._shards:
            wanted = caption_shapes(self.plan, len(self.plan.texts_of(number)))
            self._shards[number] = map_tensors(self._folder / caption_shard_name(number), wanted, letters=_LETTERS)
        return self._shards[number]


def texts_digest(texts: Iterable[str]) -> str:
    """Digest of texts in their order."""
    digest = hashlib.sha256()
    for text in texts:
        letters = text.encode()
        digest.update(len(letters).to_bytes(8, "little") + letters)
    return digest.hexdigest()


def caption_shapes(plan: CaptionPlan, count: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of `count` captions, but for their letters, by name."""
    dtype = CAPTION_DTYPES[plan.dtype]
    return {
        TEXT: ((count, *plan.text_shape), dtype), POOLED: ((count, *plan.pooled_shape), dtype),
        _ENDS: ((count,), torch.int64),
    }  # fmt: skip


def caption_content(plan: CaptionPlan, texts: Sequence[str], embeddings: Mapping[str, Tensor]) -> bytes:
    """Bytes of a file of captions: TEXT [n, L, D], POOLED [n, P]. Raises LatentStoreError: too large for the dtype."""
    letters = [text.encode() for text in texts]
    tensors = {name: embeddings[name].to(CAPTION_DTYPES[plan.dtype]).contiguous() for name in (TEXT, POOLED)}
    tensors[_ENDS] = torch.tensor(np.cumsum([len(text) for text in letters], dtype=np.int64))
    for name in (TEXT, POOLED):
        finite = tensors[name].isfinite().flatten(1).all(1)
        if not finite.all():
            text = texts[int((~finite).nonzero()[0])]
            raise LatentStoreError(f"caption {text[:60]!r}: its embedding is no finite number of {plan.dtype}")
    # A text of no letters would otherwise make an empty file of letters where it is alone, which has no place to map.
    joined = b"".join(letters) + b"\n"
    return safetensors.torch.save(tensors | {_LETTERS: torch.frombuffer(bytearray(joined), dtype=torch.uint8)})


def texts_of(shard: Mapping[str, Tensor]) -> list[str]:
    """Texts of a mapped file."""
    letters, ends = shard[_LETTERS].numpy().tobytes(), shard[_ENDS].tolist()
    return [letters[first:end].decode(errors="replace") for first, end in zip([0, *ends], ends, strict=False)]
