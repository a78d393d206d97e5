"""Operations of a train step of the trainer beyond those of the shortest loop that trains the same model."""

import tempfile

import pytest
import torch

from benchmarks.trainer_overhead import loop_step, operations, trainer_step

# Images -> operations, those of random numbers included; the present counts: a change that needs more raises one on purpose.
BEYOND_THE_LOOP = {8: 437, 64: 437}


@pytest.mark.parametrize("batch", BEYOND_THE_LOOP)
def test_the_trainer_adds_few_operations_to_a_step(batch, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the trainer's run
    ours, bare = trainer_step(batch), loop_step(batch, torch.device("cpu"))
    for _ in range(2):  # the optimizer creates its state in the first
        ours()
        bare()
    assert 0 < operations(ours) - operations(bare) <= BEYOND_THE_LOOP[batch]
