"""The estimated memory of a step is what the allocator hands out in real processes."""

import pytest

from benchmarks.estimate_memory import LAYOUTS, degrees
from tests.launcher import run_on_ranks
from torchtitan.config.job import load_config
from torchtitan.estimate.memory import estimate_memory

# So few tokens that weights, gradients and state are most of the memory.
WORDS = [
    "--model.flavor", "debug", "--training.local_batch_size", "2", "--data.name", "synthetic", "--data.kind", "noise",
    "--data.shape", "[4, 8, 8]",
]  # fmt: skip


FLUX = ["--model.name", "flux", "--data.text_length", "4", "--data.text_dim", "32", "--data.pooled_dim", "24"]


@pytest.mark.parametrize(("layout", "more"), [*((layout, []) for layout in LAYOUTS), ("FSDP x 2", FLUX)])
def test_estimate_is_within_ten_percent_of_the_measured_peak(layout, more):
    replicas, shards = LAYOUTS[layout]
    ranks = replicas * shards
    words = [*WORDS, *more, *degrees(replicas, shards)]
    estimated = estimate_memory(load_config(words, ranks), ranks).total
    for peak, unseen in run_on_ranks("tests.distributed.estimate_cases:peak", ranks, {"words": words, "ranks": ranks}):
        assert 0.9 * (peak - max(unseen, 0)) <= estimated <= 1.1 * peak
