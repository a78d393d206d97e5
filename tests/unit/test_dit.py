"""The diffusion transformer against its paper's formulas, its counts, and the contract of models/base.py."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.conditions import Classes, class_kind
from torchtitan.models import MODELS
from torchtitan.models.base import DiffusionModel
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.models.dit.model import DiT
from torchtitan.models.dit.positions import rotary_table
from torchtitan.models.layers import patchify, rotate, timestep_sinusoid, unpatchify

SMALL = dict(dim=32, num_layers=2, num_heads=2, mlp_hidden_dim=48)
PAPER = replace(FLAVORS["DiT-S/2"], **SMALL, learned_variance=True)
TORCHDITAN = replace(FLAVORS["TorchDiTan-L"], **SMALL)
DEBUG = replace(FLAVORS["debug"], **SMALL)
CONFIGS = {
    "paper": PAPER,
    "torchditan": TORCHDITAN,
    "debug": DEBUG,
    "affine layernorm": replace(PAPER, norm_affine=True, qk_norm=True, attention_bias=False, learned_variance=False),
    "rotary gelu": replace(PAPER, position="rotary", num_heads=4),
    "embedding per block": replace(PAPER, embedding_per_block=True, mlp_norm_eps=0.05),
    "swiglu sincos": replace(TORCHDITAN, position="sincos", norm_affine=False, attention_bias=True),
}
IMAGE = (3, 4, 6)  # 2 x 3 tokens of patch 2
NUM_CLASSES = 5


def build(config: DiTConfig, image_shape=IMAGE, num_classes: int = NUM_CLASSES, dtype=torch.float64) -> DiT:
    """A model whose every parameter is random and depends on its own name and shape alone."""
    model = MODELS["dit"].build(config, image_shape, class_kind(num_classes)).to(dtype)
    model.init_buffers()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * values if name.endswith("norm.weight") else 0.2 * values)
    return model


def inputs(batch: int = 3, image_shape=IMAGE, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, *image_shape, generator=generator, dtype=torch.float64).to(dtype)
    t = (1000 * torch.rand(batch, generator=generator, dtype=torch.float64)).to(dtype)
    return x, t, torch.randint(NUM_CLASSES + 1, (batch,), generator=generator)


def reference_forward(model: DiT, x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
    """The same network written out: loops, explicit softmax, complex rotary; float64."""
    config, weights = model.config, dict(model.named_parameters())
    batch, channels, height, width = x.shape
    p, rows, columns = config.patch_size, height // config.patch_size, width // config.patch_size
    head_dim = config.dim // config.num_heads

    def linear(name: str, h: Tensor) -> Tensor:
        y = torch.einsum("...i,oi->...o", h, weights[name + ".weight"])
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    def rms(h: Tensor, gain: Tensor | None, eps: float = config.norm_eps) -> Tensor:
        h = h / ((h * h).sum(-1, keepdim=True) / h.shape[-1] + eps) ** 0.5
        return h if gain is None else h * gain

    def norm(name: str, h: Tensor) -> Tensor:
        gain = weights.get(name + ".weight")
        eps = config.mlp_norm_eps if config.mlp_norm_eps and "mlp_norm" in name else config.norm_eps
        if config.norm == "rmsnorm":
            return rms(h, gain, eps)
        h = h - h.sum(-1, keepdim=True) / h.shape[-1]
        return rms(h, gain, eps)

    def rotate_complex(h: Tensor) -> Tensor:  # [B, T, N, head_dim]
        z = torch.complex(h[..., : head_dim // 2], h[..., head_dim // 2 :]).clone()
        for token in range(rows * columns):
            for k in range(head_dim // 4):
                frequency = 10000.0 ** (-4 * k / head_dim)
                by_column = complex(math.cos(token % columns * frequency), math.sin(token % columns * frequency))
                by_row = complex(math.cos(token // columns * frequency), math.sin(token // columns * frequency))
                z[:, token, :, k] *= by_column
                z[:, token, :, head_dim // 4 + k] *= by_row
        return torch.cat((z.real, z.imag), dim=-1)

    def attention(name: str, h: Tensor) -> Tensor:
        q, k, v = linear(name + ".qkv", h).split(config.dim, dim=-1)
        q, k, v = (y.reshape(batch, -1, config.num_heads, head_dim) for y in (q, k, v))
        if config.qk_norm:
            q, k = rms(q, weights[name + ".q_norm.weight"]), rms(k, weights[name + ".k_norm.weight"])
        if config.position == "rotary":
            q, k = rotate_complex(q), rotate_complex(k)
        scores = torch.einsum("bqnc,bknc->bnqk", q, k) / head_dim**0.5
        probabilities = scores.exp() / scores.exp().sum(-1, keepdim=True)
        return linear(name + ".out", torch.einsum("bnqk,bknc->bqnc", probabilities, v).reshape(h.shape))

    def mlp(name: str, h: Tensor) -> Tensor:
        if config.mlp == "swiglu":
            gate_weight, up_weight = weights[name + ".gate_up.weight"].split(config.mlp_hidden_dim)
            gate, up = h @ gate_weight.T, h @ up_weight.T
            return linear(name + ".out", gate / (1 + (-gate).exp()) * up)
        h = linear(name + ".hidden", h)
        return linear(name + ".out", 0.5 * h * (1 + torch.tanh((2 / math.pi) ** 0.5 * (h + 0.044715 * h**3))))

    def silu(h: Tensor) -> Tensor:
        return h / (1 + (-h).exp())

    kernel = weights["patch_embed.weight"].reshape(config.dim, channels, p, p)
    h = nn.functional.conv2d(x, kernel, weights["patch_embed.bias"], stride=p)  # [B, D, rows, columns]
    h = torch.stack([h[:, :, i, j] for i in range(rows) for j in range(columns)], dim=1)
    if config.position == "sincos":
        for token in range(rows * columns):
            for k in range(config.dim // 4):
                frequency = 10000.0 ** (-4 * k / config.dim)
                for axis, place in enumerate((token % columns, token // columns)):
                    h[:, token, axis * config.dim // 2 + k] += math.sin(place * frequency)
                    h[:, token, axis * config.dim // 2 + config.dim // 4 + k] += math.cos(place * frequency)

    frequencies = torch.tensor([10000.0 ** (-k / 128) for k in range(128)], dtype=torch.float64)
    sinusoid = torch.cat(((t[:, None] * frequencies).cos(), (t[:, None] * frequencies).sin()), dim=1)

    def embedding(prefix: str) -> Tensor:
        c = linear(prefix + "time_embed.out", silu(linear(prefix + "time_embed.hidden", sinusoid)))
        if condition is not None:
            c = c + torch.stack([weights[prefix + "label_embed.weight"][label] for label in condition])
        return silu(c)

    for i in range(config.num_layers):
        name = f"layers.{i}."
        c = embedding(name if config.embedding_per_block else "")
        modulation = linear(name + "modulation", c).reshape(batch, 6, 1, config.dim)
        shift, scale, gate = modulation[:, 0], modulation[:, 1], modulation[:, 2]
        h = h + gate * attention(name + "attention", norm(name + "attention_norm", h) * (1 + scale) + shift)
        shift, scale, gate = modulation[:, 3], modulation[:, 4], modulation[:, 5]
        h = h + gate * mlp(name + "mlp", norm(name + "mlp_norm", h) * (1 + scale) + shift)
    h = norm("output.norm", h)
    if config.final_modulation:
        c = embedding("layers.0." if config.embedding_per_block else "")
        shift, scale = linear("output.modulation", c).reshape(batch, 2, 1, config.dim).unbind(1)
        h = h * (1 + scale) + shift
    h = linear("output.linear", h)

    image = torch.empty(batch, model.out_channels, height, width, dtype=torch.float64)
    for token in range(rows * columns):
        top, left = token // columns * p, token % columns * p
        image[:, :, top : top + p, left : left + p] = h[:, token].reshape(batch, model.out_channels, p, p)
    return image


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_classes", [0, NUM_CLASSES])
@torch.no_grad()
def test_forward_equals_the_formulas_in_float64(name, num_classes):
    model = build(CONFIGS[name], num_classes=num_classes)
    x, t, condition = inputs()
    condition = condition if num_classes else None
    output, expected = model(x, t, condition), reference_forward(model, x, t, condition)
    assert expected.std() > 0.1
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_patches_are_cut_in_reading_order_with_channels_outermost():
    x = torch.arange(2 * 4 * 6).reshape(1, 2, 4, 6)
    tokens = patchify(x, 2)
    assert tokens.shape == (1, 6, 8)
    assert tokens[0, 4].tolist() == [14, 15, 20, 21, 38, 39, 44, 45]  # second row, second column; channels 0, 1


@pytest.mark.parametrize("patch_size,image_shape", [(1, (2, 3, 5)), (2, (3, 4, 6)), (4, (1, 12, 4))])
def test_unpatchify_is_the_inverse_of_patchify(patch_size, image_shape):
    x = torch.randn(2, *image_shape)
    grid = (image_shape[1] // patch_size, image_shape[2] // patch_size)
    image = unpatchify(patchify(x, patch_size), grid, patch_size)
    assert torch.equal(image, x)
    assert 1 in (patch_size, *grid) or not image._is_view()  # of a view as a model's output, FSDP2 warns on every rank


def test_rotary_scores_depend_on_the_difference_of_positions_only():
    rows, columns, head_dim = 4, 5, 16
    table = rotary_table(head_dim, (rows, columns))
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, head_dim, generator=generator, dtype=torch.float64)
    q = rotate(q.expand(1, 1, rows * columns, head_dim), table)[0, 0]
    k = rotate(k.expand(1, 1, rows * columns, head_dim), table)[0, 0]
    scores = q @ k.T  # the same query and key content at every place
    by_offset = {}
    for i in range(rows * columns):
        for j in range(rows * columns):
            offset = (i // columns - j // columns, i % columns - j % columns)
            by_offset.setdefault(offset, []).append(scores[i, j].item())
    assert len(by_offset) == (2 * rows - 1) * (2 * columns - 1)
    assert max(max(values) - min(values) for values in by_offset.values()) < 1e-12
    means = sorted(values[0] for values in by_offset.values())
    assert min(b - a for a, b in itertools.pairwise(means)) > 1e-6  # and every offset has its own score


def initialised_from_garbage(config: DiTConfig, garbage: float, seed: int = 3) -> DiT:
    with torch.device("meta"):
        model = MODELS["dit"].build(config, IMAGE, Classes(NUM_CLASSES))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(garbage)
    torch.manual_seed(seed)
    model.init_weights()
    return model


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("name", CONFIGS)
def test_init_weights_reaches_every_parameter_and_buffer(name):
    first = named_tensors(initialised_from_garbage(CONFIGS[name], math.nan))
    second = named_tensors(initialised_from_garbage(CONFIGS[name], 7.0))
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert all(torch.equal(first[tensor], second[tensor]) for tensor in first)
    other_seed = named_tensors(initialised_from_garbage(CONFIGS[name], math.nan, seed=4))
    assert not torch.equal(first["patch_embed.weight"], other_seed["patch_embed.weight"])


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_at_init_blocks_are_the_identity_and_the_output_is_zero(name):
    model = initialised_from_garbage(CONFIGS[name], math.nan)
    x, t, condition = inputs(dtype=torch.float32)
    assert torch.count_nonzero(model(x, t, condition)) == 0
    tokens, c = torch.randn(3, 6, 32), torch.randn(3, 32)
    for block in model.blocks():
        if model.config.embedding_per_block:
            assert torch.equal(block(tokens, torch.randn(3, 256), condition, None)[0], tokens)
        else:
            assert torch.equal(block(tokens, c, model.rotary), tokens)
    if model.output.modulation is not None:
        assert torch.count_nonzero(model.output.modulation(c)) == 0


def test_init_follows_the_paper():
    model = initialised_from_garbage(replace(FLAVORS["DiT-S/2"], num_layers=1), math.nan)
    for linear in (model.patch_embed, model.layers[0].attention.qkv, model.layers[0].mlp.out):
        bound = math.sqrt(6 / (linear.in_features + linear.out_features))  # Glorot and Bengio, equation 16
        assert 0.99 * bound < linear.weight.abs().max() <= bound
        assert torch.count_nonzero(linear.bias) == 0
    own = initialised_from_garbage(replace(FLAVORS["DiT-S/2"], num_layers=2, embedding_per_block=True), math.nan).layers[1]
    embeddings = [each for part in (model, own) for each in (part.label_embed, part.time_embed.hidden, part.time_embed.out)]
    for weight in (each.weight for each in embeddings):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert weight.abs().max() > 0.05  # normal, not uniform


def test_only_parameters_are_in_the_state_dict():
    for config in CONFIGS.values():
        model = build(config)
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def on_meta(flavor: str, image_shape: tuple[int, int, int], num_classes: int = 1000, **fields) -> DiT:
    with torch.device("meta"):
        return MODELS["dit"].build(replace(FLAVORS[flavor], **fields), image_shape, class_kind(num_classes))


@pytest.mark.parametrize(
    "flavor,published",
    [("DiT-S/2", 32_963_360), ("DiT-B/2", 130_512_416), ("DiT-L/2", 458_102_816), ("DiT-XL/2", 675_129_632)],
)
def test_parameter_counts_of_the_paper(flavor, published):
    model = on_meta(flavor, (4, 32, 32), learned_variance=True)
    assert model.num_parameters() + model.position.numel() == published  # there, the table is a frozen parameter


def test_an_embedding_per_block_adds_its_parameters_and_products_once_per_image():
    shape = (4, 32, 32)
    one, each = on_meta("DiT-XL/2", shape), on_meta("DiT-XL/2", shape, embedding_per_block=True)
    test_flops_equal_those_that_pytorch_counts("debug", (3, 8, 8), embedding_per_block=True)
    products = 256 * 1152 + 1152 * 1152
    assert each.num_parameters() - one.num_parameters() == 27 * (products + 2 * 1152 + 1001 * 1152)
    assert each.forward_macs_per_image(shape) - one.forward_macs_per_image(shape) == 27 * products


@pytest.mark.parametrize(
    "flavor,patch_size,published",
    [("TorchDiTan-L", 2, 461_943_872), ("TorchDiTan-7B", 2, 7_128_547_904), ("TorchDiTan-7B", 8, 7_133_464_064)],
)
def test_parameter_counts_of_torchditan(flavor, patch_size, published):
    assert on_meta(flavor, (16, 64, 64), patch_size=patch_size).num_parameters() == published


def counted_flops(model: DiffusionModel, image_shape: tuple[int, int, int]) -> tuple[int, int]:
    """Floating-point operations of a forward, and of forward and backward, as PyTorch counts them; batch of 2."""
    condition = model.condition_kind.of(model.condition_kind.placeholder(2, "meta"))
    with FlopCounterMode(display=False) as forward:
        output = model(torch.empty(2, *image_shape, device="meta"), torch.empty(2, device="meta"), condition)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    forward, backward = forward.get_total_flops(), backward.get_total_flops()
    return forward // 2, (forward + backward) // 2


@pytest.mark.parametrize(
    "flavor,image_shape",
    [("DiT-S/2", (4, 32, 32)), ("debug", (3, 8, 8)), ("TorchDiTan-L", (16, 32, 32)), ("cifar", (3, 16, 40))],
)
def test_flops_equal_those_that_pytorch_counts(flavor, image_shape, **fields):
    model = on_meta(flavor, image_shape, **fields)
    forward, training = counted_flops(model, image_shape)
    assert 2 * model.forward_macs_per_image(image_shape) == forward
    # The images themselves need no gradient, so the true backward saves one small product.
    assert model.flops_per_image(image_shape) == pytest.approx(training, rel=0.01)


def test_xl_2_needs_the_papers_multiply_accumulates():
    model = on_meta("DiT-XL/2", (4, 32, 32), learned_variance=True)
    assert model.forward_macs_per_image((4, 32, 32)) / 1e9 == pytest.approx(118.62, abs=0.005)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_linear_has_the_role_of_the_shape_it_sees(name):
    model = build(CONFIGS[name], dtype=torch.float32)
    roles, seen = model.linear_roles(), {}
    for linear_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args, key=linear_name: seen.update({key: args[0].ndim}))
    model(*inputs(dtype=torch.float32))
    assert set(roles) == set(seen)
    assert {linear for linear in roles if roles[linear] == "vector"} == {key for key in seen if seen[key] == 2}
    assert {linear for linear in roles if roles[linear] == "small"} == {"patch_embed", "output.linear"}


@pytest.mark.parametrize("name", ["paper", "debug"])
@pytest.mark.filterwarnings("error")
@torch.no_grad()
def test_autocast_and_bfloat16_weights_take_and_return_float32(name):
    model, x_t_c = build(CONFIGS[name], dtype=torch.float32), inputs(dtype=torch.float32)
    exact = model(*x_t_c)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(*x_t_c)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for output in (autocast, model(*x_t_c)):
        assert output.dtype == torch.float32
        assert 0 < (output - exact).norm() < 0.05 * exact.norm()


def test_bfloat16_weights_do_not_round_the_timestep():
    embed = build(DEBUG, dtype=torch.float32).time_embed.bfloat16()
    t = torch.tensor([998.6, 999.0, 999.4])  # one number in bfloat16
    assert (timestep_sinusoid(t, 256)[:, 0] - t.cos()).abs().max() < 1e-6
    first, second, _ = embed(timestep_sinusoid(t, 256))
    assert (first - second).abs().max() > 0.1


def block_gradients(block, x: Tensor, c: Tensor, rotary: Tensor | None, run) -> tuple[Tensor, list[Tensor]]:
    output = run(x, c, rotary)
    assert output._base is None  # a fresh tensor, not a view
    return output.detach(), list(torch.autograd.grad(output.square().sum(), [x, c, *block.parameters()]))


@pytest.mark.parametrize("name", ["paper", "debug"])
def test_a_compiled_and_checkpointed_block_has_the_same_gradients(name):
    model = build(CONFIGS[name])
    block = model.blocks()[0]
    x = torch.randn(3, 6, 32, dtype=torch.float64, requires_grad=True)
    c = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    output, gradients = block_gradients(block, x, c, model.rotary, block)
    names = list(block.state_dict())
    block.compile(backend="aot_eager", fullgraph=True)
    assert list(block.state_dict()) == names
    for run in (block, lambda *args: checkpoint(block, *args, use_reentrant=False)):
        compiled_output, compiled_gradients = block_gradients(block, x, c, model.rotary, run)
        torch.testing.assert_close(compiled_output, output, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 3, 6, 4), (2, 4, 4, 6), (3, 4, 6)])
def test_an_image_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"\(C, H, W\) = \(3, 4, 6\)"):
        build(DEBUG)(torch.zeros(shape, dtype=torch.float64), torch.zeros(2), torch.zeros(2, dtype=torch.long))


def test_a_condition_that_does_not_fit_the_model_is_refused():
    x, t, condition = inputs()
    with pytest.raises(ValueError, match="condition is missing: this model takes classes, or 5 for no class"):
        build(DEBUG)(x, t, None)
    with pytest.raises(ValueError, match="condition is given: this model takes no condition"):
        build(DEBUG, num_classes=0)(x, t, condition)


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(patch_size=4), "model.patch_size: 4 does not divide the image of 4 x 6"),
        (dict(num_heads=3), "model.num_heads: 3 does not divide model.dim = 32"),
        (dict(num_heads=16), "model.num_heads: heads of 2 channels; rotary"),
        (dict(dim=30, num_heads=2, position="sincos"), "model.dim: 30 is no multiple of 4"),
    ],
)
def test_impossible_sizes_are_refused_by_key(fields, message):
    config = replace(DEBUG, **fields)
    assert [line.startswith(message) for line in MODELS["dit"].problems(config, IMAGE)] == [True]
    with pytest.raises(ValueError, match=message):
        MODELS["dit"].build(config, IMAGE, Classes(NUM_CLASSES))
