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
    memory = estimate_memory(load_config(words, ranks), ranks)
    parts = {"weights": memory.parameters, "gradients": memory.all_gradients, "optimizer": memory.optimizer}
    parts["averages"] = memory.ema
    found = run_on_ranks("tests.distributed.estimate_cases:peak", ranks, {"words": words, "ranks": ranks})
    for peak, unseen, held in found:
        assert 0.9 * (peak - max(unseen, 0)) <= memory.total <= 1.1 * peak
        assert sum(held.values()) < peak / 2**30
    fullest = {name: 2**30 * max(held[name] for _, _, held in found) for name in parts}
    assert fullest == pytest.approx(parts, rel=0.01)


# So many tokens that activations are most of the memory.
TOKENS = [
    "--model.flavor", "debug", "--gns.enable", "false", "--training.local_batch_size", "8", "--data.name", "synthetic",
    "--data.kind", "noise", "--data.shape", "[4, 32, 32]", "--parallelism.context_parallel_degree", "2",
]  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "full"])
def test_estimate_has_the_activations_of_a_rank_s_share_of_the_tokens(mode):
    words = [*TOKENS, "--activation_checkpoint.mode", mode]
    estimated = estimate_memory(load_config(words, 2), 2)
    assert estimated.activations > 0.6 * estimated.total
    alone = estimate_memory(load_config([*words, "--parallelism.context_parallel_degree", "1"], 1), 1)
    assert estimated.activations < 0.6 * alone.activations  # half, and what belongs to an image and not to its tokens
    for peak, unseen, _ in run_on_ranks("tests.distributed.estimate_cases:peak", 2, {"words": words, "ranks": 2}):
        assert 0.95 * (peak - max(unseen, 0)) <= estimated.total <= 1.05 * peak
