"""Laws of cost of benchmarks/scale.py: that every one of them runs, and those that count instead of timing, at small sizes."""

import pytest

from benchmarks.scale import FLAVORS, LAWS, RANKS, exponent, meta_model

# Small sizes of the laws in seconds, which say nothing here but that both ways are still there.
TIMED = {"headers": 4, "reading": 4, "initial": 4, "order": 1 << 12, "pictures": 100, "listing": 100, "contents": 10}
COUNTED = {
    "heartbeats": [16, 32, 64], "hashing": [4, 16, 64], "drawing": [0, 1], "frozen": [0, 1], "raw_rows": [1_000, 2_000, 4_000],
}  # fmt: skip


def costs(name: str, size: int, folder) -> tuple[float, float]:
    return LAWS[name][3](folder / str(size), size)


def test_every_law_is_measured_here():
    assert sorted([*TIMED, *COUNTED]) == sorted(LAWS)


@pytest.mark.parametrize("name", TIMED)
def test_a_timed_law_runs(name, tmp_path):
    assert all(seconds > 0 for seconds in costs(name, TIMED[name], tmp_path))


@pytest.mark.parametrize(("name", "before", "after"), [("heartbeats", 1, 1), ("hashing", 0, -1), ("raw_rows", 1, 0)])
def test_exponents_of_what_is_counted(tmp_path, name, before, after):
    sizes = COUNTED[name]
    was, is_now = zip(*(costs(name, size, tmp_path) for size in sizes), strict=True)
    for found, power in ((was, before), (is_now, after)):
        # Counts at sizes that double: the law holds in every bit, not in the slope of the fit alone.
        assert [cost / found[0] for cost in found] == [(size / sizes[0]) ** power for size in sizes]
        assert exponent(sizes, found) == power
    if name == "heartbeats":
        assert [8 * files for files in is_now] == sizes


@pytest.mark.parametrize(("name", "bytes_per_weight"), [("drawing", 4), ("frozen", 2)])
def test_a_rank_of_many_draws_its_shard_and_one_whole_tensor(tmp_path, name, bytes_per_weight):
    """Beside them the buffers, and adapters of the frozen network, which every rank has whole."""
    for number in COUNTED[name]:
        model = meta_model(FLAVORS[number])
        weights = [(one.numel(), -(-one.shape[0] // RANKS) * one[0].numel()) for one in model.parameters()]
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        was, is_now = (2**30 * gib for gib in costs(name, number, tmp_path))
        adapters = was - bytes_per_weight * sum(whole for whole, _ in weights) - buffers
        assert (adapters > 0) == (name == "frozen")
        largest, shard = max(whole for whole, _ in weights), sum(part for _, part in weights)
        assert is_now == bytes_per_weight * (shard + largest) + buffers + adapters
