"""Verification of a checkpoint divided between the ranks: each reads and hashes its share of the files, and checks its
share of the tensors.

With R ranks and a checkpoint of R shards a rank reads one shard, whatever R is. The place of each piece goes to the one
rank that checks its tensor, so that no rank sees the pieces of all.
"""

import heapq
import zlib

import torch.distributed as dist

from torchtitan.checkpoint.manifest import check_content, check_files, problem_of_pieces, read_manifest, shards_of
from torchtitan.distributed.collectives import from_each_rank, from_first_rank, of_all_ranks
from torchtitan.errors import DamagedFile, StoreError
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.shard_files import Place, check_filled, read_places


def verify_together(checkpoint: AnyPath, group: dist.ProcessGroup | None = None) -> str | None:
    """Read every byte of a checkpoint, each rank its share; collective.

    Returns:
        as `verify`, on every rank.

    Raises:
        StoreError: on every rank; the store does not answer, which is not damage.
    """
    files, problem = from_first_rank(_files_of, checkpoint, group=group)
    if problem:
        return problem
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = shares_of(files, world_size)[rank]
    found: list[str | None] = [None, None]  # of the files, of the folder
    error: StoreError | None = None
    try:
        found[0] = check_files(checkpoint, {name: files[name] for name in share})
        found[1] = check_content(checkpoint, files) if rank == 0 else None
    except StoreError as unanswered:
        error = unanswered
    try:
        found += check_pieces_together(checkpoint, [] if error or found[0] else share, group)
    except StoreError as unanswered:
        error = unanswered
    answers = of_all_ranks((found, error), group)
    if first_error := next((error for _, error in answers if error), None):
        raise first_error
    return first_problem([problems for problems, _ in answers])


def first_problem(found: list[list[str | None]]) -> str | None:
    """First problem of several ranks, each with a list in the same order: causes stand before what follows from them."""
    return next((problem for kind in zip(*found, strict=True) for problem in kind if problem), None)


def check_pieces_together(
    checkpoint: AnyPath, share: list[str], group: dist.ProcessGroup | None = None
) -> tuple[str | None, str | None]:
    """Check the headers of this rank's share of the files, and that the pieces of this rank's share of the tensors fill each
    once; collective.

    Args:
        checkpoint: the folder.
        share: names of files; the shares of all ranks together have each file once. Empty on a rank that failed before.
        group: of all ranks.

    Returns:
        the problem of a header, and of a tensor, that this rank found; another rank may have found one, too.

    Raises:
        StoreError: on this rank, after the exchange.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    for_rank: list[list[tuple[str, Place]]] = [[] for _ in range(world_size)]
    problem = error = None
    try:
        problem = problem_of_pieces(checkpoint, lambda: _deal(shards_of(checkpoint, share), for_rank))
    except StoreError as unanswered:  # the others wait in the exchange
        error = unanswered
    here = [{name: place} for pieces in from_each_rank(for_rank, group) for name, place in pieces]
    if error:
        raise error
    return problem, problem_of_pieces(checkpoint, lambda: check_filled(here))


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


def _deal(shards: list[AnyPath], for_rank: list[list[tuple[str, Place]]]) -> None:
    """Deal the pieces of shards to the ranks that check their tensors."""
    for shard in shards:
        for name, place in read_places(shard).items():
            for_rank[zlib.crc32(name.encode()) % len(for_rank)].append((name, place))
