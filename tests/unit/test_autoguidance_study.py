"""The fractal mixture against its own definition, and the study of autoguidance on it, run small."""

import argparse
import math

import pytest
import torch

from tests.end_to_end.tools import rows_of
from torchtitan.experiments.folder import StudyError
from torchtitan_dit.commands.study import parse_arguments
from torchtitan_dit.studies import load_study
from torchtitan_dit.studies.fractal_mixture import fractal_mixtures


@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_the_density_integrates_to_one_and_gives_the_moments_of_the_points(sigma):
    side = torch.linspace(-3, 3, 481, dtype=torch.float64)
    for mixture in fractal_mixtures(levels=2):
        grid = torch.cartesian_prod(side, side)
        mass = mixture.log_density(grid, sigma).exp() * (side[1] - side[0]) ** 2
        assert mass.sum().item() == pytest.approx(1, abs=1e-6)
        points = mixture.draw(3, torch.arange(40_000)) + sigma * torch.randn(40_000, 2, generator=torch.manual_seed(0))
        mean = (mass[:, None] * grid).sum(0)
        assert (points.mean(0) - mean).abs().max() < 5 / math.sqrt(40_000)
        second = (mass[:, None, None] * grid[:, :, None] * grid[:, None, :]).sum(0)
        torch.testing.assert_close(points.T @ points / 40_000, second, rtol=0.03, atol=0.01)


def test_points_are_functions_of_their_number_on_branches_of_their_weight():
    mixtures = fractal_mixtures()
    points = torch.stack([mixture.draw(0, torch.arange(50_000)) for mixture in mixtures])
    assert points.square().mean().sqrt().item() == pytest.approx(0.5, abs=0.01)
    for mixture in mixtures:
        points = mixture.draw(5, torch.arange(20_000))
        assert torch.equal(mixture.draw(5, torch.tensor([7, 19_999])), points[[7, 19_999]])
        shares = mixture.branch_of(points[:4000]).bincount(minlength=63) / 4000
        assert len(mixture.branch_weights) == 63 and mixture.branch_weights.sum() == pytest.approx(1)
        assert torch.minimum(shares, mixture.branch_weights).sum() > 0.9


def options(folder, *words: str) -> argparse.Namespace:
    small = ["--seeds", "2", "--steps", "4", "--guide-steps", "2", "--samples", "100"]
    return parse_arguments(["autoguidance", *small, "--output", str(folder), *words])


def test_the_study_measures_every_method_and_resumes(tmp_path):
    study = load_study("autoguidance")
    text = study.run_alone(options(tmp_path)).read_text()
    rows = rows_of(tmp_path)
    assert len(rows) == 2 * 8 and {row["status"] for row in rows} == {"ok"}
    found = {(row["model"], row["reference"], float(row["scale"])): float(row["outside"]) for row in rows}
    assert found["seed-0", "real", 1.0] <= 0.05 < found["seed-0", "none", 1.0] <= 1  # four steps train nothing
    assert len({value for key, value in found.items() if key[0] == "seed-0"}) > 3
    assert text.count("| ") > 8 and "samples.png" in text and (tmp_path / "samples.png").stat().st_size > 10_000
    before = (tmp_path / "results.csv").read_bytes()
    study.run_alone(options(tmp_path))
    assert (tmp_path / "results.csv").read_bytes() == before
    with pytest.raises(StudyError, match="--steps: must be at least 3, is 2"):
        study.run_alone(options(tmp_path, "--steps", "2"))


def test_a_network_and_its_past_are_the_averages_after_so_many_steps():
    study = load_study("autoguidance")
    mixtures = fractal_mixtures(levels=1)
    final, past = study.train(mixtures, 1, steps=3, guide_steps=2)
    _, first = study.train(mixtures, 1, steps=2, guide_steps=1)
    assert not any(torch.equal(one, other) for one, other in zip(past.parameters(), first.parameters(), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(final.parameters(), past.parameters(), strict=True))
    again = study.train(mixtures, 1, steps=3, guide_steps=2)
    for one, other in zip((final, past), again, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
