"""Conclusions of the noise scale: by the ends of the interval, with since when and why, and how much more to measure."""

import math

import pytest

from torchtitan.gns.allocate import NEYMAN, PredictedRatio
from torchtitan.gns.conclusion import (
    conclusions,
    history,
    logged,
    on_batch,
    on_timesteps,
    steps_to_know,
    verdict,
)
from torchtitan.statistics.interval import Interval


@pytest.mark.parametrize(("ends", "batch", "found"), [
    ((900.0, 1700.0), 225, "small"), ((900.0, 1700.0), 226, "near"), ((900.0, 1700.0), 1699, "near"),
    ((900.0, 1700.0), 1700, "large"), ((900.0, math.inf), 225, "small"), ((900.0, math.inf), 1e9, "unknown"),
    ((0.0, math.inf), 1, "unknown"), ((math.nan, math.nan), 1, "unknown"),
])  # fmt: skip
def test_verdict_is_by_the_end_of_the_interval_that_speaks_against_it(ends, batch, found):
    assert verdict(Interval(1200.0, *ends), batch) == found


def images(batch: float, scale: float) -> float:
    """Images to a loss, in those of a very small batch: McCandlish et al., arXiv 1812.06162, eq. 2.11."""
    return 1 + batch / scale


def test_each_claim_holds_at_both_ends_of_the_interval():
    low, high = 900.0, 1700.0
    scale = Interval(1200.0, low, high)
    text = on_batch(scale, 128, None)
    assert text == "batch 128 wastes at most 12 % of its images; 512 would need at most 1.4 times as many"
    assert 1 - 1 / images(128, low) == pytest.approx(0.12, abs=0.005) and images(512, low) / images(128, low) <= 1.4
    text = on_batch(scale, 4096, None)
    assert text == "batch 4,096 is large: 1,024 would need at least 53 % fewer images, in more steps"
    assert min(1 - images(1024, end) / images(4096, end) for end in (low, high)) == pytest.approx(0.53, abs=0.005)
    text = on_batch(scale, 1024, None)
    assert "256 would need 28 % to 40 % fewer images in more steps, 4,096 from 2.1 to 2.6 times as many in fewer" in text
    for end, saved, more in ((high, 0.28, 2.1), (low, 0.40, 2.6)):
        assert 1 - images(256, end) / images(1024, end) == pytest.approx(saved, abs=0.005)
        assert images(4096, end) / images(1024, end) == pytest.approx(more, abs=0.05)


def test_where_the_signal_is_too_small_it_says_how_much_more_to_measure():
    opened = Interval(math.nan, 20.0, math.inf)
    assert on_batch(opened, 128, 300) == "not enough signal to judge batch 128: measure about 300 more steps"
    assert on_batch(opened, 128, None).endswith("measure more steps (train longer, or lower gns.interval if it is above 1)")
    # A standard error falls with the root of the steps: z = 1.5 of 100 measured steps is 3 of 400.
    assert steps_to_know(1.5, 1.0, 100, 8) == 2400
    assert steps_to_know(2.9, 1.0, 3, 8) == 8  # 0.2 measured steps: the next one
    assert steps_to_know(0.4, 1.0, 100, 8) is None and steps_to_know(math.nan, 1.0, 100, 8) is None
    assert steps_to_know(3.5, 1.0, 100, 8) is None


def test_timesteps_are_concluded_on():
    assert "fewer samples" in on_timesteps([PredictedRatio(NEYMAN, 0.5, 0.45, 0.55)], None)
    slight = [PredictedRatio(NEYMAN, 0.97, 0.95, 0.99)]  # certain, but a factor below 1.1
    assert on_timesteps(slight, None).startswith("no other sampler of timesteps would save more than 9 %")
    unknown = [PredictedRatio(NEYMAN, math.nan, 0.0, math.inf)]
    assert on_timesteps(unknown, 300) == "not enough signal to choose another sampler of timesteps: measure about 300 more steps"


def concluded(points: list[dict], first_batch: int = 128, phase_at=lambda step: "") -> list[str]:
    return conclusions(points, 128, first_batch, 4, phase_at)


def point(step: int, lower: float, upper: float, headline: str = "sketch") -> dict:
    found = {"step": step}
    for name in ("sketch", "composite"):
        prefix = f"gns/plain/{name}/all"
        found |= {f"{prefix}/headline": float(name == headline)}
        if name == headline:
            found |= {f"{prefix}/b_simple": math.sqrt(lower * upper), f"{prefix}/lower": lower}
            found |= {f"{prefix}/upper": upper} if math.isfinite(upper) else {}
    return found


@pytest.mark.parametrize("more_steps", [300, None])
def test_conclusions_are_of_what_was_logged_last(more_steps):
    ratios = [PredictedRatio(NEYMAN, 0.5, 0.45, 0.55), PredictedRatio("uniform", math.nan, 0.0, math.inf)]
    for known in (ratios, ratios[1:]):
        tags = {f"gns/{tag}": value for tag, value in (("plain/sketch/all/noise", 1.0), ("outlier_steps", 2.0))}
        points = [point(100, 20, math.inf) | tags | logged(known, more_steps), {"step": 110, "lr": 0.1}]
        of_batch, of_timesteps = concluded(points)
        assert of_timesteps == on_timesteps(known, more_steps)
        assert of_batch.startswith(on_batch(Interval(math.nan, 20, math.inf), 128, more_steps))
        assert "measured up to step 100" in of_batch
        of_grown, _ = concluded(points, first_batch=32)  # in steps of the first batch
        assert of_grown.startswith(on_batch(Interval(math.nan, 20, math.inf), 128, more_steps and 4 * more_steps))
    alone = concluded([point(100, 14, 70)])  # of an older version
    assert len(alone) == 1 and "measured up to" not in alone[0] and concluded([]) == []


def test_the_phase_told_is_that_of_the_age_of_what_was_measured():
    """The last measured step before a point at 303 is 300."""
    points = [point(100, 14, 70), point(303, 14, 70) | {"gns/plain/sketch/all/lag": 90 * 128.0}, {"step": 310}]
    for lag, at in ((90 * 128.0, 210), (1e6, 1)):
        points[1]["gns/plain/sketch/all/lag"] = lag
        assert concluded(points, phase_at="at {}".format)[0].startswith(f"at {at}, batch 128 ")


def test_a_verdict_says_since_when_and_what_was_before():
    grown = [point(100, 14, 70), point(200, 20, math.inf), point(300, 600, 900, "composite"), point(400, 700, math.inf)]
    assert history(grown, 128) == "this verdict since step 300; at step 100 it was 31 [14, 70] images"
    assert history(grown[2:], 128) == "this verdict since step 300"
    assert history([point(100, 20, math.inf), *grown[2:]], 128) == "this verdict since step 300"  # unknown before
    assert history([], 128) == history(grown[3:], 128) == ""
    assert history([*grown[2:], point(450, 14, 70)], 128) == (
        "this verdict since step 450; at step 400 it was more than 700 images"
    )
