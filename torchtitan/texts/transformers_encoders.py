"""Text encoders of the transformers package: T5's encoder and CLIP's text model."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from torchtitan.errors import first_line
from torchtitan.extras import install, quiet_torchao
from torchtitan.files.hub import local_folder
from torchtitan.files.weight_hash import weights_sha256
from torchtitan.pictures.number_text import first_named
from torchtitan.texts.base import EncodedTexts, TextEncoder, TextEncoderError

_T5, _CLIP = ("t5", "mt5", "umt5"), ("clip", "clip_text_model")
_TOKENIZER_FILES = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model", "vocab.json", "merges.txt",
    "added_tokens.json",
]  # fmt: skip
_WEIGHT_FILES = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
# Of repositories that publish no safetensors, as google/t5-v1_1-xxl; read as tensors alone.
_PICKLED_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]

# What the package raises for files that are damaged, missing or of another model.
_UNREADABLE = (
    OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, SafetensorError, pickle.UnpicklingError,
)  # fmt: skip


class TransformersEncoder(TextEncoder):
    """Encoder around a transformers model, without an attention mask, as Flux's were run.

    Tokens are the last hidden state; the embedding of the whole text is CLIP's pooled output, always of 77 tokens.
    """

    @quiet_torchao()
    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            path: folder with config.json, safetensors weights and the tokenizer's files, or a name on the Hugging Face
                hub: owner/repository or owner/repository/folder. The tokenizer of a pipeline's `text_encoder` is its
                `tokenizer`, of `text_encoder_2` its `tokenizer_2`.

        Raises:
            TextEncoderError: transformers is not installed, or the folder holds no encoder of a known kind.
        """
        try:
            import transformers
        except ImportError as error:
            raise TextEncoderError(f"{path}: text encoders need the transformers package: {install('text')}") from error
        transformers.utils.logging.set_verbosity_error()
        folder = local_folder("text encoder", path, [*_WEIGHT_FILES, *_TOKENIZER_FILES, *_PICKLED_FILES], TextEncoderError)
        self._kind = _kind(folder)
        self._dtype, self._device = dtype, device
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(_tokenizer_folder(folder, path), trust_remote_code=False)
            kind = transformers.CLIPTextModel if self._kind == "clip" else transformers.AutoModelForTextEncoding
            model, report = kind.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
            )
        except _UNREADABLE as error:
            raise TextEncoderError(f"{folder}: cannot be opened as a text encoder: {first_line(error)}") from error
        if missing := sorted(report["missing_keys"]):
            raise TextEncoderError(f"{folder}: its weights lack {first_named(missing, 1)}")
        self._digest = weights_sha256(model.state_dict())
        self._model: Any = model.to(device, dtype).eval().requires_grad_(False)
        config = self._model.config
        self.width = config.hidden_size
        clip = self._kind == "clip"
        self.pooled_width = config.hidden_size if clip else 0
        self.most_tokens = self.pooled_length = config.max_position_embeddings if clip else 0
        if not clip:
            self.most_tokens = None

    def identity(self) -> dict[str, Any]:
        dtype = str(self._dtype).removeprefix("torch.")
        return {"name": self._kind, "weights_sha256": self._digest, "dtype": dtype, "device": self._device.type}

    @torch.no_grad()
    def encode(self, texts: Sequence[str], length: int) -> EncodedTexts:
        tokens = self._ids(texts, length)
        lengths = [len(ids) for ids in self._tokenizer(list(texts), verbose=False)["input_ids"]]
        cut = [text for text, count in zip(texts, lengths, strict=True) if count > length]
        if self._kind != "clip":
            return EncodedTexts(self._model(input_ids=tokens).last_hidden_state.float().cpu(), None, cut)
        whole = self._model(input_ids=self._ids(texts, self.pooled_length))
        output = whole if length == self.pooled_length else self._model(input_ids=tokens)
        return EncodedTexts(output.last_hidden_state.float().cpu(), whole.pooler_output.float().cpu(), cut)

    def _ids(self, texts: Sequence[str], length: int) -> torch.Tensor:
        ids = self._tokenizer(
            list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt", verbose=False
        )["input_ids"]
        return ids.to(self._device)


def _kind(folder: Path) -> str:
    """Kind of model that a folder's config.json describes, "t5" or "clip"."""
    file = folder / "config.json"
    try:
        kind = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except OSError as error:
        raise TextEncoderError(f"{file}: cannot be read: {error.strerror} (give a folder with a text encoder)") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TextEncoderError(f"{file}: describes no model of transformers") from error
    if kind in _CLIP:
        return "clip"
    if kind in _T5:
        return "t5"
    raise TextEncoderError(f"{file}: describes a model {kind!r}; text encoders are {', '.join((*_T5, *_CLIP))}")


def _tokenizer_folder(folder: Path, path: str) -> Path:
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return folder
    name = folder.name.replace("text_encoder", "tokenizer")
    if name == folder.name:
        raise TextEncoderError(f"{folder}: holds no tokenizer (put its files, as tokenizer.json, beside the weights)")
    beside = folder.parent / name
    if beside.is_dir() and any((beside / file).is_file() for file in _TOKENIZER_FILES):
        return beside
    if Path(path).is_dir():
        raise TextEncoderError(f"{folder}: holds no tokenizer, and there is none in {beside}")
    return local_folder("tokenizer", f"{path.rpartition('/')[0]}/{name}", _TOKENIZER_FILES, TextEncoderError)
