"""Read a good checkpoint into any layout: each rank reads the headers of all shards, and the pieces that it holds a part of.

One of a remote store is read from a local copy, which is checked again.
"""

import errno
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from torchtitan.checkpoint.manifest import STATE, check_content, check_file, check_pieces, read_json, read_manifest
from torchtitan.checkpoint.pieces import offsets_of
from torchtitan.distributed.collectives import of_all_ranks
from torchtitan.errors import CheckpointError, DamagedFile, StoreError, first_line
from torchtitan.files.remote_path import AnyPath, RemotePath
from torchtitan.files.shard_headers import DamagedShard, Place, read_places, whole_tensors
from torchtitan.processes.launch import launch_number

_CHUNK = 8 << 20  # bytes copied at once


def read_tensors(checkpoint: AnyPath, tensors: dict[str, Tensor]) -> None:
    """Fill tensors (plain or sharded) in place from a verified checkpoint by this rank. Raises CheckpointError."""
    with ExitStack() as stack:
        folder = checkpoint if isinstance(checkpoint, Path) else _fetched(checkpoint, stack)
        if problem := _filled(folder, tensors):
            raise CheckpointError(f"{checkpoint}: {problem}")


def read_tensors_together(checkpoint: AnyPath, tensors: dict[str, Tensor]) -> None:
    """Fill as `read_tensors`, with one copy of a remote checkpoint per node; collective; raises on every rank."""
    with shared_copy(checkpoint) as folder:
        problems = of_all_ranks(_filled(folder, tensors))
    if problem := next((problem for problem in problems if problem), None):
        raise CheckpointError(f"{checkpoint}: {problem}")


def read_state(checkpoint: AnyPath) -> dict:
    """Read the state besides the tensors. Raises CheckpointError."""
    try:
        return read_json(checkpoint / STATE, dict)
    except DamagedFile as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error


def tensor_shapes(checkpoint: AnyPath) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of every tensor of a verified checkpoint."""
    return whole_tensors(sorted(checkpoint.glob("*.safetensors"), key=str))


def reader(checkpoint: AnyPath) -> Callable[[Iterable[str]], dict[str, Tensor]]:
    """Reader of one verified checkpoint, for one process: names -> tensors; keeps one copy of a remote one."""
    kept: list[Path] = [checkpoint] if isinstance(checkpoint, Path) else []
    shapes, stack = tensor_shapes(checkpoint), ExitStack()

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        if isinstance(checkpoint, RemotePath) and not kept:
            weakref.finalize(read, stack.close)
            kept.append(_fetched(checkpoint, stack))
        tensors = {name: torch.empty(shapes[name][0], dtype=shapes[name][1]) for name in names}
        if tensors:
            read_tensors(kept[0], tensors)
        return tensors

    return read


# ---------------------------------------------------------------------- pieces


def _filled(folder: Path, tensors: dict[str, Tensor]) -> str | None:
    """Fill this rank's parts of tensors in place; return the problem."""
    try:
        _fill(folder, tensors)
    except (DamagedShard, RuntimeError, ValueError, OSError) as error:
        return f"does not fit this model: {first_line(error)}"
    return None


@torch.no_grad()
def _fill(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's parts of tensors in place. Raises ValueError: one is missing or has another shape; OSError, DamagedShard.
    """
    pieces: dict[str, list[tuple[Path, Place]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, place in read_places(file).items():
            pieces.setdefault(name, []).append((file, place))
    by_file: dict[Path, list[tuple[str, Place]]] = {}
    for name, tensor in tensors.items():
        for file, place in _pieces_for(name, tensor, pieces.get(name, [])):
            by_file.setdefault(file, []).append((name, place))
    for file, inside in sorted(by_file.items()):
        try:
            with safe_open(file, framework="pt") as opened:
                for name, place in inside:
                    _read_piece(opened, name, place, tensors[name])
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), file.name) from error


def _pieces_for(name: str, tensor: Tensor, pieces: list[tuple[Path, Place]]) -> list[tuple[Path, Place]]:
    """Pieces of a tensor that lie in this rank's part of it. Raises ValueError: the whole has another shape."""
    if not pieces:
        raise ValueError(f"a tensor is missing: {name}")
    whole = tuple(max(ends) for ends in zip(*(map(sum, zip(*place, strict=True)) for _, place in pieces), strict=True))
    if whole != tuple(tensor.shape):
        raise ValueError(f"a tensor has the shape {list(whole)} instead of {list(tensor.shape)}: {name}")
    part = _part_here(tensor)
    return [(file, place) for file, place in pieces if _common(part, place) is not None]


def _read_piece(opened: Any, name: str, place: Place, tensor: Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    common = _common(_part_here(tensor), place)
    assert common is not None, "it was chosen for what they have in common"
    if local.ndim:
        local[common[0]].copy_(opened.get_slice(name)[common[1]])
    else:
        local.copy_(opened.get_tensor(name))


def _part_here(tensor: Tensor) -> Place:
    if isinstance(tensor, DTensor):
        return offsets_of(tensor), tuple(tensor.to_local().shape)
    return (0,) * tensor.ndim, tuple(tensor.shape)


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


# ---------------------------------------------------------------------- copies on the node's disk


@contextmanager
def shared_copy(checkpoint: AnyPath) -> Iterator[Path]:
    """Copy of a checkpoint's folder on this node, made by its first rank where it is remote.

    Called by all ranks together. The copy is in the temporary folder (TMPDIR), and removed afterwards.

    Raises:
        CheckpointError: on every rank, if any node fails to copy it.
    """
    if isinstance(checkpoint, Path):
        yield checkpoint
        return
    node = (socket.gethostname(), os.environ.get("GROUP_RANK", "0"))
    with ExitStack() as stack:
        path = error = None
        if launch_number("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0) == 0:
            try:
                path = _fetched(checkpoint, stack)
            except CheckpointError as failure:
                error = failure
        copies = of_all_ranks((node, path, error))
        if found := next((error for _, _, error in copies if error), None):
            raise found
        yield next(path for other, path, _ in copies if other == node and path)
        of_all_ranks(None)  # not to be removed before all have read it


def _fetched(checkpoint: RemotePath, stack: ExitStack) -> Path:
    """Copy of a remote checkpoint in the temporary folder, until the stack is closed. Raises CheckpointError."""
    try:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{checkpoint.name}-")))
        _fetch(checkpoint, folder)
    except CheckpointError:  # of the store too, which is an OSError
        raise
    except OSError as error:
        raise CheckpointError(f"{tempfile.gettempdir()}: {first_line(error)} (set TMPDIR to a folder)") from error
    return folder


def _fetch(checkpoint: RemotePath, folder: Path) -> None:
    """Fetch a remote checkpoint into an empty folder, trusting only its manifest.

    Raises:
        CheckpointError: damaged; StoreError, if it cannot be read now; or no room for it.
    """
    try:
        files = read_manifest(checkpoint)
        total = sum(entry["size"] for entry in files.values())
        if (free := shutil.disk_usage(folder).free) < total:
            room = f"{total / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB free"
            raise CheckpointError(f"{checkpoint}: no room for a copy in {folder.parent}: {room} (set TMPDIR to another folder)")
        bar = tqdm(
            total=total, unit="B", unit_scale=True, desc=f"reading {checkpoint.name}", file=sys.stderr, disable=None,
            leave=False,
        )  # fmt: skip
        with bar, ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda name: _copy(checkpoint / name, folder / name, files[name], bar), files)
            problem = next((problem for problem in found if problem), None)
        if problem := problem or check_content(folder, files) or check_pieces(folder, files):
            raise DamagedFile(problem)
    except DamagedFile as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    except FileNotFoundError as error:
        raise StoreError(f"{checkpoint}: {first_line(error)}") from error


def _copy(source: RemotePath, target: Path, entry: dict, bar: tqdm) -> str | None:
    """Copy a file while its bytes match its {"size", "sha256"}; return the problem."""
    if source.lstat().st_size != entry["size"]:
        return check_file(source, entry)
    digest, left = hashlib.sha256(), entry["size"]
    with source.open("rb") as read, open(target, "xb") as written:
        while left and (chunk := read.read(min(_CHUNK, left))):
            digest.update(chunk)
            written.write(chunk)
            left -= len(chunk)
            bar.update(len(chunk))
    return f"{source.name} is damaged" if left or digest.hexdigest() != entry["sha256"] else None
