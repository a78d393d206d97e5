"""Checkpoints that two ranks write while they train on: values of the step asked for, one outcome for all."""

import pytest

from tests.launcher import run_on_ranks

LAYOUTS = {"DDP": {"replicas": 2, "shards": 1}, "FSDP": {"replicas": 1, "shards": 2}}


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks("tests.distributed.checkpoint_cases:all_cases", 2, {"layouts": LAYOUTS})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_beside_training_equals_one_between_steps_bit_for_bit(ranks, layout):
    for found in (rank["saved"][layout] for rank in ranks):
        assert found["same bytes"] and found["norms"]["async"] == found["norms"]["disabled"]
    assert ranks[0]["saved"][layout]["written beside training"]
    shards = ["shard-00001.safetensors", "shard-00002.safetensors"]
    assert ranks[0]["saved"][layout]["files"] == ["manifest.json", *shards, "state.json"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_full_for_one_rank_fails_the_save_on_all_and_the_next_one_works(ranks, mode):
    first, second = (rank["failed"][mode] for rank in ranks)
    assert first == second
    assert first["problem"].endswith("No space left on device") and first["failures"] == 1
    assert first["left"] == ["step-00000001"]
    assert first["again"] is None and first["good"] == [3, []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_from_a_store_bit_for_bit(ranks, layout):
    for found in (rank["stores"][layout] for rank in ranks):
        assert found["resumed after"] == 2 and found["resumed"] == found["norms"][2:]
        assert found["read"] == "step 2, trained weights" and found["weights"]
        shards = ["shard-00001.safetensors", "shard-00002.safetensors"]
        assert found["files"] == ["manifest.json", *shards, "state.json"]
        assert found["copies left"] == [] and not found["in the run's folder"]
