"""Published Flux weights drawn from by prompt, without a run: a whole pipeline of diffusers, and an imported file."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torchtitan_dit
import torchtitan_dit.api
from tests.end_to_end.drawing import sample
from tests.unit.test_transformers_encoders import write_tokenizer
from torchtitan import philox
from torchtitan_dit.commands.checkpoint import main as checkpoint_tool

diffusers = pytest.importorskip("diffusers", reason="needs the extra diffusers: pip install '.[diffusers]'")
transformers = pytest.importorskip("transformers")

PROMPTS = ["a photo of a cat", "a dog of a dog"]
OPTIONS = ["--images-per-class", "1", "--size", "64x64", "--files", "--num-steps", "3"]
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Foreign: pass\n"


@pytest.fixture(scope="module", params=["schnell", "dev"])
def pipeline(request, tmp_path_factory):
    """A random pipeline of the sizes of the debug flavor, saved by diffusers, with code of its author in every part."""
    guided, folder = request.param == "dev", tmp_path_factory.mktemp("pipeline") / request.param
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32,
        pooled_projection_dim=24, guidance_embeds=guided, axes_dims_rope=(4, 6, 6),
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.mul_(2)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,) * 4, norm_num_groups=4, latent_channels=16, down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4, scaling_factor=0.3611, shift_factor=0.1159, sample_size=64,
    ).eval()  # fmt: skip
    t5 = transformers.T5Config(vocab_size=16, d_model=32, d_ff=32, d_kv=8, num_heads=2, num_layers=2)
    clip = transformers.CLIPTextConfig(
        vocab_size=16, hidden_size=24, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    tokenizers = [write_tokenizer(folder / name, clip=not name.endswith("2")) for name in ("tokenizer", "tokenizer_2")]
    for tokenizer in tokenizers:
        tokenizer.model_max_length = 77
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0 if guided else 1.0, use_dynamic_shifting=guided)
    encoders = transformers.CLIPTextModel(clip).eval(), transformers.T5EncoderModel(t5).eval()
    found = diffusers.FluxPipeline(scheduler, vae, encoders[0], tokenizers[0], encoders[1], tokenizers[1], transformer)
    found.set_progress_bar_config(disable=True)
    found.save_pretrained(folder)
    for part in ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "transformer", "vae"):
        (folder / part / "foreign.py").write_text(CODE)
        file = folder / part / ("tokenizer_config.json" if "tokenizer" in part else "config.json")
        kinds = ("AutoTokenizer", "AutoConfig", "AutoModel", "AutoModelForTextEncoding", "CLIPTextModel")
        named = {kind: ["foreign.Foreign", None] if kind == "AutoTokenizer" else "foreign.Foreign" for kind in kinds}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": named}))
    return folder, found, 512 if guided else 256


@torch.no_grad()  # with gradients attention of the encoders has other kernels
def drawn_by_diffusers(pipeline, length):
    noise = philox.normal(0, "sampling", torch.arange(len(PROMPTS)), (16, 8, 8))
    for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
        encoder.to(torch.bfloat16)  # as the encoders are used here
    tokens, pooled, _ = pipeline.encode_prompt(PROMPTS, None, max_sequence_length=length)
    return pipeline(
        prompt_embeds=tokens.float(), pooled_prompt_embeds=pooled.float(), height=64, width=64, num_inference_steps=3,
        latents=pipeline._pack_latents(noise, len(PROMPTS), 16, 8, 8), output_type="np",
    ).images  # fmt: skip


def drawn(source, lora=None, encoders=None, **more):
    model = torchtitan_dit.load(source, size="64x64", num_steps=3, lora=lora, **more)
    return np.stack([np.asarray(image) for image in model.sample(prompts=PROMPTS, encoders=encoders)])


def difference(ours, theirs):
    return np.abs(ours.astype(float) - np.rint(255 * theirs)).max()


def test_a_pipeline_draws_what_diffusers_draws_and_runs_no_code_of_its_folder(pipeline, tmp_path):
    folder, theirs, length = pipeline
    ((code, said),) = sample(tmp_path / "drawn", folder, *OPTIONS, "--prompt", *PROMPTS)
    assert code == 0, said
    ours = np.stack([np.asarray(Image.open(path)) for path in sorted((tmp_path / "drawn").glob("class-*.png"))])
    expected = drawn_by_diffusers(theirs, length)
    assert expected.std() > 0.05 and np.abs(expected[0] - expected[1]).max() > 0.05
    assert difference(ours, expected) <= 1
    torch.manual_seed(1)
    place = "transformer.transformer_blocks.0.attn.to_q"
    adapter = {f"{place}.lora_A.weight": torch.randn(4, 64), f"{place}.lora_B.weight": torch.randn(64, 4)}
    save_file(adapter, tmp_path / "adapter.safetensors")
    theirs.load_lora_weights(tmp_path, weight_name="adapter.safetensors")
    adapted = drawn_by_diffusers(theirs, length)
    theirs.unload_lora_weights()
    assert difference(ours, adapted) > 2
    assert difference(drawn(folder, lora=[tmp_path / "adapter.safetensors"]), adapted) <= 1
    assert not [*folder.rglob("ran")]


def test_an_imported_file_draws_the_same_and_says_what_it_needs(pipeline, tmp_path):
    folder, _, length = pipeline
    own, bfl, back = (tmp_path / f"{name}.safetensors" for name in ("own", "bfl", "back"))
    assert checkpoint_tool(["import", str(folder), "--format", "diffusers", "--output", str(own)]) == 0
    assert checkpoint_tool(["export", str(own), "--format", "bfl", "--output", str(bfl)]) == 0
    save_file(load_file(bfl), bfl)  # as published, without a header
    assert checkpoint_tool(["import", str(bfl), "--format", "bfl", "--output", str(back)]) == 0
    with safe_open(back, "pt") as file:
        config = file.metadata()["config"]
    assert f"text_length = {length}" in config and 'flavor = "debug"' in config
    assert all(torch.equal(tensor, load_file(own)[name]) for name, tensor in load_file(back).items())
    encoders = {"text": str(folder / "text_encoder_2"), "pooled": str(folder / "text_encoder")}
    vae = {"autoencoder": "diffusers", "autoencoder_path": folder / "vae"}
    expected = drawn(folder)
    assert np.array_equal(drawn(own, encoders=encoders, **vae), expected)
    assert np.array_equal(drawn(back, encoders=encoders, **vae), expected)
    for given, message in (
        ({"text": encoders["text"]}, "--pooled-encoder: not given"),
        (encoders | {"text": "stub:16"}, "--text-encoder: stub:16 has width 16, this model takes 32"),
    ):
        with pytest.raises(torchtitan_dit.api.WeightsError, match=message):
            drawn(own, encoders=given, **vae)
    ((code, said),) = sample(tmp_path / "refused", own, *OPTIONS, "--autoencoder-path", folder / "vae")
    assert code == 2 and said.splitlines()[-1] == "--prompt: not given, and these weights come without captions"
