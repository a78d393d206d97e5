"""Latent stores that are damaged, cut short or not what their index says: one line each, and never a wrong image."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.faults.confinement import bounded
from tests.latent_stores import images, plan_of, write_store
from tests.refusals import one_line
from torchtitan.data import DatasetError
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.errors import LatentStoreError
from torchtitan.latents import LatentStore, StoreWriter, verify_shards
from torchtitan.latents.index import INDEX_FILE, read_index, read_sealed, write_sealed

SHARD = "shard-00001.safetensors"


@pytest.fixture(scope="module")
def good_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    write_store(folder)
    return folder


@pytest.fixture
def store(good_store, tmp_path):
    return Path(shutil.copytree(good_store, tmp_path / "store"))


def refused(folder, number=8) -> str:
    """What opening the store, or else reading an image of the second shard, says."""
    return one_line(LatentStoreError, lambda: LatentStore(folder).read(np.array([number])))


def replace_shard(folder, tensors):
    """Put other tensors into the second shard, and its size into the index."""
    content = safetensors.torch.save(tensors)
    (folder / SHARD).write_bytes(content)
    change_index(folder, lambda index: index["shards"][1].update(size=len(content)))


def change_index(folder, change):
    index = read_sealed(folder / INDEX_FILE)
    change(index)
    write_sealed(folder / INDEX_FILE, index)


def shard_tensors(folder):
    return safetensors.torch.load((folder / SHARD).read_bytes())


def test_missing_shard(store):
    (store / SHARD).unlink()
    assert refused(store) == f"{store}/{SHARD}: missing, though index.json lists it; take a good copy of it"


def test_truncated_shard(store):
    content = (store / SHARD).read_bytes()
    (store / SHARD).write_bytes(content[:-1])
    assert f"{SHARD}: {len(content) - 1} bytes, not {len(content)}: cut short" in refused(store)
    problems = list(verify_shards(store, read_index(store)))
    assert [bool(problem) for problem in problems] == [False, True, False]


@pytest.mark.parametrize("place", ["header", "latents", "last byte"])
def test_flipped_byte_is_found_by_verify(store, place):
    content = bytearray((store / SHARD).read_bytes())
    content[{"header": 12, "latents": len(content) // 2, "last byte": -1}[place]] ^= 4
    (store / SHARD).write_bytes(content)
    problems = list(verify_shards(store, read_index(store)))
    assert problems == ["", f"{store / SHARD}: damaged, its SHA-256 is another; take a good copy of it", ""]


def test_shard_of_other_shape_dtype_count_or_names(store):
    good = shard_tensors(store)
    for tensors in (
        good | {"latents": good["latents"].flatten(-2)}, good | {"latents": good["latents"].bfloat16()},
        {name: tensor[:7] for name, tensor in good.items()}, {"latents": good["latents"]},
        good | {"more": good["labels"].clone()},
    ):  # fmt: skip
        replace_shard(store, tensors)
        assert f"{SHARD}: holds other tensors than the index describes" in refused(store)


def test_labels_out_of_range_are_refused_when_written_read_and_verified(store, tmp_path):
    good = shard_tensors(store)
    good["labels"][3] = 10
    replace_shard(store, good)
    assert "image 11: label 10 is not in 0..9; the index does not describe its shard" in refused(store, 11)
    LatentStore(store).read(np.array([8]))
    good["labels"][3] = -1
    replace_shard(store, good)
    assert "image 11: label -1 is not in 0..9" in refused(store, 11)
    writer = StoreWriter(tmp_path / "new", plan_of())
    values, labels = images(writer.plan, 8, 16)
    with pytest.raises(LatentStoreError, match="^image 8: label 10 is not in 0..9$"):
        writer.write(1, values, labels + 2)
    assert writer.pending() == [0, 1, 2]


@pytest.mark.parametrize(("change", "message"), [
    (lambda text: "", "not JSON"), (lambda text: '{"num_images": 3}', "damaged or edited"),
    (lambda text: text.replace('"num_classes": 10', '"num_classes": 11'), "damaged or edited, its checksum does not agree"),
])  # fmt: skip
def test_index_that_is_none_or_has_a_flipped_digit(store, change, message):
    path = store / INDEX_FILE
    path.write_text(change(path.read_text()))
    assert message in refused(store)


@pytest.mark.parametrize(("change", "message"), [
    (lambda index: index.update(version=2), "version"),
    (lambda index: index.update(class_names=["a"]), "1 class names for 10 classes"),
])  # fmt: skip
def test_index_that_contradicts_itself(store, change, message):
    change_index(store, change)
    assert message in refused(store)


@pytest.mark.parametrize(("dtype", "value"), [
    ("float16", 70_000.0), ("float16", torch.nan), ("bfloat16", torch.inf), ("int8", torch.nan),
])  # fmt: skip
def test_values_that_the_dtype_cannot_hold_are_refused_when_written(tmp_path, dtype, value):
    writer = StoreWriter(tmp_path, plan_of(dtype=dtype))
    values, labels = images(writer.plan, 8, 16)
    values[3, 1, 0, 2, 5, 5] = value
    with pytest.raises(LatentStoreError, match=f"^image 11: {value:g} is n"):
        writer.write(1, values, labels)
    assert writer.pending() == [0, 1, 2]


def test_constant_channel_cannot_be_normalised(tmp_path):
    writer = StoreWriter(tmp_path, plan_of(8, posterior=False))
    values, labels = images(writer.plan, 0, 8)
    values[:, :, :, 2] = 3
    writer.write(0, values, labels)
    with pytest.raises(LatentStoreError, match="channel 2 is constant"):
        writer.finish()
    assert json.loads((tmp_path / "partial" / "plan.json").read_text())["num_source_images"] == 8


def test_a_shape_that_the_shards_do_not_have_is_refused_before_training(store):
    change_index(store, lambda index: index.update(shape=[4, 1 << 13, 1 << 13]))
    with bounded(10, 200 << 20), pytest.raises(DatasetError, match="data.path: .*holds other tensors than the index describes"):
        Latents.info(LatentsConfig(path=str(store)))
