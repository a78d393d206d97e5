"""`[profiling]`: its keys, and settings that would record nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.settings import setting

WARMUP_STEPS = 3  # of the profiler before a traced step, not recorded


@dataclass(kw_only=True)
class ProfilingConfig:
    """`[profiling]`"""

    enable_profiling: bool = setting(
        False, "write traces of steps, and tables of their operations, to <run>/profile/trace", trajectory=False
    )
    profile_freq: int = setting(
        100, "steps between traces; of so many, the last that only trains, if any, is traced", ge=WARMUP_STEPS + 1,
        applies={"enable_profiling": (True,)}, trajectory=False,
    )
    enable_memory_snapshot: bool = setting(
        False, "write a snapshot of CUDA's allocator to <run>/profile/memory every 100 steps, and when memory runs out",
        trajectory=False,
    )


def profiling_problems(config: ProfilingConfig, steps: int, has_cuda: bool) -> Iterator[tuple[str, str]]:
    """Find settings without a trace or a snapshot: (key of the section, reason)."""
    if config.enable_profiling and steps <= WARMUP_STEPS:
        yield "enable_profiling", (
            f"no step would be traced, for training.steps = {steps} ({WARMUP_STEPS} steps warm the profiler up)"
        )
    if config.enable_memory_snapshot and not has_cuda:
        yield "enable_memory_snapshot", (
            "a snapshot is of CUDA's allocator; the CPU's keeps no record (set it to false; memory/max_resident is logged)"
        )
