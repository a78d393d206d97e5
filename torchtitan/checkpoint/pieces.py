"""Pieces of tensors in a checkpoint, assigned to the ranks that write them."""

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from torchtitan.distributed.parallelize import local
from torchtitan.files.shard_files import Piece


def pieces_of(tensors: dict[str, Tensor], rank: int, world_size: int) -> list[Piece]:
    """Pieces for this rank to write, so that all ranks together write every element once.

    Every rank computes the same distribution, without communication. A sharded tensor is written by its holders, of
    several copies by the first; a plain one, equal on all ranks, by the rank with the least to write so far.

    Args:
        tensors: by name, plain or sharded along one axis of the mesh.
    """
    load, mine = [0] * world_size, []
    plain = [(name, tensor) for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    for name, tensor in sorted(plain, key=lambda entry: (-entry[1].nbytes, entry[0])):
        writer = load.index(min(load))
        load[writer] += tensor.nbytes
        if writer == rank:
            mine.append(Piece(name, tensor.detach(), (0,) * tensor.ndim))
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and (offsets := _place(tensor)) is not None:
            mine.append(Piece(name, local(tensor.detach()), offsets))
    return mine


def _place(tensor: DTensor) -> tuple[int, ...] | None:
    """Place of this rank's part in a sharded tensor; None where another rank writes it or it is empty."""
    offsets, coordinate = [0] * tensor.ndim, tensor.device_mesh.get_coordinate() or ()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            size = tensor.shape[placement.dim]
            rows = math.ceil(size / tensor.device_mesh.size(axis))
            offsets[placement.dim] = min(coordinate[axis] * rows, size)
        elif coordinate[axis] > 0:
            return None
    return tuple(offsets) if tensor.to_local().numel() else None
