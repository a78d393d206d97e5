"""Small autoencoders on disk for tests: TAEF2 with random weights, and tokenizers traced to TorchScript."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan.autoencoders.taef2 import build_decoder, build_encoder


class PatchEncoder(nn.Module):
    """Each 8x8 patch through an orthogonal matrix, of which the first 16 rows are kept; the published interface."""

    def __init__(self, matrix: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix.reshape(-1, 3, 8, 8).to(dtype))
        self.zero = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return nn.functional.conv2d(x.to(self.weight.dtype), self.weight, stride=8), (self.zero * 1, self.zero * 1)


class PatchDecoder(nn.Module):
    def __init__(self, matrix: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix.reshape(-1, 3, 8, 8).to(dtype))

    def forward(self, z: Tensor) -> Tensor:
        return nn.functional.conv_transpose2d(z, self.weight, stride=8)


def write_tokenizer(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Trace encoder.jit and decoder.jit; returns the matrix [16, 192] whose rows are orthonormal."""
    folder.mkdir(parents=True, exist_ok=True)
    matrix = torch.linalg.qr(torch.randn(192, 16, generator=torch.Generator().manual_seed(5)))[0].T.contiguous()
    trace(PatchEncoder(matrix, dtype), torch.zeros(1, 3, 16, 16, dtype=dtype), folder / "encoder.jit")
    trace(PatchDecoder(matrix, dtype), torch.zeros(1, 16, 2, 2, dtype=dtype), folder / "decoder.jit")
    return matrix


def trace(module: nn.Module, example: Tensor, path: Path) -> None:
    with torch.no_grad():
        torch.jit.trace(module, example).save(str(path))


def write_taef2(folder: Path, dtype: torch.dtype = torch.float16) -> dict[str, dict[str, Tensor]]:
    """Random weights of about unit gain; returns what the two files hold."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    written = {}
    for part, network in (("encoder", build_encoder()), ("decoder", build_decoder())):
        tensors = {}
        for name, tensor in network.state_dict().items():
            gain = 1 / math.sqrt(tensor[0].numel()) if tensor.ndim == 4 else 0.3
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * gain).to(dtype)
        save_file(tensors, folder / f"taef2_{part}.safetensors")
        written[part] = tensors
    return written
