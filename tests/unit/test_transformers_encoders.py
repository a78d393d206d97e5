"""Text encoders of the transformers package, tiny and random, against the package's own use of them."""

import json
import shutil

import pytest
import torch

from torchtitan.conditions import POOLED, TEXT
from torchtitan.texts import TextEncoderError, open_encoder, open_encoders

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LENGTH = 6
TEXTS = ["a photo of a cat", "dog", "", "a photo of a dog of a cat of a dog"]


def write_tokenizer(folder, *, clip: bool):
    """A tokenizer of whole words, with the ends that T5's and CLIP's set."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "a", "photo", "of", "cat", "dog"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>" if clip else "$A </s>", special_tokens=ends
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=16, d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=2)
    model = transformers.T5EncoderModel(config).eval()
    model.save_pretrained(folder)
    return folder, model, write_tokenizer(folder, clip=False)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(1)
    config = transformers.CLIPTextConfig(
        vocab_size=16, hidden_size=12, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.CLIPTextModel(config).eval()
    model.save_pretrained(folder)
    return folder, model, write_tokenizer(folder, clip=True)


def padded(tokenizer, length):
    return tokenizer(TEXTS, padding="max_length", max_length=length, truncation=True, return_tensors="pt")["input_ids"]


def test_embeddings_are_those_of_the_packages_models_without_a_mask(t5, clip):
    encoders = open_encoders(str(t5[0]), str(clip[0]), LENGTH, torch.float32)
    found, cut = encoders.encode(TEXTS)
    assert (encoders.text_shape, encoders.pooled_shape) == ((LENGTH, 16), (12,))
    with torch.no_grad():
        tokens = t5[1](input_ids=padded(t5[2], LENGTH)).last_hidden_state
        pooled = clip[1](input_ids=padded(clip[2], 77)).pooler_output
    torch.testing.assert_close(found[TEXT], tokens, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[POOLED], pooled, rtol=0, atol=1e-6)
    assert cut == TEXTS[-1:]  # ten words and an end


def test_clip_gives_tokens_of_any_length_up_to_its_own_and_pools_77(clip):
    encoder = open_encoder(str(clip[0]), torch.float32)
    found = encoder.encode(TEXTS, LENGTH)
    with torch.no_grad():
        tokens = clip[1](input_ids=padded(clip[2], LENGTH)).last_hidden_state
        pooled = clip[1](input_ids=padded(clip[2], 77)).pooler_output
    torch.testing.assert_close(found.tokens, tokens, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.pooled, pooled, rtol=0, atol=1e-6)
    with pytest.raises(TextEncoderError, match="--text-length: 78 is not in 1..77"):
        open_encoders(str(clip[0]), str(clip[0]), 78, torch.float32)


def test_identity_is_of_the_weights_wherever_they_lie(t5, clip, tmp_path):
    shutil.copytree(t5[0], tmp_path / "copy")
    one, copy = open_encoder(str(t5[0]), torch.float32), open_encoder(str(tmp_path / "copy"), torch.float32)
    assert one.identity() == copy.identity() != open_encoder(str(t5[0]), torch.bfloat16).identity()
    assert one.identity()["name"] == "t5" and open_encoder(str(clip[0]), torch.float32).identity()["name"] == "clip"


def test_pipelines_tokenizer_is_found_beside_its_encoder(t5, tmp_path):
    encoder, tokenizer = tmp_path / "text_encoder_2", tmp_path / "tokenizer_2"
    shutil.copytree(t5[0], encoder)
    tokenizer.mkdir()
    for path in [path for path in encoder.iterdir() if path.name not in ("config.json", "model.safetensors")]:
        shutil.move(path, tokenizer / path.name)
    found = open_encoder(str(encoder), torch.float32).encode(TEXTS, LENGTH)
    assert torch.equal(found.tokens, open_encoder(str(t5[0]), torch.float32).encode(TEXTS, LENGTH).tokens)
    shutil.rmtree(tokenizer)
    shutil.copytree(encoder, tmp_path / "elsewhere")
    for folder in (encoder, tmp_path / "elsewhere"):
        with pytest.raises(TextEncoderError, match=f"^{folder}: holds no tokenizer"):
            open_encoder(str(folder), torch.float64)  # opened before, but for the dtype


def test_folders_without_an_encoder_are_refused_in_one_line(t5, tmp_path):
    for name, content, message in (
        ("empty", None, "config.json: cannot be read"),
        ("text", "no json", "describes no model of transformers"),
        ("bert", json.dumps({"model_type": "bert"}), "describes a model 'bert'; text encoders are t5"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        if content is not None:
            (folder / "config.json").write_text(content)
        with pytest.raises(TextEncoderError, match=message) as caught:
            open_encoders(str(folder), "stub:4", LENGTH)
        assert str(caught.value).startswith("--text-encoder: ") and "\n" not in str(caught.value)
    cut = tmp_path / "cut"
    shutil.copytree(t5[0], cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:100])
    with pytest.raises(TextEncoderError, match="cannot be opened as a text encoder") as caught:
        open_encoder(str(cut), torch.float32)
    assert "\n" not in str(caught.value)
    with pytest.raises(TextEncoderError, match=r"no such folder$"):
        open_encoder("no folder", torch.float32)
    with pytest.raises(TextEncoderError, match="--pooled-encoder: t5 has no embedding of a whole text"):
        open_encoders("stub:4", str(t5[0]), LENGTH, torch.float32)
