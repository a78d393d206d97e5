"""Noise scales along a training: cosines by lag of a known trajectory, windows, swings."""

import math
from dataclasses import replace

import pytest
import torch

from torchtitan_dit.studies import gns_calibration_statistics, gns_lags_statistics
from torchtitan_dit.studies.gns_lags_report import PROTOCOL, report_text
from torchtitan_dit.studies.gradient_lags import BLOCKS, GROUPS, lag_cosines, measure_trajectory

STEPS, ANGLE = [0, 1, 2, 4], 0.7


class Turning:
    """Gradient that turns by ANGLE per step, of samples with noise of variance 1 in 20 directions."""

    def __init__(self, step: int) -> None:
        self.mean = torch.zeros(20)
        self.mean[0], self.mean[1] = 2 * math.cos(ANGLE * step), 2 * math.sin(ANGLE * step)
        self.noise = torch.randn(20_000, 20, generator=torch.Generator().manual_seed(0))

    def gradient(self, numbers):
        return self.mean + self.noise[numbers].mean(0)


@pytest.fixture(scope="module")
def measured():
    return measure_trajectory([lambda step=step: Turning(step) for step in STEPS], 32 * BLOCKS * GROUPS)


def test_cosines_by_lag_are_those_of_the_true_gradients(measured):
    lags = [1, 2, 3, 4, 9]
    found = lag_cosines(measured.products.values, STEPS, lags)
    errors = measured.products.error_of(lambda values: lag_cosines(values, STEPS, lags))
    for lag, value, error in zip(lags[:4], found.tolist(), errors.tolist(), strict=False):
        assert abs(value - math.cos(ANGLE * lag)) < 4 * error + 1e-3 and error < 0.03
    assert math.isnan(found[4].item())


def test_noise_scales_hold_the_truth_at_each_point_and_over_the_window(measured):
    for found in (*measured.scales, measured.window):
        assert found.lower < 20 / 4 < found.upper and not found.unbounded


def row(step: int, bin_: int, b: float, window: float, logged: float, cosine: float) -> dict[str, str]:
    values = [b * factor for factor in (0.3, 3.0, 1.0)]
    found = {"data": "digits", "run_seed": "0", "step": str(step), "bin": str(bin_), "status": "ok",
             "t_min": str(bin_ / 4), "lags": "1 8", "cosines": f"0.9 {cosine}", "cosines_se": "0.1 0.1",
             "logged_lag": "12", "logged_estimator": "sketch"}  # fmt: skip
    for name, factor in (("b", 1.0), ("b_lower", 0.9), ("b_upper", 1.1)):
        found[name] = " ".join(str(factor * value) for value in values)
    for name, value in (("window", window), ("logged", logged)):
        found |= {name: str(value), f"{name}_lower": str(0.9 * value), f"{name}_upper": str(1.1 * value)}
    return found


def test_statistics_tell_swings_turns_and_averaging(monkeypatch, tmp_path):
    monkeypatch.setattr(gns_calibration_statistics, "_RESAMPLES", 100)
    rows = [row(step, bin_, 20.0, 10.0, 10.0, 0.1) for step in (60, 120) for bin_ in range(4)]
    rows[0]["logged_upper"] = "inf"
    found = gns_lags_statistics.finding(rows)
    assert found.frozen.value == pytest.approx(2.0) and found.window.value == pytest.approx(1.0)
    assert len(found.frozen_ratios) == 7 and found.swings == found.swing_cells == 8  # tenfold, known to a tenth
    assert gns_lags_statistics.explained(rows, found) == (True, True, True)
    still = [row(60, bin_, 10.0, 20.0, 10.0, 0.9) for bin_ in range(4)]
    assert gns_lags_statistics.explained(still, gns_lags_statistics.finding(still))[1:] == (False, False)
    whole, part = (report_text(rows, tmp_path, replace(PROTOCOL, cells=cells)) for cells in (8, 9))
    assert "(a) swings beyond sampling in half of the cells: holds" in whole
    assert "Interim, without a verdict: digits run_seed 0 8 of 9" in part
