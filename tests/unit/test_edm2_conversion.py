"""Weights of EDM2's U-Nets in the layouts of NVlabs' code and of the port: their names, their functions, and back."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.conditions import class_kind
from torchtitan.files.weight_files import named_weights
from torchtitan.models import MODELS
from torchtitan.models.edm2.config import FLAVORS, EDM2Config
from torchtitan.models.edm2.model import EDM2UNet
from torchtitan.models.published_layouts import ConversionError

LAYOUT = MODELS["edm2"].layouts["edm2"]
SMALL = replace(
    FLAVORS["XS"], channels=16, channel_mults=[1, 2, 4], num_blocks=1, attention_resolutions=[4], channels_per_head=8
)
PORT_LAYOUT = MODELS["edm2"].layouts["edm2_port"]
PORT = replace(FLAVORS["cifar"], channels=32, channel_mults=[1, 2], num_blocks=2, attention_resolutions=[4])
IMAGE, CLASSES = (3, 8, 8), 5


def build(config: EDM2Config = SMALL, image_shape: tuple[int, int, int] = IMAGE, classes: int = CLASSES) -> EDM2UNet:
    model = MODELS["edm2"].build(config, image_shape, class_kind(classes))
    torch.manual_seed(1)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return model.eval().requires_grad_(False)


def published_shapes(
    side: int, channels: int, labels: int, base: int, mults: list[int], blocks: int, attention: list[int]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of NVlabs' state dict, after its description: encoder, decoder, gains as scalars."""
    widths, emb = [base * mult for mult in mults], base * max(mults)
    shapes: dict[str, tuple[int, ...]] = {
        "unet.out_gain": (), "unet.emb_fourier.freqs": (base,), "unet.emb_fourier.phases": (base,),
        "unet.emb_noise.weight": (emb, base), "unet.emb_label.weight": (emb, labels),
        f"unet.enc.{side}x{side}_conv.weight": (base, channels + 1, 3, 3),
    }  # fmt: skip

    def block(name: str, before: int, after: int, decoder: bool, attends: bool = False) -> None:
        shapes[f"{name}.emb_gain"] = ()
        shapes[f"{name}.conv_res0.weight"] = (after, before if decoder else after, 3, 3)
        shapes[f"{name}.emb_linear.weight"] = (after, emb)
        shapes[f"{name}.conv_res1.weight"] = (after, after, 3, 3)
        if before != after:
            shapes[f"{name}.conv_skip.weight"] = (after, before, 1, 1)
        if attends:
            shapes[f"{name}.attn_qkv.weight"] = (3 * after, after, 1, 1)
            shapes[f"{name}.attn_proj.weight"] = (after, after, 1, 1)

    current, skips = base, [base]
    for level, width in enumerate(widths):
        at = f"{side >> level}x{side >> level}"
        if level:
            block(f"unet.enc.{at}_down", current, current, False)
            skips.append(current)
        for number in range(blocks):
            block(f"unet.enc.{at}_block{number}", current, width, False, side >> level in attention)
            current = width
            skips.append(current)
    for level, width in reversed(list(enumerate(widths))):
        at = f"{side >> level}x{side >> level}"
        if level == len(widths) - 1:
            block(f"unet.dec.{at}_in0", current, current, True, True)
            block(f"unet.dec.{at}_in1", current, current, True)
        else:
            block(f"unet.dec.{at}_up", current, current, True)
        for number in range(blocks + 1):
            block(f"unet.dec.{at}_block{number}", current + skips.pop(), width, True, side >> level in attention)
            current = width
    return shapes | {"unet.out_conv.weight": (channels, current, 3, 3)}


def published_network(w: dict[str, Tensor], x: Tensor, t: Tensor, one_hot: Tensor, per_head: int) -> Tensor:
    def rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        return x.square().mean(dims, keepdim=True).sqrt()

    def weight(name: str) -> Tensor:
        raw = w[f"{name}.weight"]
        return raw / (1e-4 + rms(raw, tuple(range(1, raw.ndim)))) / math.sqrt(raw[0].numel())

    def conv(name: str, x: Tensor) -> Tensor:
        return F.conv2d(x, weight(name), padding=w[f"{name}.weight"].shape[-1] // 2)

    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) / 0.596

    def added(a: Tensor, b: Tensor, t: float = 0.3) -> Tensor:
        return ((1 - t) * a + t * b) / math.sqrt((1 - t) ** 2 + t**2)

    def attended(name: str, x: Tensor) -> Tensor:
        y = conv(f"{name}.attn_qkv", x).reshape(len(x), -1, per_head, 3, x.shape[2] * x.shape[3])
        q, k, v = (y / (1e-4 + rms(y, (2,)))).unbind(3)
        scores = torch.softmax(torch.einsum("nhcq,nhck->nhqk", q, k) / math.sqrt(per_head), dim=3)
        return added(x, conv(f"{name}.attn_proj", torch.einsum("nhqk,nhck->nhcq", scores, v).reshape(x.shape)))

    def block(name: str, x: Tensor) -> Tensor:
        skips = f"{name}.conv_skip.weight" in w
        if ".enc." in name:
            x = conv(f"{name}.conv_skip", x) if skips else x
            x = x / (1e-4 + rms(x, (1,)))
        scale = 1 + w[f"{name}.emb_gain"] * (emb @ weight(f"{name}.emb_linear").T)
        y = conv(f"{name}.conv_res1", silu(conv(f"{name}.conv_res0", silu(x)) * scale[:, :, None, None]))
        x = conv(f"{name}.conv_skip", x) if ".dec." in name and skips else x
        x = added(x, y)
        return (attended(name, x) if f"{name}.attn_qkv.weight" in w else x).clamp(-256, 256)

    waves = math.sqrt(2) * torch.cos(t[:, None] * w["unet.emb_fourier.freqs"] + w["unet.emb_fourier.phases"])
    label = math.sqrt(one_hot.shape[1]) * one_hot @ weight("unet.emb_label").T
    emb = silu(added(waves @ weight("unet.emb_noise").T, label, 0.5))
    sides = sorted({int(name.split(".")[2].split("x")[0]) for name in w if ".enc." in name}, reverse=True)
    x = conv(f"unet.enc.{sides[0]}x{sides[0]}_conv", torch.cat((x, torch.ones_like(x[:, :1])), dim=1))
    skips = [x]

    def numbered(part: str, side: int) -> list[str]:
        places = {".".join(name.split(".")[:3]) for name in w if name.startswith(f"unet.{part}.{side}x{side}_block")}
        return sorted(places)

    for side in sides:
        down = [f"unet.enc.{side}x{side}_down"] if side != sides[0] else []
        for name in down + numbered("enc", side):
            x = block(name, F.avg_pool2d(x, 2) if name in down else x)
            skips.append(x)
    for side in reversed(sides):
        deepest = side == sides[-1]
        for name in ([f"unet.dec.{side}x{side}_in{i}" for i in (0, 1)] if deepest else [f"unet.dec.{side}x{side}_up"]):
            x = block(name, x if deepest else x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        for name in numbered("dec", side):
            skip = skips.pop()
            total = x.shape[1] + skip.shape[1]
            x = torch.cat((x * math.sqrt(total / 2 / x.shape[1]), skip * math.sqrt(total / 2 / skip.shape[1])), dim=1)
            x = block(name, x)
    return w["unet.out_gain"] * conv("unet.out_conv", x)


# --- the published names and function


@pytest.mark.parametrize("flavor", ["XS", "S"])
def test_names_and_shapes_are_the_published_ones(flavor):
    with torch.device("meta"):
        model = MODELS["edm2"].build(FLAVORS[flavor], (4, 64, 64), class_kind(1000))
    published, _ = LAYOUT.export_weights(named_weights(model), model)
    base = FLAVORS[flavor].channels
    wanted = published_shapes(64, 4, 1000, base, [1, 2, 3, 4], 3, [16, 8])
    assert {name: tuple(tensor.shape) for name, tensor in published.items()} == wanted


def test_exported_weights_compute_the_same_in_the_published_network_and_come_back_bit_for_bit():
    model = build()
    weights = named_weights(model)
    published, notes = LAYOUT.export_weights(weights, model)
    assert any("without logvar_fourier.freqs" in note for note in notes)
    x, t, classes = torch.randn(3, *IMAGE).double(), torch.randn(3).double(), torch.tensor([0, 4, CLASSES])
    one_hot = torch.eye(CLASSES + 1).double()[classes, :CLASSES]
    wanted = published_network({name: tensor.double() for name, tensor in published.items()}, x, t, one_hot, 8)
    found = build().double()(x, t, classes)
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()

    theirs = published | {
        "logvar_fourier.freqs": torch.randn(128), "logvar_fourier.phases": torch.randn(128),
        "logvar_linear.weight": torch.randn(1, 128),
    }  # fmt: skip
    back, notes = LAYOUT.import_weights(theirs, model)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
    assert notes == [
        "left out: logvar_fourier.freqs, logvar_fourier.phases, logvar_linear.weight (u(sigma) belongs to the objective; "
        "sampling does not need it)"
    ]
    again, _ = LAYOUT.export_weights(back, model)
    assert again.keys() == published.keys() and all(torch.equal(again[name], published[name]) for name in published)


# --- the port's names and function


def port_network(w: dict[str, Tensor], x: Tensor, t: Tensor, magnitudes: bool, per_head: int | None) -> Tensor:
    """Forward of the port's UNetC or UNetG in the terms of its state dict: `down`, two middle blocks, `up`."""

    def weight(name: str) -> Tensor:
        raw = w[f"{name}.weight"]
        n = raw[0].numel()
        norm = raw.flatten(1).norm(dim=1).view(-1, *[1] * (raw.ndim - 1))
        return raw / (1e-4 + norm / math.sqrt(n)) / math.sqrt(n) if magnitudes else raw

    def conv(name: str, x: Tensor) -> Tensor:
        return F.conv2d(x, weight(name), padding=w[f"{name}.weight"].shape[-1] // 2)

    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) / (0.596 if magnitudes else 1)

    def unit(x: Tensor, dim: int) -> Tensor:
        return x / torch.sqrt((x * x).mean(dim, keepdim=True) + 1e-8)

    def joined(a: Tensor, b: Tensor) -> Tensor:
        return (0.7 * a + 0.3 * b) / math.sqrt(0.58) if magnitudes else a + b

    def attended(name: str, x: Tensor) -> Tensor:
        d = per_head or x.shape[1]
        rows = conv(f"{name}.projection", x).flatten(2).transpose(1, 2).unflatten(2, (-1, 3 * d))  # [B, T, N, 3 D]
        q, k, v = (unit(part, 3) for part in rows.chunk(3, dim=3))
        shares = torch.softmax(torch.einsum("bihd,bjhd->bijh", q, k) / math.sqrt(d), dim=2)
        y = torch.einsum("bijh,bjhd->bihd", shares, v).flatten(2).transpose(1, 2).reshape(x.shape)
        return joined(x, conv(f"{name}.output", y))

    def block(name: str, x: Tensor, encodes: bool, resample=lambda x: x) -> Tensor:
        def widened(x: Tensor) -> Tensor:
            return conv(f"{name}.res.shortcut", x) if f"{name}.res.shortcut.weight" in w else x

        scale = emb @ weight(f"{name}.res.linear").T
        if magnitudes:
            main = unit(widened(resample(x)), 1) if encodes else resample(x)
            y = conv(f"{name}.res.conv1", silu(main)) * (1 + w[f"{name}.res.gain.g"] * scale)[:, :, None, None]
            main = main if encodes else widened(main)
        else:
            main = widened(resample(x))
            y = F.group_norm(conv(f"{name}.res.conv1", resample(silu(F.group_norm(x, 32)))), 32)
            y = y * (1 + scale)[:, :, None, None]
        x = joined(main, conv(f"{name}.res.conv2.1", silu(y)))
        return attended(f"{name}.attn", x) if f"{name}.attn.projection.weight" in w else x

    waves = torch.cos(2 * math.pi * (t[:, None] * w["embedding.fourier.frequencies"] + w["embedding.fourier.phases"]))
    emb = silu((math.sqrt(2) if magnitudes else 1) * waves @ weight("embedding.linear1").T)
    emb = emb if magnitudes else silu(emb @ weight("embedding.linear2").T)
    x = conv("image_proj", torch.cat((x, torch.ones_like(x[:, :1])), dim=1))
    skips = [x]
    for number in range(5):  # two levels of two blocks, and the one between that halves
        x = block(f"down.{number}", x, True, (lambda x: F.avg_pool2d(x, 2)) if number == 2 else lambda x: x)
        skips.append(x)
    for name in ("middle1", "middle2"):
        x = block(name, x, True)
    for number in range(7):  # two levels of three blocks, and the one between that doubles
        if number == 3:
            x = block("up.3", x, False, lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3))
            continue
        skip = skips.pop()
        half = math.sqrt((x.shape[1] + skip.shape[1]) / 2)
        parts = (x * half / math.sqrt(x.shape[1]), skip * half / math.sqrt(skip.shape[1])) if magnitudes else (x, skip)
        x = block(f"up.{number}", torch.cat(parts, dim=1), False)
    if magnitudes:
        return conv("final.0", x) * w["final.1.g"]
    return conv("final.2", silu(F.group_norm(x, 8)))


@pytest.mark.parametrize(("name", "per_head"), [("C", 0), ("G", 0), ("G", 16)])
def test_weights_of_the_port_compute_the_same_and_come_back(name, per_head):
    model = build(replace(PORT, config=name, channels_per_head=per_head), classes=0)
    weights = named_weights(model)
    published, _ = PORT_LAYOUT.export_weights(weights, model)
    x, t = torch.randn(3, *IMAGE).double(), torch.randn(3).double()
    doubled = {key: tensor.double() for key, tensor in published.items()}
    wanted = port_network(doubled, x, t, name == "G", per_head or None)
    found = model.double()(x, t)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()  # turns are rounded

    checkpoint = {f"ema_model.nn_model.{key}": tensor for key, tensor in published.items()}
    checkpoint |= {"ema_model.reweight_mlp.linear.weight": torch.ones(1, 256), "step": torch.tensor(7)}
    back, notes = PORT_LAYOUT.import_weights(checkpoint, model)
    assert notes == [
        "left out: 2 tensors without the prefix ema_model.nn_model., as of u(sigma), which belongs to the objective"
    ]
    assert back.keys() == weights.keys()
    for key, tensor in weights.items():
        waves = ".waves." in key
        assert torch.equal(back[key], tensor) or (waves and torch.allclose(back[key], tensor, rtol=2.0**-22, atol=0))


# --- refusals


@pytest.mark.parametrize(
    ("config", "image_shape", "problem"),
    [
        (replace(SMALL, config="E", channels=32), IMAGE, "model.config = E: the edm2 layout is of models with G"),
        (replace(SMALL, pixel_norm_epsilon="added_to_square"), IMAGE, "model.pixel_norm_epsilon = added_to_square: the edm2"),
        (SMALL, (3, 8, 16), "images of 8 x 16: the edm2 layout is of square ones"),
    ],
)  # fmt: skip
def test_models_that_the_layout_cannot_hold_are_refused(config, image_shape, problem):
    model = build(config, image_shape)
    with pytest.raises(ConversionError) as caught:
        LAYOUT.export_weights(named_weights(model), model)
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)


def test_models_that_the_ports_layout_cannot_hold_are_refused():
    for model, problem in (
        (build(PORT), "data.labels = true: the edm2_port layout is of models without classes"),
        (build(replace(PORT, middle_blocks="decoder"), classes=0),
         "model.middle_blocks = decoder: the edm2_port layout is of models with encoder"),
    ):  # fmt: skip
        with pytest.raises(ConversionError) as caught:
            PORT_LAYOUT.export_weights(named_weights(model), model)
        assert str(caught.value) == problem


def test_weights_of_another_model_are_refused():
    model = build()
    published, _ = LAYOUT.export_weights(named_weights(model), model)
    missing = {name: tensor for name, tensor in published.items() if name != "unet.dec.2x2_in1.conv_res0.weight"}
    for weights, into, problem in (
        (missing, model, "1 tensors are missing: unet.dec.2x2_in1.conv_res0.weight"),
        (published | {"unet.x": torch.zeros(1)}, model, "1 tensors are not of this model: unet.x"),
        (named_weights(model), model, "is in this program's own layout already"),
        (published, build(image_shape=(3, 16, 16)),
         "these are weights of 16 base channels for 3 x 8 x 8; the configuration is 16 base channels for 3 x 16 x 16"),
        (published, build(classes=0), "1 tensors are not of this model: unet.emb_label.weight"),
        (published, build(classes=6), "1 tensors have another shape: unet.emb_label.weight is [64, 5] instead of [64, 6]"),
    ):  # fmt: skip
        with pytest.raises(ConversionError) as caught:
            LAYOUT.import_weights(weights, into)
        assert str(caught.value) == problem
