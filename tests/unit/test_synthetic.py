"""Synthetic images against their stated statistics and the exact estimator."""

import numpy as np
import pytest
import torch

from torchtitan.conditions import POOLED, TEXT, Embeddings
from torchtitan.config.job import load_config
from torchtitan.data.synthetic import NUM_VALIDATION, Synthetic, SyntheticConfig, mode_variances
from torchtitan.estimate.memory import model_on_meta


def dense_covariance(config):
    """Covariance between the pixels of a channel, summed mode by mode, [H * W, H * W] float64."""
    _, height, width = config.shape
    variances = mode_variances(config)[0].numpy()
    y, x = (grid.ravel() for grid in np.meshgrid(np.arange(height), np.arange(width), indexing="ij"))
    dy, dx = y[:, None] - y[None, :], x[:, None] - x[None, :]
    total = np.zeros(dy.shape)
    for ky in range(height):
        for kx in range(width):
            total += variances[ky, kx] * np.cos(2 * np.pi * (ky * dy / height + kx * dx / width))
    return total / (height * width)


@pytest.mark.parametrize("shape", [[2, 6, 8], [1, 5, 7]])
def test_gaussian_images_have_the_stated_covariance(shape):
    config = SyntheticConfig(shape=shape, spectrum_alpha=1.5, pixel_variance=0.6)
    images = Synthetic(config, "train").fetch(np.arange(40_000))["images"].to(torch.float64)
    variances = mode_variances(config)
    assert variances.shape == tuple(shape) and variances.mean() == pytest.approx(0.6)
    assert variances[0, 0, 0] == variances[0, 0, 1] == variances[0, -1, 0]  # the constant mode counts as f = 1
    assert variances[0, 0, 2] / variances[0, 0, 1] == pytest.approx(2**-1.5)
    power = torch.fft.fft2(images, norm="ortho").abs().square().mean(dim=0)
    assert (power / variances - 1).abs().max() < 5 * (2 / 40_000) ** 0.5
    flat = images[:, 0].flatten(1)
    error = (flat.T @ flat / len(flat)).numpy() - dense_covariance(config)
    assert np.abs(error).max() < 5 * 0.6 * (2 / 40_000) ** 0.5
    assert images.mean(dim=0).abs().max() < 5 * (0.6 / 40_000) ** 0.5
    if shape[0] == 2:
        assert (images[:, 0] * images[:, 1]).mean(dim=0).abs().max() < 5 * 0.6 / 200


def test_synthetic_images_are_functions_of_their_index():
    for kind in ("constant", "noise", "gaussian"):
        config = SyntheticConfig(kind=kind, shape=[3, 4, 4], num_images=50, num_classes=7)
        train, held_out = Synthetic(config, "train"), Synthetic(config, "validation")
        images, labels = train.fetch(np.arange(50)).values()
        alone, label = train.fetch(np.array([31])).values()
        assert torch.equal(alone[0], images[31]) and label[0] == labels[31]
        assert set(labels.tolist()) == set(range(7))
        if kind == "constant":
            assert images.std(dim=(1, 2, 3)).max() == 0 and len(images.unique()) == 7 and images.abs().max() < 1
        else:
            everything = torch.cat((images, held_out.fetch(np.arange(50))["images"]))
            assert len(everything.flatten(1).unique(dim=0)) == 100


def test_texts_are_independent_standard_normals_of_their_index():
    sizes = {"shape": [1, 2, 2], "num_images": 3000, "text_length": 3, "text_dim": 4, "pooled_dim": 5}
    config = SyntheticConfig(**sizes)
    kind = Synthetic.info(config).condition_kind
    assert isinstance(kind, Embeddings)
    assert kind.entries == {TEXT: ((3, 4), torch.float32), POOLED: ((5,), torch.float32)}
    assert not any(null.any() for null in kind.nulls.values())
    training = Synthetic(config, "train")
    batch = training.fetch(np.arange(3000))
    assert batch[TEXT].shape == (3000, 3, 4) and batch[POOLED].shape == (3000, 5)
    joined = torch.cat([batch["images"].flatten(1), batch[TEXT].flatten(1), batch[POOLED]], dim=1).double()  # [3000, 21]
    assert joined.mean(0).abs().max() < 5 * 3000**-0.5
    covariance = joined.T @ joined / 3000
    assert (covariance[4:, 4:] - torch.eye(17)).abs().max() < 5 * (2 / 3000) ** 0.5
    assert covariance[:4, 4:].abs().max() < 5 * 3000**-0.5

    again = training.fetch(np.array([2999, 7]))
    assert torch.equal(again[TEXT], batch[TEXT][[2999, 7]]) and torch.equal(again[POOLED], batch[POOLED][[2999, 7]])
    held_out = Synthetic(config, "validation").fetch(np.arange(NUM_VALIDATION))
    assert not torch.isin(held_out[POOLED][:100, 0], batch[POOLED][:, 0]).any()
    without = Synthetic(SyntheticConfig(**sizes | {"text_length": 0}), "train").fetch(np.arange(8))
    assert torch.equal(without["images"], batch["images"][:8]) and set(without) == {"images", "class"}


def test_flux_is_estimated_on_synthetic_texts():
    """Parameters of schnell at the widths that are the defaults."""
    words = ["--model.name", "flux", "--data.name", "synthetic", "--data.shape", "[16, 32, 32]", "--data.text_length", "256"]
    assert model_on_meta(load_config(words, 1)).num_parameters() == 11_891_178_560
