"""Lines of the console at a run's start and end."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.console import _weighting
from torchtitan.gns.allocate import NEYMAN, PredictedRatio
from torchtitan.gns.monitor import GNSMonitor


def test_the_weighting_is_told_by_its_peak_and_the_range_above_half():
    points = torch.linspace(-6.0, 6.0, 121, dtype=torch.float64)
    assert "equal at every noise level" in _weighting(points, torch.full_like(points, 3.0))
    line = _weighting(points, torch.exp(-0.5 * points**2))  # half at ln sigma = ±1.18
    assert "highest at noise level sigma = 1, at least half of that between 0.33 and 3" in line


def monitor(scale: tuple[float, float, float], ratio: PredictedRatio) -> GNSMonitor:
    """Monitor that has measured a noise scale with its interval, and predicted a sampler's ratio."""
    made = object.__new__(GNSMonitor)
    made.pool = SimpleNamespace(geometries=("plain",))
    made.settle = lambda: None
    names = ("b_simple", "lower", "upper")
    made._whole = lambda *_: SimpleNamespace(**dict(zip(names, map(torch.tensor, scale), strict=True)))
    made.predicted_ratios = lambda: [ratio]
    return made


USELESS, USEFUL = PredictedRatio(NEYMAN, 0.99, 0.9, 1.1), PredictedRatio(NEYMAN, 0.5, 0.45, 0.55)


@pytest.mark.parametrize(("scale", "batch", "said"), [
    ((100.0, 50.0, 200.0), 128, ""), ((100.0, 90.0, 110.0), 150, ""), ((100.0, 90.0, 110.0), 10, " is below "),
    ((100.0, 90.0, 110.0), 1000, " is above "), ((0.0, 50.0, float("inf")), 20, " is below "),
    ((0.0, 50.0, float("inf")), 80, ""), ((0.0, -1.0, float("inf")), 20, ""), ((0.0, float("nan"), 3.0), 20, ""),
])  # fmt: skip
def test_advice_is_given_only_where_something_is_to_be_changed(scale, batch, said):
    lines = monitor(scale, USELESS).advice(batch)
    assert len(lines) == bool(said) and all(said in line for line in lines)
    assert [line for line in monitor(scale, USEFUL).advice(batch) if "fewer samples" in line and "would give" in line]
