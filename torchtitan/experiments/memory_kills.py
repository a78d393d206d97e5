"""Memory kills: the kernel's count of processes that it killed because memory had run out.

A process that the kernel kills for want of memory ends by SIGKILL, as one does that a scheduler or a person kills. The
count tells them apart: it rises in the first case only.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryKills:
    """Count of memory kills.

    Attributes:
        source: file that holds it.
        count: since the control group, or the machine, was started.
    """

    source: str
    count: int


def count_memory_kills(proc: Path = Path("/proc")) -> MemoryKills | None:
    """Read the count that covers this process and its descendants; None where there is none, as outside of Linux.

    It is the one of the process's own control group: `memory.events` of version 2, `memory.oom_control` of version 1;
    else the machine's. Source: cgroup-v2.rst, cgroup-v1/memory.rst and vmstat's event items in the Linux kernel.

    Args:
        proc: where the kernel shows processes.
    """
    group = _own_group(proc)
    for path in [*([group] if group else []), proc / "vmstat"]:
        count = _count_in(path)
        if count is not None:
            return MemoryKills(str(path), count)
    return None


def _count_in(path: Path) -> int | None:
    try:
        pairs = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(pairs["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _own_group(proc: Path) -> Path | None:
    """File with the count of this process's control group, by the place where its hierarchy is mounted."""
    try:
        memberships = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
    except OSError:
        return None
    groups = {name: group for _, controllers, group in memberships for name in controllers.split(",")}
    version_1 = "memory" in groups
    for mount in mounts:
        root, point, kind, options = mount[3], mount[4], mount[-3], mount[-1].split(",")
        if (kind == "cgroup" and "memory" in options) if version_1 else kind == "cgroup2":
            group = groups.get("memory" if version_1 else "")
            if group is None:
                return None
            below = os.path.relpath(group, root) if root != "/" else group.lstrip("/")
            inside = "." if below.startswith("..") else below  # the container sees a part of the hierarchy
            return Path(point) / inside / ("memory.oom_control" if version_1 else "memory.events")
    return None
