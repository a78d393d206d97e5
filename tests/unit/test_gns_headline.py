"""Advice, picture, allocation and growth use the estimator of the narrowest valid intervals, and name it."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchtitan.config.job import load_config
from torchtitan.console import measured_phase
from torchtitan.diffusion.objectives import build_objective
from torchtitan.distributed.config import ParallelismConfig
from torchtitan.distributed.mesh import Layout
from torchtitan.gns import monitor as monitor_module
from torchtitan.gns.capture import GEOMETRIES
from torchtitan.gns.config import GNSConfig
from torchtitan.gns.decayed import BinEstimates, narrowest
from torchtitan.gns.monitor import GNSMonitor
from torchtitan.gns.pool import WHOLE_MODEL
from torchtitan.training.lr_scheduler import lr_phase

BINS = 3
SCALES = {"sketch": 100.0, "composite": 200.0}


def estimates(scale: float, factor: float, bins: int = BINS) -> BinEstimates:
    """Noise scales of all bins, each with an interval of a factor to either side."""
    one = torch.ones(bins, dtype=torch.float64)
    return BinEstimates(
        signal=one, noise=scale * one, b_simple=scale * one, lower=scale / factor * one, upper=scale * factor * one,
        unbounded=one < 0, samples=1e4 * one, steps=50.0 * one, signal_stderr=0.01 * one, noise_stderr=0.01 * one,
        matrix=torch.eye(bins, dtype=torch.float64), matrix_stderr=0.01 * torch.ones(bins, bins, dtype=torch.float64),
        lag=640.0 * one,
    )


class PoolOf:
    """Pool in which one estimator has the narrower intervals, in all bins and as a whole."""

    geometries, outliers, num_bins = GEOMETRIES, 0, BINS

    def __init__(self, narrow: str) -> None:
        self._factors = {name: 1.2 if name == narrow else 1.5 for name in WHOLE_MODEL}

    def by_bin(self, geometry: str, name: str) -> BinEstimates:
        return estimates(SCALES[name], self._factors[name])

    def whole(self, geometry: str, name: str, mass: torch.Tensor | None, stratified: bool) -> BinEstimates:
        return estimates(SCALES[name], self._factors[name], 1)

    def headline(self, geometry: str) -> str:
        return narrowest({name: self.by_bin(geometry, name) for name in WHOLE_MODEL})

    def window(self, geometry: str) -> int:
        return 0

    def mean_square_loss(self) -> torch.Tensor:
        return torch.ones(BINS, dtype=torch.float64)


def monitor_of(narrow: str, **keys: bool) -> GNSMonitor:
    """Monitor of three bins with such a pool."""
    layout = Layout(ParallelismConfig(data_parallel_replicate_degree=1, data_parallel_shard_degree=1))
    found = GNSMonitor(
        GNSConfig(enable=True, num_bins=BINS, **keys), objective=build_objective(load_config([], 1).objective, seed=0),
        edges=torch.tensor([0.4, 0.6], dtype=torch.float64),
        taps=SimpleNamespace(num_bins=BINS, geometries=GEOMETRIES), ranks=None,
        layout=layout, folder=Path("unused"), global_batch_size=16,
    )  # fmt: skip
    found.pool = PoolOf(narrow)
    return found


@pytest.mark.parametrize("narrow", WHOLE_MODEL)
def test_advice_and_closing_line_are_of_the_narrowest_and_name_it(narrow):
    monitor = monitor_of(narrow)
    scale = f"estimate {SCALES[narrow]:.0f} ["
    advice = monitor.advice(16, "at the peak learning rate")
    assert advice[0].startswith(f"measured at the peak learning rate ({narrow}): ") and scale in advice[0]
    line, = monitor.result()
    assert f"by the {narrow}: {scale}" in line
    assert "its steps are 640 images old on average, and the interval does not cover the drift since" in line


@pytest.mark.parametrize("narrow", WHOLE_MODEL)
def test_the_picture_is_of_the_narrowest(narrow, monkeypatch):
    drawn = {}

    def keep(points, edges, levels, global_batch_size, names):
        drawn.update(names=names, scales={geometry: of[0].b_simple.tolist() for geometry, of in levels.items()})

    monkeypatch.setattr(monitor_module, "draw_noise_scale", keep)
    monitor_of(narrow).draw([], 16)
    assert drawn["names"] == dict.fromkeys(GEOMETRIES, narrow)
    assert drawn["scales"] == dict.fromkeys(GEOMETRIES, [SCALES[narrow]] * BINS)


@pytest.mark.parametrize("narrow", WHOLE_MODEL)
def test_batch_and_allocation_follow_the_narrowest(narrow, monkeypatch):
    monitor = monitor_of(narrow, grow_batch=True)
    monitor._schedule = SimpleNamespace(update=lambda *given, **_: seen.append(given[2].b_simple.tolist()))
    seen, lowest = [], []
    monkeypatch.setattr(monitor._batch, "update", lambda step, samples, lower: lowest.append(lower))
    monitor._step = monitor._config.interval
    monitor.conclude(torch.tensor(False))
    assert seen == [[SCALES[narrow]] * BINS]
    assert lowest == [pytest.approx(SCALES[narrow] / 1.2)]


def test_of_equally_narrow_estimators_rounding_does_not_choose():
    first = estimates(100.0, 1.2)
    rounded = replace(first, upper=first.upper * (1 - 1e-12))
    assert narrowest({"sketch": first, "composite": rounded}) == "sketch"
    assert narrowest({"sketch": first, "composite": replace(first, upper=first.upper * 0.98)}) == "composite"


def test_the_phase_named_is_that_of_the_measurement():
    config = load_config([
        "--training.steps", "60", "--training.local_batch_size", "64", "--lr_scheduler.warmup_steps", "10",
        "--lr_scheduler.decay_type", "linear",
    ], 1)  # fmt: skip
    end, ten_before = (lr_phase(config.lr_scheduler, step, 60, 64) for step in (60, 50))
    assert measured_phase(config, 60, math.nan) == measured_phase(config, 60, 0.0) == end != ten_before
    assert measured_phase(config, 60, 640.0) == ten_before
    assert "in warm-up" in measured_phase(config, 60, 1e6)
