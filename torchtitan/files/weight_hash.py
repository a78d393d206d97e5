"""Hash of a network's weights."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, shapes and values, in the order of the names.

    Values are cast to float32, so that equal ones in a float16, bfloat16 or float32 file give the same hash.

    Args:
        tensors: the weights before they are cast to a dtype of compute.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
