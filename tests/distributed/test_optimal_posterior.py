"""Posterior over a training set that ranks divide among themselves."""

from pathlib import Path

import numpy as np
import torch.distributed as dist

from tests.launcher import run_on_ranks
from tests.memory_images import draws_of, training_set
from torchtitan.evaluation import optimal_draws


def posterior(folder: str) -> list:
    """Posterior by this rank and another; blocks of one image, so that each has 32."""
    optimal_draws._BLOCK_BYTES = 1
    found = draws_of(training_set(), Path(folder), rank=dist.get_rank(), world_size=2)
    return [found.posterior.mean.flatten().tolist(), found.posterior.variance.tolist()]


def test_posterior_by_two_ranks_equals_that_of_one(tmp_path):
    one = draws_of(training_set(), tmp_path / "one")
    for mean, variance in run_on_ranks(f"{__name__}:posterior", 2, {"folder": str(tmp_path / "two")}):
        np.testing.assert_allclose(mean, one.posterior.mean.flatten(), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(variance, one.posterior.variance, rtol=1e-9, atol=1e-13)
    assert len(list((tmp_path / "two").iterdir())) == 1
