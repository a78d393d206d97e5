"""Shards whose bytes change on the disk are noticed while a store is read."""

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from tests.latent_stores import plan_of, write_store
from torchtitan.data import DatasetError
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.errors import LatentStoreError
from torchtitan.latents import LatentStore, watch

SHARD = "shard-00001.safetensors"
CHANGED = f"{SHARD}: has changed since it was written, its SHA-256 is another"


@pytest.fixture
def store(tmp_path):
    write_store(tmp_path, plan_of(20, normalization=None))
    return tmp_path


def flip(folder, keep_time=False):
    path = folder / SHARD
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_until_refused(reader, images=(0,), seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            reader.read(np.array(images))
        except LatentStoreError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("the change was not noticed")


def test_a_changed_shard_is_refused_when_it_is_first_used(store):
    flip(store, keep_time=True)
    reader = LatentStore(store, watched=True)
    reader.read(np.arange(8))
    with pytest.raises(LatentStoreError, match=CHANGED) as caught:
        reader.read(np.array([8]))
    assert "\n" not in str(caught.value) and f"scripts/latents.py verify {store} finds all such" in str(caught.value)
    LatentStore(store).read(np.array([8]))  # what is not watched reads what is there


def test_a_changed_first_shard_is_refused_before_training(store):
    for name in ("shard-00000.safetensors", SHARD):
        os.rename(store / name, store / f"{name}.old")
    os.rename(store / f"{SHARD}.old", store / "shard-00000.safetensors")
    os.rename(store / "shard-00000.safetensors.old", store / SHARD)
    with pytest.raises(DatasetError, match="data.path: .*shard-00000.safetensors: has changed since it was written"):
        Latents.info(LatentsConfig(path=str(store)))


def test_what_is_too_large_to_wait_for_is_hashed_beside_the_reading(store, monkeypatch):
    read, check = threading.Event(), watch.ShardWatch._check

    def check_after_the_read(self, number, rest):
        assert read.wait(20)
        check(self, number, rest)

    monkeypatch.setattr(watch, "BYTES_AT_ONCE", 0)
    monkeypatch.setattr(watch.ShardWatch, "_check", check_after_the_read)
    flip(store)
    reader = LatentStore(store, watched=True)
    reader.read(np.array([8]))  # does not wait for the hash
    read.set()
    for each, images in ((reader, (0,)), (LatentStore(store, watched=True), (8, 9))):
        assert CHANGED in read_until_refused(each, images)


def test_a_change_after_the_first_use_is_noticed_too_and_a_copy_of_the_same_bytes_is_none(store, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LOOKS", 0.01)
    reader = LatentStore(store, watched=True)
    reader.read(np.arange(20))
    content = (store / SHARD).read_bytes()
    (store / "copy").write_bytes(content)
    os.replace(store / "copy", store / SHARD)
    time.sleep(0.2)
    reader.read(np.arange(20))
    flip(store)
    assert CHANGED in read_until_refused(reader)


def test_a_shard_that_is_gone_harms_nobody_who_has_it_mapped(store, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LOOKS", 0.01)
    reader = LatentStore(store, watched=True)
    values, _ = reader.read(np.arange(20))
    (store / SHARD).unlink()
    time.sleep(0.2)
    assert (reader.read(np.arange(20))[0] == values).all()


def test_one_process_of_each_machine_hashes_in_a_thread_that_ends_with_its_store(store, monkeypatch):
    reader = LatentStore(store, watched=True)
    reader.read(np.arange(20))
    thread = reader._watch._thread
    assert thread.is_alive() and thread.daemon
    del reader
    thread.join(10)
    assert not thread.is_alive()
    monkeypatch.setenv("LOCAL_RANK", "1")
    reader = LatentStore(store, watched=True)
    reader.read(np.arange(20))
    assert reader._watch._thread is None


def test_a_thread_with_much_left_to_hash_ends_with_its_store(store, monkeypatch):
    monkeypatch.setattr(watch, "BYTES_AT_ONCE", 0)
    hashed = []
    monkeypatch.setattr(watch.ShardWatch, "_mark", lambda self, number: (hashed.append(number), time.sleep(0.2)) and None)
    reader = LatentStore(store, watched=True)
    reader.read(np.arange(20))
    thread, shards = reader._watch._thread, reader.index.num_shards
    del reader
    thread.join(10)
    assert not thread.is_alive() and len(hashed) < shards


def test_a_forked_copy_watches_by_itself(store):
    reader = LatentStore(store, watched=True)
    reader.read(np.arange(8))
    flip(store)

    def child():
        try:
            reader.read(np.array([8]))
        except LatentStoreError as error:
            os._exit(0 if CHANGED in str(error) else 1)
        os._exit(2)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
