"""Errors by timestep, and the slots cut from them, against closed forms on Gaussian data."""

import argparse
import csv
import json
import math

import pytest
import torch
from torch import nn

from research import slots
from research.curve_table import LossCurve, curve_of, write_curves, write_errors
from research.equal_loss import equal_loss_edges, interpolate_loss
from research.loss_curve import optimal_noise_loss
from research.timestep_errors import (
    FixedSamples,
    fixed_samples,
    in_parametrisation,
    timestep_errors,
    timestep_nodes,
)
from tests.objectives import timesteps
from tests.research.test_equal_loss import power_law_curve, scalar_curve
from torchtitan.conditions import Unconditional
from torchtitan.data.synthetic import Synthetic, SyntheticConfig, mode_variances
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Objective
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.paths import PATHS
from torchtitan.diffusion.predictions import PREDICTIONS
from torchtitan.experiments.folder import StudyError

POWER_LAW = SyntheticConfig(shape=[1, 4, 8], spectrum_alpha=3.0, pixel_variance=1.0, num_classes=0)


class BestDenoiser(nn.Module):
    """The best prediction for Gaussian data: linear, mode by mode. Its time is the DDPM's index, or t x 1000."""

    condition_kind = Unconditional()

    def __init__(self, data: SyntheticConfig, objective: Objective) -> None:
        super().__init__()
        self.variances, self.objective = mode_variances(data), objective

    def forward(self, x, time, condition):
        path = self.objective.path
        t = path.index_to_t(time.double()) if path.discrete else time.double() / 1000
        a, b = (c[:, None, None, None] for c in path.coefficients(t))
        modes = torch.fft.fft2(x.double()) / (a**2 * self.variances + b**2)
        p, q = PREDICTIONS[self.objective.prediction](a, b, self.objective.sigma_data)
        return torch.fft.ifft2((p * a * self.variances + q * b) * modes).real


def objective_of(prediction="noise", path="ddpm_linear", **more) -> Objective:
    scaling = "index" if path.startswith("ddpm") else "identity"
    keys = {"path": path, "prediction": prediction, "preconditioning": scaling, "timesteps": timesteps("uniform")}
    return build_objective(DenoisingConfig(**keys | more), 0)


def white_design(data: SyntheticConfig) -> FixedSamples:
    """Images and noises whose sample second moments are exactly those of the data, of white noise, and none between.

    Of D pixels and 2 D samples, the first D have one white coordinate in the image each, the others one in the noise.
    """
    pixels = math.prod(data.shape)
    units = (2 * pixels) ** 0.5 * torch.eye(pixels, dtype=torch.float64).view(pixels, *data.shape)
    images = torch.fft.ifft2(torch.fft.fft2(units) * mode_variances(data).sqrt()).real
    nothing = torch.zeros_like(units)
    return FixedSamples({"images": torch.cat((images, nothing)).float()}, torch.cat((nothing, units)).float())


def cut(folder, curves: list[LossCurve], errors=None, **options) -> list[dict[str, str]]:
    """Rows of slots.csv of the study `slots` on curves, written as loss_curve does."""
    write_curves(folder / "curve.csv", curves)
    if errors is not None:
        write_errors(folder / "errors.safetensors", errors)
    wanted = {"slots": 10, "weights": None, "step": None, "compare_paper": False,
              "output": None} | options
    slots.run_alone(argparse.Namespace(source=folder / "curve.csv", **wanted))
    with open(folder / "slots" / "slots.csv", newline="") as file:
        return list(csv.DictReader(file))


def given_curve(errors: torch.Tensor) -> LossCurve:
    """A curve over all indices of the linear path, as if measured on two images."""
    objective = objective_of()
    return curve_of(errors.expand(2, -1), objective, timestep_nodes(objective), "none", 1)


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_slots_below_one_is_refused_by_its_option(tmp_path, number):
    with pytest.raises(StudyError, match=f"^--slots: must be at least 1, is {number}$"):
        cut(tmp_path, [given_curve(torch.ones(1000))], slots=number)


def test_errors_of_the_best_denoiser_are_the_closed_form_and_so_are_its_slots(tmp_path):
    objective = objective_of()
    nodes = timestep_nodes(objective)
    errors = timestep_errors(
        BestDenoiser(POWER_LAW, objective), objective, white_design(POWER_LAW), nodes, batch_size=8192
    )
    best = optimal_noise_loss(POWER_LAW, nodes.log_sigma)
    assert errors.shape == (64, 1000) and best.max() / best.min() > 1e3
    torch.testing.assert_close(errors.mean(0), best, rtol=1e-4, atol=0)  # the samples' mean is the expectation
    wanted = equal_loss_edges(best, 10)
    assert wanted[1] >= 5 and wanted[9] < 400
    rows = cut(tmp_path, [curve_of(errors, objective, nodes, "none", 1)])
    assert [int(row["end"]) for row in rows] == wanted[1:]
    assert json.loads((tmp_path / "slots" / "slots.json").read_text()) == {"unit": "index", "edges": wanted}


def test_an_objective_finds_the_entries_of_fixed_samples():
    objective, found = objective_of(), []
    loss = objective.loss
    objective.loss = lambda model, batch, draw: found.append(batch.entries["feature"]) or loss(model, batch, draw)
    design = white_design(POWER_LAW)
    samples = FixedSamples(design.batch | {"feature": torch.arange(64)}, design.noise)
    timestep_errors(BestDenoiser(POWER_LAW, objective), objective, samples, timestep_nodes(objective, 3), batch_size=96)
    assert torch.cat(found).tolist() == torch.arange(64).repeat_interleave(3).tolist()


@pytest.mark.parametrize("prediction", ["x0", "v", "velocity"])
def test_currencies_agree_with_models_that_are_trained_in_them(prediction):
    as_noise, other = objective_of(), objective_of(prediction)
    nodes = timestep_nodes(as_noise, 9)
    samples = fixed_samples(Synthetic(POWER_LAW, "validation"), 6, seed=3)
    of_noise, of_other = (
        timestep_errors(BestDenoiser(POWER_LAW, objective), objective, samples, nodes)
        for objective in (as_noise, other)
    )
    converted = in_parametrisation(of_noise, as_noise, nodes, prediction)
    torch.testing.assert_close(converted, of_other, rtol=2e-3, atol=1e-7)
    torch.testing.assert_close(in_parametrisation(of_other, other, nodes, "noise"), of_noise, rtol=2e-3, atol=1e-7)
    curve = curve_of(of_other, other, nodes, "none", 1, optimal_noise_loss(POWER_LAW, nodes.log_sigma))
    torch.testing.assert_close(curve.noise_error, of_noise.mean(0), rtol=2e-3, atol=1e-7)
    torch.testing.assert_close(curve.stderr, of_other.std(0) / 6**0.5)
    torch.testing.assert_close(curve.noise_error / curve.error * curve.optimum,
                               optimal_noise_loss(POWER_LAW, nodes.log_sigma))  # fmt: skip


@pytest.mark.parametrize(
    ("curve", "edges"),
    [
        (lambda: scalar_curve(0.25), [0, 18, 36, 55, 76, 99, 127, 161, 207, 283, 1000]),
        (lambda: scalar_curve(1.0), [0, 28, 56, 86, 116, 150, 187, 230, 284, 365, 1000]),
        (power_law_curve, [0, 6, 14, 24, 37, 55, 81, 120, 182, 294, 1000]),
    ],
)
def test_slots_of_written_curves_are_the_golden_ones_beside_the_paper_s(tmp_path, curve, edges):
    rows = cut(tmp_path, [given_curve(curve())], compare_paper=True)
    assert [int(row["first"]) for row in rows] == edges[:-1] and rows[-1]["end"] == "1000"
    assert [int(row["paper_width"]) for row in rows] == [5, 8, 10, 14, 19, 26, 38, 57, 100, 724]
    assert rows[-1]["paper_last"] == "1000"  # 1001 indices
    assert sum(float(row["uniform_loss_share"]) for row in rows) == pytest.approx(1)
    assert sum(float(row["paper_uniform_loss_share"]) for row in rows) == pytest.approx(1)
    summary = (tmp_path / "slots" / "summary.md").read_text()
    assert "(the paper's: 144.8)" in summary and "No intervals" in summary


def test_intervals_of_edges_are_the_spread_over_new_images(tmp_path):
    """Images that differ in where their loss ends: resampled edges against edges of fresh sets of images."""
    generator = torch.Generator().manual_seed(1)

    def some_errors() -> torch.Tensor:
        ends = 200 + 600 * torch.rand(40, 1, generator=generator, dtype=torch.float64)
        return torch.sigmoid((ends - torch.arange(1000)) / 20)

    errors = some_errors()
    objective = objective_of()
    curve = curve_of(errors, objective, timestep_nodes(objective), "ema", 7)
    rows = cut(tmp_path, [curve], {("ema", 7): errors}, slots=4)
    fresh = torch.tensor([equal_loss_edges(some_errors().mean(0), 4) for _ in range(150)], dtype=torch.float64)
    for place, row in enumerate(rows[:-1], 1):
        width = float(row["end_upper"]) - float(row["end_lower"])
        assert float(row["end_lower"]) <= int(row["end"]) <= float(row["end_upper"])
        # Three standard errors: 11 % of a spread over 40 images, 6 % of one over 150 sets, 4 % of quantiles of 1000.
        assert width == pytest.approx(2 * 1.96 * fresh[:, place].std().item(), rel=3 * 0.133)
    wrong = {("ema", 7): errors[:3]}
    with pytest.raises(StudyError, match="is not of the curve"):
        cut(tmp_path, [curve], wrong)


def test_a_few_images_have_no_intervals(tmp_path):
    errors = torch.rand(8, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    objective = objective_of()
    for count in (7, 8):
        curve = curve_of(errors[:count], objective, timestep_nodes(objective), "none", 1)
        rows = cut(tmp_path, [curve], {("none", 1): errors[:count]}, slots=4)
        assert bool(rows[0]["end_lower"]) == (count == 8)
        assert ("needs 8 images" in (tmp_path / "slots" / "summary.md").read_text()) == (count == 7)


def test_losses_between_indices_are_straight_in_both_logarithms():
    index = torch.tensor([0, 3, 40, 99])
    every = torch.arange(100, dtype=torch.float64)
    torch.testing.assert_close(interpolate_loss(index, 0.9 * (1.0 + index) ** -0.8, 100), 0.9 * (1.0 + every) ** -0.8)
    assert interpolate_loss(torch.tensor([2, 4]), torch.tensor([3.0, 5.0]), 6)[[0, 1, 2, 4, 5]].tolist() == (
        pytest.approx([3.0, 3.0, 3.0, 5.0, 5.0])
    )
    measured = torch.tensor([0.0, 1.0])  # nothing is between these
    assert torch.equal(interpolate_loss(torch.arange(2), measured, 2), measured.double())
    with pytest.raises(ValueError, match="not positive"):
        interpolate_loss(torch.tensor([0, 3]), measured, 4)


@pytest.mark.parametrize("sampler", [{}, {"timesteps": timesteps("logit_normal", mean=-0.5, std=2.0)}])
@pytest.mark.parametrize("path", ["rectified_flow", "ddpm_linear_continuous"])
def test_slots_between_indices_have_equal_integrals_however_training_drew(tmp_path, path, sampler):
    objective = objective_of("velocity", path, **sampler)
    nodes = timestep_nodes(objective)
    # What the sampler `slots` is uniform in.
    uniform = objective_of("velocity", path).timestep_sampler.density.quantile

    def loss(t):
        return 2.0 + torch.cos(5 * t)

    rows = cut(tmp_path, [curve_of(loss(nodes.t).expand(2, -1), objective, nodes, "none", 1)], slots=4)
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    t = uniform(u)
    inner = t[torch.searchsorted(loss(t).cumsum(0) / loss(t).sum(), torch.tensor([0.25, 0.5, 0.75]).double())]
    wanted = inner if path == "rectified_flow" else PATHS[path]().log_sigma_to_index(torch.logit(inner))
    assert [float(row["end"]) for row in rows[:-1]] == pytest.approx(wanted.tolist(), rel=3e-3)
    assert rows[-1]["end"] == ("1" if path == "rectified_flow" else "1000")
    assert [float(row["uniform_loss_share"]) for row in rows] == pytest.approx([0.25] * 4, abs=0.003)


def test_indices_that_were_left_out_are_interpolated(tmp_path):
    curve, objective = power_law_curve(), objective_of()
    nodes = timestep_nodes(objective, 250)
    rows = cut(tmp_path, [curve_of(curve[nodes.index].expand(2, -1), objective, nodes, "none", 1)])
    wanted = [6, 14, 24, 37, 55, 81, 120, 182, 294, 1000]
    assert [int(row["end"]) for row in rows] == pytest.approx(wanted, abs=1)
    assert "250 of them were measured" in (tmp_path / "slots" / "summary.md").read_text()
