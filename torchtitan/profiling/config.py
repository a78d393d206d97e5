"""`[profiling]`: its keys, and settings that would record nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchtitan.settings import setting


@dataclass(kw_only=True)
class ProfilingConfig:
    """`[profiling]`"""

    enable_profiling: bool = setting(
        False, "write traces of steps, and tables of their operations, to <run>/profile/trace", trajectory=False
    )
    profile_freq: int = setting(
        100, "steps between traces; of so many, the last that only train are traced", ge=2,
        applies={"enable_profiling": (True,)}, trajectory=False,
    )
    profiler_active: int = setting(
        1, "steps in a trace", ge=1, applies={"enable_profiling": (True,)}, trajectory=False
    )
    profiler_warmup: int = setting(
        3, "warm-up steps of the profiler before a trace, not recorded", ge=1,
        applies={"enable_profiling": (True,)}, trajectory=False,
    )
    record_shapes: bool = setting(
        False, "shapes of every operation's inputs in the traces", applies={"enable_profiling": (True,)},
        trajectory=False,
    )
    with_stack: bool = setting(
        False, "Python stacks in the traces: slow and large", applies={"enable_profiling": (True,)}, trajectory=False
    )
    enable_memory_snapshot: bool = setting(
        False, "write snapshots of CUDA's allocator to <run>/profile/memory, and one when memory runs out",
        trajectory=False,
    )
    memory_snapshot_freq: int = setting(
        100, "steps between snapshots", ge=1, applies={"enable_memory_snapshot": (True,)}, trajectory=False
    )


def profiling_problems(config: ProfilingConfig, steps: int) -> Iterator[tuple[str, str]]:
    """Find settings that would give no trace or no snapshot.

    Args:
        config: the section.
        steps: of the run.

    Returns:
        pairs of a key of the section and the reason.
    """
    if config.enable_profiling:
        window = config.profiler_warmup + config.profiler_active
        if window > config.profile_freq:
            yield "profile_freq", (
                f"{config.profile_freq} steps hold no trace of profiler_warmup + profiler_active = {window} steps"
                f" (set it to {window} or more)"
            )
        elif window > steps:
            needed = f"profiler_warmup + profiler_active = {window} steps are needed"
            yield "profiler_warmup", f"no step would be traced, for training.steps = {steps} ({needed})"
    if config.enable_memory_snapshot and not torch.cuda.is_available():
        yield "enable_memory_snapshot", (
            "a snapshot is of CUDA's allocator; the CPU's keeps no record (set it to false; memory/max_resident is logged)"
        )
