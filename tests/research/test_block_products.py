"""Unbiased products of mean gradients: by brute force over all draws, and their standard errors by repetition."""

import itertools

import pytest
import torch

from research.block_products import block_products


def test_products_and_covariances_of_paired_blocks_are_unbiased_over_all_draws():
    """Block i of both gradients is of the same draw of three: the mean over all 3^3 draws is exact."""
    generator = torch.Generator().manual_seed(2)
    choices = torch.randn(2, 3, 4, generator=generator)  # [gradients, choices, P]
    found = [block_products(choices[:, drawn]) for drawn in map(list, itertools.product(range(3), repeat=3))]
    true = choices.double().mean(1)
    torch.testing.assert_close(torch.stack([one.values for one in found]).mean(0), true @ true.T, rtol=1e-6, atol=1e-9)
    apart = choices.double() - true[:, None]
    covariances = torch.einsum("icp,jcp->ij", apart, apart) / 3
    torch.testing.assert_close(torch.stack([one.noise for one in found]).mean(0), covariances, rtol=1e-6, atol=1e-9)


def test_standard_errors_are_those_of_repetitions():
    generator = torch.Generator().manual_seed(1)
    true = torch.randn(2, 1, 5, generator=generator)
    found = [block_products(true + 0.3 * torch.randn(2, 8, 5, generator=generator)) for _ in range(600)]
    spread = torch.stack([one.values for one in found]).std(0)
    expected = torch.stack([one.error_of(lambda kept: kept.values).square() for one in found]).mean(0).sqrt()
    # Four standard errors of a standard deviation from 600 repetitions, of nearly normal values.
    torch.testing.assert_close(expected, spread, rtol=4 / (2 * 599) ** 0.5, atol=0.0)


def test_too_few_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks"):
        block_products(torch.ones(2, 2, 3))
