"""Captions of a store: collected from the source, planned, and encoded."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pydantic
import torch
from torch import Tensor

from torchtitan.conditions import POOLED, TEXT
from torchtitan.data.base import DatasetError
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.image_source import ImageSource
from torchtitan.latents.captions import CAPTION_DTYPES, texts_digest
from torchtitan.latents.index import CAPTION_SHARD_BYTES, CaptionDtype, CaptionPlan, first_problem
from torchtitan.latents.writer import StoreWriter
from torchtitan.texts import TextEncoders

TEXTS_AT_A_TIME = 16  # always, for a batch's size may decide the last bits
MOST_PROMPTS = 10  # of those that are chosen here
_PLACEHOLDER = "{}"


@dataclass(frozen=True)
class Captions:
    """Captions of a source.

    Attributes:
        texts: different ones; the first is the null caption.
        numbers: of each image's text, int64 [N]; None: image with label c has text 1 + c.
        prompts: numbers of the texts that grids of samples show.
    """

    texts: list[str]
    numbers: np.ndarray | None
    prompts: list[int]

    def of(self, images: Sequence[int], labels: Tensor) -> Tensor:
        """Numbers of the texts of images with labels int64 [n], int64 [n]."""
        return 1 + labels if self.numbers is None else torch.from_numpy(self.numbers[np.asarray(images, np.int64)])


def collect_captions(
    source: ImageSource, class_template: str | None, null_caption: str, prompts: Sequence[str]
) -> Captions:
    """Collect the texts of a source.

    Args:
        class_template: makes captions of classes: {} becomes a class's name; None: every image has a caption.
        prompts: texts for grids, encoded too; none: the classes' captions, or the first of the images'.

    Raises:
        DatasetError: there are no captions, or no names of classes, or a template without {}.
    """
    if class_template is None:
        captions = source.captions()
        texts = list(dict.fromkeys([null_caption, *captions]))
        place = {text: number for number, text in enumerate(texts)}
        numbers = np.array([place[caption] for caption in captions], np.int64)
    else:
        if _PLACEHOLDER not in class_template:
            raise DatasetError(f"--class-captions: {class_template!r} has no {_PLACEHOLDER} for the name of the class")
        if not source.info.class_names:
            raise DatasetError(f"--class-captions: {source.name} has no names of classes")
        made = [class_template.replace(_PLACEHOLDER, name) for name in source.info.class_names]
        texts, numbers = [null_caption, *made], None
    place = {text: number for number, text in reversed(list(enumerate(texts)))}
    if prompts:
        texts += [prompt for prompt in dict.fromkeys(prompts) if prompt not in place]
        place |= {text: number for number, text in enumerate(texts) if text not in place}
        shown = [place[prompt] for prompt in prompts]
    else:
        shown = list(range(1, min(len(texts), MOST_PROMPTS + 1)))
    return Captions(texts, numbers, shown)


def plan_captions(
    captions: Captions, encoders: TextEncoders, dtype: CaptionDtype, shard_texts: int | None, from_classes: bool
) -> CaptionPlan:
    """Plan captions, `shard_texts` a file, or CAPTION_SHARD_BYTES. Raises LatentStoreError: impossible numbers."""
    (length, width), (pooled,) = encoders.text_shape, encoders.pooled_shape
    size = (length * width + pooled) * CAPTION_DTYPES[dtype].itemsize
    digest = hashlib.sha256(texts_digest(captions.texts).encode())
    if captions.numbers is not None:
        digest.update(captions.numbers.astype("<i8").tobytes())
    try:
        return CaptionPlan(
            source="class" if from_classes else "image", num_texts=len(captions.texts),
            texts_per_shard=min(max(1, CAPTION_SHARD_BYTES // size), shard_texts or len(captions.texts), len(captions.texts)),
            digest=digest.hexdigest(), prompts=captions.prompts, text_shape=(length, width), pooled_shape=(pooled,), dtype=dtype,
            encoders=encoders.identities,
        )  # fmt: skip
    except pydantic.ValidationError as failure:
        raise LatentStoreError(first_problem(failure)) from failure


def encode_captions(
    writer: StoreWriter, numbers: Sequence[int], texts: Sequence[str], encoders: TextEncoders,
    on_texts: Callable[[int], None],
) -> list[str]:  # fmt: skip
    """Encode and write files of captions.

    Args:
        numbers: of the files, none of which another rank writes.

    Returns:
        the texts that were longer than the store's length, and lost their ends.

    Raises:
        LatentStoreError: the store cannot hold the embeddings.
        OSError: it cannot be written; finished files stay.
    """
    plan, cut = writer.plan.captions, list[str]()
    assert plan is not None  # or there would be no file to write
    for number in numbers:
        own = [texts[place] for place in plan.texts_of(number)]
        parts = []
        for first in range(0, len(own), TEXTS_AT_A_TIME):
            batch = own[first : first + TEXTS_AT_A_TIME]
            embeddings, cut_here = encoders.encode(batch)
            parts.append(embeddings)
            cut += cut_here
            on_texts(len(batch))
        writer.write_captions(number, own, {name: torch.cat([part[name] for part in parts]) for name in (TEXT, POOLED)})
    return cut
