"""Conversions where a configuration's constants, which tensors do not show, differ from the published network's.

Each gives the published function or is refused by the key's name; an export says what the layout's own code has instead.
"""

import json
import math
import tomllib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.configurations import load
from tests.unit.test_edm2_conversion import port_network, published_network
from torchtitan.diffusion.objectives import build_objective
from torchtitan.files.weight_files import WeightsError, named_weights
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.models.flux.config import FLAVORS as FLUX_FLAVORS
from torchtitan.weights.model_record import load_record, record_of
from torchtitan.weights.network import network_on_meta
from torchtitan.weights.published import OwnWeights, open_published, write_weights
from torchtitan.weights.trained_model import load_weights

EDM2 = (
    '[model]\nname = "edm2"\nflavor = "XS"\nchannels = 16\nchannel_mults = [1, 2, 4]\nnum_blocks = 1\n'
    'attention_resolutions = [4]\nchannels_per_head = 8\n'
    '[objective]\npath = "edm"\nprediction = "edm"\npreconditioning = "edm"\nsigma_data = 0.5\n'
    '[data]\nshape = [3, 8, 8]\nnum_classes = 5\n'
)
PORT = EDM2.replace('"XS"', '"cifar"').replace("= 16\n", "= 32\n").replace("[1, 2, 4]", "[1, 2]").replace("head = 8", "head = 0")
PORT = PORT.replace("num_blocks = 1", "num_blocks = 2").replace("num_classes = 5", "num_classes = 0")
DIT = (
    '[model]\nflavor = "DiT-S/2"\nnum_layers = 2\n[objective]\npath = "ddpm_linear"\nprediction = "noise"\n'
    'preconditioning = "index"\n[data]\nshape = [4, 8, 8]\nnum_classes = 3\n'
    "shift = [0.0, 0.0, 0.0, 0.0]\nscale = [0.18215, 0.18215, 0.18215, 0.18215]\n"
)
SIT = DIT.replace("ddpm_linear", "rectified_flow").replace('"noise"', '"velocity"').replace('"index"', '"sit"')
FLUX = (
    '[model]\nname = "flux"\nflavor = "debug"\n[objective]\npath = "rectified_flow"\nprediction = "velocity"\n'
    'preconditioning = "identity"\n'
    '[data]\nname = "synthetic"\nshape = [3, 8, 12]\ntext_length = 5\ntext_dim = 32\npooled_dim = 24\n'
)
OF_LAYOUT = {"edm2": EDM2, "edm2_port": PORT, "dit": DIT, "sit": SIT, "bfl": FLUX, "diffusers": DIT}


@pytest.fixture(autouse=True)
def folder_of_the_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def record_from(text, changes=()):
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    tables = tomllib.loads(text)
    return record_of(load(text)) if "name" in tables["data"] else load_record(tables, "x.toml")


def drawn(record, source):
    model = network_on_meta(record.config, record.info).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.ndim == 1 else 0.1 if record.config.model.name != "edm2" else 1.0)
    return OwnWeights(source, record, model, named_weights(model), "x")


def published_file(tmp_path, layout, record=None):
    """Weights as others publish them: without this program's header; and those that they were made of."""
    weights = drawn(record or record_from(OF_LAYOUT[layout]), tmp_path)
    path = tmp_path / (f"{layout}.safetensors" if layout != "diffusers" else layout)
    write_weights(weights, path, layout, dtype="float32", overwrite=True, approximate=True)
    file = path / "diffusion_pytorch_model.safetensors" if path.is_dir() else path
    save_file(load_file(file), file)
    return path, weights


def output(record, model, x, sigma, condition):
    """Network output F at EDM2's x and noise level, for latents in the units of the configuration's sigma_data."""
    config = record.config.objective
    objective, scale = build_objective(config, 0), config.sigma_data / 0.5
    t = objective.path.sigma_to_t(torch.tensor([scale * sigma], dtype=torch.float64))
    scaling = objective.preconditioning.scaling(t)
    return model(scaling.c_in.view(-1, 1, 1, 1) * scale * x, scaling.c_noise, condition)


@pytest.mark.parametrize("sigma_data", [0.5, 1.0, 0.3])
@pytest.mark.parametrize("layout", ["edm2", "edm2_port"])
def test_edm2_weights_keep_their_function_in_any_units_of_the_data(tmp_path, layout, sigma_data):
    """Import and export, each against the published network in float64; this program reads its own export back."""
    changed = record_from(OF_LAYOUT[layout], [("sigma_data = 0.5", f"sigma_data = {sigma_data}")])
    theirs, _ = published_file(tmp_path, layout)
    imported, _ = open_published(theirs, layout, changed)
    write_weights(imported, tmp_path / "back.safetensors", layout, dtype="float32", overwrite=False)
    model = imported.model.to_empty(device="cpu")
    model.load_state_dict(dict(imported.tensors), strict=False)
    again = load_weights(tmp_path / "back.safetensors", None, torch.device("cpu"))
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    label = torch.tensor([3]) if layout == "edm2" else None
    for sigma in (0.002, 0.3, 2.0, 80.0):
        time, scaled = torch.tensor([math.log(sigma) / 4], dtype=torch.float64), x / math.sqrt(sigma**2 + 0.25)
        found = [output(changed, each.double(), x, sigma, label) for each in (model, again.model)]
        for file in (theirs, tmp_path / "back.safetensors"):
            published = {name: tensor.double() for name, tensor in load_file(file).items()}
            wanted = (published_network(published, scaled, time, torch.eye(5).double()[label], 8) if layout == "edm2"
                      else port_network(published, scaled, time, True, None))  # fmt: skip
            assert all((each - wanted).abs().max() <= 5e-6 * wanted.abs().max() for each in found), sigma


REFUSED = [
    ("edm2", "objective.preconditioning", [('preconditioning = "edm"', 'preconditioning = "identity"')]),
    ("edm2_port", "objective.preconditioning", [('preconditioning = "edm"', 'preconditioning = "identity"')]),
    *(("dit", key, [change]) for key, change in (
        ("objective.preconditioning", ('"index"', '"identity"')), ("objective.path", ("ddpm_linear", "ddpm_cosine")),
        ("objective.prediction", ('"noise"', '"v"')), ("latents with shift", ("shift = [0.0,", "shift = [0.1,")),
    )),
    ("diffusers", "latents with scale", [("scale = [0.18215,", "scale = [1.0,")]),
    ("sit", "objective.preconditioning", [('"sit"', '"identity"')]),
    ("bfl", "objective.preconditioning", [('"velocity"', '"x0"'), ('"identity"', '"edm"\nsigma_data = 1.0')]),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "key", "changes"), REFUSED)
def test_constants_that_tensors_do_not_show_are_refused_by_name(tmp_path, layout, key, changes):
    """Refused on import. An export notes the difference, and this program reads it back by the constants in its header."""
    path, _ = published_file(tmp_path, layout)
    other = record_from(OF_LAYOUT[layout], changes)
    with pytest.raises(WeightsError, match=rf"{key} = .* which tensors do not show"):
        open_published(path, layout, other)
    weights = drawn(other, tmp_path)
    notes = write_weights(weights, path, layout, dtype="float32", overwrite=True, approximate=True)
    assert key.startswith("latents") or any(f"{key} = " in note and "computes another function" in note for note in notes)
    found, _ = open_published(path, layout, other)
    assert all(torch.allclose(found.tensors[each], weights.tensors[each], rtol=2.0**-22, atol=0) for each in weights.tensors)


def test_a_file_of_this_program_is_converted_by_its_own_constants(tmp_path):
    weights = drawn(record_from(EDM2), tmp_path)
    write_weights(weights, tmp_path / "own.safetensors", "safetensors", dtype="float32", overwrite=False)
    assert open_published(tmp_path / "own.safetensors", "safetensors", record_from(EDM2))
    with pytest.raises(WeightsError, match=r"objective.sigma_data = 1.0 \(there 0.5\), which tensors do not show"):
        open_published(tmp_path / "own.safetensors", "safetensors", record_from(EDM2, [("a = 0.5", "a = 1.0")]))


def test_constants_of_published_sizes_are_refused_by_name(tmp_path, monkeypatch):
    """Heads and rotary axes, which only the published sizes determine."""
    tiny = DiTConfig(**(vars(FLAVORS["DiT-S/2"]) | {"flavor": "DiT-T/2", "dim": 32, "num_layers": 2, "num_heads": 2,
                                                    "mlp_hidden_dim": 128}))  # fmt: skip
    monkeypatch.setitem(FLAVORS, "DiT-T/2", tiny)
    monkeypatch.setitem(FLUX_FLAVORS, "dev", replace(FLUX_FLAVORS["debug"]))
    small = DIT.replace('"DiT-S/2"\nnum_layers = 2', '"DiT-T/2"')
    wide = EDM2.replace("head = 8", "head = 64").replace("channels = 16\n", "channels = 64\n")
    for text, layout, key, published, other in (
        (small, "dit", "model.num_heads", '"DiT-T/2"', '"DiT-T/2"\nnum_heads = 4'),
        (wide, "edm2", "model.channels_per_head", "64\n[", "32\n["),
        (FLUX, "bfl", "model.axes_dim", '"debug"', '"debug"\naxes_dim = [8, 4, 4]'),
    ):
        path, _ = published_file(tmp_path, layout, record_from(text))
        assert open_published(path, layout, record_from(text))
        with pytest.raises(WeightsError, match=rf"{key} = .* which tensors do not show"):
            open_published(path, layout, record_from(text, [(published, other)]))


def test_a_pipeline_says_the_scale_of_its_latents_and_its_schedule(tmp_path, monkeypatch):
    monkeypatch.setitem(FLAVORS, "DiT-T/2", DiTConfig(**(vars(FLAVORS["DiT-S/2"]) | {"flavor": "DiT-T/2", "num_layers": 2})))
    record = record_from(DIT.replace("[model]", '[model]\ntimestep_frequencies = "diffusers"'))
    folder, _ = published_file(tmp_path, "diffusers", record)
    folder = folder.rename(tmp_path / "transformer").parent
    for part, name, document in (
        ("vae", "config.json", {"_class_name": "AutoencoderKL", "scaling_factor": 0.13025}),
        ("scheduler", "scheduler_config.json", {"prediction_type": "epsilon", "beta_schedule": "linear"}),
    ):
        (folder / part).mkdir()
        (folder / part / name).write_text(json.dumps(document))
    found, _ = open_published(folder, "diffusers", None)
    assert found.record.latents.normalization.scale == [0.13025] * 4
    with pytest.raises(WeightsError, match=r"latents with scale = \[0.18215.* \(there 0.13025\)"):
        open_published(folder, "diffusers", record)
    (folder / "scheduler" / "scheduler_config.json").write_text('{"beta_schedule": "scaled_linear", "beta_end": 0.02}')
    with pytest.raises(WeightsError, match="its scheduler has beta_schedule = scaled_linear, this program samples linear"):
        open_published(folder, "diffusers", None)


def test_patches_of_flux_that_its_code_does_not_pack_are_said(tmp_path):
    """Of 12 channels and 1 x 1 as of 3 and 2 x 2 the same tensors."""
    path, weights = published_file(tmp_path, "bfl")
    other = record_from(FLUX, [('"debug"', '"debug"\npatch_size = 1'), ("[3, 8, 12]", "[12, 4, 6]")])
    found, notes = open_published(path, "bfl", other)
    assert torch.equal(found.tensors["patch_embed.weight"], weights.tensors["patch_embed.weight"])
    assert "model.patch_size = 1: FLUX.1's code packs latents in patches of 2 x 2" in notes
    assert not any("patch_size" in note for note in open_published(path, "bfl", weights.record)[1])
