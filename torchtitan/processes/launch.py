"""Launch variables: numbers that a launcher hands to its processes in their environment. Imports no torch."""

import os
import re

CHECKED = "TORCHTITAN_DIT_CHECKED"  # in the environment: this configuration has been checked, and warned of, just now
_LEAST = {
    "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0,
    "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RESTART_COUNT": 0, "NGPU": 1,
}  # fmt: skip
_ADVICE = "torchrun sets it; unset it for a single process"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class LaunchError(Exception):
    """Environment that gives a process no place among the others; one line."""


def launch_number(name: str, default: int) -> int:
    """Number in a launcher's variable, as RANK, or the default. Raises LaunchError: no whole number, or too small."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < _LEAST[name]:
        raise LaunchError(f"{name}: must be a whole number, {_LEAST[name]} or more, is {text[:60]!r} ({_advice(name)})")
    return int(text)


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prefer_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments, so that fewer gaps remain; a choice in the environment stays.

    Before torch is imported, and for the processes that this one starts.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def bound_openmp_spin() -> None:
    """Bound how long a thread of libgomp, which torch brings for the CPU, spins while it waits for the others.

    On a busy machine its 300,000 rounds keep the processor from the thread that is waited for. Before torch is imported, and
    for the processes that this one starts; a choice in the environment stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def check_launch() -> None:
    """Check the numbers of the launcher against one another. Raises LaunchError."""
    world_size = launch_number("WORLD_SIZE", 0)
    local = launch_number("LOCAL_WORLD_SIZE", world_size)
    for name, whole, count in (("RANK", "WORLD_SIZE", world_size), ("LOCAL_RANK", "LOCAL_WORLD_SIZE", local)):
        rank = launch_number(name, 0)
        if count and rank >= count:
            raise LaunchError(f"{name}: must be below {whole} = {count}, is {rank} ({_ADVICE})")
    if (port := launch_number("MASTER_PORT", 0)) > 65535:
        raise LaunchError(f"MASTER_PORT: must be at most 65535, is {port}")
    launch_number("TORCHELASTIC_MAX_RESTARTS", 0)


def restart_warning() -> str:
    """Warn of restarts by torchrun in which the new processes would find the addresses of the old ones; "" without."""
    if not launch_number("TORCHELASTIC_MAX_RESTARTS", 0) or os.environ.get(_OWN_STORE) == "1":
        return ""
    return f"--max-restarts: restarts share the store of the lost processes and may hang (before torchrun: export {_OWN_STORE}=1)"


def check_rendezvous() -> None:
    """Check that a process has the address of the rendezvous. Raises LaunchError."""
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        text = f"WORLD_SIZE is set, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
        raise LaunchError(f"{text} (torchrun sets them; unset WORLD_SIZE for a single process)")


def _advice(name: str) -> str:
    return "the number of processes" if name == "NGPU" else _ADVICE
