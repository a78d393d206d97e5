"""Shards: safetensors files of pieces of tensors, hashed as they are written and verified when they are read.

A file's header gives, with each piece, its place in the whole tensor; torch.distributed.checkpoint reads that.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.files.durable import new_file
from torchtitan.files.remote_path import AnyPath

MAX_HEADER_BYTES = 64 << 20
_CHUNK = 8 << 20  # bytes written and hashed at once
_OFFSETS, _PLACES = "saved_offsets", "DCP_SHARDING_INFO"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _DTYPES.items()}

Place = tuple[tuple[int, ...], tuple[int, ...]]  # offsets in the whole tensor, and shape, of a piece


class DamagedShard(Exception):
    """File that is no shard, or has a header that does not describe it; the message is a few words."""


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
        """Dtype in the file."""
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
    places = {piece.name: {_OFFSETS: list(piece.offsets)} for piece in pieces}
    return write_tensors(
        path,
        {piece.name: (tuple(piece.local.shape), piece.dtype) for piece in pieces},
        (piece.values() for piece in pieces),
        {"DCP_VERSION": "1.0", _PLACES: json.dumps(places)},
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
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def check_shards(paths: Iterable[AnyPath]) -> None:
    """Check that headers describe their files, and that the pieces fill each tensor once.

    Only headers are read, and no more of them than MAX_HEADER_BYTES each.

    Raises:
        DamagedShard, OSError.
    """
    places: dict[str, list[Place]] = {}
    with ThreadPoolExecutor(8) as pool:  # a store answers slowly, and to many at once
        for file in pool.map(read_places, paths):
            for name, place in file.items():
                places.setdefault(name, []).append(place)
    for name, found in places.items():
        if not _fills(found):
            raise DamagedShard(f"the pieces of {name[:80]} leave a gap or overlap")


def read_places(path: AnyPath) -> dict[str, Place]:
    """Read the place of each piece of a file with a checked header, by the name of its tensor. Raises DamagedShard, OSError.
    """
    return {name: (offsets, shape) for name, (offsets, shape, _) in _read_header(path).items()}


def whole_tensors(paths: Iterable[AnyPath]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in checked shards. Raises DamagedShard, OSError."""
    wholes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for path in paths:
        for name, (offsets, shape, dtype) in _read_header(path).items():
            ends = tuple(map(sum, zip(offsets, shape, strict=True)))
            before = wholes[name][0] if name in wholes else ends
            wholes[name] = tuple(map(max, before, ends)), _DTYPE_OF[dtype]
    return wholes


def _read_header(path: AnyPath) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Read offsets, shape and dtype of each piece of a file with a checked header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise DamagedShard(f"{path.name}: the header's length is impossible")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        if any(type(value) is not str for value in metadata.values()):
            raise ValueError("metadata that is no text")
        spans = sorted(_span(entry) for entry in header.values())
        places = json.loads(metadata[_PLACES]) if _PLACES in metadata else None
        found = {}
        for name, entry in header.items():
            shape = _counts(entry["shape"])
            offsets = _counts(places[name][_OFFSETS]) if places is not None else (0,) * len(shape)
            found[name] = offsets, shape, entry["dtype"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedShard(f"{path.name}: the header is damaged") from error
    ends = [0, *(end for _, end in spans)]
    if any(begin != end for (begin, _), end in zip(spans, ends, strict=False)) or ends[-1] != size - 8 - length:
        raise DamagedShard(f"{path.name}: the header does not describe the file")
    if any(len(offsets) != len(shape) for offsets, shape, _ in found.values()):
        raise DamagedShard(f"{path.name}: the header is damaged")
    return found


def _span(entry: dict) -> tuple[int, int]:
    begin, end = _counts(entry["data_offsets"])
    if end - begin != math.prod(_counts(entry["shape"])) * _ITEM_BYTES[entry["dtype"]]:
        raise ValueError("as many bytes as the shape says are not there")
    return begin, end


def _counts(values: list) -> tuple[int, ...]:
    if type(values) is not list or len(values) > 64 or any(type(v) is not int or not 0 <= v < 1 << 60 for v in values):
        raise ValueError("no list of counts")
    return tuple(values)


def _fills(places: list[Place]) -> bool:
    """Check whether the pieces follow one another along one dimension and fill the tensor."""
    if len({len(shape) for _, shape in places}) != 1:
        return False
    if len(places) == 1:
        return not any(places[0][0])
    first = places[0][0]
    split = {axis for offsets, _ in places for axis, (a, b) in enumerate(zip(offsets, first, strict=True)) if a != b}
    if len(split) != 1:
        return False
    axis, end = split.pop(), 0
    for offsets, shape in sorted(places):
        others = [size for other, size in enumerate(shape) if other != axis]
        wanted = [size for other, size in enumerate(places[0][1]) if other != axis]
        if offsets[axis] != end or others != wanted or any(offsets[other] for other in range(len(shape)) if other != axis):
            return False
        end += shape[axis]
    return True
