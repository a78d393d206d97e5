import itertools
import json
import statistics

import pytest

from torchtitan.runs.analysis.axes import add_further_axes, axes_of, values_in_order
from torchtitan.runs.analysis.measures import after_warm_up, loss_points, measure_run
from torchtitan.runs.record import Series, read_run
from torchtitan.statistics.interval import median_interval


def brute_force_coverage(n: int, low: int, high: int) -> float:
    """P(x_(low) <= median <= x_(high)): every way in which n values fall below or above it, ranks from 1."""
    inside = sum(low <= sum(below) < high for below in itertools.product((0, 1), repeat=n))
    return inside / 2**n


@pytest.mark.parametrize("n", range(2, 15))
def test_interval_of_the_median_is_the_narrowest_pair_of_order_statistics_that_covers(n):
    values = [float(value * value) for value in range(1, n + 1)]
    found = median_interval(values[::-1])
    low, high = values.index(found.lower) + 1, values.index(found.upper) + 1
    assert found.value == statistics.median(values)
    assert high == n + 1 - low
    assert found.coverage == pytest.approx(brute_force_coverage(n, low, high), abs=1e-12)
    if n >= 6:
        assert found.coverage >= 0.95
        assert low + 1 > n // 2 or brute_force_coverage(n, low + 1, high - 1) < 0.95
    else:
        assert (low, high) == (1, n)


def test_a_point_counts_if_its_window_begins_after_the_warm_up():
    series = Series((1, 10, 20, 30), (1.0, 2.0, 3.0, 4.0))
    assert after_warm_up(series, 0) == [1.0, 2.0, 3.0, 4.0]
    assert after_warm_up(series, 1) == [2.0, 3.0, 4.0]
    assert after_warm_up(series, 9) == [3.0, 4.0]
    assert after_warm_up(series, 10) == [3.0, 4.0]
    assert after_warm_up(series, 11) == [4.0]
    assert after_warm_up(series, 21) == []
    assert after_warm_up(Series((20, 30), (3.0, 4.0)), 3, 10) == [3.0, 4.0]  # resumed after step 10 in another layout


def test_a_run_is_measured_by_its_tags(tmp_path):
    points = [
        {"step": step, "throughput(img/s)": 10.0 * step, "memory/max_reserved(GiB)": 5.0 - step / 8}
        | {"memory/max_active(GiB)": 4.0, "loss_metrics/global_avg_loss": 1.0, "n_images_seen": 8 * step, "clock/train(s)": 36.0}
        for step in range(1, 8)
    ]
    points[3]["throughput(img/s)"] = float("nan")
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, points)))
    found = measure_run(read_run(tmp_path), warmup_steps=2)
    assert found["images_per_second"].value == 55.0  # of 30, 50, 60, 70
    assert found["images_per_second"].count == 4
    assert (found["memory_gib"].value, found["memory_active_gib"].value) == (4.875, 4.0)  # peaks, of the warm-up too
    assert not found["memory_gib"].bounded
    assert "mfu_percent" not in found
    assert [point["hours"] for point in loss_points(read_run(tmp_path))] == [0.01] * 7
    (tmp_path / "summary.json").write_text(json.dumps({"timed": {"as": "another layout", "after_step": 4}}))
    assert [point["hours"] for point in loss_points(read_run(tmp_path))] == [0] * 7
    assert measure_run(read_run(tmp_path), warmup_steps=2)["memory_gib"].value == 4.375  # since then


def settings(**changes) -> dict:
    return {
        "model.flavor": "DiT-L/2", "model.patch_size": 4, "training.local_batch_size": 8,
        "training.global_batch_size": 64, "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 4, "activation_checkpoint.mode": "none", "compile.enable": True,
        "training.mixed_precision_param": "bfloat16",
    } | {key.replace("__", "."): value for key, value in changes.items()}


def test_axes_of_a_configuration():
    axes = axes_of(settings())
    assert axes == {
        "model": "DiT-L", "patch": 4, "local_batch": 8, "global_batch": 64, "layout": "hsdp", "mesh": "2x4",
        "world_size": 8, "ac": "none", "compile": "true", "dtype": "bfloat16", "device": None,
    }
    assert axes_of(settings(float8__enable=True))["dtype"] == "float8"


DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree")


def divided(replicas: int, shards: int, context: int) -> dict:
    degrees = dict(zip(DEGREES, (replicas, shards, context), strict=True))
    return {f"parallelism.{name}": degree for name, degree in degrees.items()}


@pytest.mark.parametrize(
    ("degrees", "layout", "mesh", "world_size"),
    [
        ((1, 1, 1), "single", "1x1", 1),
        ((8, 1, 1), "ddp", "8x1", 8),
        ((1, 8, 1), "fsdp", "1x8", 8),
        ((1, 1, 2), "ddp (context=2)", "1x1x2", 2),  # copies of the weights, as the processes share tokens alone
        ((2, 1, 4), "ddp (context=4)", "2x1x4", 8),
        ((1, 2, 2), "fsdp (context=2)", "1x2x2", 4),
        ((2, 4, 2), "hsdp (context=2)", "2x4x2", 16),
    ],
)
def test_processes_that_share_tokens_count_in_the_axes(degrees, layout, mesh, world_size):
    axes = axes_of(settings() | divided(*degrees))
    assert (axes["layout"], axes["mesh"], axes["world_size"]) == (layout, mesh, world_size)


SELECTIVE = {"activation_checkpoint.mode": "selective"}
DIFFERING = {  # changes of each run, further axes, and the values of one axis
    "degrees of context, by the layout alone": (
        [divided(4, 1, 1), divided(2, 1, 2), divided(1, 1, 4)], [], "layout", ["ddp", "ddp (context=2)", "ddp (context=4)"],
    ),
    "another key": (
        [{"optimizer.name": "AdamW", "metrics.log_freq": 1}, {"optimizer.name": "Muon", "metrics.log_freq": 2}],
        ["optimizer.name"], "optimizer.name", ["AdamW", "Muon"],
    ),
    "keys that the model decides": (
        [{"model.flavor": "DiT-S/2", "model.dim": 384, "optimizer.lr": 1e-4}, {"model.dim": 1024, "optimizer.lr": 2e-4}],
        [], "model", ["DiT-S", "DiT-L"],
    ),
    "options of a switch": (
        [{}, SELECTIVE | {"activation_checkpoint.every": 2}, SELECTIVE | {"activation_checkpoint.every": 4}],
        [], "ac", ["none", "selective (every=2)", "selective (every=4)"],
    ),
    "two meshes of one size": ([divided(2, 4, 1), divided(4, 2, 1)], [], "layout", ["hsdp 2x4", "hsdp 4x2"]),
    "meshes with context": (
        [divided(2, 4, 2), divided(4, 2, 2), divided(4, 4, 1)], [], "layout",
        ["hsdp 2x4x2 (context=2)", "hsdp 4x2x2 (context=2)", "hsdp"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERING)
def test_what_differs_is_told_apart_by_axes(case):
    every, further, key, values = DIFFERING[case]
    runs = [(axes_of(settings() | changes), settings() | changes) for changes in every]
    assert add_further_axes(runs) == further
    assert [axes[key] for axes, _ in runs] == values


def test_layouts_with_context_follow_those_without():
    assert values_in_order("layout", ["fsdp", "ddp (context=2)", "single"]) == ["single", "ddp (context=2)", "fsdp"]
