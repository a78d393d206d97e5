"""NVIDIA's Cosmos continuous image tokenizers (CI8x8, CI16x16): encoder and decoder in TorchScript.

Source: github.com/NVIDIA/Cosmos-Tokenizer; NVIDIA, "Cosmos World Foundation Model Platform", 2025, section 4.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents, dtype_name
from torchtitan.files.hub import local_folder

ENCODER, DECODER = "encoder.jit", "decoder.jit"
PROBE_SIDE = 64


class CosmosTokenizer(Autoencoder):
    """Cosmos tokenizer: a pair of TorchScript files; latents are deterministic and have no published normalization.

    The dtype is part of a trace: the files compute in their own dtype, whatever training uses. Channels
    and downscale are found by encoding one small black image. The `cosmos-tokenizer` package calls the files where it
    is installed, TorchScript alone elsewhere; both give the same.
    """

    name = "cosmos"

    def __init__(self, path: str, dtype: torch.dtype | None, device: torch.device) -> None:
        """
        Args:
            path: folder with encoder.jit and decoder.jit, or a hub name such as nvidia/Cosmos-0.1-Tokenizer-CI8x8.

        Raises:
            AutoencoderError: a file is missing, is no continuous image tokenizer, or was made in another dtype; there are no
                layers without weights.
        """
        if device.type == "meta":
            raise AutoencoderError("cosmos: its layers are in the files of its weights")
        folder = local_folder(self.name, path, [ENCODER, DECODER], AutoencoderError)
        files = folder / ENCODER, folder / DECODER
        for file in files:
            if not file.is_file():
                raise AutoencoderError(f"cosmos: {file}: no such file ({ENCODER} and {DECODER} are needed)")
        encoder, decoder = _load(files[0], device), _load(files[1], device)
        traced, latents = _probe_encoder(files[0], encoder, device)
        _probe_decoder(files[1], decoder, latents, traced)
        if dtype not in (None, traced):
            raise AutoencoderError(
                f"cosmos: {files[0]} was made in {dtype_name(traced)} and cannot compute in {dtype_name(dtype)} "
                "(leave the dtype out)"
            )
        super().__init__(traced, device)
        self.channels, self.downscale = latents.shape[1], PROBE_SIDE // latents.shape[2]
        self.weights_sha256 = _files_sha256(files)
        self._encoder: Callable[[Tensor], Tensor]
        self._decoder: Callable[[Tensor], Tensor]
        self._encoder, self._decoder = _through_package(files, traced, device) or (encoder, decoder)
        self.eval().requires_grad_(False)

    def _encode(self, images: Tensor) -> Latents:
        return Latents(_call(self._encoder, images))

    def _decode(self, latents: Tensor) -> Tensor:
        return _call(self._decoder, latents)


def _load(file: Path, device: torch.device) -> torch.jit.ScriptModule:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.14 deprecates the format, as published
            return torch.jit.load(file, map_location=device)
    except (RuntimeError, ValueError, OSError) as error:
        raise AutoencoderError(f"cosmos: {file}: is not a TorchScript file (or is damaged)") from error


def _through_package(
    files: tuple[Path, Path], dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None:
    """Load encoder and decoder through the package, or None if it is not installed."""
    try:
        from cosmos_tokenizer.image_lib import ImageTokenizer
    except ImportError:
        return None
    tokenizer = ImageTokenizer(
        checkpoint_enc=str(files[0]), checkpoint_dec=str(files[1]), device=str(device), dtype=dtype_name(dtype)
    )
    return tokenizer.encode, tokenizer.decode


@torch.no_grad()
def _probe_encoder(file: Path, encoder: torch.jit.ScriptModule, device: torch.device) -> tuple[torch.dtype, Tensor]:
    """Probe the encoder: its dtype, and its output for a black image [1, 3, 64, 64]."""
    black = -torch.ones(1, 3, PROBE_SIDE, PROBE_SIDE, device=device)
    reason = ""
    for dtype in _likely_dtypes(encoder):
        try:
            latents = _call(encoder, black.to(dtype))
        except RuntimeError as error:
            reason = reason or str(error).strip().splitlines()[-1]
            continue
        _check_latents(file, latents)
        return dtype, latents
    raise AutoencoderError(f"cosmos: {file}: does not encode images [B, 3, H, W]: {reason}")


def _likely_dtypes(module: torch.jit.ScriptModule) -> list[torch.dtype]:
    """Likely floating dtypes, the likeliest first: of the weights, of constants in the trace, then all."""
    found = [tensor.dtype for tensor in (*module.parameters(), *module.buffers())]
    found += [value.dtype for value in _constants(module.inlined_graph)]
    found += [torch.float32, torch.bfloat16, torch.float16]
    return list(dict.fromkeys(dtype for dtype in found if dtype.is_floating_point))


def _constants(graph: torch.Graph) -> Iterator[Tensor]:
    for node in graph.nodes():
        if node.kind() == "prim::Constant" and "value" in node.attributeNames() and node.kindOf("value") == "t":
            yield node.t("value")


def _check_latents(file: Path, latents: object) -> None:
    if isinstance(latents, Tensor) and not latents.is_floating_point():
        raise AutoencoderError(f"cosmos: {file}: gives indices: a discrete tokenizer (take a continuous one, as CI8x8)")
    if not isinstance(latents, Tensor) or latents.ndim != 4 or len(latents) != 1:
        shape = list(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
        raise AutoencoderError(f"cosmos: {file}: does not give latents [B, C, h, w] for images, but {shape}")
    height, width = latents.shape[2:]
    if height != width or height == 0 or PROBE_SIDE % height:
        raise AutoencoderError(
            f"cosmos: {file}: gives latents {height} x {width} for {PROBE_SIDE} x {PROBE_SIDE} pixels; their ratio is "
            "not a whole number"
        )


@torch.no_grad()
def _probe_decoder(file: Path, decoder: torch.jit.ScriptModule, latents: Tensor, dtype: torch.dtype) -> None:
    try:
        image = _call(decoder, latents.to(dtype))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise AutoencoderError(
            f"cosmos: {file}: does not decode the output of {ENCODER} in the same folder, {list(latents.shape)} in "
            f"{dtype_name(dtype)}: {reason}"
        ) from error
    if not isinstance(image, Tensor) or image.shape != (1, 3, PROBE_SIDE, PROBE_SIDE):
        shape = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise AutoencoderError(f"cosmos: {file}: gives {shape} instead of the image [1, 3, {PROBE_SIDE}, {PROBE_SIDE}]")


def _call(network: Callable[[Tensor], object], x: Tensor) -> Any:
    # The optimizing executor changes its kernels after the first calls, and so the last bits of what they give.
    with torch.jit.optimized_execution(False):
        output = network(x)
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output


def _files_sha256(files: tuple[Path, Path]) -> str:
    """SHA-256 of both files' hashes: the files hold operations as well as weights."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
