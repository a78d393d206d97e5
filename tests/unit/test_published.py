"""Weights between layouts without a run, what tensors show of their model, and pipelines of diffusers."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torchtitan_dit
from torchtitan import philox
from torchtitan.diffusion.solvers.schedules import leading_indices, trailing_indices
from torchtitan.files.weight_files import WeightsError
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.weights.model_record import load_record, record_of_weights
from torchtitan.weights.network import network_on_meta
from torchtitan.weights.published import OwnWeights, open_published, write_weights
from torchtitan_dit.commands.checkpoint import main

SCALE = 0.18215
CONFIG = f"""
[model]
flavor = "DiT-T/2"
learned_variance = true
timestep_frequencies = "FREQUENCIES"
[objective]
path = "ddpm_linear"
prediction = "noise"
preconditioning = "index"
[sampling]
solver.name = "ddim"
schedule.name = "ddpm"
[data]
shape = [4, 8, 8]
num_classes = 3
class_names = ["cat", "dog", "axolotl"]
scale = [{SCALE}, {SCALE}, {SCALE}, {SCALE}]
"""


@pytest.fixture(autouse=True)
def tiny_flavor(monkeypatch):
    published = {"mlp": "gelu", "norm": "layernorm", "norm_affine": False, "norm_eps": 1e-6, "qk_norm": False,
                 "attention_bias": True, "position": "sincos", "final_modulation": True}  # fmt: skip
    tiny = DiTConfig(flavor="DiT-T/2", dim=32, num_layers=2, num_heads=2, patch_size=2, mlp_hidden_dim=128, **published)
    monkeypatch.setitem(FLAVORS, "DiT-T/2", tiny)


def random_weights(frequencies: str = "dit", changes: tuple[str, str] = ("", "")) -> OwnWeights:
    record = load_record(tomllib.loads(CONFIG.replace("FREQUENCIES", frequencies).replace(*changes)), "x.toml")
    model = network_on_meta(record.config, record.info)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.2 * torch.randn(each.shape, generator=generator) for name, each in model.named_parameters()}
    return OwnWeights(Path("x"), record, model, tensors, "x")


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("layout", ["dit", "sit", "diffusers"])
def test_published_tensors_show_their_model(layout, tmp_path):
    changes = ("learned_variance = true", "learned_variance = false") if layout == "sit" else ("", "")
    weights = random_weights("diffusers" if layout == "diffusers" else "dit", changes)
    out = tmp_path / ("folder" if layout == "diffusers" else "x.safetensors")
    write_weights(weights, out, layout, dtype="float32", overwrite=False)
    file = out / "diffusion_pytorch_model.safetensors" if out.is_dir() else out
    save_file(load_file(file), file)  # as others publish it, without a header
    if out.is_dir():
        document = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(document | {"_class_name": "Transformer2DModel"}))
    found, notes = open_published(out, layout, None)
    assert "its latents are taken as scaled by 0.18215, which tensors do not show (add CONFIG for another)" in notes
    assert same(found.tensors, weights.tensors) and found.model.config == weights.model.config
    assert found.record.latents.normalization.scale == [SCALE] * 4
    assert found.record.info.image_shape == (4, 8, 8) and found.record.info.num_classes == 3
    assert found.record.config.objective.path == ("rectified_flow" if layout == "sit" else "ddpm_linear")


OWN_EMBEDDINGS = ("learned_variance = true", "learned_variance = true\nembedding_per_block = true\nmlp_norm_eps = 1e-5")


def test_a_folder_of_diffusers_with_an_embedder_in_each_block_is_imported(tmp_path, capsys):
    weights = random_weights("diffusers", OWN_EMBEDDINGS)
    folder = tmp_path / "native"
    write_weights(weights, folder, "diffusers", dtype="float32", overwrite=False)
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file), file)
    document = json.loads((folder / "config.json").read_text())
    assert document.pop("norm_eps") == 1e-5  # what diffusers takes where nothing is said
    (folder / "config.json").write_text(json.dumps(document))
    found, _ = open_published(folder, "diffusers", None)
    assert same(found.tensors, weights.tensors) and found.model.config == weights.model.config
    own, again = tmp_path / "own.safetensors", tmp_path / "again"
    assert main(["import", str(folder), "--format", "diffusers", "--output", str(own)]) == 0
    assert main(["export", str(own), "--format", "diffusers", "--output", str(again)]) == 0
    assert same(load_file(again / file.name), load_file(file))
    assert json.loads((again / "config.json").read_text())["norm_eps"] == 1e-5
    capsys.readouterr()
    dit = ["export", str(own), "--format", "dit", "--approximate", "--output", str(tmp_path / "x")]
    assert main(dit) == 2
    error = capsys.readouterr().err
    assert "model.embedding_per_block = true: only the diffusers layout has that" in error and not (tmp_path / "x").exists()
    (folder / "config.json").write_text(json.dumps(document | {"norm_eps": 1e-3}))
    with pytest.raises(WeightsError, match="norm_eps is 0.001 there and 1e-05 in this configuration"):
        open_published(folder, "diffusers", found.record)


def test_an_embedder_in_each_block_draws_what_diffusers_draws(tmp_path):
    """A DiTTransformer2DModel as diffusers initialises it, its constants and zeros drawn too, with its own defaults."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=8, num_embeds_ada_norm=3, out_channels=8
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "native")
    found, _ = open_published(tmp_path / "native", "diffusers", None)
    assert found.record.config.model.embedding_per_block and found.record.config.model.mlp_norm_eps == 1e-5
    model = found.model.to_empty(device="cpu")
    model.load_state_dict(found.tensors)
    model.init_buffers()
    x, y, t = torch.randn(4, 4, 8, 8), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3, 20, 50])
    with torch.no_grad():
        expected = theirs(x, t, y).sample
        assert expected.std() > 0.1
        assert (model(x, t.float(), y) - expected).abs().max() <= 1e-5
    write_weights(found, tmp_path / "back", "diffusers", dtype="float32", overwrite=False)
    back = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(back(x, t, y).sample, expected)


def test_an_export_is_refused_with_everything_that_stands_against_it(tmp_path, capsys):
    """--approximate is advised only where it leads to an export."""
    plain, modern = random_weights(), random_weights(changes=(OWN_EMBEDDINGS[0], 'mlp = "swiglu"\nqk_norm = true'))
    for weights, count in ((plain, 1), (modern, 3)):
        with pytest.raises(WeightsError) as refused:
            write_weights(weights, tmp_path / "out", "diffusers", dtype="float32", overwrite=False)
        lines = str(refused.value).splitlines()
        assert "timestep_frequencies = dit: " in lines[0] and "(train with model.timestep_frequencies = diffusers)" in lines[0]
        assert len(lines) == count and ("--approximate" in str(refused.value)) == (count == 1)
    assert "model.mlp = swiglu" in lines[1] and "model.qk_norm = true" in lines[2]
    with pytest.raises(WeightsError, match=r"^(?s:(?!--approximate).)*$") as again:
        write_weights(modern, tmp_path / "out", "diffusers", dtype="float32", overwrite=False, approximate=True)
    assert str(again.value) == str(refused.value) and not (tmp_path / "out").exists()


def test_published_to_published_and_back_is_exact(tmp_path, capsys):
    weights = random_weights()
    first, folder, back = tmp_path / "dit.safetensors", tmp_path / "diffusers", tmp_path / "own.safetensors"
    write_weights(weights, first, "dit", dtype="float32", overwrite=False)
    published = load_file(first)
    torch.save({"ema": {f"_orig_mod.{name}": tensor for name, tensor in published.items()}}, tmp_path / "DiT.pt")
    own = tmp_path / "imported.safetensors"
    assert main(["import", str(tmp_path / "DiT.pt"), "--format", "dit", "--output", str(own)]) == 0
    said = capsys.readouterr().err
    assert "taken from 'ema'" in said and "without their '_orig_mod.'" in said
    words = ["export", str(own), "--format", "diffusers", "--output", str(folder)]
    assert main(words) == 2
    assert "--approximate" in capsys.readouterr().err and not folder.exists()
    assert main([*words, "--approximate"]) == 0
    assert main(["import", str(folder), "--format", "diffusers", "--output", str(back)]) == 0
    assert same(load_file(back), weights.tensors)
    again = tmp_path / "again.pt"
    assert main(["export", str(back), "--format", "dit", "--approximate", "--output", str(again)]) == 0
    assert same(torch.load(again, weights_only=True), published)
    assert main(["export", str(back), "--format", "safetensors", "--output", str(tmp_path / "own.pt")]) == 2
    assert "name it own.safetensors" in capsys.readouterr().err
    with safe_open(back, framework="pt") as file:
        assert 'flavor = "DiT-T/2"' in file.metadata()["config"]


def test_a_configuration_describes_published_weights_without_its_data_and_initial_weights(tmp_path, capsys):
    own_data = CONFIG[CONFIG.index("shape = ") : CONFIG.index("scale = ")]
    weights = random_weights(changes=(own_data, "shape = [4, 32, 32]\nnum_classes = 1000\n"))
    write_weights(weights, tmp_path / "dit.safetensors", "dit", dtype="float32", overwrite=False)
    described = CONFIG.replace("FREQUENCIES", "dit").partition("[data]")[0]
    described += '[data]\nname = "latents"\npath = "latents/imagenet256"\n[checkpoint]\ninitial_weights = "own.safetensors"\n'
    (tmp_path / "model.toml").write_text(described)
    words = ["import", str(tmp_path / "dit.safetensors"), str(tmp_path / "model.toml"), "--format", "dit"]
    assert main([*words, "--output", str(tmp_path / "own.safetensors")]) == 0
    assert "latents/imagenet256: not here; 4 x 32 x 32 and 1000 classes are assumed" in capsys.readouterr().err
    assert same(load_file(tmp_path / "own.safetensors"), weights.tensors)


def test_what_shows_no_model_is_refused_in_one_line(tmp_path, capsys):
    write_weights(random_weights(), tmp_path / "x.safetensors", "dit", dtype="float32", overwrite=False)
    tensors = load_file(tmp_path / "x.safetensors")
    wider = {name: tensor.repeat(*[1] * (tensor.ndim - 1), 3) for name, tensor in tensors.items()}
    save_file(wider, tmp_path / "wide.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    write_weights(random_weights(), tmp_path / "own.safetensors", "safetensors", dtype="float32", overwrite=False)
    out = ("--output", str(tmp_path / "y.safetensors"))
    (tmp_path / "step").mkdir()
    for name in ("step/manifest.json", "step/shard.safetensors", "config.toml"):
        (tmp_path / name).touch()
    for words, text in (
        (("import", "wide.safetensors", "--format", "dit", *out), "of a named size in the dit layout (add CONFIG)"),
        (("import", "other.safetensors", "--format", "sit", *out), "show no model of a named size in the sit layout"),
        (("import", "own.safetensors", "--format", "dit", *out), "own layout already"),
        (("export", "own.safetensors", "--format", "safetensors", "--vae", "v", *out), "--vae: has no effect on safetensors"),
        (("import", "nothing.safetensors", "--format", "dit", *out), "no such file of weights"),
        (("import", "step/shard.safetensors", "--format", "dit", *out), "is a part of a checkpoint (give the"),
        (("export", "config.toml", "--format", "dit", *out), "is the record of a run (give the run's folder)"),
    ):
        assert main([words[0], str(tmp_path / words[1]), *words[2:]]) == 2
        error = capsys.readouterr().err
        assert text in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "y.safetensors").exists()


def vae_folder(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True)
    document = {"_class_name": "AutoencoderKL", "latent_channels": 4, "scaling_factor": 1.0} | changes
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(b"weights")
    return folder


def test_a_pipeline_folder_has_all_its_parts(tmp_path):
    vae = vae_folder(tmp_path / "sd" / "vae")
    options = {"dtype": "float16", "overwrite": False}
    notes = write_weights(random_weights("diffusers"), tmp_path / "out", "diffusers-pipeline", vae=vae.parent, **options)
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["_class_name"] == "DiTPipeline" and index["id2label"]["2"] == "axolotl"
    for part in ("transformer", "vae", "scheduler"):
        assert index[part][0] == "diffusers" and (tmp_path / "out" / part).is_dir()
    assert json.loads((tmp_path / "out" / "vae" / "config.json").read_text())["scaling_factor"] == pytest.approx(SCALE)
    assert (tmp_path / "out" / "vae" / "diffusion_pytorch_model.safetensors").read_bytes() == b"weights"
    assert any("null class is number 1000" in note for note in notes)
    found, _ = open_published(tmp_path / "out", "diffusers", None)
    assert found.record.info.class_names == ("cat", "dog", "axolotl")
    with pytest.raises(WeightsError, match="exists already"):
        write_weights(random_weights("diffusers"), tmp_path / "out", "diffusers-pipeline", vae=vae, **options)


@pytest.mark.parametrize(("changes", "vae", "text"), [
    (('prediction = "noise"', 'prediction = "v"'), {},
     "is no model that DiTPipeline samples: objective.prediction = v (there noise)"),
    ((CONFIG[CONFIG.index("shape = [4"):], "shape = [3, 8, 8]\nnum_classes = 3\n"), {}, "draws images"),
    ((f"scale = [{SCALE}, ", "scale = [1.0, "), {}, "or scaled by channel"),
    (("", ""), {"latent_channels": 16}, "its latents have 16 channels, those of x 4"),
])  # fmt: skip
def test_what_the_pipeline_would_not_draw_is_refused(changes, vae, text, tmp_path):
    folder = vae_folder(tmp_path / "vae", **vae) if vae is not None else None
    weights = random_weights("diffusers", changes)
    with pytest.raises(WeightsError) as refused:
        write_weights(weights, tmp_path / "out", "diffusers-pipeline", dtype="float32", overwrite=False, vae=folder)
    assert text in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_the_pipeline_of_diffusers_draws_the_same_pictures(tmp_path, monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2, sample_size=16,
    ).eval()  # fmt: skip
    vae.save_pretrained(tmp_path / "vae")
    weights = random_weights("diffusers")
    write_weights(weights, tmp_path / "x.safetensors", "safetensors", dtype="float32", overwrite=False)
    options = {"dtype": "float32", "overwrite": False, "vae": tmp_path / "vae"}
    write_weights(weights, tmp_path / "pipeline", "diffusers-pipeline", **options)
    pipeline = diffusers.DiTPipeline.from_pretrained(tmp_path / "pipeline")
    assert pipeline.get_label_ids(["dog", "axolotl"]) == [1, 2]

    from diffusers.pipelines.dit import pipeline_dit

    noise = philox.normal(7, "sampling", torch.arange(2), (4, 8, 8))
    monkeypatch.setattr(pipeline_dit, "randn_tensor", lambda **kinds: noise)
    theirs = pipeline([1, 2], guidance_scale=1.0, num_inference_steps=10, output_type="np").images
    model = torchtitan_dit.load(tmp_path / "x.safetensors", num_steps=10, spacing="leading", guidance_scale=1.0)
    latents = model.sample([1, 2], seed=7, output="latents")
    document = json.loads((tmp_path / "pipeline" / "transformer" / "config.json").read_text())
    document["_class_name"] = "Transformer2DModel"  # as older pipelines have it
    (tmp_path / "pipeline" / "transformer" / "config.json").write_text(json.dumps(document))
    alone = torchtitan_dit.load(tmp_path / "pipeline", num_steps=10, spacing="leading", guidance_scale=1.0)
    assert alone.class_names == ("cat", "dog", "axolotl")
    pictures = (alone.sample([1, 2], seed=7, output="tensor") / 2 + 0.5).permute(0, 2, 3, 1).numpy()
    assert np.abs(theirs - pictures).max() < 1e-4
    with torch.no_grad():
        ours = pipeline.vae.decode(latents / SCALE).sample
    ours = (ours / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    assert ours.std() > 0.01 and np.abs(theirs - ours).max() < 1e-4


def test_spacings_are_those_of_other_code():
    """ADM's `ddimN` takes range(0, 1000, stride) of N indices; diffusers' documentation lists trailing ones of 10 steps."""
    for num_steps in (10, 50, 250, 1000):
        stride = next(stride for stride in range(1, 1001) if len(range(0, 1000, stride)) == num_steps)
        assert leading_indices(num_steps).tolist() == list(range(0, 1000, stride))[::-1]
    assert trailing_indices(10).tolist() == [999, 899, 799, 699, 599, 499, 399, 299, 199, 99]
    assert leading_indices(30)[0] == 29 * 33 and trailing_indices(3).tolist() == [999, 666, 332]
    assert trailing_indices(1).tolist() == [999] and leading_indices(1).tolist() == [0]


PLAIN = CONFIG.split("[data]")[0].replace("FREQUENCIES", "dit")


@pytest.mark.parametrize(("changes", "use"), [
    ((PLAIN, '''
[model]
flavor = "DiT-T/2"
intermediate_head = 1
[objective]
intermediate_share = 0.5
'''), "for --guide head"),
    ((PLAIN, '''
[model]
flavor = "DiT-T/2"
intermediate_head = 1
[objective]
name = "mean_flow"
tangent = "head"
'''), "for training alone"),
])  # fmt: skip
def test_an_export_says_what_an_intermediate_head_is_kept_for(changes, use, tmp_path):
    weights, output = random_weights(changes=changes), tmp_path / "w.safetensors"
    found = write_weights(weights, output, "safetensors", dtype="float32", overwrite=False)
    assert found == [f"model.intermediate_head: kept, {use}"]


def test_a_published_layout_without_the_head_is_read_back(tmp_path):
    of_head = 'intermediate_head = 1\nlabel_dropout = 0.0\n[objective]\nintermediate_share = 0.5\n'
    by_head = '[sampling]\nguide_track = "head"\nguidance_scale = 1.4\n'
    config = PLAIN.replace("learned_variance = true\n", "").replace("[objective]\n", of_head).replace("[sampling]\n", by_head)
    weights = random_weights(changes=(PLAIN, config))
    write_weights(weights, tmp_path / "w.safetensors", "dit", dtype="float32", overwrite=False)
    found = record_of_weights(tmp_path / "w.safetensors").config
    assert (found.model.intermediate_head, found.objective.intermediate_share) == (None, None)
    assert (found.sampling.guide_track, found.sampling.guidance_scale) == ("", 1)
