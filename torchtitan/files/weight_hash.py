"""Hash of a network's weights."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, shapes and values, in the order of the names.

    Values are cast to float32, so that equal ones in a float16, bfloat16 or float32 file give the same hash.

    Args:
        tensors: the weights before they are cast to a dtype of compute.

    Returns:
        64 hexadecimal digits.
    """
    return _hashed(tensors, tensors.__getitem__)


def file_sha256(path: Path) -> str:
    """Hash the tensors of a safetensors file as `weights_sha256` does, one at a time; a file that stays the same once.

    Raises:
        OSError, SafetensorError: it cannot be read.
    """
    status = path.stat()
    return _file_sha256(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _file_sha256(path: Path, time: int, size: int) -> str:
    with safe_open(path, framework="pt") as file:
        return _hashed(file.keys(), file.get_tensor)


def _hashed(names: Iterable[str], tensor: Callable[[str], Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        values = tensor(name).detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
