"""Verification divided between ranks: each reads its share, and all say what one process says that reads everything."""

from itertools import chain

import pytest

from tests.distributed.verification_cases import DAMAGES
from tests.launcher import run_on_ranks

RANKS = 3


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_on_ranks("tests.distributed.verification_cases:checked_together", RANKS)


def test_each_file_is_hashed_by_one_rank_when_resuming(found):
    assert [of_rank["saved"] for of_rank in found] == [None] * RANKS
    steps, hashed = zip(*(of_rank["found"] for of_rank in found), strict=True)
    assert set(steps) == {1} and all(len(names) <= 2 for names in hashed)
    assert sorted(chain(*hashed)) == [*(f"shard-{rank:05d}.safetensors" for rank in (1, 2, 3)), "state.json"]


def test_tensors_are_read_into_any_layout(found):
    assert all(of_rank["read"] for of_rank in found)


def test_one_rank_reads_without_the_others(found):
    assert all(of_rank["read by one rank"] for of_rank in found)


def test_what_one_rank_cannot_read_is_said_on_all(found):
    for of_rank in found:
        assert of_rank["unread"] == [
            "a tensor is missing: weigth", "a tensor has the shape [8, 3] instead of [8, 4]: weight",
            "a collective was called in work of the first rank alone, where no other rank answers",
        ]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_ranks_name_a_damage_as_one_process_does(found, damage):
    together, alone, newest = found[0][damage]
    assert alone and together == alone and newest is None
    assert all(of_rank[damage] == found[0][damage] for of_rank in found)


def test_a_piece_in_the_wrong_place_fails_the_save_and_the_one_before_stays(found):
    for of_rank in found:
        problem, step = of_rank["wrong place"]
        assert "the pieces of weight leave a gap or overlap" in problem and step == 2


def test_a_store_that_one_rank_cannot_reach_is_no_damage():
    said = run_on_ranks("tests.distributed.verification_cases:store_that_does_not_answer", 2)
    assert said == ["rank 1 gets no answer"] * 2
