"""Resizers of feature extractors against their definitions, written pixel by pixel or as dense matrices."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.published_state_dicts import noise_images
from torchtitan.fidelity.resizing import resize_bicubic_antialias, resize_bicubic_pillow, resize_bilinear_tf1


def tensorflow_bilinear(image, size):
    """TensorFlow 1's kernel, a pixel at a time, every product and sum rounded to float32; [H, W] -> [size, size]."""
    one = np.float32
    height, width = image.shape
    line_scale, column_scale = one(height) / one(size), one(width) / one(size)
    result = np.empty((size, size), np.float32)
    for line in range(size):
        y = one(line) * line_scale
        top = int(np.floor(y))
        bottom = min(top + 1, height - 1)
        for column in range(size):
            x = one(column) * column_scale
            left = int(np.floor(x))
            right = min(left + 1, width - 1)
            upper, lower = (
                one(image[at, left]) + (one(image[at, right]) - one(image[at, left])) * (x - one(left)) for at in (top, bottom)
            )
            result[line, column] = upper + (lower - upper) * (y - one(top))
    return result


def bicubic_matrix(length, size):
    """Antialiased bicubic (a = -1/2) as a matrix [size, length]: the kernel is as wide as the reduction."""
    scale = length / size
    stretch = max(scale, 1.0)
    centres = (np.arange(size) + 0.5) * scale
    distance = np.abs(np.arange(length) + 0.5 - centres[:, None]) / stretch
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("height, width, size", [(8, 8, 37), (32, 32, 45), (61, 50, 37), (37, 37, 37), (1, 90, 37), (40, 1, 17)])
def test_tf1_bilinear_is_tensorflows_kernel_bit_for_bit(height, width, size):
    images = noise_images(2, 3, height, width)
    resized = resize_bilinear_tf1(images, size)
    assert resized.dtype == torch.float32 and resized.shape == (2, 3, size, size)
    for image, result in zip(images.flatten(0, 1), resized.flatten(0, 1), strict=True):
        assert np.array_equal(result.numpy(), tensorflow_bilinear(image.numpy(), size))


def test_tf1_bilinear_has_neither_aligned_corners_nor_half_pixels_nor_antialias():
    ramp = torch.arange(0, 40, 10, dtype=torch.uint8).expand(1, 1, 4, 4)
    assert resize_bilinear_tf1(ramp, 8)[0, 0, 0].tolist() == [0, 5, 10, 15, 20, 25, 30, 30]
    assert resize_bilinear_tf1(ramp, 2)[0, 0, 0].tolist() == [0, 20]  # a mean would be 5, 25


@pytest.mark.parametrize("height, width, size", [(32, 32, 224), (256, 200, 224), (512, 300, 64)])
def test_antialiased_bicubic_is_the_stretched_kernel_and_is_not_clamped(height, width, size):
    images = noise_images(1, 3, height, width)
    expected = bicubic_matrix(height, size) @ images.double().numpy() @ bicubic_matrix(width, size).T
    resized = resize_bicubic_antialias(images, size)
    assert resized.dtype == torch.float32
    places = max(height, width) * 2.0**-23  # torch rounds the places of pixels to float32
    assert np.abs(resized.numpy() - expected).max() <= 2 * 255 * places
    if size > height:
        assert resized.min() < -1 and resized.max() > 256


@pytest.mark.parametrize("height, width, size", [(32, 32, 224), (256, 200, 64)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pillows_bicubic_rounds_lines_and_then_columns(height, width, size, channels):
    images = noise_images(2, channels, height, width)
    resized = resize_bicubic_pillow(images, size)
    assert resized.dtype == torch.uint8 and resized.shape == (2, channels, size, size)
    as_picture = Image.fromarray(images[1].permute(1, 2, 0).squeeze(-1).numpy())
    again = np.asarray(as_picture.resize((size, size), Image.Resampling.BICUBIC)).reshape(size, size, channels)
    assert np.array_equal(resized[1].permute(1, 2, 0).numpy(), again)
    lines = np.clip(np.floor(images.double().numpy() @ bicubic_matrix(width, size).T + 0.5), 0, 255)
    expected = np.clip(np.floor(bicubic_matrix(height, size) @ lines + 0.5), 0, 255)
    difference = np.abs(resized.numpy() - expected)
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3  # Pillow's weights have 22 bits


def test_pillows_bicubic_leaves_images_of_the_size_as_they_are():
    images = noise_images(2, 3, 224, 224)
    assert torch.equal(resize_bicubic_pillow(images, 224), images)
