"""What the ranks of test_shared_verification.py run."""

import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.cases import remove, shared_folder
from torchtitan.checkpoint import checkpointer as checkpoint
from torchtitan.checkpoint import manifest, shared_verification
from torchtitan.checkpoint.checkpointer import Checkpointer, checkpoint_path, verify
from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.shared_verification import verify_together
from torchtitan.distributed.collectives import from_each_rank
from torchtitan.errors import StoreError
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
    return [
        dataclasses.replace(piece, offsets=(row, 0)) if piece.name == "weight" else piece for piece in pieces
    ]


def checked_together() -> dict[str, object]:
    """What each rank reads of a checkpoint, and what all say of a damaged one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = Path(shared_folder())
    found: dict[str, object] = {"sent": from_each_rank([f"{rank} to {other}" * other for other in range(ranks)])}
    headers, hashed = noted(shared_verification, "read_places"), noted(manifest, "hash_file")
    keeper = Checkpointer(folder / "run" / "checkpoint", CheckpointConfig(enable=True), rank)
    keeper.save(1, tensors(), {"step": 1})
    path = checkpoint_path(keeper.folder, 1)
    found["saved"] = [keeper.wait(), sorted(headers)]
    headers.clear()
    hashed.clear()
    found["found"] = [keeper.find(), sorted(headers), sorted(hashed)]
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


def store_that_does_not_answer() -> str:
    """What every rank raises when one cannot reach the store."""
    folder = Path(shared_folder())
    keeper = Checkpointer(folder / "checkpoint", CheckpointConfig(enable=True), dist.get_rank())
    keeper.save(1, tensors(), {})

    def unanswered(*given):
        raise StoreError(f"rank {dist.get_rank()} gets no answer")

    if dist.get_rank() == 1:
        shared_verification.check_files = unanswered
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
