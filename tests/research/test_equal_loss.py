"""Edges of equal loss: closed forms of Gaussian data, and what is no curve."""

import numpy as np
import pytest
import torch

from research.equal_loss import equal_loss_edges
from torchtitan.diffusion.paths import PATHS


def power_law_curve() -> torch.Tensor:
    """Least error of the noise on Gaussian data with a power-law spectrum, at each index of the linear path."""
    frequency = torch.logspace(0, np.log10(128), 400, dtype=torch.float64)
    variance, snr = 23_875.2886 * frequency**-3.38794999, 1 / PATHS["ddpm_linear"]().t_to_sigma(
        PATHS["ddpm_linear"]().index_to_t(torch.arange(1000))
    ) ** 2
    modes = variance * snr[:, None] / (1 + variance * snr[:, None])
    return (modes * frequency**2).sum(1) / frequency.square().sum()


def scalar_curve(variance: float) -> torch.Tensor:
    path = PATHS["ddpm_linear"]()
    snr = path.alphas_cumprod / (1 - path.alphas_cumprod)
    return variance * snr / (1 + variance * snr)


@pytest.mark.parametrize(("curve", "edges"), [
    (lambda: scalar_curve(0.25), [0, 18, 36, 55, 76, 99, 127, 161, 207, 283, 1000]),
    (lambda: scalar_curve(1.0), [0, 28, 56, 86, 116, 150, 187, 230, 284, 365, 1000]),
    (power_law_curve, [0, 6, 14, 24, 37, 55, 81, 120, 182, 294, 1000]),
])
def test_equal_loss_edges_of_gaussian_data_are_the_closed_form_s(curve, edges):
    assert equal_loss_edges(curve(), 10) == edges


def test_equal_loss_edges_leave_no_slot_empty_and_refuse_what_is_no_curve():
    assert equal_loss_edges(torch.ones(6), 3) == [0, 2, 4, 6]
    assert equal_loss_edges(torch.tensor([100.0, 1, 1, 1]), 3) == [0, 1, 2, 4]
    assert equal_loss_edges(torch.tensor([1.0, 1, 1, 100]), 4) == [0, 1, 2, 3, 4]
    for curve, slots, reason in (
        ([1.0, float("nan")], 1, "timestep 1 is nan"), ([1.0, -1.0], 1, "timestep 1 is -1"), ([0.0, 0.0], 1, "all"),
        ([1.0, 1.0], 3, "3 slots of 2"), ([1.0, 1.0], 0, "0 slots"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            equal_loss_edges(torch.tensor(curve), slots)
