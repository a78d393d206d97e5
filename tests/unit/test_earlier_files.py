"""Files that earlier versions wrote are read as they were meant: a run goes on from its checkpoint, a store has its values."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.faults.forked import ForkedRun
from tests.latent_stores import images, plan_of
from torchtitan.latents import LatentStore

EARLIER = Path(__file__).parents[1] / "fixtures" / "earlier"


def test_a_run_of_an_earlier_version_goes_on_from_its_checkpoint(tmp_path):
    shutil.copytree(EARLIER / "run", tmp_path / "outputs" / "earlier")
    recorded = [json.loads(line) for line in (EARLIER / "run" / "metrics.jsonl").read_text().splitlines()]
    shutil.copy(EARLIER / "run" / "config.toml", tmp_path)
    run = ForkedRun(tmp_path / "config.toml", "earlier")
    (output,) = run.finish()
    assert "resumed after step 2 of 4" in output
    points = run.points()
    assert [point["step"] for point in points] == [1, 2, 3, 4] == [point["step"] for point in recorded]
    for then, now in zip(recorded, points, strict=True):
        for tag in ("loss_metrics/global_avg_loss", "grad_norm", "lr"):
            assert now[tag] == pytest.approx(then[tag], rel=1e-6), tag  # bit for bit on the same kind of processor


def test_a_store_of_an_earlier_version_has_its_values():
    store, plan = LatentStore(EARLIER / "store"), plan_of(6, shape=(2, 4, 4), images_per_shard=4)
    expected, labels = images(plan, 0, 6)
    for view in range(2):
        found, found_labels = store.read(np.arange(6), np.full(6, view))
        assert torch.equal(found_labels, labels) and torch.equal(found, expected[:, view].half().float())
