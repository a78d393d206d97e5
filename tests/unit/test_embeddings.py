"""Data with embeddings, registered by name: what travels with an image, and which models and stores refuse it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.configurations import problems
from torchtitan.conditions import Embeddings
from torchtitan.data import DATASETS, DataConfig, Dataset, DatasetError, DatasetInfo, UnreadableImage
from torchtitan.extraction.image_source import ImageSource
from torchtitan.settings import setting
from torchtitan.training.data_loading import TrainingData

TOKENS, WIDTH, NULL = 3, 8, 7.0
SHAPE = (1, 4, 4)


def brightness_of(indices: np.ndarray) -> Tensor:
    return torch.from_numpy(indices % 11).to(torch.float32) / 5 - 1


def embedded(brightness: Tensor) -> dict[str, Tensor]:
    """The brightness in every channel of the first two tokens; the third is padding."""
    embeddings = brightness[:, None, None].repeat(1, TOKENS, WIDTH)
    mask = torch.tensor([True, True, False]).repeat(len(brightness), 1)
    return {"embeddings": embeddings, "mask": mask}


@dataclass(kw_only=True)
class CaptionsConfig(DataConfig):
    name: Literal["captions"] = setting("captions", "dataset")
    horizontal_flip: bool = setting(True, "mirror each training image with probability 1/2")
    unreadable: int = setting(-1, "image that cannot be decoded")


class Captions(Dataset):
    """Even images whose embeddings say how bright they are."""

    Config = CaptionsConfig

    @staticmethod
    def info(config):
        nulls = {"embeddings": torch.full((TOKENS, WIDTH), NULL), "mask": torch.zeros(TOKENS, dtype=torch.bool)}
        prompts = embedded(torch.tensor([-0.8, 0.8]))
        kind = Embeddings(nulls, prompts, names=("dark", "bright"))
        return DatasetInfo(SHAPE, kind, entries={"number": ((), torch.int64)})

    def __init__(self, config, split):
        self._length, self._unreadable = (40 if split == "train" else 12), config.unreadable

    def __len__(self):
        return self._length

    def fetch(self, indices):
        if self._unreadable in indices:
            raise UnreadableImage(self._unreadable, f"{self._unreadable}.png", "truncated")
        brightness = brightness_of(indices)
        images = brightness[:, None, None, None].expand(-1, *SHAPE).contiguous()
        return {"images": images, "number": torch.from_numpy(indices)} | embedded(brightness)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(DATASETS, "captions", Captions)


def training_data(config, size):
    return TrainingData(
        Captions(config, "train"), config, info=Captions.info(config), seed=3, end_sample=80, global_batch_size=size,
        local_batch_size=4, rank=0, world_size=1,
    )  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_entry_travels_and_is_replaced_with_its_image(num_workers):
    data = training_data(CaptionsConfig(unreadable=5, num_workers=num_workers), 8)
    batches = [data.next_batch() for _ in range(20)]
    data.close()
    for batch, repeated in zip(batches[4:6], data.again(first_sample=16, attempt=0, microbatches=2), strict=True):
        assert batch.keys() == repeated.keys() and all(torch.equal(batch[name], repeated[name]) for name in batch)
    met = torch.cat([batch["number"] for batch in batches])
    assert 5 not in met and met.bincount(minlength=40)[6] == 4  # image 6 stands for image 5 in both epochs
    for batch in batches:
        wanted = embedded(brightness_of(batch["number"].numpy()))
        assert set(batch) == {"images", "number", "embeddings", "mask", "samples"}
        assert all(torch.equal(batch[name], value) for name, value in wanted.items())
        assert torch.equal(batch["images"][:, 0, 0, 0], wanted["embeddings"][:, 0, 0])


# --- what is refused


@pytest.mark.parametrize(("model", "data", "message"), [
    ("dit", "captions", "model.name: dit takes no condition or a class, and data.name = captions gives embeddings "
     "(choose flux, or other data)"),
    ("flux", "digits", "model.name: flux takes embeddings, and data.name = digits gives a class "
     "(choose dit or edm2, or captions encoded as docs/fine_tuning.md describes, or other data)"),
])  # fmt: skip
def test_a_model_that_does_not_take_what_data_give_is_refused_in_one_line(model, data, message):
    (problem,) = problems(None, ["--model.name", model, "--data.name", data])
    assert problem.endswith(message)


def test_a_latent_store_does_not_keep_embeddings():
    info = DatasetInfo((3, 4, 4), Captions.info(None).condition_kind)
    with pytest.raises(DatasetError, match="data.name: captions gives embeddings, and a latent store keeps classes only"):
        ImageSource(CaptionsConfig(), info, "train")


@pytest.mark.parametrize(("broken", "message"), [
    (lambda batch: {name: value for name, value in batch.items() if name != "mask"}, "and no mask, which the dataset"),
    (lambda batch: batch | {"number": batch["number"][1:]}, r"number: torch.int64 \[0\], not torch.int64 \[1\]"),
    (lambda batch: batch | {"number": 1}, "number: is a int, not a tensor"),
    (lambda batch: batch | {"size": batch["number"]}, "a batch has size, which the dataset does not say it gives .add it to Dat"),
    (lambda batch: batch | {"samples": batch["number"]}, "a batch has samples, which the loader adds"),
])  # fmt: skip
def test_a_batch_that_breaks_its_declaration_is_named(monkeypatch, broken, message):
    fetch = Captions.fetch
    monkeypatch.setattr(Captions, "fetch", lambda self, indices: broken(fetch(self, indices)))
    with pytest.raises(DatasetError, match=message):
        training_data(CaptionsConfig(), 4).next_batch()
