"""Steps kept out of a noise scale because one sample's gradient decides them, and that no ordinary step is."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_gns_pool import BINS, GEOMETRIES, made_up
from torchtitan.gns.pool import ESTIMATORS, OutlierRule, Pool
from torchtitan.gns.ranks import RankMonitor


def lognormal(sigma: float, steps: int, samples: int, bins: int) -> Tensor:
    """Mean squares [steps, bins] of samples whose norms are lognormal."""
    norms = torch.randn(steps, bins, samples, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return (sigma * norms).exp().square().mean(-1)


@pytest.mark.parametrize("samples", [1, 4, 32])
@pytest.mark.parametrize("sigma", [0.0, 1.0, 1.5])
def test_lognormal_gradients_never_stand_out_but_a_sample_a_million_times_the_others_does(sigma, samples):
    rule, steps = OutlierRule(100), lognormal(sigma, 300, samples, bins=100)
    assert not any(rule.stands_out(step) for step in steps)
    outlier = steps[-1].clone()
    outlier[3] *= 1 + (1e12 - 1) / samples  # of the mean of its bin, one sample as large as the others together
    assert rule.stands_out(outlier) and rule.count == 1


def test_nothing_stands_out_of_few_steps_and_a_lasting_change_is_soon_ordinary():
    rule = OutlierRule(1)
    values = torch.ones(1, dtype=torch.float64)
    assert not any(rule.stands_out(10.0 ** (9 * (step % 2)) * values) for step in range(32))
    rule = OutlierRule(1)
    assert not any(rule.stands_out(values) for _ in range(100))
    assert [rule.stands_out(1e8 * values) for _ in range(40)] == [True] * 33 + [False] * 7
    assert not any(rule.stands_out(1e-8 * values) for _ in range(40))  # a fall never is


def test_bins_without_samples_are_left_out_and_the_state_survives_json():
    rule = OutlierRule(3)
    for step in range(150):
        values = torch.tensor([math.nan if step % 3 else 1.0 + step, 0.0, 2.0 + step % 5], dtype=torch.float64)
        assert not rule.stands_out(values)
    again = OutlierRule(3)
    again.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert again.state_dict() == rule.state_dict()
    assert [len(ring) for ring in rule.state_dict()["logs"]] == [50, 0, 64]
    for one in (rule, again):
        assert one.stands_out(torch.tensor([math.nan, math.nan, 1e12], dtype=torch.float64))
        assert one.stands_out(torch.tensor([1e12, math.nan, math.inf], dtype=torch.float64))
        assert one.count == 2


# ---------------------------------------------------------------------- pools


def with_outlier(sums, size: float):
    """The same step, in which one sample of bin 1 has a gradient `size` times as large, with a float32's rounding."""
    def grown(values: Tensor, of_bin: tuple, exact: bool) -> Tensor:
        values = values.clone()
        values[of_bin] *= size**2 * (1.0 if exact else 1.0 - 1e-5)
        return values

    corner = (..., 1, 1)
    return replace(
        sums, squares=grown(sums.squares, (..., 1), True), products=grown(sums.products, corner, False),
        sketched=grown(sums.sketched, corner, False), corrections=grown(sums.corrections, corner, False),
    )  # fmt: skip


@pytest.mark.parametrize("measured", [True, False])
def test_one_outlier_leaves_the_estimates_where_they_are_without_it(measured):
    straight, struck, without = (Pool(BINS, GEOMETRIES, half_life=1e4) for _ in range(3))
    for step in range(1, 81):
        sums = made_up(step, measured=step % 2 == 0)
        assert straight.add(sums)
        outlier = step == (70 if measured else 71)
        if not outlier:
            assert struck.add(sums) and without.add(sums)
        elif measured:
            assert not struck.add(with_outlier(sums, 1e6))
        else:
            sums.squares[:, :, 1] *= 1e12
            sums.products[:, :, 1, 1] *= 1e12
            assert not struck.add(sums)
    assert (straight.outliers, struck.outliers) == (0, 1)
    for geometry in straight.geometries:
        for estimator in ESTIMATORS:
            wanted, found = (pool.by_bin(geometry, estimator) for pool in (straight, struck))
            assert (wanted.lower < found.b_simple).all() and (found.b_simple < wanted.upper).all()
            assert torch.equal(found.b_simple, without.by_bin(geometry, estimator).b_simple)
    again = Pool(BINS, GEOMETRIES, half_life=1e4)
    again.load_state_dict(json.loads(json.dumps(struck.state_dict())))
    assert again.state_dict() == struck.state_dict() and again.outliers == 1


def test_ranks_gradients_tell_a_noise_scale_that_rises_and_not_its_mean_since_the_start():
    layout = SimpleNamespace(world_size=1, sharded=False, device=torch.device("cpu"))
    monitor = RankMonitor(None, layout, microbatches=2, num_bins=None, half_life=1e9)
    parameter, generator = nn.Parameter(torch.zeros(400)), torch.Generator().manual_seed(0)
    for step in range(200):
        signal = 4.0 if step < 100 else 0.5
        for _ in range(2):
            parameter.grad = 0.5 * (signal + torch.randn(400, generator=generator) / 8**0.5)  # the mean of 8 samples
            monitor.end_microbatch([parameter], 8, 0, 1.0)
        monitor.end_step([parameter], 8)
        monitor.keep_step(torch.tensor(False))
    found = {name: monitor.metrics()[f"gns/plain/ranks/all/{name}"] for name in ("b_simple", "lower", "upper", "lag")}
    assert found["lower"] < 1 / 0.5**2 < found["upper"] < 5 and found["lag"] < 100 * 16  # of both halves: near 1 / 8


def test_ranks_gradients_of_a_step_that_is_skipped_or_stands_out_do_not_count():
    layout = SimpleNamespace(world_size=1, sharded=False, device=torch.device("cpu"))
    straight, struck = (RankMonitor(None, layout, microbatches=2, num_bins=None, half_life=1e4) for _ in range(2))
    parameter, generator = nn.Parameter(torch.zeros(6)), torch.Generator().manual_seed(0)
    for step in range(60):
        gradients = 1.0 + torch.randn(2, 6, generator=generator)
        for monitor in (straight, struck):
            if monitor is straight and step in (50, 55):
                continue
            for number in range(2):
                parameter.grad = 0.5 * gradients[number] * (1e6 if step == 50 and number else 1.0)
                monitor.end_microbatch([parameter], 8, 0, 1.0)
            monitor.end_step([parameter], 8)
            monitor.keep_step(torch.tensor(step == 55))
    found = struck.metrics()
    assert found.pop("gns/plain/ranks/outlier_steps") == 1.0
    assert found == straight.metrics() and len(found) > 4
    again = RankMonitor(None, layout, microbatches=2, num_bins=None, half_life=1e4)
    again.load_state_dict(json.loads(json.dumps(struck.state_dict())))
    assert again.state_dict() == struck.state_dict()
