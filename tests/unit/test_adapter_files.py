"""Files of adapters: every published layout and this program's own, both ways; conversions that keep the function; refusals."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.adapted_models import CLASSES, DEBUG, PIXELS, drawn, flux, flux_inputs, randomised, with_adapter
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapter_files import known_layouts, read_adapter, write_adapter
from torchtitan.models.adapters.adapters import adapter_weights, add_trained_adapter, fill_adapter
from torchtitan.models.adapters.config import LoRAConfig
from torchtitan.models.adapters.fusing import cut, join
from torchtitan.models.adapters.layers import AdapterError
from torchtitan.models.adapters.layouts import NATIVE
from torchtitan.models.adapters.target import LowRankWeights, Target
from torchtitan.models.adapters.targets import of_blocks, weight_of
from torchtitan.models.edm2.config import EDM2Config
from torchtitan.models.flux.conversion import published_linears
from torchtitan_dit.commands.checkpoint import main

FAMILY = MODELS["flux"]
LAYOUTS = known_layouts(FAMILY.adapter_layouts)
SPLIT, FUSED = ("diffusers", "ai-toolkit"), ("kohya", "comfyui")


def read(path, model):
    return read_adapter(path, model, FAMILY.adapter_layouts)


def written(path, weights, model, layout, **options):
    write_adapter(path, weights, model, LAYOUTS[layout], overwrite=True, **options)
    return path


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[target].down, b[target].down) and torch.equal(a[target].up, b[target].up)
        and math.isclose(a[target].alpha, b[target].alpha, rel_tol=1e-7) for target in a
    )  # fmt: skip


def same_function(a, b, bound=1e-6):
    """Check in float64, so that no order of summation counts, that two adapters are the same function."""
    x, times, condition = flux_inputs()
    x = x.double(), times.double(), {name: value.double() for name, value in condition.items()}
    found, wanted = (with_adapter(flux(), weights).double()(*x) for weights in (a, b))
    base = flux().double()(*x)
    assert (wanted - base).abs().max() > 1e-3 * base.abs().max()
    return (found - wanted).abs().max() <= bound * wanted.abs().max()


def every_linear(model, network):
    """Every linear of a layout of the network: of the blocks and outside of them."""
    return list(published_linears(model, network).values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trips_are_exact(tmp_path, layout, dtype):
    model = flux()
    targets = every_linear(model, "bfl" if layout in FUSED else "diffusers")
    alpha = None if layout == "ai-toolkit" else 3.0
    weights = {
        target: LowRankWeights(*(v.to(getattr(torch, dtype)).float() for v in (values.down, values.up)), values.alpha)
        for target, values in drawn(model, targets, rank=2, alpha=alpha).items()
    }
    path = written(tmp_path / "a.safetensors", weights, model, layout, dtype=dtype)
    tensors = load_file(path)
    assert {tensor.dtype for name, tensor in tensors.items() if "alpha" not in name} == {getattr(torch, dtype)}
    found = read(path, model)
    assert found.layout == ("diffusers" if layout == "ai-toolkit" else layout) and same(found.weights, weights)
    again = written(tmp_path / "b.safetensors", found.weights, model, layout, dtype=dtype)
    assert again.read_bytes() == path.read_bytes()


def test_names_are_the_published_ones(tmp_path):
    model = flux()
    split = drawn(model, FAMILY.adapter_sets["ai-toolkit"](model))
    fused = drawn(model, FAMILY.adapter_sets["kohya"](model))
    names = {
        layout: load_file(written(tmp_path / "a.safetensors", split if layout in SPLIT else fused, model, layout)).keys()
        for layout in (*SPLIT, *FUSED)
    }
    assert names["diffusers"] == names["ai-toolkit"] and len(names["diffusers"]) == 2 * (14 * 2 + 6 * 2)
    assert len(names["kohya"]) == len(names["comfyui"]) == 3 * (10 * 2 + 3 * 2)
    double = (
        "norm1.linear norm1_context.linear attn.to_q attn.to_k attn.to_v attn.to_out.0 attn.add_q_proj attn.add_k_proj"
        " attn.add_v_proj attn.to_add_out ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2"
    )
    assert names["diffusers"] == {
        f"transformer.{block}.{layer}.{part}.weight"
        for number in (0, 1) for part in ("lora_A", "lora_B")
        for block, layers in ((f"transformer_blocks.{number}", double),
                              (f"single_transformer_blocks.{number}",
                               "norm.linear attn.to_q attn.to_k attn.to_v proj_mlp proj_out"))
        for layer in layers.split()
    }  # fmt: skip
    streams = "attn.qkv attn.proj mlp.0 mlp.2 mod.lin".split()
    bfl = [f"double_blocks.{number}.{stream}_{layer}" for number in (0, 1) for stream in ("img", "txt") for layer in streams]
    bfl += [f"single_blocks.{number}.{layer}" for number in (0, 1) for layer in ("linear1", "linear2", "modulation.lin")]
    parts = ("lora_down.weight", "lora_up.weight", "alpha")
    assert names["comfyui"] == {f"diffusion_model.{layer}.{part}" for layer in bfl for part in parts}
    assert names["kohya"] == {f"lora_unet_{layer.replace('.', '_')}.{part}" for layer in bfl for part in parts}


@pytest.mark.parametrize("source", ["ai-toolkit", "diffusers", "kohya"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_set_is_the_same_function_in_every_layout(tmp_path, source, layout):
    model = flux()
    weights = drawn(model, FAMILY.adapter_sets[source](model), rank=3, alpha=2.0)
    found = read(written(tmp_path / "a.safetensors", weights, model, layout), model).weights
    assert same_function(found, weights)
    trained = flux()
    add_trained_adapter(trained, list(weights), LoRAConfig(enable=True, rank=3, alpha=2.0))
    fill_adapter(trained, read(tmp_path / "a.safetensors", model).as_trained)  # as a run of that set begins from the file
    assert same_function(adapter_weights(trained), weights)
    if source == "kohya" and layout in SPLIT:  # A is copied to all parts of a fused layer, B cut by its rows
        whole = weights[Target("single_layers.1.qkv_hidden", 0, 448)]
        parts = [values for target, values in found.items() if target.module == "single_layers.1.qkv_hidden"]
        assert len(parts) == 4 and all(torch.equal(part.down, whole.down) for part in parts)
        scale = whole.scale if layout == "ai-toolkit" else 1.0
        torch.testing.assert_close(torch.cat([part.up for part in parts]), whole.up * scale)
    if source != "kohya" and layout in FUSED:  # and back: the parts as they were
        again = read(written(tmp_path / "b.safetensors", found, model, "diffusers"), model).weights
        assert same(again, weights)


def test_a_file_of_one_part_does_not_fit_a_run_of_several():
    model = flux()
    add_trained_adapter(model, targets := FAMILY.adapter_sets["diffusers"](model), LoRAConfig(enable=True, rank=3))
    weights = drawn(model, [target for target in targets if target.module.endswith("qkv") and target.start == 0], rank=3)
    with pytest.raises(AdapterError, match="lacks .*: set lora.targets to the layers that it has adapters of"):
        fill_adapter(model, weights)


def test_parts_are_joined_block_by_block_and_cut_again():
    generator = torch.Generator().manual_seed(0)

    def part(rank, rows, alpha):
        return LowRankWeights(torch.randn(rank, 5, generator=generator), torch.randn(rows, rank, generator=generator), alpha)

    rows = [4, 4, 6]
    equal = [part(2, count, 3.0) for count in rows]
    joined = join(equal, rows)
    assert joined.rank == 6 and joined.alpha == 9.0 and joined.scale == equal[0].scale
    assert [(p.rank, p.alpha) for p in cut(joined, rows)] == [(2, 3.0)] * 3
    for before, after in zip(equal, cut(joined, rows), strict=True):
        assert torch.equal(before.down, after.down) and torch.equal(before.up, after.up)
    unequal = [part(1, 4, 3.0), None, part(2, 6, 1.0)]
    joined = join(unequal, rows)
    update = joined.scale * joined.up @ joined.down
    torch.testing.assert_close(update[:4], 3.0 * unequal[0].up @ unequal[0].down)
    torch.testing.assert_close(update[8:], 0.5 * unequal[2].up @ unequal[2].down)
    assert not update[4:8].any() and cut(joined, rows)[1] is None
    dense = part(6, 14, 3.0)
    assert all(p.rank == 6 and p.alpha == 3.0 and torch.equal(p.down, dense.down) for p in cut(dense, rows))
    assert torch.equal(torch.cat([p.up for p in cut(dense, rows)]), dense.up)


def test_halves_of_the_output_modulation_are_swapped_in_up_alone(tmp_path):
    model = flux()
    target = Target("output.modulation", 0, 128)
    weights = drawn(model, [target])
    bfl = load_file(written(tmp_path / "a.safetensors", weights, model, "kohya"))
    diffusers = load_file(written(tmp_path / "b.safetensors", weights, model, "diffusers"))
    up = bfl["lora_unet_final_layer_adaLN_modulation_1.lora_up.weight"]
    assert torch.equal(diffusers["transformer.norm_out.linear.lora_B.weight"], torch.cat((up[64:], up[:64])))
    assert torch.equal(diffusers["transformer.norm_out.linear.lora_A.weight"], weights[target].down)
    assert torch.equal(up, weights[target].up)


def rewritten(path, harm, metadata=None):
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        kept = file.metadata()
    harm(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata=kept if metadata is None else metadata)
    return path


OUT = Target("single_layers.0.out", 0, 64)


def of_one_layer(tmp_path, layout, alpha=None, rank=2):
    model = flux()
    return model, written(tmp_path / "a.safetensors", drawn(model, [OUT], rank, alpha), model, layout)


SPELLINGS = {
    "onetrainer": ("kohya parts", lambda name: "lora_transformer_" + name.replace(".", "_"), "diffusers"),
    "diffusers without prefix": ("peft parts", lambda name: name, "diffusers"),
    "bfl": ("kohya parts", lambda name: name, "bfl"),
    "fal": ("peft parts", lambda name: f"base_model.model.{name}", "bfl"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_names_of_other_programs_are_read(tmp_path, name):
    """The weight's change s B A of every layer, in float64, against the tensors that were written by their names."""
    parts, spelled, network = SPELLINGS[name]
    model, generator, tensors, wanted = flux(), torch.Generator().manual_seed(0), {}, {}
    for number, (published, target) in enumerate(published_linears(model, network).items()):
        down = torch.randn(2 + number % 2, weight_of(model, target.module)[1], generator=generator)
        up = torch.randn(target.stop - target.start, len(down), generator=generator)
        if network == "diffusers" and target.module == "output.modulation":
            wanted[target] = up.roll(64, 0).double() @ down.double()
        else:
            wanted[target] = up.double() @ down.double()
        endings = ("lora_down.weight", "lora_up.weight") if parts == "kohya parts" else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"{spelled(published)}.{ending}": part for ending, part in zip(endings, (down, up), strict=True)}
        if parts == "kohya parts":
            tensors[f"{spelled(published)}.alpha"] = torch.tensor(1.0 + number % 3)
            wanted[target] *= (1.0 + number % 3) / len(down)
    save_file(tensors, tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors", model)
    assert found.layout == name and found.weights.keys() == wanted.keys()
    for target, values in found.weights.items():
        change = values.scale * values.up.double() @ values.down.double()
        assert (change - wanted[target]).abs().max() <= 1e-12 * wanted[target].abs().max()
    assert any("scale 1" in note for note in found.notes) == (parts == "peft parts")
    save_file({f"x.{layer}": tensor for layer, tensor in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match=r"x\..* is of no layout of adapters of this network"):
        read(tmp_path / "a.safetensors", model)


def test_missing_alpha_means_scale_one_whatever_the_rank(tmp_path):
    for layout in ("kohya", "comfyui", "diffusers"):
        for rank in (1, 5):
            model, path = of_one_layer(tmp_path, layout, alpha=3.0, rank=rank)
            rewritten(path, lambda tensors: tensors.pop(next(name for name in tensors if name.endswith(".alpha"))))
            assert read(path, model).weights[OUT].scale == 1


def test_alpha_is_written_where_readers_would_guess_another(tmp_path):
    model, path = of_one_layer(tmp_path, "diffusers")
    assert not [name for name in load_file(path) if "alpha" in name]
    for layout, expected in (("diffusers", {3.0}), ("ai-toolkit", set())):
        model, path = of_one_layer(tmp_path, layout, alpha=3.0)
        tensors = load_file(path)
        assert {tensor.item() for name, tensor in tensors.items() if name.endswith(".alpha")} == expected
        assert all(tensor.is_floating_point() for tensor in tensors.values())
    assert same_function(read(path, model).weights, drawn(model, [OUT], 2, 3.0))  # folded into B
    # Of several ranks diffusers 0.36 would take the scale from the first one's: alphas are written, or ranks made equal.
    other = Target("single_layers.1.out", 0, 64)
    weights = drawn(model, [OUT, other], rank=lambda target: 2 if target == OUT else 3)
    tensors = load_file(written(path, weights, model, "diffusers"))
    assert sorted(tensor.item() for name, tensor in tensors.items() if name.endswith(".alpha")) == [2, 3]
    tensors = load_file(written(path, weights, model, "ai-toolkit"))
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name} == {3}
    assert same_function(read(path, model).weights, weights)


def header(**config):
    return {"format": "pt", "lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}


@pytest.mark.parametrize(("found", "scale"), [
    (header(r=2, lora_alpha=3, alpha_pattern={}, rank_pattern={}), 1.5),
    (header(r=2, lora_alpha=3, alpha_pattern={"proj_out": 5}), 2.5),
    (header(r=2, lora_alpha=3, alpha_pattern={"^proj_out": 5, "blocks.0.proj_out": 6}), 1.5),
    (header(r=2, lora_alpha=3, alpha_pattern={"^single_transformer_blocks.0.proj_out": 5}), 2.5),
    (header(r=2, lora_alpha=2, use_rslora=True), 2 / 2**0.5),
    ({"lora_adapter_metadata": json.dumps({"text_encoder.lora_alpha": 7, "text_encoder.r": 1})}, 1),  # of another network
])  # fmt: skip
def test_scale_in_the_header_is_that_of_peft(tmp_path, found, scale):
    model, path = of_one_layer(tmp_path, "diffusers")
    rewritten(path, lambda tensors: None, found)
    assert read(path, model).weights[OUT].scale == pytest.approx(scale)


def test_text_encoders_are_left_out_and_said_so(tmp_path):
    model, path = of_one_layer(tmp_path, "comfyui")
    before = read(path, model)
    assert not before.notes
    rewritten(path, lambda tensors: tensors.update({
        "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.lora_up.weight": torch.zeros(4, 2),
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(1.0),
    }))  # fmt: skip
    found = read(path, model)
    assert same(found.weights, before.weights)
    assert found.notes == (f"{path}: 2 tensors of text encoders are left out; this program adapts none",)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


LAYER = "transformer.single_transformer_blocks.0.proj_out"
HARMS = {
    "raw peft": (lambda t: t.update({name.replace("transformer", "base_model.model", 1): t.pop(name) for name in list(t)}), None,
                 "is a raw peft file (base_model.model.single_transformer_blocks.0.proj_out.lora_"),
    "DoRA": (put(f"{LAYER}.lora_magnitude_vector.weight", torch.ones(64)), None, "is a scale of DoRA"),
    "DoRA of kohya": (put(f"{LAYER}.dora_scale", torch.ones(64, 1)), None, "is a scale of DoRA"),
    "DoRA in the header": (lambda t: None, header(lora_alpha=2, use_dora=True), "says use_dora"),
    "bias": (put(f"{LAYER}.lora_B.bias", torch.ones(64)), None, "lora_B.bias is no part of an update W + s B A"),
    "difference": (put(f"{LAYER}.diff", torch.ones(64, 320)), None, "diff is no part of an update"),
    "alpha 0": (put(f"{LAYER}.alpha", torch.zeros(())), None, "alpha is no number, or 0"),
    "one half": (lambda t: t.pop(f"{LAYER}.lora_B.weight"), None, f"{LAYER} lacks B"),
    "ranks": (put(f"{LAYER}.lora_B.weight", torch.ones(64, 3)), None, "which have no rank in common"),
    "not finite": (put(f"{LAYER}.lora_B.weight", torch.full((64, 2), math.nan)), None, "values that are no finite numbers"),
    "deeper": (lambda t: t.update({name.replace("blocks.0", "blocks.7"): t.pop(name) for name in list(t)}), None,
               "is an adapter of another network: transformer.single_transformer_blocks.7.proj_out is no layer of this one"),
    "wider": (put(f"{LAYER}.lora_B.weight", torch.ones(96, 2)), None,
              "is an adapter of another network: single_layers.0.out[0:64] needs A [2, 320] and B [64, 2], and it has [2, 320]"),
    "text alone": (lambda t: t.update({f"text_encoder.{name}": t.pop(name) for name in list(t)}), None, "text encoders alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_files_that_would_be_another_function_are_refused_in_one_line(tmp_path, name):
    model, path = of_one_layer(tmp_path, "diffusers")
    harm, metadata, message = HARMS[name]
    rewritten(path, harm, metadata)
    with pytest.raises(AdapterError) as raised:
        read(path, model)
    said = str(raised.value)
    assert said.startswith(f"{path}: ") and message in said and "\n" not in said


def test_native_layout_keeps_adapters_of_families_without_published_ones(tmp_path):
    """Convolutions, embeddings and parts of layers, in every dtype of files."""
    config = EDM2Config(channels=32, channel_mults=[1, 2], num_blocks=1, attention_resolutions=[8], dropout=0.0)
    model = randomised(MODELS["edm2"].build(config, PIXELS, CLASSES))
    whole = of_blocks(model)
    targets = [replace(whole[0], stop=5), replace(whole[0], start=7), *whole[1:]]
    weights = drawn(model, targets, alpha=0.3)
    write_adapter(tmp_path / "a.safetensors", weights, model, NATIVE, metadata={"step": "7"})
    found = read_adapter(tmp_path / "a.safetensors", model, MODELS["edm2"].adapter_layouts)
    assert same(found.weights, weights) and found.layout == "native" and found.metadata["step"] == "7"
    with pytest.raises(AdapterError, match="is an adapter of another network, with "):
        read(tmp_path / "a.safetensors", flux())


def test_values_beyond_float16_and_rows_without_a_name_are_not_written(tmp_path):
    model = flux()
    weights = drawn(model, [OUT])
    weights[OUT].up[0, 0] = 1e5
    path = tmp_path / "a.safetensors"
    with pytest.raises(AdapterError, match=r"proj_out has values that are not finite in float16 \(give --dtype float32\)"):
        write_adapter(path, weights, model, LAYOUTS["diffusers"], dtype="float16")
    write_adapter(path, weights, model, LAYOUTS["diffusers"], dtype="bfloat16")
    with pytest.raises(AdapterError, match=r"the layout has no layer of the rows single_layers.0.out\[0:9\]"):
        write_adapter(path, drawn(model, [replace(OUT, stop=9)]), model, LAYOUTS["diffusers"], overwrite=True)
    with pytest.raises(AdapterError, match="must end in .safetensors"):
        write_adapter(tmp_path / "a.bin", weights, model, LAYOUTS["diffusers"])


def test_command_converts_files_and_keeps_what_the_header_says_of_their_training(tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text(
        '[model]\nname = "flux"\nflavor = "debug"\n[data]\nname = "synthetic"\nshape = [3, 8, 12]\ntext_length = 5\n'
        "text_dim = 32\npooled_dim = 24\n"
    )
    model = flux(DEBUG)
    weights = drawn(model, FAMILY.adapter_sets["ai-toolkit"](model), alpha=3.0)
    source, kohya, back = (tmp_path / f"{name}.safetensors" for name in ("source", "kohya", "back"))
    write_adapter(source, weights, model, LAYOUTS["diffusers"], metadata={"step": "300", "trigger_word": "sks", "other": "x"})

    def convert(*words):
        status = main(["convert-adapter", *map(str, words), "--config", str(config)])
        return status, capsys.readouterr()

    status, said = convert(source, "--adapter", "kohya", "--output", kohya)
    assert status == 0 and said.out.endswith("78 tensors, from the diffusers layout of adapters to kohya\n")
    assert convert(kohya, "--adapter", "diffusers", "--output", back)[0] == 0
    assert same(read(back, model).weights, weights)
    with safe_open(back, framework="pt") as file:
        found = file.metadata()
    assert (found["step"], found["trigger_word"], found["rank"], found["alpha"], found["layout"]) == (
        "300", "sks", "2", "3", "diffusers",
    )  # fmt: skip
    assert "other" not in found
    for words, message in (
        ((source, "--adapter", "kohya", "--output", kohya), "exists already (--overwrite replaces it)"),
        ((tmp_path / "no.safetensors", "--adapter", "kohya", "--output", tmp_path / "x.safetensors"), "no such file"),
        ((config, "--adapter", "kohya", "--output", tmp_path / "x.safetensors"), "holds more than tensors, or is damaged"),
    ):
        status, said = convert(*words)
        assert status == 2 and message in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "x.safetensors").exists()
