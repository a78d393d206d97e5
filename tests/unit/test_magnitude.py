"""Magnitude-preserving layers and the transformer of them, against closed forms and the paper's formulas written out."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.conditions import class_kind
from torchtitan.models import MODELS
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.models.flops import check_macs
from torchtitan.models.magnitude import (
    MPConv2d,
    MPFourier,
    MPLinear,
    mp_cat,
    mp_gelu,
    mp_silu,
    mp_sum,
    normalize_rows,
    normalized_weights,
)

SMALL = DiTConfig(dim=32, num_layers=3, num_heads=2, mlp_hidden_dim=48, mlp="swiglu", position="rotary",
                  magnitude_preserving=True)  # fmt: skip
CONFIGS = {
    "rotary swiglu": SMALL, "sincos gelu": replace(SMALL, mlp="gelu", position="sincos", timestep_frequencies="diffusers"),
    "variance": replace(SMALL, learned_variance=True, patch_size=1),
}  # fmt: skip
IMAGE, CLASSES = (3, 4, 6), 5


def gaussian_mean_square(function) -> float:
    """Mean square of a function of a standard normal number, by quadrature."""
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return torch.trapezoid(function(x) ** 2 * density, x).item()


def test_activations_have_unit_mean_square_for_normal_inputs():
    assert gaussian_mean_square(mp_silu) == pytest.approx((0.5964692 / 0.596) ** 2, abs=2e-6)
    assert gaussian_mean_square(mp_gelu) == pytest.approx(1.0, abs=3e-4)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_sums_and_concatenations_keep_the_mean_square(share):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, 64, 128, generator=generator, dtype=torch.float64)
    assert mp_sum(a, b, share).square().mean() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(mp_sum(a, b, 0.0), a)
    assert mp_sum(torch.ones(1), torch.ones(1), 0.3).item() == pytest.approx(1 / 0.7615773, rel=1e-6)
    wide = torch.cat((b, b.flip(0)), dim=-1)  # 128 and 256 channels
    both = mp_cat(a, wide, 0.5, dim=-1)
    assert both.shape[-1] == 384
    assert both[..., :128].square().mean() == pytest.approx(1.5, rel=0.02)
    assert both[..., 128:].square().mean() == pytest.approx(0.75, rel=0.02)
    mean_squares = torch.tensor([p.square().mean() for p in mp_cat(a, wide, share, dim=-1).split([128, 256], dim=-1)])
    assert (mean_squares * torch.tensor([128, 256]) / 384).sum() == pytest.approx(1.0, rel=0.02)


@torch.no_grad()
def test_layers_keep_the_mean_square_and_ignore_the_length_of_rows():
    torch.manual_seed(0)
    convolution, linear, waves = MPConv2d(128, 64, 3), MPLinear(128, 64), MPFourier(512)
    for layer in (convolution, linear, waves):
        layer.init_weights()
    x = torch.randn(16, 128, 16, 16)
    assert convolution(x)[..., 1:-1, 1:-1].var() == pytest.approx(1.0, abs=0.02)
    assert linear(x.movedim(1, -1)).var() == pytest.approx(1.0, abs=0.02)
    assert waves(torch.randn(1000)).square().mean() == pytest.approx(1.0, abs=0.02)
    before = convolution(x)
    convolution.weight *= 7.0
    assert (convolution(x) - before).abs().max() <= 2e-4 * before.abs().max()  # twice the epsilon added to rows of size 1
    normalize_rows([convolution.weight.detach(), linear.weight.detach(), torch.empty(0, 3)])
    assert torch.allclose(convolution.weight.flatten(1).norm(dim=1), torch.tensor(33.9411), rtol=2e-4)
    assert torch.allclose(linear.weight.norm(dim=1), torch.tensor(11.3137), rtol=2e-4)


def test_gradients_are_orthogonal_to_rows():
    torch.manual_seed(0)
    linear = MPLinear(16, 8).double()
    linear.init_weights()
    linear(torch.randn(32, 16, dtype=torch.float64)).pow(3).sum().backward()
    weight, gradient = linear.weight.detach(), linear.weight.grad
    cosine = F.cosine_similarity(weight, gradient, dim=1)
    # Of the added epsilon a part 1e-4 of the gradient along the row is left.
    assert cosine.abs().max() < 2e-4


def build(config: DiTConfig, gains: float = 0.5):
    model = MODELS["dit"].build(config, IMAGE, class_kind(CLASSES)).double()
    torch.manual_seed(3)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gain"):
                parameter.fill_(gains)
    return model


def inputs(batch: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, *IMAGE, generator=generator, dtype=torch.float64)
    t = 1000 * torch.rand(batch, generator=generator, dtype=torch.float64)
    return x, t, torch.tensor([0, 4, 5, 2])[:batch]  # 5 is the null class


def written_out(model, x: Tensor, t: Tensor, classes: Tensor) -> Tensor:
    """The network token by token, head by head, from the paper's formulas; float64."""
    config, weights = model.config, dict(model.named_parameters())
    p, (rows, columns) = config.patch_size, model.grid
    head_dim = config.dim // config.num_heads

    def linear(name: str, h: Tensor) -> Tensor:
        weight = weights[name + ".weight"]
        fan_in = weight.shape[1]
        norm = weight.pow(2).sum(1, keepdim=True).sqrt() / fan_in**0.5
        return h @ (weight / (1e-4 + norm) / fan_in**0.5).T

    def unit(h: Tensor) -> Tensor:
        return h / (1e-4 + (h.pow(2).sum(-1, keepdim=True) / h.shape[-1]).sqrt())

    def total(a: Tensor, b: Tensor, share: float) -> Tensor:
        return ((1 - share) * a + share * b) / ((1 - share) ** 2 + share**2) ** 0.5

    def silu(h: Tensor) -> Tensor:
        return h / (1 + torch.exp(-h)) / 0.596

    def gelu(h: Tensor) -> Tensor:
        return 0.5 * h * (1 + torch.tanh((2 / math.pi) ** 0.5 * (h + 0.044715 * h**3))) / 0.652

    outputs = []
    for image, time, label in zip(x, t, classes.tolist(), strict=True):
        tokens = torch.stack([
            torch.cat((image[:, p * i : p * i + p, p * j : p * j + p].flatten(), torch.ones(1, dtype=x.dtype)))
            for i in range(rows) for j in range(columns)
        ])  # fmt: skip
        h = linear("patch_embed", tokens)
        if config.position == "sincos":
            h = total(h, 2**0.5 * model.position, 0.5)
        last = 127 if config.timestep_frequencies == "diffusers" else 128
        angles = time * 10000.0 ** (-torch.arange(128, dtype=x.dtype) / last)
        c = linear("time_embed", 2**0.5 * torch.cat((angles.cos(), angles.sin()))[None])
        one_hot = torch.zeros(1, CLASSES, dtype=x.dtype)
        if label < CLASSES:
            one_hot[0, label] = CLASSES**0.5
        c = silu(total(c, linear("label_embed", one_hot), 0.5))
        for number in range(config.num_layers):
            name = f"layers.{number}"
            scale = linear(f"{name}.modulation", c)[0]
            gain = weights[f"{name}.gain"]
            h = unit(h)
            q, k, v = linear(f"{name}.attention.qkv", h * (1 + gain[0] * scale[: config.dim])).chunk(3, dim=1)
            heads = []
            for n in range(config.num_heads):
                part = slice(n * head_dim, (n + 1) * head_dim)
                q_n, k_n, v_n = unit(q[:, part]), unit(k[:, part]), unit(v[:, part])
                if config.position == "rotary":
                    turn = torch.complex(*model.rotary.double())
                    half = head_dim // 2
                    q_n, k_n = (
                        torch.cat((z.real, z.imag), dim=1)
                        for z in (torch.complex(y[:, :half], y[:, half:]) * turn for y in (q_n, k_n))
                    )
                heads.append(torch.softmax(q_n @ k_n.T / head_dim**0.5, dim=1) @ v_n)
            h = total(h, linear(f"{name}.attention.out", torch.cat(heads, dim=1)), 0.3)
            y = h * (1 + gain[1] * scale[config.dim :])
            if config.mlp == "swiglu":
                gate, up = linear(f"{name}.mlp.gate_up", y).chunk(2, dim=1)
                y = silu(gate) * up
            else:
                y = gelu(linear(f"{name}.mlp.hidden", y))
            h = total(h, linear(f"{name}.mlp.out", y), 0.3)
        h = weights["output.gain"] * linear("output.linear", h)
        result = torch.empty(model.out_channels, *IMAGE[1:], dtype=x.dtype)
        for number, token in enumerate(h):
            i, j = divmod(number, columns)
            result[:, p * i : p * i + p, p * j : p * j + p] = token.view(-1, p, p)
        outputs.append(result)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformer_is_the_written_out_network(name):
    model = build(CONFIGS[name])
    x, t, classes = inputs()
    assert (model(x, t, classes) - written_out(model, x, t, classes)).abs().max() <= 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_transformer_counts_its_products_and_begins_at_zero(name):
    with torch.device("meta"):
        check_macs(MODELS["dit"].build(CONFIGS[name], IMAGE, class_kind(CLASSES)), "dit")
    assert not build(CONFIGS[name], gains=0.0)(*inputs()).any()


def test_tokens_keep_their_magnitude_through_many_blocks():
    config = replace(FLAVORS["digits"], magnitude_preserving=True, num_layers=24)
    model = MODELS["dit"].build(config, (1, 8, 8), class_kind(10))
    torch.manual_seed(0)
    model.init_weights()
    seen = []
    for block in model.blocks():
        block.register_forward_hook(lambda module, given, out: seen.append(out.square().mean().sqrt().item()))
    model(torch.randn(8, 1, 8, 8), torch.linspace(0, 1000, 8), torch.arange(8))
    assert all(0.9 <= value <= 1 for value in seen), seen


def test_each_weight_of_the_transformer_but_gains_is_normalised():
    model = build(SMALL)
    kept = {id(parameter) for parameter in normalized_weights(model)}
    others = {name for name, parameter in model.named_parameters() if id(parameter) not in kept}
    assert others == {"output.gain", *(f"layers.{n}.gain" for n in range(3))}
