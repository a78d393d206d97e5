"""Checks of sizes: processes, batches, loader processes."""

from collections.abc import Callable, Iterator

from torchtitan.config.view import ConfigView
from torchtitan.pictures.number_text import counted
from torchtitan.processes.launch import launch_number
from torchtitan.settings.schema import Problem
from torchtitan.settings.sizes import largest_divisor
from torchtitan.training.loader_processes import loader_problem, prefetch_problem


def _degrees(checked: ConfigView) -> Iterator[Problem]:
    keys = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
    degrees = [getattr(checked.parallelism, key) for key in keys]
    zeros = [key for key in keys if getattr(checked.parallelism, key) == 0]
    for key in zeros:
        yield Problem(f"parallelism.{key}", "must be at least 1, or -1 for as many as remain, is 0")
    if zeros:
        return
    replicas, shards = degrees
    processes = f"the {counted(checked.world_size, 'process', 'es')}"
    ranks, context = checked.data_ranks, checked.parallelism.context_parallel_degree
    if checked.world_size % context:
        text = f"{context} does not divide {processes} of this run ({_started_by(context)})"
        yield Problem("parallelism.context_parallel_degree", text)
        return
    if context > 1:
        processes = f"the {counted(ranks, 'group')} of {context} processes"
    if replicas == shards == -1:
        yield Problem(f"parallelism.{keys[0]}", f"is -1, and so is parallelism.{keys[1]} (set one of the two to a number)")
    elif -1 in degrees:
        known = degrees.index(max(degrees))
        if ranks % degrees[known]:
            text = f"{degrees[known]} does not divide {processes} of this run ({_started_by(degrees[known] * context)})"
            yield Problem(f"parallelism.{keys[known]}", text)
    elif replicas * shards != ranks:
        key = f"parallelism.{keys[0]}"
        if key not in checked.given:
            key = f"parallelism.{keys[1]}"
        needed = _started_by(replicas * shards * context)
        text = f"{replicas} replicas x {shards} shards are not {processes} of this run (-1 is as many as remain; {needed})"
        yield Problem(key, text)


def _started_by(processes: int) -> str:
    return f"NGPU={processes} scripts/train.sh starts {processes}, also to check only; an estimate has --world-size"


def batch_sizes(checked: ConfigView) -> Iterator[Problem]:
    wanted, local, ranks = checked.training.global_batch_size, checked.training.local_batch_size, checked.data_ranks
    if wanted == local == -1:
        yield Problem("training.local_batch_size", "is -1, and so is training.global_batch_size (set one of the two to a number)")
    elif local == 0:
        yield Problem("training.local_batch_size", "must be at least 1, or -1 for a rank's share, is 0")
    elif local == -1 and (wanted == 0 or wanted % ranks):
        near = [f"{size}" for size in (wanted // ranks * ranks, (wanted // ranks + 1) * ranks) if size > 0]
        text = f"{wanted} is not a multiple of {counted(ranks, 'rank')} (set {' or '.join(near)})"
        yield Problem("training.global_batch_size", text)
    elif local != -1 and wanted != -1 and (wanted == 0 or wanted % (ranks * local)):
        whole = wanted > 0 and not wanted % ranks
        whole = whole and not _problem_of_share(wanted // ranks, -1, checked.training.max_local_batch_size, ranks)
        other = ", or set training.local_batch_size = -1" if whole else ""
        text = (
            f"{wanted} is not a multiple of {ranks * local} = {counted(ranks, 'rank')} x training.local_batch_size"
            f" (set a multiple, or -1 for {ranks * local}{other})"
        )
        yield Problem("training.global_batch_size", text)
    elif wanted != -1 and (text := _problem_of_share(wanted // ranks, local, checked.training.max_local_batch_size, ranks)):
        yield Problem("training.global_batch_size", text)


def _problem_of_share(share: int, local: int, limit: int, ranks: int) -> str:
    """Problem with a rank's `share` of the batch, computed `local` images at a time; for -1, at most `limit` (0: all)."""
    size = local if local != -1 else limit or share
    if local == -1 and share > size and 4 * largest_divisor(share, size) < size:
        fitting = -(-share // limit) * limit * ranks
        text = f"{share} images per rank split into no equal parts of about {limit}, training.max_local_batch_size"
        return f"{text} (set a multiple of {limit * ranks}, as {fitting})"
    return ""


def global_batch_size(checked: ConfigView) -> int:
    """Global batch size that follows from sizes without problems."""
    wanted, local = checked.training.global_batch_size, checked.training.local_batch_size
    return checked.data_ranks * local if wanted == -1 else wanted


def local_batch_size(checked: ConfigView) -> int:
    """Images of a rank in one forward that follow from sizes without problems."""
    training = checked.training
    if training.local_batch_size != -1:
        return training.local_batch_size
    share = training.global_batch_size // checked.data_ranks
    return largest_divisor(share, training.max_local_batch_size or share)


def _loader_processes(checked: ConfigView) -> Iterator[Problem]:
    if checked.elsewhere:
        return
    workers, ranks = checked.data.num_workers, launch_number("LOCAL_WORLD_SIZE", checked.world_size)
    if text := loader_problem(workers, ranks):
        yield Problem("data.num_workers", text)
    elif workers:
        local = checked.training.local_batch_size
        local = checked.training.global_batch_size // checked.data_ranks if local == -1 else local
        batch_bytes = local * checked.dataset().sample_bytes
        if text := prefetch_problem(batch_bytes, workers, ranks):
            yield Problem("data.num_workers", text)


def _pairs(checked: ConfigView) -> Iterator[Problem]:
    objective = checked.whole("objective")
    if not getattr(objective, "contrastive_weight", 0.0) or any(batch_sizes(checked)):
        return
    if (local := local_batch_size(checked)) % 2:
        text = f"{local} is odd: objective.contrastive_weight sets the samples of a microbatch against each other in pairs"
        yield Problem("training.local_batch_size", f"{text} (make it even)")


SIZE_CHECKS: list[Callable[[ConfigView], Iterator[Problem]]] = [_loader_processes, batch_sizes, _pairs, _degrees]
