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
from torchtitan.latents.index import CaptionPlan, FileRecord, caption_shard_name
from torchtitan.latents.shards import map_tensors

CAPTION_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NULL_CAPTION = 0
_LETTERS, _ENDS = "letters", "ends"


class CaptionReader:
    """Reader of a store's captions; files are mapped when they are first read. Survives pickling.
    """

    def __init__(self, folder: Path, plan: CaptionPlan, records: Sequence[FileRecord]) -> None:
        self.plan = plan
        self._folder = folder
        self._records = records
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
            self._shards[number] = map_captions(self._folder, number, self.plan, self._records[number])
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


def caption_content(plan: CaptionPlan, number: int, texts: Sequence[str], embeddings: Mapping[str, Tensor]) -> bytes:
    """Build the bytes of a file of captions.

    Args:
        embeddings: TEXT [n, L, D] and POOLED [n, P], any floating dtype.

    Raises:
        LatentStoreError: they contradict the plan, or the dtype cannot hold a value.
    """
    letters = [text.encode() for text in texts]
    tensors = {name: embeddings[name].to(CAPTION_DTYPES[plan.dtype]).contiguous() for name in (TEXT, POOLED)}
    tensors[_ENDS] = torch.tensor(np.cumsum([len(text) for text in letters], dtype=np.int64))
    for name, (shape, _) in caption_shapes(plan, len(plan.texts_of(number))).items():
        if tensors[name].shape != shape:
            raise LatentStoreError(f"{caption_shard_name(number)}: {name} is {list(tensors[name].shape)}, not {list(shape)}")
    for name in (TEXT, POOLED):
        finite = tensors[name].isfinite().flatten(1).all(1)
        if not finite.all():
            text = texts[int((~finite).nonzero()[0])]
            raise LatentStoreError(f"caption {text[:60]!r}: its embedding is no finite number of {plan.dtype}")
    # A text of no letters would otherwise make an empty file of letters where it is alone, which has no place to map.
    joined = b"".join(letters) + b"\n"
    return safetensors.torch.save(tensors | {_LETTERS: torch.frombuffer(bytearray(joined), dtype=torch.uint8)})


def map_captions(folder: Path, number: int, plan: CaptionPlan, record: FileRecord) -> dict[str, Tensor]:
    """Map a file of captions for reading. Raises LatentStoreError where the index contradicts it."""
    path = folder / caption_shard_name(number)
    wanted = caption_shapes(plan, len(plan.texts_of(number)))
    fixed = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted.values())
    # The header's length is not known, the letters' only from it: the file says it, and its own size bounds it.
    count = _letter_count(path, max(record.size - fixed, 0))
    tensors = map_tensors(path, wanted | {_LETTERS: ((count,), torch.uint8)})
    ends = tensors[_ENDS].numpy()
    if np.any(np.diff(ends, prepend=0) < 0) or ends[-1] != count - 1:
        raise LatentStoreError(f"{path}: its texts do not fill their letters; the index does not describe it")
    return tensors


def texts_of(shard: Mapping[str, Tensor]) -> list[str]:
    """Texts of a mapped file."""
    letters, ends = shard[_LETTERS].numpy().tobytes(), shard[_ENDS].tolist()
    return [letters[first:end].decode(errors="replace") for first, end in zip([0, *ends], ends, strict=False)]


def _letter_count(path: Path, most: int) -> int:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            shape = file.get_slice(_LETTERS).get_shape()
    except (OSError, safetensors.SafetensorError):
        return 0  # refused with its reason when the tensors are mapped
    return shape[0] if len(shape) == 1 and 1 <= shape[0] <= most else 0
