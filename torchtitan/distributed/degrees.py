"""Degrees of parallelism: how many processes a run has and what they share; without torch, for those who read files alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchtitan.settings.sizes import is_count

DEGREE_KEYS = (
    "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree",
    "parallelism.context_parallel_degree",
)  # fmt: skip


class Degrees(NamedTuple):
    """Resolved degrees of a run.

    Attributes:
        replicas: copies of the model, of processes with images of their own.
        shards: of each copy, on processes with images of their own.
        context: processes that share the tokens of each image.
    """

    replicas: int
    shards: int
    context: int

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different images."""
        return self.replicas * self.shards

    @property
    def processes(self) -> int:
        return self.data_ranks * self.context

    @property
    def copies_and_shards(self) -> tuple[int, int]:
        """Copies of the weights and shards of each, of all processes: those that share tokens share, or repeat, the weights."""
        if self.shards > 1:
            return self.replicas, self.shards * self.context
        return self.replicas * self.context, 1

    def describe(self) -> str:
        """Describe the layout in words, such as `HSDP 2 x 2`; the product of the numbers is that of the processes."""
        if self.processes == 1:
            return "one process"
        if self.shards > 1:
            data = [f"FSDP x {self.shards}" if self.replicas == 1 else f"HSDP {self.replicas} x {self.shards}"]
        else:
            data = [f"DDP x {self.replicas}"] if self.replicas > 1 else []
        return ", ".join([*data, *([f"context parallel x {self.context}"] if self.context > 1 else [])])


def degrees_of(settings: Mapping[str, Any]) -> Degrees | None:
    """Degrees of a saved configuration, dotted key -> value; None where it does not give them as counts."""
    replicas, shards, context = map(settings.get, DEGREE_KEYS)
    if DEGREE_KEYS[2] not in settings:
        context = 1  # runs of earlier versions lack the key
    return Degrees(replicas, shards, context) if is_count(replicas) and is_count(shards) and is_count(context) else None
