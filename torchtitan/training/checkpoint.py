"""Checkpoints: a folder that is complete and verified, or does not count.

    checkpoint/step-00001000/shard-*.safetensors  every tensor of the run's state, in pieces (torch.distributed.checkpoint)
                             state.json           counters and whatever else is not a tensor
                             manifest.json        size and SHA-256 of each file; written last

A checkpoint is written into a new hidden folder and renamed when it is whole. Tensors are read back in any
layout. Nothing is pickled.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from torchtitan.distributed.agreement import from_first_rank
from torchtitan.settings import setting

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"step-(\d{8,})")
_STATE, _MANIFEST = "state.json", "manifest.json"


@dataclass(kw_only=True)
class CheckpointConfig:
    """`[checkpoint]`"""

    enable: bool = setting(True, "save checkpoints and resume from the newest good one", trajectory=False)
    interval: int = setting(
        1000, "steps between checkpoints; the last step is always saved", ge=1, applies={"enable": (True,)},
        trajectory=False,
    )
    keep_latest_k: int = setting(
        3, "checkpoints kept, older ones are deleted; 0 keeps all", ge=0, applies={"enable": (True,)}, trajectory=False
    )
    load_step: int = setting(
        -1, "step to resume from; -1 is the newest good one", ge=-1, applies={"enable": (True,)}, trajectory=False
    )
    initial_weights: str = setting(
        "", "safetensors file, named as the model's parameters, that a run starts from; not read when it resumes"
    )


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message is one line."""


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoint folders under `folder`, good or not, newest first."""
    names = (_FOLDER.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in names if match), reverse=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def verify(checkpoint: Path) -> str | None:
    """Read every byte of a checkpoint.

    Returns:
        None for a good checkpoint, else in a few words what is wrong with it.
    """
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_bytes())
        files = manifest["files"]
        damaged = manifest["digest"] != _digest_of(files)
    except FileNotFoundError:
        return f"{_MANIFEST} is missing: the save was cut off"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        damaged = True
    if damaged:
        return f"{_MANIFEST} is damaged"
    # The reader takes every shard in the folder, so one that was not verified must not lie there.
    stray = sorted(path.name for path in checkpoint.glob("*.safetensors") if path.name not in files)
    if stray:
        return f"{stray[0]} is not in {_MANIFEST}"
    with ThreadPoolExecutor(4) as pool:
        problems = pool.map(lambda name: _check_file(checkpoint / name, **files[name]), files)
        return next((problem for problem in problems if problem), None)


def newest_good(folder: Path) -> tuple[int | None, list[str]]:
    """Step of the newest good checkpoint, and one line for each newer one that is damaged."""
    skipped = []
    for step in checkpoint_steps(folder):
        problem = verify(checkpoint_path(folder, step))
        if problem is None:
            return step, skipped
        skipped.append(f"{checkpoint_path(folder, step)}: {problem}; skipped")
    return None, skipped


def read_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors (plain or sharded) in place from a verified checkpoint, by name. Raises CheckpointError."""
    try:
        with _single_process_allowed():
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    except (dcp.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{checkpoint}: does not fit this model: {_first_line(error)}") from error


def read_state(checkpoint: Path) -> dict:
    """What is not a tensor."""
    return json.loads((checkpoint / _STATE).read_bytes())


class Checkpointer:
    """Saves and finds the checkpoints of one run. Every method is called by all ranks together."""

    def __init__(self, folder: Path, config: CheckpointConfig, rank: int) -> None:
        self.folder = folder
        self._config = config
        self._rank = rank

    def find(self) -> int | None:
        """Step to resume from, None for a new run; names damaged checkpoints in the log.

        Raises:
            CheckpointError: `checkpoint.load_step` names a step that is missing or damaged.
        """
        step, messages, error = from_first_rank(self._find)
        for message in messages:
            if self._rank == 0:
                logger.warning(message)
        if error:
            raise CheckpointError(error)
        return step

    def newest(self) -> int | None:
        """Step of the newest good checkpoint, on every rank."""
        return from_first_rank(lambda: newest_good(self.folder)[0])

    def save(self, step: int, tensors: dict[str, Tensor], state: dict) -> None:
        """Write a checkpoint, then delete those beyond keep_latest_k.

        Args:
            step: optimizer steps done.
            tensors: every tensor by name, plain (equal on all ranks) or sharded.
            state: JSON-serialisable, equal on all ranks.

        Raises:
            CheckpointError: it could not be written, on every rank.
        """
        try:
            partial = Path(from_first_rank(self._new_folder, step))
        except OSError as error:
            raise CheckpointError(f"{checkpoint_path(self.folder, step)}: cannot be written: {error}") from error
        try:
            writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
            with _single_process_allowed():
                dcp.save(tensors, storage_writer=writer)
        except (dcp.CheckpointException, RuntimeError, OSError) as error:
            raise CheckpointError(f"{partial}: cannot be written: {_first_line(error)}") from error
        problem = from_first_rank(self._commit, partial, step, state)
        if problem:
            raise CheckpointError(problem)

    def _find(self) -> tuple[int | None, list[str], str | None]:
        if self.folder.is_dir():
            for path in self.folder.glob(".*"):
                shutil.rmtree(path, ignore_errors=True)
        wanted = self._config.load_step
        if wanted >= 0:
            path = checkpoint_path(self.folder, wanted)
            problem = verify(path) if path.exists() else "no such checkpoint"
            if problem:
                there = ", ".join(map(str, checkpoint_steps(self.folder))) or "none"
                message = f"checkpoint.load_step: {wanted}: {problem} (checkpoints in {self.folder}: {there})"
                return None, [], message
            return wanted, self._set_aside_after(wanted), None
        step, skipped = newest_good(self.folder)
        return step, skipped, None

    def _set_aside_after(self, step: int) -> list[str]:
        """Keep later checkpoints under names that do not count: the next restart must follow the new branch."""
        messages = []
        for later in checkpoint_steps(self.folder):
            if later > step:
                path = checkpoint_path(self.folder, later)
                aside = path.with_name(f"set-aside-{path.name}-{uuid.uuid4().hex[:8]}")
                path.rename(aside)
                messages.append(f"{path}: is later than checkpoint.load_step = {step}; kept as {aside.name}")
        return messages

    def _new_folder(self, step: int) -> str:
        partial = self.folder / f".step-{step:08d}-{uuid.uuid4().hex[:8]}"
        partial.mkdir(parents=True)
        return str(partial)

    def _commit(self, partial: Path, step: int, state: dict) -> str | None:
        """Complete the folder and give it its name; returns what went wrong."""
        final = checkpoint_path(self.folder, step)
        try:
            (partial / _STATE).write_text(json.dumps(state, indent=1))
            _write_manifest(partial)
            if final.exists():
                # Only a damaged one is there: a good one would have been resumed from or set aside.
                final.rename(self.folder / f".replaced-{final.name}-{uuid.uuid4().hex[:8]}")
            partial.rename(final)
            _sync(self.folder)
        except OSError as error:
            return f"{final}: cannot be written: {error}"
        self._delete_old(step)
        return None

    def _delete_old(self, saved: int) -> None:
        if self._config.keep_latest_k == 0:
            return
        # Later steps are damaged; if they counted, they would push out the one just saved.
        older = [step for step in checkpoint_steps(self.folder) if step < saved]
        for step in older[self._config.keep_latest_k - 1 :]:
            path = checkpoint_path(self.folder, step)
            # Renamed first: a delete that is cut off must not leave something that looks like a checkpoint.
            hidden = self.folder / f".deleted-{path.name}"
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def _write_manifest(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(_hash_file, paths))
    files = {
        path.name: {"size": path.stat().st_size, "sha256": value} for path, value in zip(paths, hashes, strict=True)
    }
    for path in paths:
        _sync(path)
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({"files": files, "digest": _digest_of(files)}, indent=1))
    _sync(manifest)
    _sync(folder)


def _digest_of(files: dict) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(path: Path, size: int, sha256: str) -> str | None:
    try:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        return None if _hash_file(path) == sha256 else f"{path.name} is damaged"
    except OSError:
        return f"{path.name} is missing or unreadable"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _single_process_allowed() -> Iterator[None]:
    """Without torch's warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
