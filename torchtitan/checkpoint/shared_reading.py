"""Tensors read from a checkpoint of any layout into the present one; each rank reads the pieces that it holds a part of.

Where R ranks look for the pieces of a checkpoint of R shards together, a rank reads one header, and asks for its pieces those
ranks that know where they are: no rank sees the pieces of all.
"""

import errno
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint.pieces import offsets_of
from torchtitan.distributed.collectives import from_each_rank, on_all_ranks
from torchtitan.files.shard_files import DamagedShard, Place, read_places


class Wanted(NamedTuple):
    """Part of a tensor that a rank holds: its name, the tensor's shape, offsets and shape of the part."""

    name: str
    whole: tuple[int, ...]
    place: Place


class Found(NamedTuple):
    """Piece in a file, with a part of a tensor that a rank holds."""

    name: str
    file: str
    place: Place


Answer = str | list[Found]  # why a tensor cannot be read, or its pieces


def find_pieces(folder: Path, tensors: dict[str, Tensor]) -> list[Answer]:
    """Find the pieces of a verified checkpoint that lie in this rank's parts of tensors, without the other ranks.

    Raises:
        OSError, DamagedShard: a header cannot be read.
    """
    here = _by_name(_pieces_in(sorted(folder.glob("*.safetensors"))))
    return [_answer(_wanted(name, tensor), here) for name, tensor in tensors.items()]


def find_pieces_together(folder: Path, tensors: dict[str, Tensor]) -> list[Answer]:
    """Find pieces as `find_pieces` does; collective.

    Raises:
        OSError, DamagedShard: a header cannot be read; on every rank.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    files = sorted(folder.glob("*.safetensors"))[rank::world_size]
    known = on_all_ranks(lambda: _pieces_in(files), (OSError, DamagedShard), None)
    here = _by_name(chain(*from_each_rank(_dealt(known, world_size))))
    questions = from_each_rank(_dealt([_wanted(name, tensor) for name, tensor in tensors.items()], world_size))
    return list(chain(*from_each_rank([[_answer(part, here) for part in asked] for asked in questions])))


@torch.no_grad()
def read_pieces(folder: Path, answers: list[Answer], tensors: dict[str, Tensor]) -> None:
    """Fill this rank's parts of tensors in place from the pieces that lie in them.

    Raises:
        ValueError: the checkpoint lacks a tensor, or has it in another shape.
        OSError: a file cannot be read.
    """
    by_file: dict[str, list[Found]] = {}
    for answer in answers:
        if isinstance(answer, str):
            raise ValueError(answer)
        for piece in answer:
            by_file.setdefault(piece.file, []).append(piece)
    for file, pieces in sorted(by_file.items()):
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for piece in pieces:
                    _read_piece(opened, piece, tensors[piece.name])
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), file) from error


def _read_piece(opened: Any, piece: Found, tensor: Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    common = _common(_wanted(piece.name, tensor).place, piece.place)
    assert common is not None, "it was answered for what they have in common"
    if local.ndim:
        local[common[0]].copy_(opened.get_slice(piece.name)[common[1]])
    else:
        local.copy_(opened.get_tensor(piece.name))


def _wanted(name: str, tensor: Tensor) -> Wanted:
    if isinstance(tensor, DTensor):
        return Wanted(name, tuple(tensor.shape), (offsets_of(tensor), tuple(tensor.to_local().shape)))
    return Wanted(name, tuple(tensor.shape), ((0,) * tensor.ndim, tuple(tensor.shape)))


def _pieces_in(files: list[Path]) -> list[Found]:
    return [Found(name, file.name, place) for file in files for name, place in read_places(file).items()]


def _by_name(pieces: Iterable[Found]) -> dict[str, "_KnownTensor"]:
    by_name: dict[str, list[Found]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    return {name: _KnownTensor(pieces) for name, pieces in by_name.items()}


def _answer(part: Wanted, here: dict[str, "_KnownTensor"]) -> Answer:
    return here[part.name].answer(part) if part.name in here else f"a tensor is missing: {part.name}"


class _KnownTensor:
    """Pieces of one tensor that follow one another along one dimension, as those of a verified checkpoint do."""

    def __init__(self, pieces: list[Found]) -> None:
        places = [piece.place for piece in pieces]
        offsets, sizes = places[-1]
        self._whole = tuple(max(place[0][axis] + place[1][axis] for place in places) for axis in range(len(sizes)))
        self._axis = next((axis for axis, size in enumerate(self._whole) if sizes[axis] != size), 0)
        self._pieces = sorted(pieces, key=lambda piece: piece.place[0])
        self._begins = [piece.place[0][self._axis] if offsets else 0 for piece in self._pieces]

    def answer(self, wanted: Wanted) -> Answer:
        """Answer the pieces that lie in a part of the tensor, or why the part cannot be read."""
        if self._whole != wanted.whole:
            return f"a tensor has the shape {list(self._whole)} instead of {list(wanted.whole)}: {wanted.name}"
        if not self._whole:
            return self._pieces
        offsets, sizes = wanted.place
        first, size = offsets[self._axis], sizes[self._axis]
        near = self._pieces[max(bisect_right(self._begins, first) - 1, 0) : bisect_left(self._begins, first + size)]
        return [piece for piece in near if _common(wanted.place, piece.place) is not None]


def _common(part: Place, piece: Place) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Common box of a part and a piece of a tensor: its slices in each; None if it is empty."""
    of_part, of_piece = [], []
    for first, size, other, length in zip(*part, *piece, strict=True):
        begin, end = max(first, other), min(first + size, other + length)
        if begin >= end:
            return None
        of_part.append(slice(begin - first, end - first))
        of_piece.append(slice(begin - other, end - other))
    return tuple(of_part), tuple(of_piece)


def _dealt(entries: list, world_size: int) -> list[list]:
    """Deal entries to the ranks that know the pieces of their tensors."""
    dealt: list[list] = [[] for _ in range(world_size)]
    for entry in entries:
        dealt[zlib.crc32(entry.name.encode()) % world_size].append(entry)
    return dealt
