"""Checkpoints: a folder that is complete and verified, or does not count.

    checkpoint/step-00001000/shard-*.safetensors  every tensor of the run's state, in pieces
                             state.json           counters and whatever else is not a tensor
                             manifest.json        size and SHA-256 of each file; written last

A checkpoint is written, read back, and counts once it is whole (checkpoint/store.py). Tensors are read back in
any layout (checkpoint/reading.py; torch.distributed.checkpoint can, too). Nothing is pickled.

Saving does not use torch.distributed.checkpoint: names and layouts determine the rank that writes each piece, so that a
rank copies only its own share to host memory, and the ranks only exchange the outcome. They do so in a separate process
group, while training continues.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint.config import CheckpointConfig
from torchtitan.checkpoint.finding import CheckpointFinder, newest_good, verify
from torchtitan.checkpoint.host_copies import HostCopies
from torchtitan.checkpoint.manifest import (
    STATE,
    check_content,
    check_pieces,
    checkpoint_path,
    checkpoint_steps,
    glance,
    read_back,
)
from torchtitan.checkpoint.pieces import pieces_of
from torchtitan.checkpoint.reading import read_state, read_tensors, read_tensors_together
from torchtitan.checkpoint.store import store_of
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks
from torchtitan.errors import CheckpointError, StoreError, first_line
from torchtitan.files.durable import write_synced
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.shard_files import Piece, write_shard

__all__ = [
    "CheckpointError", "Checkpointer", "StoreError", "checkpoint_path", "checkpoint_steps",
    "newest_good", "read_state", "read_tensors", "read_tensors_together", "verify",
]  # fmt: skip

logger = logging.getLogger(__name__)

# How long a rank waits for the others' share of a checkpoint.
_GROUP_TIMEOUT = timedelta(minutes=10)


class Checkpointer:
    """Checkpointer of one run: saves and finds its checkpoints. Every method is called by all ranks together.

    A save that fails does not end the run: its folder is removed, earlier checkpoints stay, the next save tries again.

    Attributes:
        failures: saves of this process that failed; settled by `wait`.
    """

    def __init__(self, folder: AnyPath, config: CheckpointConfig, rank: int) -> None:
        self.folder = folder
        self.failures = 0
        self._store = store_of(folder)
        self._finder = CheckpointFinder(folder, self._store, rank)
        self._config = config
        self._rank = rank
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._group: dist.ProcessGroup | None = None  # of saves
        self._problem: str | None = None  # of the last save
        self._last: int | None = None  # step of the last save that came off, on the first rank
        self._pending: Future[None] | None = None
        self._copies = self._thread = None
        if config.async_mode != "disabled":
            self._copies = HostCopies(pinned=config.async_mode == "async_with_pinned_mem")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def find(self) -> int | None:
        """Find the step to resume from, as `CheckpointFinder.find`."""
        return self._finder.find(self._config.load_step)

    def branch(self, step: int) -> None:
        """Set aside the checkpoints after a step that `checkpoint.load_step` has named, once the run has resumed from it."""
        if step == self._config.load_step:
            self._finder.set_aside_after(step)

    def newest(self) -> int | None:
        """Find the newest good checkpoint's step, on every rank; waits for a save in progress."""
        self.wait()
        return self._finder.newest()[0]

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict,
        before: Callable[[], None] = lambda: None,
        stored_as: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        """Save a checkpoint of the present values, then delete those beyond keep_latest_k.

        Returns when it is written, or with `checkpoint.async_mode` once the values are copied; one save at a time.

        Args:
            tensors: every tensor by name, plain (equal on all ranks) or sharded along one axis of the mesh.
            state: JSON-serialisable; the first rank's is written.
            before: called on every rank before the checkpoint counts, perhaps in another thread: brings the run's other
                files to the disk, for a run that resumes from it. Raises nothing.
            stored_as: dtype in the files of the tensors with these names; others keep their own.
        """
        self.wait()
        if self._world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
        frozen = json.dumps(state, indent=1).encode()
        pieces = [
            dataclasses.replace(piece, stored_as=stored_as.get(piece.name))
            for piece in pieces_of(tensors, self._rank, self._world_size)
        ]
        if self._thread is None or self._copies is None:
            self._save(step, pieces, frozen, before)
        else:
            self._pending = self._thread.submit(self._save, step, self._copies.take(pieces), frozen, before)

    def wait(self) -> str | None:
        """Wait until no save is in progress; return why the last one failed, on every rank, or None."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
        return self._problem

    @property
    def under_way(self) -> bool:
        """True while a save is written during training, on this rank."""
        return self._pending is not None and not self._pending.done()

    def require_saved(self) -> None:
        """Require a good last save: wait for it. Raises CheckpointError: it failed, or is damaged by now."""
        if problem := self.wait() or from_first_rank(self._look_at_last):
            newest = self.newest()
            goes_on = "begins anew" if newest is None else f"goes on from step {newest}, the newest good one"
            raise CheckpointError(f"the last checkpoint was not saved (the same command {goes_on}): {problem}")

    def _look_at_last(self) -> str | None:
        path = checkpoint_path(self.folder, self._last) if self._last is not None else None
        problem = glance(path) if path else None
        return f"{path}: {problem}, though it was written" if problem else None

    def close(self) -> None:
        """Close: let a save in progress end, also on a run that fails."""
        if self._thread is not None:
            self._thread.shutdown()

    # ---------------------------------------------------------------------- saving, perhaps during training

    def _save(self, step: int, pieces: list[Piece], state: bytes, before: Callable[[], None]) -> None:
        left = "nothing of it is kept"
        try:
            if self._copies is not None:
                self._copies.wait()
            before()
            self._problem = self._write(step, pieces, state)
        except (OSError, RuntimeError) as error:  # another rank is gone
            self._problem = f"{checkpoint_path(self.folder, step)}: cannot be written: {first_line(error)}"
            left = "a resume uses it where it is whole"
        if self._problem:
            self.failures += 1
            if self._rank == 0:
                logger.error(
                    f"{self._problem}; {left}, and the next save tries again where training continues "
                    f"(failures so far: {self.failures})"
                )

    def _write(self, step: int, pieces: list[Piece], state: bytes) -> str | None:
        """Write a checkpoint together with the other ranks; return the failure on any of them."""
        partial, problem = from_first_rank(self._begin, step, group=self._group)
        if problem is None:
            files, failure = self._write_files(self.folder / partial, pieces, state)
            outcomes = of_all_ranks((files, failure), group=self._group)
            files = {name: entry for written, _ in outcomes for name, entry in written.items()}
            problem = next((failure for _, failure in outcomes if failure), None)
            problem = from_first_rank(self._conclude, partial, step, files, problem, group=self._group)
        return f"{checkpoint_path(self.folder, step)}: cannot be written: {problem}" if problem else None

    def _begin(self, step: int) -> tuple[str, str | None]:
        try:
            return self._store.begin(step), None
        except OSError as error:
            return "", first_line(error)

    def _write_files(self, partial: AnyPath, pieces: list[Piece], state: bytes) -> tuple[dict[str, dict], str | None]:
        """Write this rank's files and read them back; return their entries of the manifest, and the failure."""
        files = {}
        try:
            if pieces:
                name = f"shard-{self._rank + 1:05d}.safetensors"
                files[name] = write_shard(partial / name, pieces)
            if self._rank == 0:
                files[STATE] = write_synced(partial / STATE, state)
            for name, entry in files.items():
                read_back(partial / name, entry)
        except OSError as error:
            return files, first_line(error)
        return files, None

    def _conclude(self, partial: str, step: int, files: dict[str, dict], problem: str | None) -> str | None:
        """Conclude a save: let the checkpoint count, or remove it; return the failure."""
        try:
            folder = self.folder / partial
            problem = problem or check_content(folder, files) or check_pieces(folder, files)
            if problem is None:
                self._store.commit(partial, step, files)
        except OSError as error:
            problem = first_line(error)
        if problem:
            self._store.discard(partial)
            return problem
        self._last = step
        try:
            self._delete_old(step)
        except OSError as error:
            logger.warning(f"{self.folder}: older checkpoints could not be deleted: {first_line(error)}")
        return None

    def _delete_old(self, saved: int) -> None:
        """Delete checkpoints older than the newest keep_latest_k; one that is damaged by now is not one of them."""
        keep, whole = self._config.keep_latest_k, 0
        if keep == 0:
            return
        # Later steps are damaged; if they counted, they would push out the one just saved.
        for step in (step for step in checkpoint_steps(self.folder) if step <= saved):
            path = checkpoint_path(self.folder, step)
            if whole >= keep:
                self._store.delete(step)
            elif problem := glance(path):
                logger.warning(f"{path}: {problem}; an older one is kept instead")
            else:
                whole += 1
