"""Noise scale in the nuclear norm: on Gaussian matrices with known signal and noise."""

import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from torchtitan.config.job import load_config
from torchtitan.errors import ConfigError
from torchtitan.gns.decayed import DecayedSums
from torchtitan.gns.nuclear import NuclearNorms, nuclear_norm

ROWS, COLUMNS, STEPS, SAMPLES = 24, 48, 60, 8
FLAT = torch.ones(ROWS, dtype=torch.float64)
FALLING = 1.0 / torch.arange(1, ROWS + 1, dtype=torch.float64)


def orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def test_nuclear_norm_is_the_sum_of_singular_values():
    generator = torch.Generator().manual_seed(0)
    for shape in ((7, 20), (20, 7), (9, 9)):
        matrix = torch.randn(shape, generator=generator)
        assert nuclear_norm(matrix).item() == pytest.approx(torch.linalg.svdvals(matrix.double()).sum().item(), rel=1e-10)
    lowest = torch.outer(torch.randn(30, generator=generator), torch.randn(12, generator=generator))
    assert nuclear_norm(lowest).item() == pytest.approx(lowest.norm().item(), rel=1e-6)


def estimated(singular: torch.Tensor, ratio: float, ranks: int) -> tuple[float, float]:
    """Estimated over true norms of a rank's noise and of the signal; ratio: noise over signal of a rank."""
    generator = torch.Generator().manual_seed(1)
    left, right = orthogonal(ROWS, generator), orthogonal(COLUMNS, generator)[:ROWS]
    signal = left @ singular.diag() @ right
    draws = torch.randn(400, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    level = ratio * singular.sum() / torch.linalg.svdvals(draws).sum(1).mean()
    parameter = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    monitors = [
        NuclearNorms({parameter: 1.0}, SimpleNamespace(world_size=ranks, rank=rank), ["all"], 1e9, 1) for rank in range(ranks)
    ]
    monitors[0]._sums = DecayedSums(1, math.inf)  # of all steps alike
    for _ in range(STEPS):
        own = signal + level * torch.randn(ranks, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
        parameter.grad = own.mean(0).float()
        found = all_ranks(monitors, parameter, own.float())
        for monitor in monitors:
            monitor._noted = [(0, SAMPLES, found)]
            monitor.keep_step(torch.tensor(False))
    monitors[0].pool_kept_steps()
    noise, squared, samples = (monitors[0].metrics("all").get(f"all/{name}", 0.0) for name in ("noise", "signal", "small_batch"))
    return (noise / samples) ** 0.5 / (ratio * singular.sum().item()), max(squared, 0.0) ** 0.5 / singular.sum().item()


def all_ranks(monitors: list[NuclearNorms], parameter: nn.Parameter, own: torch.Tensor) -> torch.Tensor:
    """What the collectives of all ranks give: the contrast of the halves first, then the sum of the ranks' norms."""
    half = len(own) // 2
    contrast = ((own[:half].sum(0) - own[half:].sum(0)) / len(own)).flatten()
    for monitor, gradient in zip(monitors, own, strict=True):
        with patch("torchtitan.gns.nuclear.dist.all_reduce", lambda tensor: len(tensor) == 4 or tensor.copy_(contrast)):
            monitor.measure(0, SAMPLES, {parameter: gradient}, 1.0)
    return torch.stack([monitor._noted[-1][2] for monitor in monitors]).sum(0)


@pytest.mark.parametrize("singular, ratio, ranks, off", [
    (FLAT, 0.3, 2, 0.01), (FLAT, 1.0, 8, 0.01), (FALLING, 0.3, 2, 0.01), (FALLING, 1.0, 8, 0.015), (FALLING, 1.0, 2, 0.06),
])  # fmt: skip
def test_signal_and_noise_are_right_where_the_steps_noise_is_below_the_signal(singular, ratio, ranks, off):
    noise, signal = estimated(singular, ratio, ranks)
    assert noise == pytest.approx(1.0, abs=0.01)
    assert signal == pytest.approx(1.0, abs=off)


def test_without_a_signal_none_is_found():
    noise, signal = estimated(FLAT * 1e-9, 1e9, 4)  # the noise of a rank has the norm of FLAT
    assert noise == pytest.approx(1.0, abs=0.01)
    assert signal * 1e-9 < 0.15  # uncorrected, the mean of four ranks has half a rank's norm


@pytest.mark.parametrize("words, message", [
    ([], "is the norm of Muon's step, and optimizer.name is AdamW"),
    (["--optimizer.name", "Muon", "--parallelism.data_parallel_shard_degree", "2"], "needs a rank's whole gradients"),
    (["--optimizer.name", "Muon", "--training.global_batch_size", "96"], "compares halves of the processes, and there are 3"),
])  # fmt: skip
def test_other_rules_layouts_and_numbers_of_ranks_are_refused(words, message, tmp_path):
    ranks = 3 if "3" in message else 2
    shared = ["train_configs/digits.toml", "--gns.rank_gradients", "true", "--gns.nuclear_norm", "true"]
    with pytest.raises(ConfigError, match=message):
        load_config([*shared, "--job.dump_folder", str(tmp_path), *words], ranks)
