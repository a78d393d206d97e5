"""EDM2's U-Nets: sizes, products, initial magnitudes, invariance, and what they refuse."""

from dataclasses import replace

import pytest
import torch

from torchtitan.conditions import Classes, ConditionKind, Unconditional
from torchtitan.models import MODELS
from torchtitan.models.edm2.config import FLAVORS, EDM2Config
from torchtitan.models.edm2.model import EDM2UNet
from torchtitan.models.flops import check_macs

SMALL = EDM2Config(channels=32, channel_mults=[1, 2], num_blocks=1, attention_resolutions=[4], dropout=0.0)
# Of NVlabs' S on pixels, without labels: the port's U-Nets at that size.
IMAGENET64 = replace(
    FLAVORS["cifar"], channels=192, channel_mults=[1, 2, 3, 4], num_blocks=3, attention_resolutions=[16, 8]
)


def on_meta(config: EDM2Config, image_shape: tuple[int, int, int], kind: ConditionKind) -> EDM2UNet:
    with torch.device("meta"):
        return MODELS["edm2"].build(config, image_shape, kind)


# --- published sizes


@pytest.mark.parametrize(
    ("row", "side", "counts"),
    [
        (FLAVORS["cifar"], 32, {"C": 39_509_888, "E": 39_509_888, "G": 39_542_685}),
        (FLAVORS["tiny_imagenet"], 64, {"C": 62_414_720, "E": 62_414_720, "G": 62_447_533}),
        (IMAGENET64, 64, {"C": 277_045_056, "E": 277_045_056, "G": 279_441_253}),
    ],
    ids=["cifar", "tiny_imagenet", "imagenet64"],
)
def test_parameter_counts_and_products_of_the_ports_networks(row, side, counts):
    for name, count in counts.items():
        model = on_meta(replace(row, config=name), (3, side, side), Unconditional())
        assert model.num_parameters() == count
        assert len(model.blocks()) == model.config.depth
        check_macs(model, "edm2")


@pytest.mark.parametrize(
    ("flavor", "channels", "published"),
    [
        ("XXS", 4, 31_309_029), ("XS", 4, 124_713_253), ("S", 4, 280_212_837), ("M", 4, 497_807_781),
        ("L", 4, 777_498_085), ("XL", 4, 1_119_283_749), ("XXL", 4, 1_523_164_773), ("S", 3, 280_209_381),
    ],
)  # fmt: skip
def test_parameter_counts_and_products_of_the_published_networks(flavor, channels, published):
    model = on_meta(FLAVORS[flavor], (channels, 64, 64), Classes(1000))
    assert model.num_parameters() + 128 == published  # theirs has u(sigma), of 128 parameters, which is the objective's here
    check_macs(model, "edm2")
