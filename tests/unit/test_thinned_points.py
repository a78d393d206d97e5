"""Points of the noise scale's picture."""

from torchtitan.gns.config import is_drawn
from torchtitan.training.metric_points import ThinnedPoints


def test_points_are_thinned_evenly_and_the_last_one_stays():
    points, most = ThinnedPoints(most=8), 0
    assert points.read() == []
    for step in range(101):
        points.add({"step": step})
        found = [point["step"] for point in points.read()]
        most = max(most, len(found))
        assert found[0] == 0 and found[-1] == step
    assert most <= 9 and found == [0, 16, 32, 48, 64, 80, 96, 100]


def test_what_a_picture_draws_is_kept_of_a_point():
    assert is_drawn("gns/adam/composite/3/b_simple") and is_drawn("gns/plain/composite/0/upper")
    assert is_drawn("gns/bins") and is_drawn("gns/edges/3")
    for tag in ("gns/adam/sketch/3/b_simple", "gns/adam/composite/3/signal", "loss/composite/3/lower", "gns/all/x"):
        assert not is_drawn(tag)
