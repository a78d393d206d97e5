"""What the ranks of test_shared_verification.py run."""

import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.cases import remove, shared_folder
from torchtitan.checkpoint import checkpointer as checkpoint
from torchtitan.checkpoint import finding, manifest
from torchtitan.checkpoint.checkpointer import (
    Checkpointer,
    checkpoint_path,
    read_tensors,
    read_tensors_together,
    verify,
)
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.finding import verify_together
from torchtitan.distributed.collectives import from_first_rank
from torchtitan.errors import CheckpointError, StoreError
from torchtitan.files.shard_files import Piece, write_shard


def tensors() -> dict[str, torch.Tensor]:
    """Two sharded tensors, one of whose last shard is short, and two plain ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {"weight": torch.arange(24.0).view(8, 3), "bias": torch.arange(7.0)}
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in sharded.items()} | {
        "step": torch.ones(2, 2), "table": torch.zeros(5),
    }  # fmt: skip


def in_first(function, *given) -> None:
    """Call a function on the first rank while the others wait."""
    if dist.get_rank() == 0:
        function(*given)
    dist.barrier()


def relocated(pieces: list[Piece], row: int) -> list[Piece]:
    """Pieces of a shard with the weight's moved to another row."""
    return [dataclasses.replace(piece, offsets=(row, 0)) if piece.name == "weight" else piece for piece in pieces]


def checked_together() -> dict[str, object]:
    """What each rank reads of a checkpoint, and what all say of a damaged one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = Path(shared_folder())
    found: dict[str, object] = {}
    hashed = noted(manifest, "hash_file")
    keeper = Checkpointer(folder / "run" / "checkpoint", CheckpointConfig(enable=True), rank)
    keeper.save(1, tensors(), {"step": 1})
    path = checkpoint_path(keeper.folder, 1)
    found["saved"] = keeper.wait()
    hashed.clear()
    found["found"] = [keeper.find(), sorted(hashed)]
    found |= read_in_other_layouts(path)
    shard = path / f"shard-{ranks:05d}.safetensors"
    content = {file: file.read_bytes() for file in sorted(path.iterdir())}
    dist.barrier()
    for damage in DAMAGES:
        in_first(DAMAGES[damage], path, shard)
        found[damage] = [verify_together(path), verify(path), keeper.newest()]
        dist.barrier()
        in_first(restore, path, content)
    keeper.save(2, tensors(), {"step": 2})
    checkpoint.write_shard = lambda path, pieces: write_shard(path, relocated(pieces, 4) if rank == 1 else pieces)
    keeper.save(3, tensors(), {"step": 3})
    found["wrong place"] = [str(keeper.wait()), keeper.find()]
    remove(folder)
    return found


def read_in_other_layouts(path: Path) -> dict[str, object]:
    """Whether tensors are what was saved where each is sharded otherwise; errors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors().items()}
    placements = {"weight": [Shard(1)], "bias": [Replicate()], "step": [Shard(0)], "table": None}
    zeros = {name: torch.zeros_like(value) for name, value in saved.items()}
    found = {
        name: zeros[name] if placing is None else distribute_tensor(zeros[name], mesh, placing)
        for name, placing in placements.items()
    }
    read_tensors_together(path, found)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    errors = []
    for wanted in ({"weigth": torch.zeros(8, 3)}, {"weight": torch.zeros(8, 4)}):
        mine = wanted if dist.get_rank() == 1 else {"table": torch.zeros(5)}
        try:
            read_tensors_together(path, mine)
        except CheckpointError as error:
            errors.append(str(error).partition(": does not fit this model: ")[2])
    zeros = torch.zeros_like(saved["weight"])
    if dist.get_rank() == 1:
        read_tensors(path, {"weight": zeros})
    try:
        from_first_rank(read_tensors_together, path, {"weight": zeros.clone()})
    except AssertionError as error:
        errors.append(str(error))
    return {
        "read": all(torch.equal(whole[name], saved[name]) for name in saved), "unread": errors,
        "read by one rank": torch.equal(zeros, saved["weight"]) == (dist.get_rank() == 1),
    }  # fmt: skip


def store_that_does_not_answer() -> str:
    """What every rank raises when one cannot reach the store."""
    folder = Path(shared_folder())
    keeper = Checkpointer(folder / "checkpoint", CheckpointConfig(enable=True), dist.get_rank())
    keeper.save(1, tensors(), {})

    def unanswered(*given):
        raise StoreError(f"rank {dist.get_rank()} gets no answer")

    if dist.get_rank() == 1:
        finding.check_files = unanswered
    try:
        keeper.find()
    except StoreError as error:
        return str(error)
    finally:
        remove(folder)
    return "nothing"


def noted(module, name: str) -> list[str]:
    """Names of the files for which a module's function is called from now on."""
    original, files = getattr(module, name), []

    def call(path):
        files.append(path.name)
        return original(path)

    setattr(module, name, call)
    return files


def _flip(path: Path, shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def _rewrite(path: Path, shard: Path, row: int) -> None:
    """Move a piece, and make the manifest fit: only the pieces can tell."""
    with_header = shard.read_bytes()
    length = int.from_bytes(with_header[:8], "little")
    header = json.loads(with_header[8 : 8 + length])
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    places["weight"]["saved_offsets"][0] = row
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + with_header[8 + length :])
    files = manifest.read_manifest(path)
    files[shard.name] = {"size": shard.stat().st_size, "sha256": manifest.hash_file(shard)}
    (path / "manifest.json").unlink()
    manifest.write_manifest(path, files)


DAMAGES = {
    "byte": _flip,
    "cut": lambda path, shard: shard.write_bytes(shard.read_bytes()[:-1]),
    "missing": lambda path, shard: shard.unlink(),
    "overlap": lambda path, shard: _rewrite(path, shard, 5),
    "stray": lambda path, shard: (path / "shard-00009.safetensors").write_bytes(shard.read_bytes()),
    "manifest": lambda path, shard: (path / "manifest.json").write_text("{"),
}


def restore(path: Path, content: dict[Path, bytes]) -> None:
    """Give a folder back the files that it had."""
    for file in path.iterdir():
        file.unlink()
    for file, data in content.items():
        file.write_bytes(data)
