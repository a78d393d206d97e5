"""Loader processes: batches where shared memory is small, a process that is lost, and how many can be meant."""

import logging
import multiprocessing
import os
import resource
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data._utils import signal_handling

from tests.forked import ForkedProcess
from tests.small_shared_memory import needs_mounts, shrink_shared_memory
from torchtitan.data import DatasetError
from torchtitan.training.data_loading import read_here
from torchtitan.training.loader_processes import LoaderProcesses, crowded_cores, shared_memory_shortage

MIB = 2**20


class Images:
    """Batch i: a large tensor and a small one that hold i, and something else."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __getitem__(self, number):
        time.sleep(self._seconds)
        return {"images": torch.full((600, 1024), float(number)), "labels": torch.tensor([number]), "text": str(number)}


def loading(num_workers: int, count: int = 12, **keys) -> LoaderProcesses:
    return LoaderProcesses("blocks", num_workers, dataset=Images(**keys), sampler=range(count), prefetch_factor=2)


def read_all(num_workers: int) -> None:
    for number, batch in enumerate(loading(num_workers) if num_workers else read_here(Images(), range(12))):
        assert batch.keys() == {"images", "labels", "text"} and batch["text"] == str(number)
        assert batch["images"].shape == (600, 1024) and (batch["images"] == number).all()
        assert batch["labels"].tolist() == [number] and batch["labels"].dtype == torch.int64
        batch["images"].add_(1)  # it can be written to
    assert number == 11


def read_where_shared_memory_is(size: str) -> int:
    multiprocessing.set_start_method("fork", force=True)  # not the test's
    logging.basicConfig(format="%(message)s")
    shrink_shared_memory(size)
    read_all(num_workers=2)
    return 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_arrive_whole_and_in_order(num_workers):
    read_all(num_workers)


def test_this_process_loads_a_batch_when_it_is_asked_for():
    asked = []

    class Recording(Images):
        def __getitem__(self, number):
            asked.append(number)
            return super().__getitem__(number)

    batches = read_here(Recording(), range(2))
    assert asked == []
    assert next(batches)["text"] == "0" and asked == [0]
    assert next(batches)["text"] == "1" and asked == [0, 1]
    with pytest.raises(StopIteration):
        next(batches)


@needs_mounts
def test_batches_that_find_no_shared_memory_arrive_all_the_same_and_it_is_said_once():
    process = ForkedProcess(read_where_shared_memory_is, ("3m",), dict(os.environ))  # a batch has 2.3 MiB
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count("/dev/shm is full: batches of the loader processes go through pipes") == 1
    assert "Traceback" not in said


def test_a_shortage_of_shared_memory_is_said_in_one_line_with_what_helps():
    batch = 16 * MIB
    assert shared_memory_shortage(batch, 0, 1, free_bytes=0) is None
    assert shared_memory_shortage(batch, 4, 1, free_bytes=9 * batch) is None
    text = shared_memory_shortage(batch, 4, 1, free_bytes=64 * MIB)
    assert text.startswith("/dev/shm has 64.0 MiB free, and 9 batches of 16.0 MiB are loaded ahead")
    assert "--shm-size=160m, or data.num_workers 1" in text and "\n" not in text
    assert shared_memory_shortage(batch, 1, 1, free_bytes=64 * MIB) is None  # as the advice says
    assert "data.num_workers 0" in shared_memory_shortage(batch, 4, 4, free_bytes=64 * MIB)


def test_more_processes_than_cores_are_said_in_one_line_and_not_by_torch(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    assert crowded_cores(0, 8) is crowded_cores(1, 2) is crowded_cores(2, 1) is None
    assert crowded_cores(2, 2) == "data.num_workers 2: 4 loader processes share 2 cores (try 1)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loading(3).close()


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "SIGKILL, as the system does where memory has run out (fewer data.num_workers"),
        (signal.SIGBUS, "SIGBUS: /dev/shm is full (docker run --shm-size"),
    ],
)
def test_a_lost_process_is_named_within_seconds_and_the_others_end(number, cause):
    known = set(multiprocessing.active_children())
    loader = loading(2, count=1000, seconds=0.01)
    next(loader)
    victim, _ = set(multiprocessing.active_children()) - known
    started = time.monotonic()
    os.kill(victim.pid, number)
    with pytest.raises((DatasetError, RuntimeError)) as caught:  # torch's handler of SIGCHLD raises anywhere
        for _ in range(1000):
            next(loader)
    assert f"loader process {victim.pid} was killed by {cause}" in loader.lost(1.0)
    assert caught.type is RuntimeError or f"dataset blocks: loader process {victim.pid}" in str(caught.value)
    loader.close()
    assert time.monotonic() - started < 4
    assert set(multiprocessing.active_children()) <= known


def test_a_lost_process_is_found_without_a_signal_of_its_death(monkeypatch):
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", True)  # as where a fork server starts them
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        loader = loading(1, count=1000, seconds=0.01)
        next(loader)
        (victim,) = loader._batches._workers
        started = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(DatasetError, match=f"loader process {victim.pid} was killed by SIGKILL"):
            for _ in range(1000):
                next(loader)
        assert time.monotonic() - started < 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def start_too_many() -> int:
    multiprocessing.set_start_method("fork", force=True)
    warnings.simplefilter("ignore")  # torch's, of more processes than cores
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20,) * 2)
    try:
        loading(64)
    except DatasetError as error:
        print(error)
        return 0 if not multiprocessing.active_children() else 3
    return 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts its open files in /proc")
def test_processes_that_cannot_be_started_are_one_line_and_none_is_left():
    process = ForkedProcess(start_too_many, (), dict(os.environ))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.startswith("dataset blocks: 64 loader processes cannot be started: Too many open files (set data.num_w")
    assert said.count("\n") == 1
