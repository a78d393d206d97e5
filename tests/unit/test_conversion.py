"""Converted weights compute what the published network computes, and nothing else passes for them.

tests/fixtures/diffusers_dit.safetensors was made once with diffusers 0.42.1: a DiTTransformer2DModel of two blocks,
every parameter drawn anew (the embedders alike in both blocks), its input, its output in eval mode, and its
configuration in the file's metadata. Its timesteps are small: near 1,000 the sinusoid's angles, and with them the output,
differ by 6e-5 between processors that round the exponential differently, in diffusers as here.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from tests.launcher import ROOT
from torchtitan.conditions import Classes, class_kind
from torchtitan.models.dit.config import FLAVORS
from torchtitan.models.dit.conversion import (
    LAYOUTS,
    ConversionError,
    diffusers_config,
    diffusers_config_problems,
    export_weights,
    import_weights,
)
from torchtitan.models.dit.model import DiT

FIXTURE = ROOT / "tests" / "fixtures" / "diffusers_dit.safetensors"
PAPER = replace(FLAVORS["DiT-S/2"], dim=32, num_layers=2, num_heads=4, mlp_hidden_dim=128)
IMAGE, CLASSES = (3, 8, 8), 5
LABELS = "y_embedder.embedding_table.weight"


def build(config=PAPER, image_shape=IMAGE, classes=CLASSES) -> DiT:
    """A model whose every parameter is random."""
    model = DiT(config, image_shape, class_kind(classes))
    model.init_buffers()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False)


def weights_of(model: DiT) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def filled(model: DiT, weights: dict[str, torch.Tensor]) -> DiT:
    missing, extra = model.load_state_dict(weights, strict=True)
    assert not missing and not extra
    return model


def published_dit(w: dict, x, t, y, heads: int):
    """The DiT's forward in the terms of its published state dict, float64 from the timestep's sinusoid on."""
    w = {name: tensor.double() for name, tensor in w.items()}

    def linear(name, z):
        return z @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def silu(z):
        return z / (1 + torch.exp(-z))

    def norm(z):
        z = z - z.mean(-1, keepdim=True)
        return z / torch.sqrt(z.square().mean(-1, keepdim=True) + 1e-6)

    patch = w["x_embedder.proj.weight"].shape[-1]
    z = F.conv2d(x.double(), w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=patch)
    side = z.shape[-1]
    z = z.flatten(2).transpose(1, 2) + w["pos_embed"]
    # In float32 as published: at t = 999 its rounding is a phase of 6e-5, and both must make the same.
    angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
    time = torch.cat([angles.cos(), angles.sin()], 1).double()
    embedded = linear("t_embedder.mlp.2", silu(linear("t_embedder.mlp.0", time)))
    c = silu(embedded + w["y_embedder.embedding_table.weight"][y])
    depth = sum(name.endswith("attn.qkv.weight") for name in w)
    for i in range(depth):
        block = f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(f"{block}.adaLN_modulation.1", c)[:, None].chunk(6, -1)
        h = linear(f"{block}.attn.qkv", norm(z) * (1 + scale1) + shift1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in h.chunk(3, -1))
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        z = z + gate1 * linear(f"{block}.attn.proj", (scores @ v).transpose(1, 2).flatten(2))
        h = linear(f"{block}.mlp.fc1", norm(z) * (1 + scale2) + shift2)
        h = h / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        z = z + gate2 * linear(f"{block}.mlp.fc2", h)
    shift, scale = linear("final_layer.adaLN_modulation.1", c)[:, None].chunk(2, -1)
    z = linear("final_layer.linear", norm(z) * (1 + scale) + shift)
    z = z.reshape(len(x), side, side, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", z).reshape(len(x), -1, side * patch, side * patch)


def inputs(image_shape=IMAGE):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, *image_shape, generator=generator)
    return x, torch.tensor([0.0, 3.7, 512.0, 999.0]), torch.tensor([0, 2, 4, 5])


# --- the same function


@pytest.mark.parametrize("learned_variance", [False, True])
@pytest.mark.parametrize("patch_size", [2, 4])
def test_exported_dit_weights_compute_the_same_in_the_published_network(learned_variance, patch_size):
    model = build(replace(PAPER, learned_variance=learned_variance, patch_size=patch_size))
    x, t, y = inputs()
    ours = model(x, t, y)
    published = export_weights(weights_of(model), model, "dit")
    theirs = published_dit(published, x, t, y, heads=4)
    assert ours.abs().mean() > 0.3
    assert (ours - theirs).abs().max() <= 1e-5


def read_fixture() -> tuple[dict, dict, dict]:
    with safe_open(FIXTURE, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
    tensors = load_file(FIXTURE)
    example = {name: tensors.pop(name) for name in ("input.x", "input.t", "input.y", "output")}
    return tensors, example, config


def model_of_fixture(**changes) -> DiT:
    config = replace(
        PAPER, dim=8, num_heads=2, mlp_hidden_dim=32, learned_variance=True, timestep_frequencies="diffusers"
    )
    return DiT(replace(config, **changes), (2, 8, 8), Classes(3))


def test_imported_diffusers_weights_compute_what_diffusers_computed():
    tensors, example, document = read_fixture()
    model = model_of_fixture()
    assert diffusers_config_problems(document, model) == []
    weights, notes = import_weights(tensors, model, "diffusers")
    filled(model, weights).init_buffers()
    with torch.no_grad():
        output = model(example["input.x"], example["input.t"].float(), example["input.y"])
    assert notes == [] and example["output"].abs().mean() > 1
    assert (output - example["output"]).abs().max() <= 1e-5


def test_the_frequencies_of_the_timestep_tell_diffusers_from_dit():
    tensors, example, _ = read_fixture()
    model = model_of_fixture(timestep_frequencies="dit")
    filled(model, import_weights(tensors, model, "diffusers")[0]).init_buffers()
    with torch.no_grad():
        output = model(example["input.x"], example["input.t"].float(), example["input.y"])
    difference = (output - example["output"]).abs().amax((1, 2, 3))
    assert difference[0] <= 1e-5 and difference[2:].min() > 0.1  # at t = 0 every angle is zero


def test_diffusers_configuration_is_that_of_the_fixture():
    _, _, document = read_fixture()
    written = diffusers_config(model_of_fixture())
    assert {key: document[key] for key in written} == written
    other = document | {"num_attention_heads": 4, "activation_fn": "gelu"}
    assert [line.split()[0] for line in diffusers_config_problems(other, model_of_fixture())] == [
        "num_attention_heads", "activation_fn",
    ]


OWN = replace(
    PAPER, embedding_per_block=True, mlp_norm_eps=1e-3, learned_variance=True, timestep_frequencies="diffusers"
)


def test_weights_of_one_embedder_fill_those_of_every_block():
    one, each = build(replace(OWN, embedding_per_block=False)), DiT(OWN, IMAGE, class_kind(CLASSES))
    published = export_weights(weights_of(one), one, "diffusers")
    filled(each, import_weights(published, each, "diffusers")[0]).init_buffers()
    with torch.no_grad():
        assert torch.equal(each(*inputs()), one(*inputs()))


# --- there and back


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("learned_variance", [False, True])
def test_there_and_back_is_exact(layout, learned_variance):
    model = build(replace(PAPER, learned_variance=learned_variance))
    published = export_weights(weights_of(model), model, layout)
    back, notes = import_weights(published, model, layout)
    assert notes == [] and back.keys() == weights_of(model).keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights_of(model).items())
    again = export_weights(back, model, layout)
    assert again.keys() == published.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in published.items())


def test_names_and_shapes_are_those_of_the_published_dit_xl():
    with torch.device("meta"):
        model = DiT(replace(FLAVORS["DiT-XL/2"], learned_variance=True), (4, 32, 32), Classes(1000))
    weights = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in export_weights(weights, model, "dit").items()}
    assert len(shapes) == 8 + 4 + 28 * 10
    assert sum(map(math.prod, shapes.values())) == 675_129_632  # as the published code prints it
    assert shapes["pos_embed"] == (1, 256, 1152)
    assert shapes["x_embedder.proj.weight"] == (1152, 4, 2, 2)
    assert shapes["y_embedder.embedding_table.weight"] == (1001, 1152)
    assert shapes["t_embedder.mlp.0.weight"] == (1152, 256)
    assert shapes["blocks.27.attn.qkv.weight"] == (3456, 1152)
    assert shapes["blocks.0.mlp.fc1.weight"] == (4608, 1152)
    assert shapes["blocks.0.adaLN_modulation.1.weight"] == (6912, 1152)
    assert shapes["final_layer.linear.weight"] == (32, 1152)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_state_dict_cast_as_a_whole_is_imported(layout, dtype):
    model = build()
    published = export_weights(weights_of(model), model, layout)
    name = "pos_embed.pos_embed" if layout == "diffusers" else "pos_embed"
    published |= {name: model.position[None].clone()}
    halved = {name: tensor.to(dtype) for name, tensor in published.items()}
    back, notes = import_weights(halved, model, layout)
    assert notes == [] and all(torch.equal(back[name], tensor.to(dtype)) for name, tensor in weights_of(model).items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_position_table_off_by_two_steps_of_its_dtype_is_refused(dtype):
    model = build()
    published = {name: tensor.to(dtype) for name, tensor in export_weights(weights_of(model), model, "dit").items()}
    table, place = published["pos_embed"], (0, 5, 20)
    table[place] += 2 * max(torch.finfo(dtype).eps * abs(table[place].item()), 1e-6)
    with pytest.raises(ConversionError, match="pos_embed differs by"):
        import_weights(published, model, "dit")


# --- learned variance


def test_variance_is_dropped_with_a_note_where_the_model_has_none():
    whole = build(replace(PAPER, learned_variance=True))
    model = DiT(PAPER, IMAGE, Classes(CLASSES))
    published = export_weights(weights_of(whole), whole, "sit")
    weights, notes = import_weights(published, model, "sit")
    assert notes == ["the learned variance's half of the output layer was dropped"]
    filled(model, weights).init_buffers()
    x, t, y = inputs()
    with torch.no_grad():
        assert (model(x, t, y) - whole(x, t, y)[:, :3]).abs().max() <= 1e-6


def test_variance_that_is_not_in_the_weights_is_refused():
    model = build()
    published = export_weights(weights_of(model), model, "dit")
    with pytest.raises(ConversionError, match=r"makes output.linear.weight \[12, 32\] instead of \[24, 32\]"):
        import_weights(published, DiT(replace(PAPER, learned_variance=True), IMAGE, Classes(CLASSES)), "dit")


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("blocks.1.attn.proj.bias"), "1 tensors are missing: blocks.1.attn.proj.bias"),
        (lambda w: w.update({"blocks.1.attn.q_norm.weight": torch.ones(8)}), "this model: blocks.1.attn.q_norm.weight"),
        (lambda w: w.update(pos_embed=torch.zeros(1, 64, 32)), r"\[1, 64, 32\] instead of \[1, 16, 32\].*another size"),
        (lambda w: w.pop("x_embedder.proj.weight"), "is not in the dit layout"),
        (lambda w: w.update({LABELS: torch.ones(5, 32)}), r"\[5, 32\] instead of \[6, 32\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message):
    model = build()
    published = export_weights(weights_of(model), model, "dit")
    change(published)
    with pytest.raises(ConversionError, match=message):
        import_weights(published, model, "dit")


def test_weights_of_another_flavor_are_named():
    with torch.device("meta"):
        large = DiT(FLAVORS["DiT-B/4"], (4, 32, 32), Classes(10))
        small = DiT(FLAVORS["DiT-S/2"], (4, 32, 32), Classes(10))
        own = DiT(PAPER, IMAGE, Classes(CLASSES))
    for layout in LAYOUTS:
        weights = {name: torch.empty(p.shape, device="meta") for name, p in large.named_parameters()}
        published = export_weights(weights, large, layout)
        with pytest.raises(ConversionError, match=r"weights of DiT-B/4 \(.*\); the configuration is DiT-S/2 \(dim 384"):
            import_weights(published, small, layout)
        with pytest.raises(ConversionError, match="the configuration is no flavor's size"):
            import_weights(published, own, layout)


def test_another_layout_is_named():
    model = build()
    dit = export_weights(weights_of(model), model, "dit")
    diffusers = export_weights(weights_of(model), model, "diffusers")
    with pytest.raises(ConversionError, match="is in the dit layout .give --format dit."):
        import_weights(dit, model, "diffusers")
    with pytest.raises(ConversionError, match="is in the diffusers layout"):
        import_weights(diffusers, model, "sit")
    with pytest.raises(ConversionError, match="own layout already"):
        import_weights(weights_of(model), model, "dit")


def test_diffusers_weights_with_an_embedder_per_block_are_refused_by_a_model_with_one():
    model = build()
    published = export_weights(weights_of(model), model, "diffusers")
    changed = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.bias"
    published[changed] += 1
    with pytest.raises(ConversionError, match=rf"{changed} is not equal.*\(add model.embedding_per_block = true\)"):
        import_weights(published, model, "diffusers")


@pytest.mark.parametrize("key, value", [
    ("mlp", "swiglu"), ("norm", "rmsnorm"), ("norm_eps", 1e-5), ("qk_norm", True), ("attention_bias", False),
    ("position", "rotary"), ("final_modulation", False), ("embedding_per_block", True), ("mlp_norm_eps", 1e-5),
])
def test_a_model_without_a_place_in_the_layout_is_refused(key, value):
    model = build(replace(PAPER, **{key: value}))
    with pytest.raises(ConversionError, match=rf"^model.{key} = "):
        export_weights(weights_of(model), model, "dit")


def test_unconditional_and_oblong_models_are_refused():
    with pytest.raises(ConversionError, match="no classes"):
        export_weights({}, build(classes=0), "sit")
    with pytest.raises(ConversionError, match="images of 8 x 12"):
        export_weights({}, build(image_shape=(3, 8, 12)), "dit")
