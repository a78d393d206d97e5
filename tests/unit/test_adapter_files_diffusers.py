"""Files of adapters in diffusers and peft: loaded without a key too many or too few, they compute what this program does."""

import logging

import pytest
import torch
from safetensors.torch import save_file

from tests.adapted_models import IMAGE, TOKENS, drawn, flux, flux_inputs, with_adapter
from torchtitan.conditions import POOLED, TEXT
from torchtitan.models import MODELS
from torchtitan.models.adapters.adapter_files import read_adapter, write_adapter
from torchtitan.models.adapters.target import AdapterError, LowRankWeights, Target
from torchtitan.models.flux.conversion import LAYOUTS as NETWORKS
from torchtitan.models.flux.conversion import published_linears
from torchtitan.weights.final_weights import final_layout

FAMILY = MODELS["flux"]
LAYOUTS = FAMILY.adapter_layouts
OF_SINGLE = "single_layers.0.qkv_hidden"


@pytest.fixture
def diffusers():
    pytest.importorskip("peft")
    return pytest.importorskip("diffusers")


def theirs_of(diffusers, model):
    layout = NETWORKS["diffusers"]
    settings = {key: value for key, value in layout.folder_config(model).items() if key != "_class_name"}
    theirs = diffusers.FluxTransformer2DModel(**settings).eval()
    published, _ = layout.export_weights({name: p.detach() for name, p in model.named_parameters()}, model)
    theirs.load_state_dict(dict(published), strict=True)
    return theirs


@torch.no_grad()
def output_of(theirs):
    x, times, condition = flux_inputs()
    rows, columns = IMAGE[1] // 2, IMAGE[2] // 2
    packed = x.view(2, 3, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, rows * columns, 12)
    ids = torch.stack([torch.tensor([0, row, column]) for row in range(rows) for column in range(columns)]).float()
    found = theirs(
        hidden_states=packed, timestep=times / 1000, encoder_hidden_states=condition[TEXT],
        pooled_projections=condition[POOLED], img_ids=ids, txt_ids=torch.zeros(TOKENS, 3), guidance=None,
    ).sample  # fmt: skip
    return found.view(2, rows, columns, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(2, *IMAGE)


class Problems(logging.Handler):
    """Warnings of diffusers about keys, which it does not raise."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def loaded(diffusers, theirs, path):
    """Load a file as FluxPipeline.load_lora_weights does; returns what diffusers said about it."""
    said = Problems()
    logger = logging.getLogger("diffusers")
    logger.addHandler(said)
    try:
        mixin = diffusers.loaders.FluxLoraLoaderMixin
        state, alphas, metadata = mixin.lora_state_dict(str(path), return_alphas=True, return_lora_metadata=True)
        mixin.load_lora_into_transformer(state, alphas, theirs, adapter_name="tested", metadata=metadata)
    finally:
        logger.removeHandler(said)
    return state, said.lines


def compared(diffusers, tmp_path, weights, layout):
    model = flux()
    path = tmp_path / "adapter.safetensors"
    write_adapter(path, weights, model, LAYOUTS[layout], overwrite=True, metadata={"step": "7", "trigger_word": "sks"})
    theirs = theirs_of(diffusers, model)
    base = output_of(theirs)
    state, said = loaded(diffusers, theirs, path)
    found, wanted = output_of(theirs), with_adapter(flux(), weights)(*flux_inputs())
    scale = wanted.abs().max()
    assert (wanted - base).abs().max() > 0.01 * scale
    assert (found - wanted).abs().max() <= 1e-5 * scale
    assert not said, said
    updates = {name for name, _ in theirs.named_modules() if name.endswith("lora_A.tested")}
    assert {f"transformer.{name}".removesuffix(".tested") for name in updates} == {
        name.removesuffix(".weight") for name in state if name.endswith("lora_A.weight")
    }


RANKS = {
    "alpha as the rank": (2, None),
    "another alpha": (2, 3.0),
    "ranks and alphas of each": (lambda target: 1 + target.start // 64 % 2, lambda target: 3.0 + len(target.module) % 2),
}


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("layout", ["diffusers", "ai-toolkit"])
def test_split_layouts_in_diffusers(diffusers, tmp_path, layout, name):
    model = flux()
    compared(diffusers, tmp_path, drawn(model, FAMILY.adapter_sets["ai-toolkit"](model), *RANKS[name]), layout)


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_the_file_of_a_run_has_its_scale_in_readers_without_alphas(diffusers, tmp_path, alpha):
    """FluxTransformer2DModel.load_lora_adapter reads no alpha tensor; the run's file also loads as before."""
    model = flux()
    weights = drawn(model, FAMILY.adapter_sets["kohya"](model), 8, alpha)
    path = tmp_path / "adapter.safetensors"
    write_adapter(path, weights, model, final_layout("flux"))
    theirs = theirs_of(diffusers, model)
    theirs.load_lora_adapter(str(tmp_path), weight_name=path.name, prefix="transformer")
    found, wanted = output_of(theirs), with_adapter(flux(), weights)(*flux_inputs())
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    again = read_adapter(path, model, LAYOUTS)
    assert {values.alpha for values in again.as_trained.values()} == {alpha or 8.0}
    for mine in (with_adapter(flux(), weights)(*flux_inputs()) for weights in (again.weights, again.as_trained)):
        assert (mine - wanted).abs().max() <= 1e-6 * wanted.abs().max()


SCALES = {
    "plain": {}, "root": {"use_rslora": True},
    "patterns": {"rank_pattern": {"to_q": 2, "transformer_blocks.0.ff.net.2": 2}, "alpha_pattern": {"to_out.0": 5}},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("saved", ["save_lora_adapter", "save_lora_weights", "peft folder", "peft file"])
def test_adapters_saved_by_diffusers_and_by_peft_are_read_with_their_scales(diffusers, tmp_path, saved, name):
    import peft

    model = flux()
    theirs = theirs_of(diffusers, model)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, init_lora_weights=False, target_modules=["to_q", "to_out.0", "net.2"], **SCALES[name]
    )
    torch.manual_seed(0)
    if saved.startswith("save"):
        theirs.add_adapter(config)
        path = tmp_path / "pytorch_lora_weights.safetensors"
    if saved == "save_lora_adapter":
        theirs.save_lora_adapter(tmp_path)
    elif saved == "save_lora_weights":  # with the header in which peft's configuration is
        layers, header = peft.get_peft_model_state_dict(theirs), theirs.peft_config["default"].to_dict()
        diffusers.FluxPipeline.save_lora_weights(
            tmp_path, transformer_lora_layers=layers, transformer_lora_adapter_metadata=header
        )
    else:
        peft.get_peft_model(theirs, config).save_pretrained(tmp_path)
        path = tmp_path if saved == "peft folder" else tmp_path / "adapter_model.safetensors"
    wanted = output_of(theirs)
    mine = with_adapter(flux(), read_adapter(path, model, LAYOUTS).weights)(*flux_inputs())
    assert (wanted - output_of(theirs_of(diffusers, model))).abs().max() > 0.01 * wanted.abs().max()
    assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    if saved == "peft file":
        (tmp_path / "adapter_config.json").unlink()
        with pytest.raises(AdapterError, match="with its scale in another file, adapter_config.json"):
            read_adapter(path, model, LAYOUTS)


def test_xlabs_files_are_read_as_diffusers_reads_them(diffusers, tmp_path):
    model, generator = flux(), torch.Generator().manual_seed(0)
    state = {
        f"{block}.processor.{layer}.{part}.weight": 0.3 * torch.randn(shape, generator=generator)
        for block, layers in (("double_blocks.0", ("qkv_lora1", "qkv_lora2", "proj_lora1", "proj_lora2")),
                              ("single_blocks.1", ("qkv_lora", "proj_lora")))
        for layer in layers for part, shape in (
            ("down", (4, 320 if (block, layer) == ("single_blocks.1", "proj_lora") else 64)),
            ("up", (192 if "qkv" in layer else 64, 4)),
        )
    }  # fmt: skip
    save_file(state, tmp_path / "xlabs.safetensors")
    theirs = theirs_of(diffusers, model)
    _, said = loaded(diffusers, theirs, tmp_path / "xlabs.safetensors")
    found = read_adapter(tmp_path / "xlabs.safetensors", model, LAYOUTS)
    assert not said and found.layout == "xlabs" and len(found.weights) == 6
    wanted, mine = output_of(theirs), with_adapter(flux(), found.weights)(*flux_inputs())
    assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_alphas_that_diffusers_would_mistake_are_not_written(diffusers, tmp_path):
    """It compares endings of names: the alpha of the last proj_out would be that of every block's."""
    model = flux()
    targets = list(published_linears(model, "diffusers").values())
    weights = drawn(model, targets, 2, lambda target: 5.0 if target.module == "output.linear" else 3.0)
    with pytest.raises(AdapterError, match="the alpha of proj_out, 5, for single_transformer_blocks.0.proj_out too, which has 3"):
        compared(diffusers, tmp_path, weights, "diffusers")
    compared(diffusers, tmp_path, weights, "ai-toolkit")
    compared(diffusers, tmp_path, drawn(model, targets, 2, 3.0), "diffusers")


def test_fused_layers_in_diffusers(diffusers, tmp_path):
    model = flux()
    compared(diffusers, tmp_path, drawn(model, FAMILY.adapter_sets["kohya"](model), 4, 3.0), "diffusers")


@pytest.mark.parametrize("source", ["ai-toolkit", "kohya"])
@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_fused_layouts_through_the_conversion_of_diffusers(diffusers, tmp_path, layout, source):
    """Without the first layer of single blocks: the conversion assumes its rows to be those of FLUX.1 (see the next test)."""
    model = flux()
    targets = [target for target in FAMILY.adapter_sets[source](model) if not target.module.endswith("qkv_hidden")]
    compared(diffusers, tmp_path, drawn(model, targets, 2, 3.0), layout)


@pytest.mark.parametrize("parts", [1, 4])
def test_first_layer_of_single_blocks_at_the_size_of_flux(diffusers, tmp_path, parts):
    """The update W of each part, as diffusers' conversion of our kohya file has it, against ours."""
    from tests.unit.test_adapter_sets import published

    model = published("schnell")
    rows = [3072, 3072, 3072, 12288]
    targets = [Target(OF_SINGLE, 0, 21504)] if parts == 1 else [
        Target(OF_SINGLE, sum(rows[:place]), sum(rows[: place + 1])) for place in range(4)
    ]
    generator = torch.Generator().manual_seed(0)
    weights = {
        target: LowRankWeights(
            torch.randn(2, 3072, generator=generator), torch.randn(target.stop - target.start, 2, generator=generator), 3.0
        )
        for target in targets
    }
    path = tmp_path / "adapter.safetensors"
    write_adapter(path, weights, model, LAYOUTS["kohya"])
    state = diffusers.loaders.FluxLoraLoaderMixin.lora_state_dict(str(path))
    block = "transformer.single_transformer_blocks.0"
    names = [*(f"{block}.attn.to_{letter}" for letter in "qkv"), f"{block}.proj_mlp"]
    assert {name.rpartition(".lora_")[0] for name in state} == set(names)
    assert {tensor.shape[0] for name, tensor in state.items() if "lora_A" in name} == {2}  # cut, not copied four times
    ours = read_adapter(path, model, LAYOUTS).weights
    for adapter in (weights, ours):
        whole = torch.zeros(21504, 8)
        for target, values in adapter.items():
            whole[target.start : target.stop] += values.scale * values.up @ values.down[:, :8]
        theirs = torch.cat([state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"][:, :8] for name in names])
        torch.testing.assert_close(theirs, whole, rtol=1e-5, atol=1e-5)
