"""Find the checkpoint that a run resumes from: the newest good one, or that of `checkpoint.load_step`.

Every byte is read before a checkpoint counts. Ranks divide its files; the first one checks the headers of all shards.
"""

import heapq
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from torchtitan.checkpoint.manifest import (
    MANIFEST,
    check_content,
    check_file,
    check_pieces,
    checkpoint_path,
    checkpoint_steps,
    read_manifest,
)
from torchtitan.checkpoint.reading import read_state
from torchtitan.checkpoint.store import LocalStore, RemoteStore
from torchtitan.distributed.collectives import from_first_rank, group_for_work, of_all_ranks
from torchtitan.errors import CheckpointError, DamagedFile, StoreError
from torchtitan.files.remote_path import AnyPath

logger = logging.getLogger(__name__)

NONE_GOOD = "put a copy of a good one back, or remove all of them, and summary.json, to start the run from the beginning"
BRANCHED_FROM = "branched_from"  # entry of a checkpoint's state: the `checkpoint.load_step` applied last, or nothing


class CheckpointFinder:
    """Finder of one run's checkpoints. Every method is called by all ranks together."""

    def __init__(self, folder: AnyPath, store: LocalStore | RemoteStore, rank: int) -> None:
        self._folder, self._store, self._rank = folder, store, rank
        self._group: dist.ProcessGroup | None = None

    def find(self, wanted: int) -> int | None:
        """Find the step to resume from, None for a new run; names damaged checkpoints in the log.

        Args:
            wanted: `checkpoint.load_step`. Applied once: of later checkpoints, which record it, the newest counts.

        Raises:
            CheckpointError: the wanted step is missing or damaged, or every checkpoint is damaged.
            StoreError: the store does not answer.
        """
        from_first_rank(self._store.prepare)
        step, messages = self.newest()
        if wanted >= 0:
            if step is None or step <= wanted or from_first_rank(self._branch_of, step) != wanted:
                return self._find_wanted(wanted)
            messages.append(
                f"checkpoint.load_step: {wanted}: was applied before; resuming from the newest checkpoint, step {step} "
                f"(to start from {wanted} again, move the later checkpoints out of {self._folder})"
            )
        elif step is None and from_first_rank(self._has_saved):
            raise CheckpointError(f"{messages[0].removesuffix('; skipped')}, and no older one is good ({NONE_GOOD})")
        self._warn(messages)
        return step

    def newest(self) -> tuple[int | None, list[str]]:
        """Step of the newest good checkpoint, and one line for each newer one that is damaged."""
        return first_good(self._folder, from_first_rank(checkpoint_steps, self._folder), self._problem_of)

    def _problem_of(self, checkpoint: AnyPath) -> str | None:
        # The disk may keep one rank busy for longer than collectives of training wait.
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = group_for_work()
        return verify_together(checkpoint, self._group)

    def _branch_of(self, step: int) -> int | None:
        return read_state(checkpoint_path(self._folder, step)).get(BRANCHED_FROM)

    def _has_saved(self) -> bool:
        """Whether a save has ended here: the folders without a manifest are of cut off saves, or a user's."""
        return any((checkpoint_path(self._folder, step) / MANIFEST).exists() for step in checkpoint_steps(self._folder))

    def _find_wanted(self, step: int) -> int:
        path = checkpoint_path(self._folder, step)
        problem = self._problem_of(path) if from_first_rank(path.exists) else "no such checkpoint"
        if problem:
            there = ", ".join(map(str, from_first_rank(checkpoint_steps, self._folder))) or "none"
            raise CheckpointError(f"checkpoint.load_step: {step}: {problem} (checkpoints in {self._folder}: {there})")
        return step

    def set_aside_after(self, step: int) -> None:
        """Set aside later checkpoints under names that do not count: the next restart must follow the new branch."""
        self._warn(from_first_rank(self._set_aside_after, step))

    def _warn(self, messages: list[str]) -> None:
        for message in messages:
            if self._rank == 0:
                logger.warning(message)

    def _set_aside_after(self, step: int) -> list[str]:
        messages = []
        for later in checkpoint_steps(self._folder):
            if later > step:
                path = checkpoint_path(self._folder, later)
                aside = self._store.set_aside(later)
                messages.append(f"{path}: is later than checkpoint.load_step = {step}; kept as {aside}")
        return messages


def verify(checkpoint: AnyPath) -> str | None:
    """Read every byte of a checkpoint; its problem, or None. Raises StoreError: no answer, which is no damage."""
    try:
        files = read_manifest(checkpoint)
    except DamagedFile as error:
        return str(error)
    return check_files(checkpoint, files) or check_content(checkpoint, files) or check_pieces(checkpoint, files)


def verify_together(checkpoint: AnyPath, group: dist.ProcessGroup | None = None) -> str | None:
    """Read every byte of a checkpoint, each rank its share; collective. Returns as `verify`, on every rank.

    Raises:
        StoreError: on every rank; the store does not answer, which is not damage.
    """
    files, problem = from_first_rank(_files_of, checkpoint, group=group)
    if problem:
        return problem
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share, first = {name: files[name] for name in shares_of(files, world_size)[rank]}, rank == 0

    def problems() -> list[str | StoreError | None]:
        """Problems of this rank's files; on the first rank also of the checkpoint as a whole."""
        try:
            found = check_files(checkpoint, share)
            return [found, check_content(checkpoint, files), check_pieces(checkpoint, files)] if first else [found]
        except StoreError as error:
            return [error]

    answers = of_all_ranks(problems(), group)
    if unanswered := next((found[0] for found in answers if isinstance(found[0], StoreError)), None):
        raise unanswered
    damaged = [found[0] for found in answers] + answers[0][1:]  # causes before what follows from them
    return next((problem for problem in damaged if problem), None)


def check_files(checkpoint: AnyPath, files: dict[str, dict]) -> str | None:
    """Compare files with their entries of the manifest; return the problem. Raises StoreError."""
    with ThreadPoolExecutor(4) as pool:
        problems = pool.map(lambda name: check_file(checkpoint / name, files[name]), files)
        return next((problem for problem in problems if problem), None)


def shares_of(files: dict[str, dict], world_size: int) -> list[list[str]]:
    """Share of the files for each rank: from the largest down, each to the rank with the fewest bytes so far."""
    shares: list[list[str]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for name in sorted(files, key=lambda name: (-files[name]["size"], name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + files[name]["size"], rank))
        shares[rank].append(name)
    return shares


def _files_of(checkpoint: AnyPath) -> tuple[dict[str, dict], str | None]:
    try:
        return read_manifest(checkpoint), None
    except DamagedFile as error:
        return {}, str(error)


def newest_good(folder: AnyPath) -> tuple[int | None, list[str]]:
    """Step of the newest good checkpoint, and one line for each newer one that is damaged."""
    return first_good(folder, checkpoint_steps(folder), verify)


def first_good(
    folder: AnyPath, steps: Iterable[int], problem_of: Callable[[AnyPath], str | None]
) -> tuple[int | None, list[str]]:
    """First step with a good checkpoint (None: none has), trying in this order; a line for each before it."""
    skipped: list[str] = []
    for step in steps:
        problem = problem_of(checkpoint_path(folder, step))
        if problem is None:
            return step, skipped
        skipped.append(f"{checkpoint_path(folder, step)}: {problem}; skipped")
    return None, skipped
