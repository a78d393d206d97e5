"""Coordinate check: slopes of small widths, table and picture."""

import argparse

import pytest

from research import coordinate_check


def test_activations_change_alike_only_with_maximal_updates(tmp_path):
    words = ["--widths", "64", "192", "--seeds", "1", "--output", str(tmp_path)]
    parser = argparse.ArgumentParser()
    coordinate_check.add_options(parser)
    summary = coordinate_check.run_alone(parser.parse_args(words)).read_text()
    slopes = {
        tuple(cells[:2]): float(cells[2].split()[0])
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in summary.splitlines()[2:] if "|" in line)
    }
    assert len(slopes) == 15 and (tmp_path / "coordinate_check.png").stat().st_size > 10_000
    for role in ("attention", "feed-forward"):
        assert slopes["Adam", role] > 0.5 and abs(slopes["Adam, maximal updates", role]) < 0.2


def test_slope_is_the_exponent_of_a_power_law():
    assert coordinate_check.slope({64: 3 * 64**1.5, 128: 3 * 128**1.5, 512: 3 * 512**1.5}) == pytest.approx(1.5)
