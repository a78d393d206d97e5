"""Extraction by several processes: every image once, the same bytes on any number of them and after any kills."""

import os
import random
import signal
import sys
import time

import pytest

from tests.extractions import content, run_rank, write_inputs
from tests.forked import ForkedProcess
from tests.launcher import free_port
from tests.process_state import descendants, process_state
from torchtitan.latents.index import PARTIAL_FOLDER

COUNT = 72  # in 24 shards
BAD = (4, 30, 31, 32, 71)
CAPTIONS = [
    "--text-encoder", "stub:8", "--pooled-encoder", "stub:4", "--text-length", "5", "--class-captions", "a photo of a {}",
    "--prompts", "one", "two", "three", "a photo of a class1",
]  # of 7 texts in 3 files


class Ranks:
    def __init__(self, words: list[str], count: int, kill_at: int = -1) -> None:
        """kill_at: the file at whose renaming the first rank dies; -1: it does not."""
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        self.processes = [
            ForkedProcess(
                run_rank, (words, -1 if rank else kill_at), shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(count)
        ]

    def wait(self) -> list[int]:
        return [process.wait(600) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.wait()

    def said(self) -> str:
        return "".join(process.said() for process in self.processes)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), COUNT, bad=BAD) + CAPTIONS


@pytest.fixture(scope="module")
def straight(words, tmp_path_factory):
    store = tmp_path_factory.mktemp("straight") / "store"
    ranks = Ranks(["--output", str(store), *words], 1)
    assert ranks.wait() == [0], ranks.said()
    return content(store)


def test_store_is_the_same_on_four_ranks(words, straight, tmp_path):
    ranks = Ranks(["--output", str(tmp_path / "store"), *words], 4)
    assert ranks.wait() == [0] * 4, ranks.said()
    assert content(tmp_path / "store") == straight
    assert f"{COUNT} images in" in ranks.said() and "on 4 ranks" in ranks.said()


def test_store_is_the_same_after_kills_at_random_moments_on_other_numbers_of_ranks(words, straight, tmp_path):
    store, moments, left = tmp_path / "store", random.Random(7), []
    for count in (1, 2, 1, 2, 4):  # the last one's other ranks may come far before they are killed too
        ranks = Ranks(["--output", str(store), *words], count, kill_at=moments.randrange(1, 5))
        assert ranks.processes[0].wait(600) == -signal.SIGKILL, ranks.said()
        ranks.kill()
        left.append(27 - len(list((store / PARTIAL_FOLDER).glob("*-*"))))
    assert left == sorted(left, reverse=True) and left[-2] > 0 and not (store / "index.json").exists()
    ranks = Ranks(["--output", str(store), *words], 2)
    assert ranks.wait() == [0, 0], ranks.said()
    assert content(store) == straight


def test_rank_that_fails_says_why_and_the_others_end_too(words, straight, tmp_path):
    """A folder in the way of a shard of the second rank."""
    store = tmp_path / "store"
    begun = Ranks(["--output", str(store), *words], 1, kill_at=1)
    begun.wait()
    (store / "shard-00003.safetensors").mkdir()
    ranks = Ranks(["--output", str(store), *words], 2)
    assert ranks.wait() == [1, 1]
    assert "rank 1: " in ranks.said() and "shard-00003.safetensors: is a folder, not a regular file" in ranks.said()
    assert "rank 0: lost another rank" in ranks.said()
    (store / "shard-00003.safetensors").rmdir()
    assert Ranks(["--output", str(store), *words], 1).wait() == [0]
    assert content(store) == straight


def test_refusal_is_said_once(words, tmp_path):
    for more in (["--data.image_size", "12"], ["--data.image_size", "none"], ["--batch-size", "0"]):
        ranks = Ranks(["--output", str(tmp_path / "store"), *words, *more], 2)
        assert ranks.wait() == [2, 2], ranks.said()
        assert ranks.said().count("\n") == 1, ranks.said()


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_decoding_processes_end_with_a_rank_that_is_killed(words, tmp_path):
    ranks = Ranks(["--output", str(tmp_path / "store"), *words, "--num-workers", "3"], 1)
    deadline = time.monotonic() + 300
    while len(left := descendants(ranks.processes[0].pid)) < 3 and ranks.processes[0].poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    ranks.kill()
    assert len(left) >= 3
    while {process_state(pid) for pid in left} != {"gone"}:
        assert time.monotonic() < deadline, [process_state(pid) for pid in left]
        time.sleep(0.05)
