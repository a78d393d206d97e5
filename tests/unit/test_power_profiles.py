"""Profiles of power-function averages against published values, quadrature, and a trajectory with a known average."""

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan.training.config import EMAConfig, EMATrackConfig
from torchtitan.training.ema import EMABank, power_exponent
from torchtitan.training.power_profiles import WIDEST_STD, Profile, combine, inner_products

TRACKED = (0.05, 0.10)


def stored(count: int, stds: tuple[float, ...] = TRACKED) -> list[Profile]:
    return [Profile(time, std) for time in range(1, count + 1) for std in stds]


def relative_std(exponent: float) -> float:
    """Standard deviation of the profile tau^exponent on (0, 1]."""
    return ((exponent + 1.0) / ((exponent + 2.0) ** 2 * (exponent + 3.0))) ** 0.5


@pytest.mark.parametrize("std", [0.001, 0.01, 0.03, 0.05, 0.1, 0.2, 0.25, 0.288])
def test_std_is_the_inverse_of_the_exponent(std):
    assert relative_std(power_exponent(std)) == pytest.approx(std, rel=1e-9)


def test_widest_profile_is_flat():
    assert relative_std(0.0) == pytest.approx(WIDEST_STD, rel=1e-15)


@pytest.mark.parametrize(("a", "b", "product"), [
    (Profile(1, 0.05), Profile(1, 0.05), 9.243253523859764),
    (Profile(1, 0.05), Profile(1, 0.10), 5.726713247539306),
    (Profile(0.5, 0.05), Profile(1, 0.10), 0.04673034271139702),
])
def test_inner_products_have_their_published_values(a, b, product):
    np.testing.assert_allclose(inner_products([a], [b]), [[product]], rtol=1e-12)
    np.testing.assert_allclose(inner_products([b], [a]), [[product]], rtol=1e-12)


@pytest.mark.parametrize(("a", "b"), [((0.5, 0.05), (1.0, 0.10)), ((0.3, 0.2), (0.9, 0.03)), ((1.0, 0.25), (0.7, 0.15))])
def test_inner_product_is_the_integral_of_the_product(a, b):
    a, b = Profile(*a), Profile(*b)
    edges = np.linspace(0, min(a.time, b.time), 200_001)
    tau = (edges[1:] + edges[:-1]) / 2
    density = [(p.exponent + 1) * tau**p.exponent / p.time ** (p.exponent + 1) for p in (a, b)]
    np.testing.assert_allclose(inner_products([a], [b]), (density[0] * density[1]).sum() * edges[1], rtol=1e-6)


@pytest.mark.parametrize(("count", "std", "coefficients"), [
    (2, 0.075, [1.35748e-4, -2.426627e-3, 0.342969036, 0.659321842]),
    (4, 0.15, [
        -5.62035e-4, 1.944069e-3, -0.013147866, 0.038019967, -0.077958372, 0.200408640, -0.264061971, 1.115357568,
    ]),
])
def test_coefficients_have_their_published_values(count, std, coefficients):
    found = combine(stored(count), Profile(count, std)).coefficients
    np.testing.assert_allclose(found, coefficients, rtol=1e-5, atol=1e-9)
    assert sum(found) == pytest.approx(1, abs=1e-12)


ERRORS = {  # snapshots -> error of each length
    1: (0.232, 0.0556, 0.253, 0.604, 1.04),
    4: (0.173, 0.0346, 0.106, 0.223, 0.394),
    8: (0.101, 0.0125, 0.0333, 0.0779, 0.182),
    16: (0.0386, 0.00348, 0.00899, 0.0233, 0.0793),
    64: (0.0029, 2.25e-4, 5.78e-4, 0.00171, 0.0146),
}


@pytest.mark.parametrize("count", ERRORS)
def test_profile_errors_have_their_published_values(count):
    found = [combine(stored(count), Profile(count, std)).error for std in (0.03, 0.075, 0.15, 0.20, 0.25)]
    np.testing.assert_allclose(found, ERRORS[count], rtol=0.02)
    for std in TRACKED:
        exact = combine(stored(count), Profile(count, std))
        assert exact.error < 1e-12
        assert exact.magnitude == 1


def test_magnitudes_and_errors_of_256_snapshots_have_their_published_values():
    found = [combine(stored(256), Profile(256, std)) for std in (0.015, 0.03, 0.075, 0.13, 0.20, 0.25)]
    np.testing.assert_allclose([each.magnitude for each in found], [95, 14, 1.6, 1.5, 2.0, 2.2], rtol=0.05)
    np.testing.assert_allclose([each.error for each in found], [1.5e-3, 1.8e-4, 1.4e-5, 2.1e-5, 1.1e-4, 2.7e-3], rtol=0.05)


@pytest.mark.parametrize(("count", "condition"), [(4, 1.2e2), (16, 5.9e3), (64, 1.6e6), (256, 4.6e8)])
def test_condition_numbers_have_their_published_values(count, condition):
    profiles = stored(count)
    assert np.linalg.cond(inner_products(profiles, profiles)) == pytest.approx(condition, rel=0.05)


def test_error_is_the_distance_of_the_profiles():
    profiles, wanted = stored(4), Profile(4, 0.15)
    combination = combine(profiles, wanted)
    edges = np.linspace(0, 4, 100_001)
    tau = (edges[1:] + edges[:-1]) / 2

    def density(profile):
        values = (profile.exponent + 1) * tau**profile.exponent / profile.time ** (profile.exponent + 1)
        return np.where(tau <= profile.time, values, 0)

    reached = sum(c * density(profile) for c, profile in zip(combination.coefficients, profiles, strict=True))
    distance = np.linalg.norm(reached - density(wanted)) / np.linalg.norm(density(wanted))
    assert combination.error == pytest.approx(distance, rel=1e-3)


def test_averages_of_a_known_trajectory_are_reconstructed():
    steps = 4000
    tracks = [EMATrackConfig(name=f"{std:g}", kind="power", sigma_rel=std) for std in (*TRACKED, 0.15)]
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    bank = EMABank({"theta": parameter}, EMAConfig(tracks=tracks), images_per_step=8)
    kept: dict[int, dict[str, float]] = {}
    for step in range(1, steps + 1):
        parameter.data.fill_(step / steps)
        bank.update(step)
        kept[step] = {name: track["theta"].item() for name, track in bank.tracks.items()}
    for std in (*TRACKED, 0.15):
        gamma = power_exponent(std)
        assert kept[steps][f"{std:g}"] == pytest.approx((gamma + 1) / (gamma + 2) + 0.5 / steps, abs=2e-7)
    published = {4: 0.829470, 8: 0.821707, 16: 0.820262}
    for count, value in published.items():
        places = [steps * k // count for k in range(1, count + 1)]
        profiles = [Profile(step, std) for step in places for std in TRACKED]
        found = combine(profiles, Profile(steps, 0.15)).coefficients
        values = [kept[step][f"{std:g}"] for step in places for std in TRACKED]
        # The discrete average lies half a step above the continuous one, at every snapshot alike.
        assert np.dot(found, values) == pytest.approx(value + 0.5 / steps, abs=2e-6)
