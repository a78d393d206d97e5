"""EDM2's U-Nets against a plain computation, in float64, of the formulas of the paper, the port and the published code."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.conditions import Classes, ConditionKind, Unconditional
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel
from torchtitan.models.edm2.config import FLAVORS, EDM2Config

PORT = replace(FLAVORS["cifar"], channels=32, channel_mults=[1, 2, 2], attention_resolutions=[4])
NVLABS = replace(
    FLAVORS["XS"], channels=16, channel_mults=[1, 2, 3], num_blocks=1, attention_resolutions=[8, 4], channels_per_head=8
)
IMAGE, CLASSES = (3, 8, 8), 5


def build(config: EDM2Config, kind: ConditionKind, dtype: torch.dtype = torch.float64) -> DiffusionModel:
    model = MODELS["edm2"].build(config, IMAGE, kind)
    torch.manual_seed(1)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # gains: 0 or 1 at first, under which a mistake would not show
                parameter.normal_()
    return model.to(dtype).eval()


# --- the formulas, from tables of weights by name


def normalised_rows(weight: Tensor) -> Tensor:
    """w / (1e-4 + |w| / sqrt(n)) / sqrt(n) over each row's n elements."""
    n = weight[0].numel()
    norm = weight.flatten(1).square().sum(1).sqrt().view(-1, *[1] * (weight.ndim - 1))
    return weight / (1e-4 + norm / math.sqrt(n)) / math.sqrt(n)


def pixel_normed(x: Tensor, dim: int, epsilon: str) -> Tensor:
    square = (x * x).mean(dim, keepdim=True)
    return x / torch.sqrt(square + 1e-8) if epsilon == "added_to_square" else x / (1e-4 + torch.sqrt(square))


def group_normed(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.shape
    x = x.reshape(batch, groups, -1)
    x = (x - x.mean(2, keepdim=True)) / torch.sqrt(x.var(2, unbiased=False, keepdim=True) + 1e-5)
    return x.reshape(batch, channels, height, width)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def mp_silu(x: Tensor) -> Tensor:
    return silu(x) / 0.596


def mp_sum(a: Tensor, b: Tensor, t: float) -> Tensor:
    return ((1 - t) * a + t * b) / math.sqrt((1 - t) ** 2 + t**2)


def mp_cat(a: Tensor, b: Tensor) -> Tensor:
    c = math.sqrt((a.shape[1] + b.shape[1]) / 0.5)
    return torch.cat((c * 0.5 / math.sqrt(a.shape[1]) * a, c * 0.5 / math.sqrt(b.shape[1]) * b), dim=1)


def halved(x: Tensor) -> Tensor:
    return (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4


def doubled(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


class Formulas:
    """The whole network as formulas.

    Args:
        weights: by the names of the model.
        config: for its sizes and options.
    """

    def __init__(self, weights: dict[str, Tensor], config: EDM2Config) -> None:
        self.weights, self.config = weights, config
        self.magnitudes, self.normalises = config.config == "G", config.config != "C"

    def network(self, x: Tensor, t: Tensor, classes: Tensor | None) -> Tensor:
        config, side = self.config, x.shape[-1]
        embedded = self.embedded(t, classes)
        x = self.conv("input", torch.cat((x, torch.ones_like(x[:, :1])), dim=1))
        skips, levels = [x], len(config.channel_mults)
        attends = [side >> level in config.attention_resolutions for level in range(levels)]
        for level in range(levels):
            if level:
                x = self.block(f"encoder.level{level}_down", halved(x), x, embedded, "encoder")
                skips.append(x)
            for number in range(config.num_blocks):
                x = self.block(f"encoder.level{level}_block{number}", x, x, embedded, "encoder", attends[level])
                skips.append(x)
        x = self.block("decoder.middle0", x, x, embedded, config.middle_blocks, True)
        x = self.block("decoder.middle1", x, x, embedded, config.middle_blocks)
        for level in reversed(range(levels)):
            if level < levels - 1:
                x = self.block(f"decoder.level{level}_up", doubled(x), x, embedded, "decoder")
            for number in range(config.num_blocks + 1):
                skip = skips.pop()
                x = mp_cat(x, skip) if self.magnitudes else torch.cat((x, skip), dim=1)
                x = self.block(f"decoder.level{level}_block{number}", x, x, embedded, "decoder", attends[level])
        assert not skips
        if self.magnitudes:
            return self.conv("output", x) * self.weights["output_gain"]
        return self.conv("output", silu(group_normed(x, 8)))

    def embedded(self, t: Tensor, classes: Tensor | None) -> Tensor:
        waves = torch.cos(t[:, None] * self.weights["embedding.waves.freqs"] + self.weights["embedding.waves.phases"])
        one_hot = None
        if classes is not None:  # the null class has no 1
            one_hot = math.sqrt(CLASSES) * torch.eye(CLASSES + 1, dtype=t.dtype)[classes, :CLASSES]
        if self.magnitudes:
            noise = self.linear("embedding.noise", math.sqrt(2) * waves)
            if one_hot is not None:
                noise = mp_sum(noise, self.linear("embedding.label", one_hot), 0.5)
            return mp_silu(noise)
        noise = self.linear("embedding.hidden", silu(self.linear("embedding.noise", waves)))
        return silu(noise if one_hot is None else noise + self.linear("embedding.label", one_hot))

    def block(self, name: str, x: Tensor, before: Tensor, embedded: Tensor, kind: str, attention: bool = False) -> Tensor:
        """x is resampled, `before` is not."""
        config = self.config
        modulation = self.linear(f"{name}.embedding", embedded)[:, :, None, None]
        if self.magnitudes:
            if kind == "encoder":
                x = pixel_normed(self.skip(name, x), 1, config.pixel_norm_epsilon)
            y = self.conv(f"{name}.conv0", mp_silu(x))
            y = mp_silu(y * (1 + self.weights[f"{name}.embedding_gain"] * modulation))
            y = self.conv(f"{name}.conv1", y)
            x = mp_sum(self.skip(name, x) if kind == "decoder" else x, y, 0.3)
            x = mp_sum(x, self.attention(name, x), 0.3) if attention else x
            return x.clamp(-256, 256)
        y = silu(group_normed(before, 32))
        y = halved(y) if x.shape[-1] < before.shape[-1] else doubled(y) if x.shape[-1] > before.shape[-1] else y
        y = group_normed(self.conv(f"{name}.conv0", y), 32) * (1 + modulation)
        x = self.skip(name, x) + self.conv(f"{name}.conv1", silu(y))
        x = x + self.attention(name, x) if attention else x
        return x.clamp(-256, 256) if self.normalises else x

    def attention(self, name: str, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        per_head = self.config.channels_per_head or channels
        qkv = self.conv(f"{name}.attention.qkv", x).reshape(batch, channels // per_head, per_head, 3, height * width)
        q, k, v = (pixel_normed(qkv[:, :, :, i], 2, self.config.pixel_norm_epsilon) for i in range(3))
        scores = torch.einsum("bhcq,bhck->bhqk", q, k) / math.sqrt(per_head)
        shares = torch.exp(scores) / torch.exp(scores).sum(3, keepdim=True)
        y = torch.einsum("bhqk,bhck->bhcq", shares, v).reshape(x.shape)
        return self.conv(f"{name}.attention.out", y)

    def skip(self, name: str, x: Tensor) -> Tensor:
        return self.conv(f"{name}.skip", x) if f"{name}.skip.weight" in self.weights else x

    def conv(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.conv2d(x, normalised_rows(weight) if self.normalises else weight, padding=weight.shape[-1] // 2)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return x @ (normalised_rows(weight) if self.normalises else weight).T


@pytest.mark.parametrize("kind", [Unconditional(), Classes(CLASSES)], ids=["unconditional", "classes"])
@pytest.mark.parametrize(
    "config", [replace(PORT, config="C"), replace(PORT, config="E"), PORT, NVLABS], ids=["C", "E", "G", "XS"]
)
def test_the_forward_is_the_published_one(config, kind):
    model = build(config, kind)
    torch.manual_seed(2)
    x, t = torch.randn(3, *IMAGE, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    classes = torch.tensor([0, 4, CLASSES]) if isinstance(kind, Classes) else None
    with torch.no_grad():
        wanted = Formulas(model.state_dict(), config).network(x, t, classes)
        found = model(x, t, classes)
    assert wanted.square().mean() > 1e-3
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


# --- what normalised weights and preserved magnitudes promise


def test_a_new_g_predicts_zero_and_its_blocks_keep_the_magnitude():
    model = MODELS["edm2"].build(replace(FLAVORS["cifar"], channels=64), (3, 32, 32), Unconditional())
    torch.manual_seed(1)
    model.init_weights()
    found = []
    for block in model.eval().blocks():
        block.register_forward_hook(lambda module, inputs, output: found.append(output.square().mean().sqrt().item()))
    with torch.no_grad():
        assert torch.equal(model(torch.randn(2, 3, 32, 32), torch.randn(2)), torch.zeros(2, 3, 32, 32))
    assert len(found) == 28 and 0.95 <= min(found) and max(found) <= 1.65
