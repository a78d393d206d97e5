"""EDM2's U-Nets: sizes, products, initial magnitudes, invariance, and what they refuse."""

import math
from dataclasses import replace

import pytest
import torch

from tests.configurations import problems
from torchtitan.conditions import Classes, ConditionKind, Unconditional
from torchtitan.config.job import load_config
from torchtitan.estimate.memory import estimate_memory
from torchtitan.estimate.simulation import simulate_step
from torchtitan.gns.capture import check_measurable
from torchtitan.gns.config import CannotMeasure
from torchtitan.models import MODELS
from torchtitan.models.dropout import dropout, dropout_keys
from torchtitan.models.edm2.config import FLAVORS, EDM2Config
from torchtitan.models.edm2.model import EDM2UNet
from torchtitan.models.float8 import Float8Config, Float8Error, check_convertible
from torchtitan.models.flops import check_macs

SMALL = EDM2Config(channels=32, channel_mults=[1, 2], num_blocks=1, attention_resolutions=[4], dropout=0.0)
# Of NVlabs' S on pixels, without labels: the port's U-Nets at that size.
IMAGENET64 = replace(
    FLAVORS["cifar"], channels=192, channel_mults=[1, 2, 3, 4], num_blocks=3, attention_resolutions=[16, 8]
)


def on_meta(config: EDM2Config, image_shape: tuple[int, int, int], kind: ConditionKind) -> EDM2UNet:
    with torch.device("meta"):
        return MODELS["edm2"].build(config, image_shape, kind)


def initialised(config: EDM2Config, seed: int = 0, garbage: float = 0.0) -> EDM2UNet:
    """Model with random gains, and an output that is not zero."""
    model = MODELS["edm2"].build(config, (1, 8, 8), Classes(10))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(garbage)
    torch.manual_seed(seed)
    model.init_weights()
    with torch.no_grad():
        if model.output_gain is not None:
            model.output_gain.fill_(1.0)
    return model


def inputs(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 1, 8, 8, generator=generator), torch.linspace(-1.5, 1, batch), torch.arange(batch)


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
        if row is FLAVORS["cifar"]:
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
    if flavor == "XS":
        check_macs(model, "edm2")


# --- initialisation and conditions


@pytest.mark.parametrize("name", ["C", "E", "G"])
def test_every_weight_and_wave_is_initialised_alike_for_equal_seeds(name):
    first, second = (initialised(replace(SMALL, config=name), garbage=value) for value in (math.nan, 3.0))
    other = initialised(replace(SMALL, config=name), seed=1)
    for key, tensor in first.state_dict().items():
        assert tensor.isfinite().all() and torch.equal(tensor, second.state_dict()[key])
        assert tensor.numel() == 1 or not torch.equal(tensor, other.state_dict()[key])


@pytest.mark.parametrize("name", ["C", "E", "G"])
def test_the_null_class_is_the_zero_vector_and_other_classes_count(name):
    model, other = (initialised(replace(SMALL, config=name)).eval() for _ in range(2))
    with torch.no_grad():
        other.embedding.label.weight[:, 3] += 1.0
        x, t, _ = inputs(2)
        null, third = torch.tensor([10, 10]), torch.tensor([3, 3])
        assert torch.equal(model(x, t, null), other(x, t, null))
        assert not torch.allclose(model(x, t, third), other(x, t, third))
        assert not torch.allclose(model(x, t, third), model(x, t, null))


@pytest.mark.parametrize("name", ["C", "E", "G"])
def test_weights_in_bfloat16_give_float32_near_that_of_float32(name):
    model, (x, t, classes) = initialised(replace(SMALL, config=name)).eval(), inputs()
    with torch.no_grad():
        wanted = model(x, t, classes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast = model(x, t, classes)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        rounded = model(x, t, classes)
    for found in (autocast, rounded):
        assert found.dtype == torch.float32
        assert 0 < (found - wanted).norm() / wanted.norm() < 0.03


def test_images_need_not_be_square():
    with torch.device("meta"):
        model = MODELS["edm2"].build(replace(SMALL, attention_resolutions=[6]), (2, 8, 12), Unconditional())
        check_macs(model, "edm2")
        assert model(torch.empty(3, 2, 8, 12), torch.empty(3)).shape == (3, 2, 8, 12)


# --- dropout


def test_dropout_drops_its_share_and_keeps_the_mean():
    x = torch.ones(64, 9, 8, 8)
    keys = dropout_keys(0, torch.arange(64), layers=2)
    found = dropout(x, keys[0], 0.13)
    dropped = (found == 0).double()
    error = 4 * math.sqrt(0.13 * 0.87 / x.numel())
    assert dropped.mean().item() == pytest.approx(0.13, abs=error)
    assert found[found != 0].unique().tolist() == pytest.approx([1 / 0.87], rel=1e-5)
    # Independent between images, layers, attempts and neighbours.
    others = [dropout(x, keys[1], 0.13), dropout(x, dropout_keys(0, torch.arange(64), 2, attempt=1)[0], 0.13)]
    pairs = [(dropped, (other == 0).double()) for other in others]
    pairs += [(dropped[:-1], dropped[1:]), (dropped[..., :-1], dropped[..., 1:])]
    for a, b in pairs:
        error = 5 * math.sqrt(0.13**2 * (1 - 0.13**2) / a.numel())
        assert (a * b).mean().item() == pytest.approx(0.13**2, abs=error)


@pytest.mark.parametrize("name", ["C", "G"])
def test_dropout_is_that_of_the_sample_in_any_batch_and_off_in_evaluation(name):
    model, (x, t, classes) = initialised(replace(SMALL, config=name, dropout=0.3)).train(), inputs()
    samples = torch.tensor([5, 9, 2, 70])

    def outputs(chosen: slice, attempt: int = 0) -> torch.Tensor:
        model.draw_dropout(7, samples[chosen], attempt)
        return model(x[chosen], t[chosen], classes[chosen])

    with torch.no_grad():
        whole = outputs(slice(None))
        parts = torch.cat((outputs(slice(0, 2)), outputs(slice(2, 4))))
        assert torch.allclose(whole, parts, atol=1e-5)
        assert (whole - outputs(slice(None), attempt=1)).abs().max() > 1e-2
        evaluated = model.eval()(x, t, classes)
        assert torch.equal(evaluated, initialised(replace(SMALL, config=name)).eval()(x, t, classes))
    assert (whole - evaluated).abs().max() > 1e-2
    with pytest.raises(ValueError, match=r"dropout is drawn for 4 images \(draw_dropout\), the batch has 2"):
        model.train()(x[:2], t[:2], classes[:2])


# --- estimates


def test_the_estimate_simulates_all_blocks_since_they_differ():
    words = ["--model.name=edm2", "--model.channels=32", "--model.channel_mults=[1]", "--model.num_blocks=1",
             "--model.attention_resolutions=[16]", "--model.dropout=0", "--data.name=synthetic", "--data.shape=[3,16,16]",
             "--training.local_batch_size=8", "--ema.tracks=[]", "--sampling.ema_track=none"]  # fmt: skip
    config, recomputed = (load_config([*words, *more], 1) for more in ([], ["--activation_checkpoint.mode=full"]))
    windows = simulate_step(config, 1).windows
    assert {block for _, phase, block in windows if phase == "backward"} == set(range(6)) and config.model.depth == 5
    estimate = estimate_memory(recomputed, 1)
    model = on_meta(config.model, (3, 16, 16), Classes(10))
    assert estimate.parameters == 4 * (model.num_parameters() + 2 * 32)  # with the waves
    assert 0 < estimate.activations < 0.6 * max(peak["activations"] for peak in windows.values())


# --- refusals


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--data.shape", "[3,28,28]", "--model.attention_resolutions", "[14]"],
         "model.channel_mults: 4 levels halve images 3 times, those of 28 x 28 can be halved 2 times "
         "(give at most 3 multipliers, or images of a multiple of 8 pixels)"),
        (["--data.shape", "[3,16,16]", "--model.attention_resolutions", "[16,7]"],
         "model.attention_resolutions: 7 is the side of no feature map (they are 16, 8, 4, 2)"),
        (["--data.shape", "[3,32,32]", "--model.channels", "48", "--model.config", "E"],
         "model.channels: 48 is no multiple of 32, the groups that configuration E normalises"),
        (["--data.shape", "[3,32,32]", "--objective.heads", '["x0", "v"]'], "model.name = edm2 makes one prediction"),
        (["--data.shape", "[3,32,32]", "--optimizer.weight_decay", "0.1"], "optimizer.weight_decay: has no effect on weights"),
        (["--data.shape", "[3,32,32]", "--gns.enable", "true"], "gns.single_pass: single gradients of normalised"),
        (["--data.shape", "[3,32,32]", "--data.num_classes", "4", "--sampling.guidance_scale", "2"],
         "model.label_dropout = 0 trains no unconditional prediction to guide away from"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_one_line(words, problem):
    (found,) = problems(None, ["--model.name", "edm2", "--data.name", "synthetic", *words])
    assert problem in found and "\n" not in found


def test_single_gradients_of_c_are_refused_with_the_way_out():
    model = on_meta(replace(SMALL, config="C"), (1, 8, 8), Unconditional())
    with pytest.raises(CannotMeasure, match=r"belongs to a Conv2d; .* or set gns.enable to false, or, with two"):
        check_measurable(model)


def test_float8_has_nothing_to_convert():
    model = on_meta(SMALL, (1, 8, 8), Unconditional())
    with pytest.raises(Float8Error, match=r"float8.enable: no product of the model \(EDM2UNet\) is of a plain linear"):
        check_convertible(model, Float8Config(enable=True, emulate=True), 16)
