"""Hashes of a network's weights.

Values are cast to float32, so that equal ones in a float16, bfloat16 or float32 file give the same hash.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, shapes and values, in the order of the names, before any cast for compute: 64 hex digits; "" on meta."""
    if any(tensor.is_meta for tensor in tensors.values()):
        return ""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        _update(digest, name, tensors[name])
    return digest.hexdigest()


def tensor_sha256(name: str, tensor: Tensor) -> str:
    """Hash the name, shape and values of one tensor."""
    digest = hashlib.sha256()
    _update(digest, name, tensor)
    return digest.hexdigest()


def joined_sha256(digests: Mapping[str, str]) -> str:
    """Hash a network by the `tensor_sha256` of each tensor by name, which several processes may have computed."""
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Hash a safetensors file as `joined_sha256`, an unchanged one once. Raises OSError, SafetensorError."""
    status = path.stat()
    return _file_sha256(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _file_sha256(path: Path, time: int, size: int) -> str:
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return joined_sha256({name: tensor_sha256(name, file.get_tensor(name)) for name in names})


def _update(digest: Any, name: str, tensor: Tensor) -> None:
    values = tensor.detach().to("cpu", torch.float32).contiguous()
    digest.update(f"{name} {list(values.shape)}\n".encode())
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
