"""Flux: its formulas, computed plainly in float64; its sizes; its published layouts; what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchtitan.conditions import POOLED, TEXT, Classes, Embeddings
from torchtitan.models import MODELS
from torchtitan.models.flops import check_macs
from torchtitan.models.flux.config import FLAVORS, FluxConfig
from torchtitan.models.flux.conversion import LAYOUTS
from torchtitan.models.flux.model import Flux, condition_problems, problems
from torchtitan.models.published_layouts import ConversionError
from torchtitan_dit.commands.checkpoint import main

DEBUG = FLAVORS["debug"]
GUIDED = replace(DEBUG, guidance_embedding=True, guidance=2.5)
IMAGE, TOKENS = (3, 8, 12), 5


def text_kind(config: FluxConfig, tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> Embeddings:
    shapes = {TEXT: (tokens, config.text_dim), POOLED: (config.pooled_dim,)}
    return Embeddings({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()})


def build(config: FluxConfig, image: tuple[int, int, int] = IMAGE) -> Flux:
    """A model in float64 of which no parameter is at a special value."""
    model = Flux(config, image, text_kind(config)).double()
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.normal_(1.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0, 0.2)
    model.init_buffers()
    return model.eval()


def inputs(config: FluxConfig, image: tuple[int, int, int] = IMAGE) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal(2, *image), torch.tensor([0.25, 0.9]).double(), {
        TEXT: normal(2, TOKENS, config.text_dim), POOLED: normal(2, config.pooled_dim)
    }  # fmt: skip


# --- the formulas as published, from a table of weights under the published names


class Plain:
    """FLUX.1 in loops and sums, one head and one token at a time where that is plainest."""

    def __init__(self, weights: dict[str, Tensor], config: FluxConfig) -> None:
        self.w, self.config = weights, config

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.out_layer", swish(self.linear(f"{name}.in_layer", x)))

    def __call__(self, x: Tensor, time: Tensor, text: Tensor, pooled: Tensor, guidance: float | None) -> Tensor:
        images = [self.one(*row, guidance) for row in zip(x, time, text, pooled, strict=True)]
        return torch.stack(images)

    def one(self, x: Tensor, time: Tensor, text: Tensor, pooled: Tensor, guidance: float | None) -> Tensor:
        channels, height, width = x.shape
        p = self.config.patch_size
        rows, columns = height // p, width // p
        patches = [
            torch.stack([x[c, r * p + i, q * p + j] for c in range(channels) for i in range(p) for j in range(p)])
            for r in range(rows) for q in range(columns)
        ]
        places = [(0, 0, 0)] * len(text) + [(0, r, q) for r in range(rows) for q in range(columns)]
        vec = self.mlp("time_in", waves(1000 * time)) + self.mlp("vector_in", pooled)
        if guidance is not None:
            vec = vec + self.mlp("guidance_in", waves(torch.tensor(1000 * guidance).double()))
        img, txt = self.linear("img_in", torch.stack(patches)), self.linear("txt_in", text)
        for i in range(self.config.num_double_layers):
            img, txt = self.double(f"double_blocks.{i}", img, txt, vec, places)
        tokens = torch.cat((txt, img))
        for i in range(self.config.num_single_layers):
            tokens = self.single(f"single_blocks.{i}", tokens, vec, places)
        shift, scale = self.linear("final_layer.adaLN_modulation.1", swish(vec)).chunk(2)
        out = self.linear("final_layer.linear", (1 + scale) * layer_normed(tokens[len(text) :]) + shift)
        image = torch.empty_like(x)
        for token, values in enumerate(out):
            r, q = divmod(token, columns)
            image[:, r * p : r * p + p, q * p : q * p + p] = values.view(channels, p, p)
        return image

    def double(self, name: str, img: Tensor, txt: Tensor, vec: Tensor, places: list) -> tuple[Tensor, Tensor]:
        parts, streams = {}, {"img": img, "txt": txt}
        for stream, x in streams.items():
            parts[stream] = self.linear(f"{name}.{stream}_mod.lin", swish(vec)).chunk(6)
            shift, scale = parts[stream][:2]
            qkv = self.linear(f"{name}.{stream}_attn.qkv", (1 + scale) * layer_normed(x) + shift)
            parts[f"{stream} qkv"] = self.normed_heads(f"{name}.{stream}_attn.norm", qkv)
        joint = [torch.cat(pair, dim=1) for pair in zip(parts["txt qkv"], parts["img qkv"], strict=True)]
        attended = attention(*joint, places, self.config)
        found = {"txt": attended[: len(txt)], "img": attended[len(txt) :]}
        for stream, x in streams.items():
            _, _, gate, shift, scale, mlp_gate = parts[stream]
            x = x + gate * self.linear(f"{name}.{stream}_attn.proj", found[stream])
            h = gelu(self.linear(f"{name}.{stream}_mlp.0", (1 + scale) * layer_normed(x) + shift))
            streams[stream] = x + mlp_gate * self.linear(f"{name}.{stream}_mlp.2", h)
        return streams["img"], streams["txt"]

    def single(self, name: str, x: Tensor, vec: Tensor, places: list) -> Tensor:
        shift, scale, gate = self.linear(f"{name}.modulation.lin", swish(vec)).chunk(3)
        both = self.linear(f"{name}.linear1", (1 + scale) * layer_normed(x) + shift)
        qkv, h = both[:, : 3 * self.config.dim], both[:, 3 * self.config.dim :]
        attended = attention(*self.normed_heads(f"{name}.norm", qkv), places, self.config)
        return x + gate * self.linear(f"{name}.linear2", torch.cat((attended, gelu(h)), dim=1))

    def normed_heads(self, norm: str, qkv: Tensor) -> list[Tensor]:
        """Queries, keys and values [heads, tokens, channels], the first two over their root mean square."""
        heads = self.config.num_heads
        q, k, v = (part.reshape(len(qkv), heads, -1).transpose(0, 1) for part in qkv.chunk(3, dim=1))
        normed = [
            x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.w[f"{norm}.{kind}_norm.scale"]
            for x, kind in ((q, "query"), (k, "key"))
        ]
        return [*normed, v]


def swish(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_normed(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-6)


def waves(t: Tensor) -> Tensor:
    angles = torch.stack([t * 10000 ** (-i / 128) for i in range(128)])
    return torch.cat((angles.cos(), angles.sin()))


def turned(x: Tensor, place: tuple[int, int, int], config: FluxConfig) -> Tensor:
    """Each pair of neighbouring channels as a complex number, times e^(i angle)."""
    angles = [
        place[axis] * 10000.0 ** (-2 * i / channels)
        for axis, channels in enumerate(config.axes_dim) for i in range(channels // 2)
    ]
    turns = torch.exp(1j * torch.tensor(angles, dtype=torch.float64))
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * turns).flatten()


def attention(q: Tensor, k: Tensor, v: Tensor, places: list, config: FluxConfig) -> Tensor:
    q, k = (
        torch.stack([torch.stack([turned(row, place, config) for row, place in zip(head, places, strict=True)]) for head in x])
        for x in (q, k)
    )
    weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), dim=-1)
    return (weights @ v).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("config", [DEBUG, GUIDED], ids=["schnell", "dev"])
@pytest.mark.parametrize("image", [IMAGE, (3, 6, 6)], ids=["as built", "another size"])
def test_the_network_is_the_published_formula(config, image):
    model = build(config)
    x, time, condition = inputs(config, image)
    published, _ = LAYOUTS["bfl"].export_weights({name: p.detach() for name, p in model.named_parameters()}, model)
    guidance = config.guidance if config.guidance_embedding else None
    wanted = Plain(published, config)(x, time, condition[TEXT], condition[POOLED], guidance)
    with torch.no_grad():
        found = model(x, 1000 * time, condition)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


# --- sizes


@pytest.mark.parametrize(("flavor", "tokens", "count"), [("dev", 512, 11_901_408_320), ("schnell", 256, 11_891_178_560)])
def test_published_sizes_are_exact(flavor, tokens, count):
    with torch.device("meta"):
        model = MODELS["flux"].build(FLAVORS[flavor], (16, 32, 32), text_kind(FLAVORS[flavor], tokens, torch.bfloat16))
    assert model.num_parameters() == count
    assert sum(p.numel() for p in model.double_layers[0].parameters()) == 339_831_296
    assert sum(p.numel() for p in model.single_layers[0].parameters()) == 141_591_808
    check_macs(model, "flux")
    if tokens == 256:  # 256 x 256 pixels: the 20.3 TFLOP a sample of published training configurations, within 1 %
        assert model.flops_per_image((16, 32, 32)) == pytest.approx(20.4e12, rel=2e-3)


@pytest.mark.parametrize("image", [(3, 8, 8), (16, 4, 10)])
def test_products_are_counted_at_any_size(image):
    with torch.device("meta"):
        check_macs(MODELS["flux"].build(GUIDED, image, text_kind(GUIDED)), "flux")


# --- published layouts


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("config", [DEBUG, GUIDED], ids=["schnell", "dev"])
def test_a_round_trip_is_exact(layout, config):
    model = build(config)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    published, _ = layout.export_weights(weights, model)
    assert sum(tensor.numel() for tensor in published.values()) == model.num_parameters()
    returned, notes = layout.import_weights(published, model)
    assert returned.keys() == weights.keys() and not notes
    assert all(torch.equal(returned[name], weights[name]) for name in weights)


def test_weights_of_another_model_are_refused_by_name():
    model, guided = build(DEBUG), build(GUIDED)
    weights = {name: parameter.detach() for name, parameter in guided.named_parameters()}
    of_guided = {name: layout.export_weights(weights, guided)[0] for name, layout in LAYOUTS.items()}
    for name, layout in LAYOUTS.items():
        with pytest.raises(ConversionError, match="these are weights of .* with a guidance embedding.*; the configuration is"):
            layout.import_weights(of_guided[name], model)
    with pytest.raises(ConversionError, match="give --format bfl"):
        LAYOUTS["diffusers"].import_weights(of_guided["bfl"], guided)
    with pytest.raises(ConversionError, match="own layout already"):
        LAYOUTS["bfl"].import_weights(weights, guided)
    with pytest.raises(ConversionError, match="is no Flux"):
        LAYOUTS["bfl"].import_weights({}, guided)
    whole = dict(of_guided["bfl"])
    cut = dict(whole)
    del cut["double_blocks.1.img_mlp.0.bias"]
    with pytest.raises(ConversionError, match=r"1 tensors are missing: double_blocks\.1\.img_mlp\.0\.bias"):
        LAYOUTS["bfl"].import_weights(cut, guided)
    narrow = whole | {"txt_in.weight": torch.zeros(DEBUG.dim, 7)}
    with pytest.raises(ConversionError, match=r"txt_in.weight is \[64, 7\], this model needs \[64, 32\]"):
        LAYOUTS["bfl"].import_weights(narrow, guided)


CONFIG = (
    '[model]\nname = "flux"\nflavor = "debug"\n[data]\nname = "synthetic"\nshape = [3, 8, 12]\ntext_length = 5\n'
    "text_dim = 32\npooled_dim = 24\n"
)


def imported(tmp_path, tensors):
    """What `import` of a file in BFL's names says; its output, if it wrote one."""
    (tmp_path / "config.toml").write_text(CONFIG)
    save_file(tensors, tmp_path / "published.safetensors")
    words = ["import", tmp_path / "published.safetensors", "--format", "bfl", "--config", tmp_path / "config.toml"]
    code = main([*map(str, words), "--output", str(tmp_path / "own.safetensors")])
    files = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".toml" and "published" not in path.name)
    return code, load_file(tmp_path / files[0]) if files else files


def test_weights_that_are_not_finite_are_not_imported(tmp_path, capsys):
    model = build(DEBUG).float()
    published, _ = LAYOUTS["bfl"].export_weights({name: p.detach() for name, p in model.named_parameters()}, model)
    tensors = dict(published)
    tensors["double_blocks.1.img_attn.qkv.weight"][7, 3] = float("nan")
    assert imported(tmp_path, tensors) == (2, [])
    said = capsys.readouterr().err
    assert "published.safetensors: double_layers.1.image.qkv.weight holds values that are not finite" in said


def test_a_checkpoint_of_comfyui_is_imported_without_its_other_parts(tmp_path, capsys):
    model = build(DEBUG).float()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    published, _ = LAYOUTS["bfl"].export_weights(weights, model)
    tensors = {f"model.diffusion_model.{name}": published[name] for name in published}
    tensors |= {f"vae.decoder.{number}": torch.ones(1) for number in range(3)} | {"text_encoders.t5xxl.x": torch.ones(2)}
    code, found = imported(tmp_path, tensors)
    assert code == 0 and found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    said = capsys.readouterr().err
    assert "left out beside model.diffusion_model.: 1 tensors of text_encoders, 3 tensors of vae" in said


def test_tensors_are_converted_one_at_a_time():
    """24 GB of weights pass through a machine that has less."""
    model, read = build(DEBUG), []

    class Files(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    published, _ = LAYOUTS["diffusers"].export_weights({name: p.detach() for name, p in model.named_parameters()}, model)
    weights, _ = LAYOUTS["diffusers"].import_weights(Files(published), model)
    assert len(read) == len(published)  # their shapes; the tensors of files are mapped
    assert weights.shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    first, second = weights["output.modulation.weight"], weights["output.modulation.weight"]
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


def write_folder(folder, model, files=3):
    """The model as diffusers publishes it: several files with an index, and config.json."""
    published, _ = LAYOUTS["diffusers"].export_weights({name: p.detach() for name, p in model.named_parameters()}, model)
    folder.mkdir()
    places = {name: f"part-{number % files}.safetensors" for number, name in enumerate(published)}
    for file in {*places.values()}:
        save_file({name: published[name] for name in published if places[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(LAYOUTS["diffusers"].folder_config(model)))
    return folder


def test_published_folder_of_several_files_is_imported(tmp_path, capsys):
    model = build(DEBUG).float()
    folder = write_folder(tmp_path / "published", model)
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    words = ["import", str(folder), "--format", "diffusers", "--config", str(config), "--output"]
    assert main([*words, str(tmp_path / "own.safetensors")]) == 0, capsys.readouterr().err
    found = load_file(tmp_path / "own.safetensors")
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
    capsys.readouterr()

    for harm, message in (
        (lambda: (folder / "part-1.safetensors").unlink(), f"{folder}/part-1.safetensors: missing, though diffusion_py"),
        (lambda: (folder / "part-1.safetensors").write_bytes(b"none"), "part-1.safetensors: is not a readable safetensors"),
    ):  # fmt: skip
        harm()
        assert main([*words, str(tmp_path / "other.safetensors")]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
        assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.parametrize("config", [DEBUG, GUIDED], ids=["schnell", "dev"])
def test_diffusers_computes_the_same(config):
    diffusers = pytest.importorskip("diffusers")
    model, layout = build(config).float(), LAYOUTS["diffusers"]
    model.init_buffers()
    settings = {key: value for key, value in layout.folder_config(model).items() if key != "_class_name"}
    theirs = diffusers.FluxTransformer2DModel(**settings).eval()
    published, _ = layout.export_weights({name: p.detach() for name, p in model.named_parameters()}, model)
    assert theirs.load_state_dict(dict(published), strict=True)
    x, time, condition = (value for value in inputs(config))
    x, time, condition = x.float(), time.float(), {name: value.float() for name, value in condition.items()}
    rows, columns = IMAGE[1] // 2, IMAGE[2] // 2
    packed = x.view(2, 3, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, rows * columns, 12)
    ids = torch.stack([torch.tensor([0, r, q]) for r in range(rows) for q in range(columns)]).float()
    with torch.no_grad():
        wanted = theirs(
            hidden_states=packed, timestep=time, encoder_hidden_states=condition[TEXT], pooled_projections=condition[POOLED],
            img_ids=ids, txt_ids=torch.zeros(TOKENS, 3),
            guidance=torch.full((2,), config.guidance) if config.guidance_embedding else None,
        ).sample.view(2, rows, columns, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(2, *IMAGE)  # fmt: skip
        found = model(x, 1000 * time, condition)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    back, _ = layout.import_weights(theirs.state_dict(), model)
    assert all(torch.equal(back[name], parameter) for name, parameter in model.named_parameters())


# --- what is refused


def test_fields_that_do_not_fit_are_named():
    assert not problems(DEBUG, IMAGE)
    assert problems(DEBUG, (3, 9, 8)) == ["model.patch_size: 2 does not divide the image of 9 x 8"]
    assert problems(replace(DEBUG, num_heads=3), IMAGE) == ["model.num_heads: 3 does not divide model.dim = 64"]
    (line,) = problems(replace(DEBUG, axes_dim=[4, 6, 8]), IMAGE)
    assert line.startswith("model.axes_dim: [4, 6, 8] add up to 18 channels, a head has")
    assert "not three even" in problems(replace(DEBUG, axes_dim=[5, 5, 6]), IMAGE)[0]


def test_text_of_other_encoders_is_refused_with_both_widths():
    assert not condition_problems(DEBUG, text_kind(DEBUG))
    other = Embeddings({TEXT: torch.zeros(5, 48), POOLED: torch.zeros(24)})
    assert condition_problems(DEBUG, other) == [
        "model.text_dim: 32, and the data's text has width 48 (set it to 48, or, as given weights need, "
        "encode by a data.text_encoder of width 32)"
    ]
    (line,) = condition_problems(DEBUG, Embeddings({TEXT: torch.zeros(5, 32)}))
    assert "flux takes the embeddings text and pooled, the data give text" in line
    (line,) = condition_problems(DEBUG, Classes(10))
    assert "the data give class" in line


@pytest.mark.parametrize(("shape", "condition", "message"), [
    ((2, 4, 8, 12), {}, "3 channels"), ((2, 3, 7, 12), {}, "multiples of 2"), (None, None, "missing"),
    (None, {TEXT: torch.zeros(2, 4, 32), POOLED: torch.zeros(2, 24)}, "4 tokens; this model takes 5"),
])  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(shape, condition, message):
    x, time, right = inputs(DEBUG)
    with pytest.raises(ValueError, match=message):
        build(DEBUG)(x if shape is None else torch.zeros(shape), time, right if condition == {} else condition)
