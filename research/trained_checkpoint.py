"""Identity of a trained checkpoint, and the number of images it has seen."""

import hashlib
import json
from pathlib import Path

from torchtitan.checkpoint.checkpointer import CheckpointError, checkpoint_path, read_state
from torchtitan.checkpoint.location import run_checkpoints
from torchtitan.checkpoint.manifest import read_manifest
from torchtitan.errors import DamagedFile

_DIGITS = 12  # of SHA-256: enough to distinguish checkpoints of one table, and still readable


def checkpoint_digest(run: Path, step: int) -> str:
    """Digest of a checkpoint's weights and state: another training has another one, a copy elsewhere the same.

    Args:
        run: the run's folder.
        step: of the checkpoint.

    Raises:
        CheckpointError: it is not there, or its manifest is damaged.
    """
    checkpoint = checkpoint_path(run_checkpoints(run), step)
    try:
        files = read_manifest(checkpoint)
    except DamagedFile as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def samples_seen(run: Path, step: int) -> int:
    """Samples seen by a checkpoint, with repetitions. Raises CheckpointError."""
    checkpoint = checkpoint_path(run_checkpoints(run), step)
    try:
        return int(read_state(checkpoint)["data"]["next_sample"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: does not say how many images it has seen") from error
