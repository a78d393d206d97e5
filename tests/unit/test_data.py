"""Datasets and the order in which training and validation read them."""

import dataclasses
import multiprocessing
import os
import pickle
import re
import signal
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image

from tests.distributed.cases import make_trainer
from tests.encoded_images import image_bytes, write_tar
from tests.latent_stores import plan_of, write_store
from tests.unit.test_cifar10 import random_images, write_parquet
from torchtitan import philox
from torchtitan.conditions import Classes, Unconditional
from torchtitan.data import DATASETS, DataConfig, Dataset, DatasetError, DatasetInfo, dataset_info
from torchtitan.data.digits import Digits, DigitsConfig
from torchtitan.data.image_folder import ImageFolderConfig
from torchtitan.extraction.image_source import ImageSource
from torchtitan.settings import has_key, setting
from torchtitan.state.resume import load_position
from torchtitan.training.data_loading import TrainingData, validation_batches
from torchtitan.training.sample_order import SampleOrder
from torchtitan.weights.trained_model import load_run

# --- order


@dataclass(kw_only=True)
class NumberedConfig(DataConfig):
    name: Literal["numbered"] = setting("numbered", "dataset")
    horizontal_flip: bool = setting(False, "mirror")


class Numbered(Dataset):
    """Image i has i in its left pixel and -1 in its right one; `broken` cannot be read."""

    Config = NumberedConfig

    def __init__(self, length: int, broken: int = -1) -> None:
        self._length = length
        self._broken = broken

    @staticmethod
    def info(config):
        return DatasetInfo((1, 1, 2), Classes(1))

    def __len__(self):
        return self._length

    def fetch(self, indices):
        if self._broken in indices:
            raise OSError("disk\nfell off")
        left = torch.from_numpy(indices).to(torch.float32)
        images = torch.stack((left, -torch.ones_like(left)), dim=-1)[:, None, None]
        return {"images": images, "class": torch.zeros(len(indices), dtype=torch.int64)}


def training_data(dataset, rank=0, world_size=1, *, total=120, size=12, local=2, seed=3, config=None, **keys):
    config = config or NumberedConfig(**keys)
    return TrainingData(
        dataset, config, info=dataset.info(config), seed=seed, end_sample=total, global_batch_size=size,
        local_batch_size=local, rank=rank, world_size=world_size,
    )  # fmt: skip


def read_all(data, steps):
    batches = [data.next_batch() for _ in range(steps * data.microbatches_per_step)]
    data.close()
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def read_layout(world_size, local, steps=10, **keys):
    """All ranks' batches, put in the order of sample numbers."""
    ranks = [
        read_all(training_data(Numbered(30), rank, world_size, local=local, **keys), steps)
        for rank in range(world_size)
    ]
    merged = {key: torch.cat([rank[key] for rank in ranks]) for key in ranks[0]}
    return {key: value[merged["samples"].argsort()] for key, value in merged.items()}


def image_numbers(batch):
    return batch["images"][:, 0, 0, 0].to(torch.int64)


def test_every_image_is_read_once_per_epoch_over_ranks_and_microbatches():
    batch = read_layout(world_size=3, local=2)  # 12 per step does not divide 30: steps straddle epochs
    assert batch["samples"].tolist() == list(range(120))
    epochs = image_numbers(batch).reshape(4, 30)
    assert (epochs.sort(dim=1).values == torch.arange(30)).all()
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


@pytest.mark.parametrize(("world_size", "local"), [(1, 3), (1, 1), (2, 6), (2, 3), (4, 3), (6, 1)])
def test_samples_do_not_depend_on_ranks_or_accumulation(world_size, local):
    one = read_layout(world_size=1, local=12, horizontal_flip=True)
    other = read_layout(world_size=world_size, local=local, horizontal_flip=True)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_each_step_covers_its_own_samples_microbatch_by_microbatch():
    data = training_data(Numbered(30), rank=1, world_size=2, local=3)
    assert [data.next_batch()["samples"].tolist() for _ in range(3)] == [[3, 4, 5], [9, 10, 11], [15, 16, 17]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_within_an_epoch_equals_the_uninterrupted_run(num_workers, world_size):
    straight = read_layout(world_size=1, local=12, horizontal_flip=True)
    before = training_data(Numbered(30), num_workers=num_workers, horizontal_flip=True)
    first = read_all(before, steps=4)  # 48 samples: within the second epoch
    state = pickle.loads(pickle.dumps(before.state_dict()))
    assert state == {"next_sample": 48, "attempt": 0}
    ranks = []
    for rank in range(world_size):
        after = training_data(Numbered(30), rank, world_size, num_workers=num_workers, horizontal_flip=True)
        after.next_batch()
        after.close()  # as a rollback does
        load_position(after, state)
        ranks.append(read_all(after, steps=6))
    images = torch.cat([first["images"], *(rank["images"] for rank in ranks)])
    samples = torch.cat([first["samples"], *(rank["samples"] for rank in ranks)])
    assert torch.equal(images[samples.argsort()], straight["images"])


def test_state_within_a_step_is_that_of_its_beginning():
    data = training_data(Numbered(30), local=3)
    for _ in range(6):
        data.next_batch()
    assert data.state_dict()["next_sample"] == 12
    data.close()
    assert data.next_batch()["samples"][0] == 12


def test_flips_are_a_function_of_the_sample_number():
    data = training_data(Numbered(30), total=4000, size=400, local=400, horizontal_flip=True)
    batch = read_all(data, steps=10)
    flipped = batch["images"][:, 0, 0, 0] == -1
    assert torch.equal(flipped, philox.uniform(3, "horizontal_flip", torch.arange(4000)) < 0.5)
    assert 0.46 < flipped.float().mean() < 0.54
    plain = read_all(training_data(Numbered(30), total=4000, size=400, local=400), steps=10)
    assert (plain["images"][:, 0, 0, 1] == -1).all()
    assert torch.equal(batch["images"][flipped].flip(-1), plain["images"][flipped])
    assert torch.equal(batch["images"][~flipped], plain["images"][~flipped])


def test_another_attempt_or_seed_gives_another_order_and_other_flips():
    def read(attempt, seed):
        data = training_data(Numbered(30), seed=seed, horizontal_flip=True)
        load_position(data, {"next_sample": 0, "attempt": attempt})
        return read_all(data, steps=10)

    runs = [read(attempt, seed) for attempt, seed in ((0, 3), (1, 3), (0, 4))]
    assert torch.equal(runs[0]["images"], read(0, 3)["images"])
    for number, run in enumerate(runs):
        for other in runs[:number]:
            left, right = run["images"].amax(dim=(1, 2, 3)), other["images"].amax(dim=(1, 2, 3))
            assert (left != right).float().mean() > 0.8  # the order: which image
            assert 0.3 < ((run["images"][..., 0] == -1) != (other["images"][..., 0] == -1)).float().mean() < 0.7


def test_the_order_is_the_same_on_every_machine():
    assert SampleOrder(10, 5, 1).indices(np.arange(10, 20)).tolist() == [3, 6, 7, 5, 2, 8, 9, 4, 1, 0]


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    read_all(training_data(Numbered(30)), steps=2)
    assert torch.equal(torch.rand(3), expected)


# --- loader processes


def test_a_fault_in_the_code_of_a_dataset_is_named_with_its_line():
    class Faulty(Numbered):
        def fetch(self, indices):
            return {"images": self.missing}

    with pytest.raises(DatasetError, match=r"AttributeError: .* has no attribute 'missing' \(test_data.py:\d+\)"):
        read_all(training_data(Faulty(30)), steps=1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_read_names_dataset_image_and_cause(num_workers):
    known = set(multiprocessing.active_children())
    data = training_data(Numbered(30, broken=17), num_workers=num_workers)
    with pytest.raises(DatasetError) as caught:
        read_all(data, steps=3)
    assert str(caught.value) == "dataset numbered: image 17 cannot be read: OSError: disk fell off"
    assert set(multiprocessing.active_children()) <= known  # although the error's traceback is still held


def test_a_dataset_that_breaks_its_contract_is_named():
    class Mislabelled(Numbered):
        def fetch(self, indices):
            return super().fetch(indices) | {"class": torch.from_numpy(indices == 4).long()}

    class Misshapen(Numbered):
        def fetch(self, indices):
            batch = super().fetch(indices)
            return batch | {"images": batch["images"].double()}

    with pytest.raises(DatasetError, match="^dataset numbered: image 4 cannot be read: label 1 is not in 0..0$"):
        read_all(training_data(Mislabelled(30)), steps=3)
    with pytest.raises(DatasetError, match="torch.float64"):
        training_data(Misshapen(30)).next_batch()


def test_loader_processes_survive_the_request_to_stop_and_end_with_close():
    known = set(multiprocessing.active_children())
    data = training_data(Numbered(30), num_workers=2)
    for _ in range(2):  # one from each process
        data.next_batch()
    workers = set(multiprocessing.active_children()) - known
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    for _ in range(20):
        data.next_batch()
    assert data.data_seconds > 0
    data.close()
    assert set(multiprocessing.active_children()) <= known


# --- validation


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("num_images", "expected"), [(1, 1), (7, 7), (24, 24), (1000, 30)])
def test_validation_reads_the_first_images_once_in_equal_numbers_of_batches(world_size, num_images, expected):
    dataset = Numbered(30)
    ranks = [
        list(validation_batches(dataset, dataset.info(None), num_images, 4, rank, world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert len({len(batch["images"]) for batch in batches}) == 1 and len(batches[0]["images"]) <= 4
    for batch in batches:
        assert torch.equal(image_numbers(batch), batch["indices"])
    indices, weights = (torch.cat([batch[key] for batch in batches]) for key in ("indices", "weights"))
    assert (indices[weights == 0] == 0).all()
    assert sorted(indices[weights == 1].tolist()) == list(range(expected))
    assert weights.sum() == expected and (weights == 0).sum() < len(ranks) * len(ranks[0])


# --- digits, every dataset


def test_digits_are_split_into_disjoint_fixed_parts():
    train, held_out = Digits(DigitsConfig(), "train"), Digits(DigitsConfig(), "validation")
    assert (len(train), len(held_out)) == (1500, 297)
    whole = [part.fetch(np.arange(len(part))) for part in (train, held_out)]
    images, labels = (torch.cat([part[name] for part in whole]) for name in ("images", "class"))
    assert images.min() == -1 and images.max() == 1
    from sklearn.datasets import load_digits

    stored = load_digits()

    def rows(pixels, labels):
        counts = (8 * (pixels.reshape(1797, 64) + 1)).tolist()
        return sorted((*row, label) for row, label in zip(counts, labels.tolist(), strict=True))

    # Together exactly the stored images with their labels, hence nothing in both parts.
    assert rows(images, labels) == rows(torch.from_numpy(stored.images) / 8 - 1, torch.from_numpy(stored.target))
    assert torch.bincount(labels[1500:], minlength=10).min() >= 15


def write_images(folder, count):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{number}.JPEG")


def write_tinyimagenet(folder):
    write_images(folder / "train" / "n2" / "images", 2)
    write_images(folder / "train" / "n1" / "images", 2)
    write_images(folder / "val" / "images", 3)
    (folder / "wnids.txt").write_text("n2\nn1\n")
    (folder / "words.txt").write_text("n0\tthing\nn1\tfirst, one\nn2\tsecond, two\n")
    rows = ((0, "n2"), (1, "n1"), (2, "n2"))
    lines = "".join(f"{number}.JPEG\t{wnid}\t0\t0\t9\t9\n" for number, wnid in rows)
    (folder / "val" / "val_annotations.txt").write_text(lines)


def write_captioned(folder):
    write_images(folder / "inner", 60)
    for image in list((folder / "inner").iterdir()):
        image.with_suffix(".txt").write_text(f"picture {image.stem}")


WRITERS = {
    "captioned_folder": write_captioned,
    "cifar10": lambda folder: write_parquet(folder / "train-0.parquet", *random_images(30)),
    "cifar100": lambda folder: write_parquet(folder / "train-0.parquet", *random_images(30), label_column="fine_label"),
    "huggingface": lambda folder: write_parquet(folder / "train-0.parquet", *random_images(100)),
    "image_folder": lambda folder: [write_images(folder / name, 40) for name in ("a", "b")],
    "imagenet": lambda folder: [
        write_images(folder / split / wnid, 3) for split in ("train", "val") for wnid in ("n00000001", "n00000002")
    ],
    "tinyimagenet": write_tinyimagenet,
    "latents": lambda folder: write_store(folder, plan_of(80)),
    "webdataset": lambda folder: write_tar(
        folder / "a.tar", {f"{number}.{kind}": content for number in range(80) for kind, content in SAMPLE.items()}
    ),
}
SAMPLE = {"png": image_bytes(0), "cls": b"0"}
KEYS = {
    "captioned_folder": {"image_size": 8},
    "huggingface": {"image_size": 8, "streaming": True, "label_column": "label"},
    "image_folder": {"image_size": 8},
    "imagenet": {"image_size": 8},
    "webdataset": {"image_size": 8},
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_dataset_keeps_the_contract(name, split, tmp_path):
    dataset_class = DATASETS[name]
    config = dataset_class.Config(**KEYS.get(name, {}))
    if has_key(config, "path"):
        WRITERS[name](tmp_path)
        config.path = str(tmp_path)
    assert config.name == name
    info = dataset_class.info(config)
    dataset = dataset_class(config, split)
    indices = np.array([2, 0, 1])
    batch = dataset.fetch(indices)
    assert batch.keys() == {"images", *info.condition_kind.entries}
    images, labels = batch["images"], batch.get("class")
    assert images.dtype == torch.float32 and images.shape == (3, *info.image_shape)
    if labels is None:
        assert len(dataset.captions(indices)) == 3
    else:
        assert labels.dtype == torch.int64 and labels.shape == (3,)
        assert 0 <= labels.min() and labels.max() < info.num_classes
    assert len(info.class_names) in (0, info.num_classes)
    again = pickle.loads(pickle.dumps(dataset)).fetch(indices[1:])["images"]
    assert torch.equal(again, images[1:])


def documented_blocks(language):
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_documented_sections_are_valid():
    sections = [tomllib.loads(block)["data"] for block in documented_blocks("toml")]
    assert [DATASETS[section["name"]].Config(**section).name for section in sections] == [
        "image_folder", "captioned_folder", "imagenet", "huggingface", "webdataset", "synthetic",
    ]  # fmt: skip


def test_the_documented_dataset_trains():
    names = {"__name__": "stripes"}
    exec(documented_blocks("python")[0], names)
    config = names["StripesConfig"]()
    batch = read_all(training_data(names["Stripes"](config, "train"), config=config), steps=10)
    assert batch["images"].shape == (120, 1, 16, 16) and batch["class"].unique().tolist() == [0, 1]


# --- labels left aside


def test_a_run_without_labels_trains_an_unconditional_network(tmp_path):
    arguments = {"steps": 2, "replicas": 1, "shards": 1, "accumulation": 1}
    kept = (
        "--sampling.enable=true", "--checkpoint.enable=true", "--sampling.num_steps=2", "--sampling.images_per_class=2",
        "--validation.enable=true", "--lr_scheduler.warmup_steps=0",
    )  # fmt: skip
    with_labels = make_trainer(str(tmp_path), "with", **arguments, overrides=kept)
    without = make_trainer(str(tmp_path), "without", **arguments, overrides=("--data.labels=false", *kept))
    assert isinstance(without.state.model.condition_kind, Unconditional)
    classes = {"label_embed.weight": 11 * with_labels.state.model.label_embed.weight.shape[1]}
    sizes = [{name: p.numel() for name, p in each.state.parameters.items()} for each in (with_labels, without)]
    assert sizes[0] == sizes[1] | classes
    # The images are the same ones, in the same order.
    assert torch.equal(*(each.state.data.next_batch()["images"] for each in (with_labels, without)))
    for each in (with_labels, without):
        each.state.data.close()
        load_position(each.state.data, {"next_sample": 0, "attempt": 0})
    assert without.train() == 0
    assert load_run(tmp_path / "without", None, None, torch.device("cpu")).info.num_classes == 0
    with_labels.close()
    without.close()


def test_images_are_encoded_without_labels_if_they_are_left_aside(tmp_path):
    for number, name in enumerate(("a", "a", "b", "b")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{number}.png").write_bytes(image_bytes(number))
    config = ImageFolderConfig(path=str(tmp_path), image_size=8, validation_fraction=0.0)
    bare = dataclasses.replace(config, labels=False)
    sources = [ImageSource(each, dataset_info(each), "train") for each in (config, bare)]
    labels = [source.read(range(len(source)))[1] for source in sources]
    assert labels[0].unique().tolist() == [0, 1] and labels[1].unique().tolist() == [0]
    assert "labels" not in sources[0].origin()["data"] and sources[1].origin()["data"]["labels"] is False
