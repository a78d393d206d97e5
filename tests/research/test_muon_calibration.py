"""Calibration of the noise scale in Muon's norm: direction and norm of its step, and cells of a small run."""

from pathlib import Path

import pytest
import torch
from torch import nn

from research.muon_calibration import MuonStep
from tests.research.small_runs import SMALL, trained_folder
from tests.research.tables import rows_of
from tests.research.test_gns_calibration_study import CONFIG


def test_a_step_has_the_published_sizes_and_its_gain_is_the_dual_norm():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((6, 4), (5,), (3, 8))]
    step = MuonStep(parameters, {parameters[0]: 0.5, parameters[2]: 2.0})
    gradient, other = torch.randn(2, 24 + 5 + 24)
    first, last = gradient[:24].view(6, 4), gradient[29:].view(3, 8)
    wanted = 0.5 * torch.linalg.svdvals(first).sum() + 2 * torch.linalg.svdvals(last).sum()
    assert step.norm(gradient) == pytest.approx(wanted.item(), rel=1e-6)
    direction = step.direction(gradient)
    assert not direction[24:29].any()
    for part, size in ((direction[:24].view(6, 4), 0.5), (direction[29:].view(3, 8), 2.0)):
        assert ((torch.linalg.svdvals(part) / size - 0.95).abs() < 0.31).all()  # as orthogonalise says
    assert 0.65 * wanted < torch.dot(gradient, direction) < 1.25 * wanted
    both = torch.dot(first.flatten(), other[:24]) + torch.dot(last.flatten(), other[29:])
    assert step.product(gradient, other) == pytest.approx(both.item(), rel=1e-5)


def test_cells_of_a_run_with_muon_are_measured_and_reported(study, tmp_path):
    config = CONFIG.replace("[optimizer]", '[optimizer]\nname = "Muon"').replace("beta2 = 0.9\n", "")
    assert SMALL in config
    run = trained_folder(tmp_path, "trained", config)
    tiny = ["--batches", "1", "64", "--samples", "512", "--replicates", "128", "--held", "16", "--bins", 1, "--steps", 4]
    code, output, _ = study("muon_calibration", run, *tiny, "--output", tmp_path / "cells")
    (row,) = rows_of(tmp_path / "cells")
    assert code == 0 and row["status"] == "ok", row["reason"]
    few, many = map(float, row["nuclear"].split())
    # Means of few samples have gradients of low rank. Samples are drawn by the checkpoint's hash, other ones in each training:
    # over ten with 128 replicates ln(many / few) was 0.27 +- 0.061; with 16 the order of the two was chance.
    assert 0 < few < many and float(row["frobenius"]) > 0
    progress = [float(value) for value in row["progress"].split()]
    assert len(progress) == 3 and progress[-1] > 0
    assert "three are needed" in Path(output.strip()).read_text()
    code, _, errors = study("gns_calibration", run, "--steps", 4)
    assert code == 2 and "optimizer.name = Muon" in errors
