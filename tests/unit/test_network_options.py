"""Options of the diffusion transformer against formulas written out, published counts, and what is refused."""

import cmath
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.configurations import problems
from tests.unit.test_dit import IMAGE, NUM_CLASSES, build, counted_flops, initialised_from_garbage, inputs, on_meta
from tests.unit.test_gns_taps import OPTIONS
from torchtitan.conditions import Classes, Unconditional
from torchtitan.diffusion.denoising import DenoisingConfig
from torchtitan.diffusion.objective import Microbatch
from torchtitan.diffusion.objectives import build_objective
from torchtitan.diffusion.timesteps.sampler import GlobalBatch
from torchtitan.models import MODELS
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.models.dit.model import DiT

SMALL = dict(dim=32, num_layers=3, num_heads=2, mlp_hidden_dim=40, patch_size=2)
CONFIGS = {
    "jit": replace(FLAVORS["JiT-B/16"], **SMALL, patch_bottleneck=5, class_tokens=3, class_tokens_start=1),
    "wide head": replace(FLAVORS["DiT-DH-S/1"], **SMALL, wide_dim=48, wide_heads=4),
    "value residual": DiTConfig(**SMALL, value_residual=True),
    "all": OPTIONS,
}


def reference_forward(model: DiT, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
    """The network written out for one image after another, float64: output patches, of an intermediate head behind them."""
    return torch.stack([_Reference(model).image(*each) for each in zip(x, t, condition, strict=True)])


class _Reference:
    def __init__(self, model: DiT) -> None:
        self.config, self.grid, self.joined = model.config, model.grid, 0
        self.weights = model.state_dict()

    def linear(self, name: str, h: Tensor) -> Tensor:
        return h @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, name: str, h: Tensor) -> Tensor:
        if self.config.norm == "layernorm":
            h = h - h.mean(-1, keepdim=True)
        h = h / (h.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        return h * self.weights.get(f"{name}.weight", 1.0)

    def rotated(self, h: Tensor) -> Tensor:
        """Turn channels i and i + d / 2 of the image's tokens [T, d], not those of the class before them."""
        z, quarter = torch.complex(*h.chunk(2, dim=-1)), h.shape[1] // 4
        for token in range(self.joined, len(h)):
            row, column = divmod(token - self.joined, self.grid[1])
            turns = [cmath.exp(1j * place * 10000 ** (-k / quarter)) for place in (column, row) for k in range(quarter)]
            z[token] = z[token] * torch.tensor(turns, dtype=torch.complex128)
        return torch.cat((z.real, z.imag), dim=-1)

    def attention(self, name: str, h: Tensor, heads: int, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.linear(f"{name}.qkv", h).chunk(3, dim=-1)
        if first is None:
            first = v
        else:
            first = torch.cat((v[: len(v) - len(first)], first))
            share = self.weights[f"{name}.value_share.weight"]
            v = share * first + (1 - share) * v
        outputs, parts = [], (each.chunk(heads, dim=-1) for each in (q, k, v))
        for q, k, v in zip(*parts, strict=True):
            if self.config.qk_norm:
                q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
            if self.config.position != "sincos":
                q, k = self.rotated(q), self.rotated(k)
            outputs.append(torch.softmax(q @ k.T / math.sqrt(q.shape[1]), dim=-1) @ v)
        return self.linear(f"{name}.out", torch.cat(outputs, dim=-1)), first

    def mlp(self, name: str, h: Tensor) -> Tensor:
        if self.config.mlp == "gelu":
            return self.linear(f"{name}.out", F.gelu(self.linear(f"{name}.hidden", h), approximate="tanh"))
        gate, up = self.linear(f"{name}.gate_up", h).chunk(2, dim=-1)
        return self.linear(f"{name}.out", gate * torch.sigmoid(gate) * up)

    def block(self, name: str, h: Tensor, c: Tensor, heads: int, first: Tensor | None) -> tuple[Tensor, Tensor]:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.linear(f"{name}.modulation", c).chunk(6, dim=-1)
        normed = self.norm(f"{name}.attention_norm", h) * (1 + scale) + shift
        attended, first = self.attention(f"{name}.attention", normed, heads, first)
        h = h + gate * attended
        return h + mlp_gate * self.mlp(f"{name}.mlp", self.norm(f"{name}.mlp_norm", h) * (1 + mlp_scale) + mlp_shift), first

    def output(self, name: str, h: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.linear(f"{name}.modulation", c).chunk(2, dim=-1)
        return self.linear(f"{name}.linear", self.norm(f"{name}.norm", h) * (1 + scale) + shift)

    def position(self) -> Tensor:
        quarter = self.config.dim // 4
        frequencies = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
        rows = [
            torch.cat([turn(place * frequencies) for place in (column, row) for turn in (torch.sin, torch.cos)])
            for row in range(self.grid[0]) for column in range(self.grid[1])
        ]  # fmt: skip
        return torch.stack(rows)

    def time(self, t: Tensor) -> Tensor:
        if self.config.timestep_frequencies == "fourier":
            angles = 2 * math.pi * t / 1000 * self.weights["waves.frequencies"]
            features = torch.cat((angles.sin(), angles.cos()))
        else:
            angles = t * 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
            features = torch.cat((angles.cos(), angles.sin()))
        return self.linear("time_embed.out", F.silu(self.linear("time_embed.hidden", features)))

    def image(self, x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
        config, p = self.config, self.config.patch_size
        patches = torch.stack([
            x[:, p * row : p * (row + 1), p * column : p * (column + 1)].flatten()
            for row in range(self.grid[0]) for column in range(self.grid[1])
        ])  # fmt: skip
        if config.patch_bottleneck:
            h = self.linear("patch_embed.expand", self.linear("patch_embed.reduce", patches))
        else:
            h = self.linear("patch_embed", patches)
        h = h + self.position()
        time, label = self.time(t), self.weights["label_embed.weight"][condition]
        c, first, found = F.silu(time + label), None, []
        c = F.silu(c) if config.wide_dim else c
        for number in range(config.num_layers):
            if config.class_tokens and number == config.class_tokens_start:
                h, self.joined = torch.cat((label + self.weights["class_tokens.weight"], h)), config.class_tokens
            h, values = self.block(f"layers.{number}", h, c, config.num_heads, first)
            first = values if config.value_residual else None
            if config.intermediate_head == number + 1:
                found.append(self.output("intermediate", h[self.joined :], c))
        h, self.joined = h[self.joined :], 0
        if config.wide_dim:
            c = F.silu(self.linear("wide_condition", F.silu(time + h)))
            h = self.linear("wide_embed", patches)
            for number in range(config.wide_layers):
                h, _ = self.block(f"wide_layers.{number}", h, c, config.wide_heads, None)
        return torch.cat((self.output("output", h, c), *found), dim=-1)


def fill_waves(model: DiT) -> None:
    if model.config.timestep_frequencies == "fourier":
        model.waves.frequencies.copy_(torch.linspace(-2, 2, 256))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_forward_equals_the_formulas_in_float64(config):
    model = build(config)
    fill_waves(model)
    x, t, condition = inputs()
    found = model(x, t, condition)
    tokens = found.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    expected = reference_forward(model, x, t, condition)
    assert expected.std() > 0.1
    torch.testing.assert_close(tokens, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_products_are_those_that_pytorch_counts_and_roles_those_of_the_shapes(config):
    with torch.device("meta"):
        model = MODELS["dit"].build(config, IMAGE, Classes(NUM_CLASSES))
    assert 2 * model.forward_macs_per_image(IMAGE) == counted_flops(model, IMAGE)[0]
    roles, seen = model.linear_roles(), {}
    model = build(config, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args, key=name: seen.update({key: args[0].ndim}))
    model(*inputs(dtype=torch.float32))
    assert set(roles) == set(seen)
    assert {name for name in roles if roles[name] == "vector"} == {name for name in seen if seen[name] == 2}
    for name, point in model.probe_points().items():
        assert model.get_submodule(point.module) is model.blocks()[int(name.removeprefix("block_")) - 1]
        assert point.first_place == (3 if config.class_tokens and name in ("block_2", "block_3") else 0)


@pytest.mark.parametrize(
    ("flavor", "image_shape", "count"),
    [
        ("JiT-B/16", (3, 256, 256), 131_123_712), ("JiT-B/32", (3, 512, 512), 133_190_400),
        ("JiT-L/16", (3, 256, 256), 458_877_664), ("JiT-H/16", (3, 256, 256), 952_514_368),
        ("DiT-DH-S/1", (768, 16, 16), 196_357_204), ("DiT-DH-XL/1", (768, 16, 16), 838_380_628),
    ],
)  # fmt: skip
def test_parameter_counts_are_those_of_the_published_networks(flavor, image_shape, count):
    assert on_meta(flavor, image_shape).num_parameters() == count


def test_noise_of_more_channels_than_a_stream_is_wide_is_fitted_by_a_wide_head_alone():
    """A linear of d channels leaves a share 1 - d / C of the noise of C channels, even of one image.

    Source: arXiv 2510.11690, section 4.
    """
    shape, steps, batch = (96, 2, 2), 100, 16
    x0 = torch.randn(shape, generator=torch.Generator().manual_seed(1)).expand(batch, *shape)
    errors = {}
    for width, head in ((32, {}), (32, {"wide_dim": 128, "wide_heads": 2, "wide_layers": 1}), (128, {})):
        config = DiTConfig(dim=width, num_layers=2, num_heads=2, patch_size=1, mlp_hidden_dim=4 * width, **head)
        model, objective = MODELS["dit"].build(config, shape, Unconditional()), build_objective(DenoisingConfig(), 0)
        torch.manual_seed(0)
        model.init_weights()
        optimizer, last = torch.optim.Adam(model.parameters(), 3e-3), []
        for step in range(steps):
            draw = objective.draw(shape, GlobalBatch(step * batch, batch), torch.arange(batch) + step * batch)
            terms = objective.loss(model, Microbatch(x0), draw)
            optimizer.zero_grad()
            terms.loss.mean().backward()
            optimizer.step()
            last.append(terms.error.mean().item())
        errors[width, bool(head)] = sum(last[-20:]) / 20
    assert errors[32, False] > 1 - 32 / 96 and errors[32, True] < 0.4 and errors[128, False] < 0.3


def test_the_wide_heads_modulation_is_counted_for_each_token():
    model = on_meta("DiT-DH-XL/1", (768, 16, 16))
    assert model.forward_macs_per_image((768, 16, 16)) / 1e9 == pytest.approx(161.6, abs=0.05)
    assert model.applications((768, 16, 16))["wide_layers.0.modulation"] == 256
    assert model.applications((768, 16, 16))["layers.0.modulation"] == 1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_init_reaches_every_tensor_and_the_first_prediction_is_zero(config):
    first, second = (initialised_from_garbage(config, garbage) for garbage in (math.nan, 7.0))
    tensors = dict(second.named_parameters()) | dict(second.named_buffers())
    for name, tensor in [*first.named_parameters(), *first.named_buffers()]:
        assert tensor.isfinite().all() and torch.equal(tensor, tensors[name]), name
    x, t, condition = inputs(dtype=torch.float32)
    assert torch.count_nonzero(first(x, t, condition)) == 0
    if config.value_residual:
        shares = [block.attention.value_share for block in first.layers]
        assert shares[0] is None and [share.weight.item() for share in shares[1:]] == [0.5, 0.5]
    if config.class_tokens:
        assert first.class_tokens.weight.std().item() == pytest.approx(0.02, rel=0.3)
    if config.timestep_frequencies == "fourier":  # of no use without these numbers
        assert first.waves.frequencies.std().item() == pytest.approx(1.0, rel=0.15)
        assert "waves.frequencies" in first.state_dict()


@torch.no_grad()
def test_bfloat16_weights_and_autocast_return_float32():
    model, x_t_c = build(OPTIONS, dtype=torch.float32), inputs(dtype=torch.float32)
    fill_waves(model)
    exact = model(*x_t_c)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = [model(*x_t_c)]
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for output in [*rounded, model(*x_t_c)]:
        assert output.dtype == torch.float32 and 0 < (output - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--model.class_tokens 4 --data.labels false", "model.class_tokens: the data have no classes, whose tokens"),
        ("--model.class_tokens 4 --model.class_tokens_start 3", "model.class_tokens_start: 3 leaves no block for them (at most"),
        ("--model.class_tokens_start 1", "model.class_tokens_start: has no effect when model.class_tokens = 0"),
        ("--model.wide_dim 100", "model.wide_heads: 16 does not divide model.wide_dim = 100"),
        ("--model.wide_dim 96", "model.wide_heads: heads of 6 channels; rotary embedding needs a multiple of 4"),
        ("--model.wide_layers 3", "model.wide_layers: has no effect when model.wide_dim = 0"),
        ("--model.timestep_frequencies fourier --objective.preconditioning data_time",
         "model.timestep_frequencies: fourier is for times in 0..1000, and objective.preconditioning = data_time gives"),
        ("--model.value_residual true --model.embedding_per_block true",
         "model.value_residual: has no effect when model.embedding_per_block = true"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_in_one_line(arguments, line):
    (problem,) = problems(arguments=["--model.flavor", "debug", *arguments.split()])
    assert line in problem


def test_processes_do_not_divide_tokens_of_the_class_or_heads_that_they_cannot():
    context = ["--model.flavor", "debug", "--parallelism.context_parallel_degree", "4"]
    for arguments, line in (
        ("--model.class_tokens 4", "model.class_tokens are no tokens of the image"),
        ("--model.wide_dim 48 --model.wide_heads 6", "4 does not divide model.wide_heads = 6"),
    ):
        assert any(line in problem for problem in problems(arguments=[*context, *arguments.split()], world_size=4))
