"""Averages of the weights against closed forms, published values and float64 loops."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan.checkpoint.checkpointer import Checkpointer, checkpoint_path, read_tensors
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.training.config import EMAConfig, EMATrackConfig
from torchtitan.training.ema import EMABank, kept_share, power_exponent

IMAGES = 32  # per step
TRACKS = [
    EMATrackConfig(name="warm", decay=0.8, warmup_power=0.5),
    EMATrackConfig(name="plain", decay=0.99, warmup_power=0),
    EMATrackConfig(name="ramped", kind="half_life", half_life=200.0, rampup_ratio=0.3),
    EMATrackConfig(name="short", kind="half_life", half_life=100.0, rampup_ratio=0),
    EMATrackConfig(name="broad", kind="power", sigma_rel=0.2),
]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def walk(parameters: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_warm_decay_reaches_the_final_one_at_the_published_update():
    track = EMATrackConfig(decay=0.9993, warmup_power=2 / 3)
    reached = next(step for step in range(53_000, 55_000) if kept_share(track, step, 1) == 0.9993)
    assert abs(reached - 53_995) <= 1
    for step in (1, 10, 1000, reached - 1):
        assert kept_share(track, step, 1) == pytest.approx(1 - (1 + step) ** (-2 / 3), rel=1e-12)
    assert kept_share(track, 10**9, 1) == 0.9993
    assert kept_share(EMATrackConfig(decay=0.5, warmup_power=0), 1, 1) == 0.5


@pytest.mark.parametrize(("sigma_rel", "gamma"), [
    (0.01, 96.9949), (0.03, 30.3174), (0.05, 16.972198602303447), (0.075, 10.289116), (0.10, 6.937203937601809),
    (0.15, 3.557869), (0.20, 1.826214), (0.25, 0.719824),
])
def test_exponent_of_the_power_function_has_its_published_value(sigma_rel, gamma):
    found = power_exponent(sigma_rel)
    assert found == pytest.approx(gamma, rel=1e-6)
    assert math.sqrt((found + 1) / ((found + 2) ** 2 * (found + 3))) == pytest.approx(sigma_rel, rel=1e-12)


def test_power_function_keeps_the_published_shares():
    narrow, broad = (EMATrackConfig(kind="power", sigma_rel=sigma_rel) for sigma_rel in (0.05, 0.10))
    assert kept_share(narrow, 1, IMAGES) == kept_share(broad, 1, IMAGES) == 0
    assert kept_share(narrow, 2, IMAGES) == pytest.approx(3.888921e-6, rel=1e-6)
    assert kept_share(broad, 2, IMAGES) == pytest.approx(0.00408003, rel=1e-6)
    assert kept_share(narrow, 1000, IMAGES) == pytest.approx(0.9821795, rel=1e-6)
    assert kept_share(broad, 1000, IMAGES) == pytest.approx(0.9920903, rel=1e-6)


def test_profile_of_the_power_function_has_its_mean_and_width():
    steps = 1000
    kept = np.array([kept_share(EMATrackConfig(kind="power", sigma_rel=0.1), n, IMAGES) for n in range(1, steps + 1)])
    weights = (1 - kept) * np.append(np.cumprod(kept[:0:-1])[::-1], 1.0)
    times = np.arange(1, steps + 1) / steps
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    mean = weights @ times
    assert mean == pytest.approx(0.8886075, rel=1e-6)
    assert math.sqrt(weights @ (times - mean) ** 2) == pytest.approx(0.0999997, rel=1e-6)


def test_half_life_is_counted_in_images_and_ramped_up():
    track = EMATrackConfig(kind="half_life", half_life=6400.0, rampup_ratio=0)
    assert kept_share(track, 1, 64) ** 100 == pytest.approx(0.5, rel=1e-12)
    assert kept_share(track, 9, 640) ** 10 == pytest.approx(0.5, rel=1e-12)
    ramped = EMATrackConfig(kind="half_life", half_life=6400.0, rampup_ratio=0.1)
    assert kept_share(ramped, 1, 64) == 0
    assert kept_share(ramped, 11, 64) == pytest.approx(0.5)  # 640 images seen: half after 64
    assert kept_share(ramped, 1001, 64) == kept_share(ramped, 10**6, 64) == kept_share(track, 1, 64)


def test_averages_equal_a_float64_loop_over_the_weights():
    parameters = dict(network().named_parameters())
    bank = EMABank(parameters, EMAConfig(tracks=TRACKS), IMAGES)
    wanted = {f"{track.name}.{key}": p.detach().double() for track in TRACKS for key, p in parameters.items()}
    exponent = 2.8262137798958382  # 1 + gamma of 0.2
    for step in range(1, 41):
        walk(parameters, step)
        bank.update(step)
        kept = {
            "warm": min(0.8, 1 - (1 + step) ** -0.5), "plain": 0.99, "short": 2 ** (-IMAGES / 100),
            "ramped": 0 if step == 1 else 2 ** (-IMAGES / min(200, 0.3 * IMAGES * (step - 1))),
            "broad": ((step - 1) / step) ** exponent,
        }
        for name, share in kept.items():
            for key, parameter in parameters.items():
                entry = f"{name}.{key}"
                wanted[entry] = share * wanted[entry] + (1 - share) * parameter.detach().double()
    found = bank.tensors()
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted[key], rtol=1e-5, atol=2e-6)


def test_a_stored_bank_goes_on_bit_for_bit(tmp_path):
    straight, resumed = (dict(network().named_parameters()) for _ in range(2))
    bank, other = (EMABank(p, EMAConfig(tracks=TRACKS), IMAGES) for p in (straight, resumed))
    for step in range(1, 6):
        walk(straight, step)
        bank.update(step)
    Checkpointer(tmp_path, CheckpointConfig(), 0).save(5, bank.tensors(), {})
    read_tensors(checkpoint_path(tmp_path, 5), other.tensors())
    with torch.no_grad():
        for key, parameter in resumed.items():
            parameter.copy_(straight[key])
    for parameters, averages in ((straight, bank), (resumed, other)):
        walk(parameters, 6)
        averages.update(6)
    for key, value in bank.tensors().items():
        assert torch.equal(value, other.tensors()[key])


def test_average_weights_are_used_inside_and_the_trained_ones_restored_bit_for_bit():
    model = network()
    parameters = dict(model.named_parameters())
    bank = EMABank(parameters, EMAConfig(), IMAGES)
    start = {key: p.detach().clone() for key, p in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(1.7).add_(float(np.float32(1e-3)))
    trained = {key: p.detach().clone() for key, p in parameters.items()}
    identities = {key: p.data_ptr() for key, p in parameters.items()}

    def holds(values):
        return all(torch.equal(p, values[key]) for key, p in model.named_parameters())

    with bank.weights("ema", model):
        assert holds(start)
    assert holds(trained)
    with pytest.raises(ZeroDivisionError), bank.weights("ema", model):
        assert holds(start)
        raise ZeroDivisionError
    assert holds(trained)
    with bank.weights("none", model):
        assert holds(trained)
    assert {key: p.data_ptr() for key, p in parameters.items()} == identities
    assert all(torch.equal(value, start[key]) for key, value in bank.tracks["ema"].items())
