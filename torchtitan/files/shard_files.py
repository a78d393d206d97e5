"""Shards: safetensors files of pieces of tensors, hashed as they are written.

A file's header gives, with each piece, its place in the whole tensor; torch.distributed.checkpoint reads that.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.files.durable import new_file
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.shard_headers import DTYPES, OFFSETS, PLACES

_CHUNK = 8 << 20  # bytes written and hashed at once


@dataclass(frozen=True)
class Piece:
    """Piece of a tensor, held by one process.

    Attributes:
        name: of the whole tensor.
        local: the values, on any device.
        offsets: start of the piece in the whole tensor, one number per dimension.
        stored_as: dtype in the file; None: that of the values.
    """

    name: str
    local: Tensor
    offsets: tuple[int, ...]
    stored_as: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.stored_as or self.local.dtype

    def values(self) -> Tensor:
        """Values as they are written."""
        return self.local.to(self.dtype)


def write_shard(path: AnyPath, pieces: Iterable[Piece]) -> dict:
    """Write pieces to a new file, and bring it to the disk or the store.

    Returns:
        {"size": bytes, "sha256": of the bytes to be written}, to compare with the file that is read back.

    Raises:
        OSError: it could not be written.
    """
    # Values of eight bytes first, so that each begins where its type wants it.
    pieces = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))
    places = {piece.name: {OFFSETS: list(piece.offsets)} for piece in pieces}
    return write_tensors(
        path,
        {piece.name: (tuple(piece.local.shape), piece.dtype) for piece in pieces},
        (piece.values() for piece in pieces),
        {"DCP_VERSION": "1.0", PLACES: json.dumps(places)},
    )


def write_tensors(
    path: AnyPath,
    entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    values: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> dict:
    """Write a new safetensors file tensor by tensor, of which one at a time need be in memory.

    Args:
        entries: name -> shape and dtype, those of more bytes first.
        values: of each entry, in that order.
        metadata: of the header, besides the format.

    Returns:
        {"size": bytes, "sha256": of the bytes to be written}.

    Raises:
        OSError: it could not be written.
    """
    header = _header(entries, metadata)
    digest, size = hashlib.sha256(), 8 + len(header) + sum(math.prod(s) * d.itemsize for s, d in entries.values())
    with new_file(path) as file:
        _put(file, digest, len(header).to_bytes(8, "little") + header)
        for (shape, dtype), tensor in zip(entries.values(), values, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise ValueError(f"a tensor is {tensor.dtype} {list(tensor.shape)}, announced was {dtype} {list(shape)}")
            view = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(view), _CHUNK):
                _put(file, digest, view[start : start + _CHUNK])
    return {"size": size, "sha256": digest.hexdigest()}


def _put(file, digest, data) -> None:
    digest.update(data)
    file.write(data)


def _header(entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    header: dict = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (shape, dtype) in entries.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)
