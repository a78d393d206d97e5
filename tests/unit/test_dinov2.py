"""DINOv2's transformer against transformers' values and float64 by hand; its published size; both resizings."""

import numpy as np
import pytest
import torch

from tests.unit.published_state_dicts import noise_images, transformer_state_dict, uniform
from torchtitan.fidelity.dinov2 import DGM_EVAL, EDM2, DinoV2, VisionTransformer
from torchtitan.fidelity.published import DINOV2

WIDTH, DEPTH, HEADS, GRID = 48, 3, 4, 7
# Of Dinov2Model of transformers 4.40.2, which interpolates positions as the published code does (later versions do
# not), with these weights and images: each eighth channel of the class token of two images.
TRANSFORMERS = {
    (98, 98): [
        [0.3820532, -0.9425015, 0.4747972, -1.401828, -1.027984, -0.5895217],
        [0.1681213, -0.8875415, 0.7032738, -1.563275, -0.7874752, -0.9743118],
    ],
    (56, 70): [
        [-0.5478422, -0.6374981, -0.2336155, -1.975731, -1.15222, -0.8940849],
        [-0.3704146, -0.7704459, 0.9798226, -1.169669, -0.9860048, -1.005362],
    ],
}


@pytest.fixture(scope="module")
def network():
    built = VisionTransformer(WIDTH, DEPTH, HEADS, patch=14, grid=GRID)
    built.load_state_dict(transformer_state_dict(built))
    return built.eval().requires_grad_(False)


@pytest.mark.parametrize("height, width", TRANSFORMERS)
def test_class_tokens_are_those_of_transformers(network, height, width):
    tokens = network(uniform("pixels", (2, 3, height, width)))
    assert (tokens[:, ::8] - torch.tensor(TRANSFORMERS[height, width])).abs().max() <= 1e-5


def bicubic_row(place, length):
    """Weights of Keys' kernel (a = -3/4) at a place between pixels, those outside given to the border."""
    weights = np.zeros(length)
    first = int(np.floor(place)) - 1
    for pixel in range(first, first + 4):
        distance = abs(place - pixel)
        if distance <= 1:
            weight = (1.25 * distance - 2.25) * distance**2 + 1
        else:
            weight = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        weights[min(max(pixel, 0), length - 1)] += weight
    return weights


def test_positions_are_interpolated_at_the_scale_of_the_published_code(network):
    rows, columns = (
        np.stack([bicubic_row((index + 0.5) * GRID / (side + 0.1) - 0.5, GRID) for index in range(side)]) for side in (4, 5)
    )
    own = network.pos_embed[0, 1:].double().numpy().reshape(GRID, GRID, WIDTH)
    expected = np.einsum("ya,xb,abd->yxd", rows, columns, own).reshape(20, WIDTH)
    found = network.positions(4, 5)
    assert np.abs(found[0, 1:].numpy() - expected).max() <= 1e-5
    assert torch.equal(found[:, 0], network.pos_embed[:, 0])
    to_sides = torch.nn.functional.interpolate(
        network.pos_embed[:, 1:].unflatten(1, (GRID, GRID)).permute(0, 3, 1, 2), (4, 5), mode="bicubic"
    )
    assert (found[0, 1:] - to_sides.flatten(2)[0].T).abs().max() > 1e-3
    assert network.positions(GRID, GRID) is network.pos_embed


def test_the_published_file_has_room_for_the_tensors_and_their_names_alone():
    with torch.device("meta"):
        tensors = VisionTransformer().state_dict() | {"mask_token": torch.empty(1, 1024)}
    assert len(tensors) == 24 * 14 + 7
    count = sum(tensor.numel() for tensor in tensors.values())
    assert count == 304_368_640
    assert 100 * len(tensors) < DINOV2.size - 4 * count < 400 * len(tensors)


class Recorded(torch.nn.Module):
    """Network that keeps its input, and returns its first values."""

    def forward(self, x):
        self.x = x
        return x.flatten(1)[:, :1024]


@pytest.mark.parametrize("resizing", [EDM2, DGM_EVAL])
def test_each_resizing_gives_pixels_normalised_by_imagenet(resizing):
    with torch.device("meta"):
        shapes = VisionTransformer().state_dict()
    zeros = {name: torch.zeros(1).expand(each.shape) for name, each in shapes.items()}
    extractor = DinoV2(resizing, zeros, torch.device("cpu"))
    extractor.network = Recorded()
    images = noise_images(2, 3, 40, 56)
    assert extractor.extract(images)["pooled"].shape == (2, 1024)
    mean, std = (np.array(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pixels = 255 * (extractor.network.x.double().numpy() * std + mean)
    assert np.abs(pixels - resizing.resize(images, 224).double().numpy()).max() < 1e-3
    whole = np.abs(pixels - pixels.round()).max() < 1e-3
    assert whole == (resizing is DGM_EVAL) and (pixels.min() < -1) == (resizing is EDM2)
    assert extractor.record()["name"] == resizing.name and resizing.words == extractor.record()["resize"]
