"""Headers of shards: what they say of the pieces in a file is checked against the file before it is believed."""

import json
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from torchtitan.files.remote_path import AnyPath

MAX_HEADER_BYTES = 64 << 20
OFFSETS, PLACES = "saved_offsets", "DCP_SHARDING_INFO"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}

Place = tuple[tuple[int, ...], tuple[int, ...]]  # offsets in the whole tensor, and shape, of a piece


class DamagedShard(Exception):
    """File that is no shard, or has a header that does not describe it; the message is a few words."""


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
        places = json.loads(metadata[PLACES]) if PLACES in metadata else None
        found = {}
        for name, entry in header.items():
            shape = _counts(entry["shape"])
            offsets = _counts(places[name][OFFSETS]) if places is not None else (0,) * len(shape)
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
