"""A data set of images of several shapes with texts, for tests; `registered` makes its name known."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch

from torchtitan import philox
from torchtitan.conditions import POOLED, TEXT, Embeddings
from torchtitan.data import DATASETS, DataConfig, Dataset, DatasetInfo, UnreadableImage
from torchtitan.models.flux.config import FLAVORS
from torchtitan.settings import setting

SHAPES = ((2, 4, 4), (2, 6, 4), (2, 4, 8), (2, 2, 6))
TOKENS = 3


@dataclass(kw_only=True)
class BucketedConfig(DataConfig):
    name: Literal["bucketed"] = setting("bucketed", "dataset")
    counts: list[int] = setting([11, 5, 0, 2], "training images of each bucket")
    held_out: list[int] = setting([4, 3, 0, 1], "held-out images of each bucket")
    unreadable: list[int] = setting([], "images that cannot be decoded")


class Bucketed(Dataset):
    """Noise with its number in the first pixel, by 64, and a text that is a function of the number."""

    Config = BucketedConfig

    @staticmethod
    def info(config):
        width, pooled = FLAVORS["debug"].text_dim, FLAVORS["debug"].pooled_dim
        nulls = {TEXT: torch.zeros(TOKENS, width), POOLED: torch.zeros(pooled)}
        prompts = {TEXT: torch.ones(2, TOKENS, width), POOLED: torch.ones(2, pooled)}
        return DatasetInfo(SHAPES[2], Embeddings(nulls, prompts, names=("one", "two")), bucket_shapes=SHAPES)

    def __init__(self, config, split):
        self.buckets = np.array(config.counts if split == "train" else config.held_out)
        self._unreadable = config.unreadable

    def __len__(self):
        return int(self.buckets.sum())

    def fetch(self, indices):
        for index in indices:
            if index in self._unreadable:
                raise UnreadableImage(int(index), f"{index}.png", "truncated")
        (bucket,) = set(buckets_of(indices, self.buckets))  # never of two
        numbers = torch.from_numpy(indices)
        images = philox.normal(0, "synthetic_data", numbers, SHAPES[bucket]) / 3
        images[:, 0, 0, 0] = numbers / 64
        kind = Bucketed.info(None).condition_kind
        texts = {
            name: philox.normal(place, "synthetic_data", numbers + (1 << 33), shape)
            for place, (name, (shape, _)) in enumerate(kind.entries.items())
        }
        return {"images": images} | texts


def numbers_of(batch) -> list[int]:
    return (64 * batch["images"][:, 0, 0, 0]).round().to(torch.int64).tolist()


def buckets_of(indices, counts) -> list[int]:
    return np.repeat(np.arange(len(counts)), counts)[indices].tolist()


@contextmanager
def registered() -> Iterator[None]:
    with patch.dict(DATASETS, {"bucketed": Bucketed}):
        yield
