"""Memory monitor: warns before the host's memory runs out, or when CUDA's allocator begins to struggle."""

import logging
from pathlib import Path

from torchtitan.training.hardware import ALLOCATOR_RETRIES

logger = logging.getLogger(__name__)

NEAR = 0.95  # share of the limit in use that is worth a warning


class MemoryMonitor:
    """Monitor that warns once of each."""

    def __init__(self, rank: int, root: Path = Path("/")) -> None:
        """root: where /proc and /sys lie."""
        self._rank = rank
        self._root = root
        self._warned_of_host = False
        self._retries: float | None = None
        self._warned_of_retries = False

    def check(self, metrics: dict[str, float]) -> None:
        """Check the host's memory, and the allocator's count among the metrics of `hardware.memory_metrics`."""
        if not self._warned_of_host:
            self._check_host()
        retries = metrics.get(ALLOCATOR_RETRIES)
        if retries is not None and not self._warned_of_retries:
            if self._retries is not None and retries > self._retries:
                self._warned_of_retries = True
                logger.warning(
                    f"rank {self._rank}: CUDA's memory is so full that the allocator empties its cache and tries again "
                    f"({int(retries)} times so far), which is slow (a smaller training.local_batch_size needs less)"
                )
            self._retries = retries

    def _check_host(self) -> None:
        for name, used, limit in host_memory(self._root):
            if used > NEAR * limit:
                self._warned_of_host = True
                logger.warning(
                    f"rank {self._rank}: {used / 2**30:.1f} of {limit / 2**30:.1f} GiB of {name} are in use; the system "
                    "will kill a process when none is left (fewer data.num_workers or processes need less)"
                )
                return


def host_memory(root: Path = Path("/")) -> list[tuple[str, int, int]]:
    """Host memory in use and in total, of the control group's limits and of the machine.

    Args:
        root: where /proc and /sys lie.

    Returns:
        (name, bytes in use that cannot be freed, bytes in total), of every known limit; nothing on systems without
        them.
    """
    found = []
    for name, folder in _control_groups(root).items():
        limit = _number(folder / ("memory.max" if name == "v2" else "memory.limit_in_bytes"))
        stat = _table(folder / "memory.stat", 1)
        anonymous = stat.get("anon", stat.get("total_rss", stat.get("rss")))
        if limit and limit < 1 << 60 and anonymous is not None:  # v1 writes a huge number for no limit
            found.append(("the control group's memory", anonymous + stat.get("shmem", 0), limit))
    machine = _table(root / "proc/meminfo", 1024)
    if {"MemTotal:", "MemAvailable:"} <= machine.keys():
        found.append(("the machine's memory", machine["MemTotal:"] - machine["MemAvailable:"], machine["MemTotal:"]))
    return found


def _control_groups(root: Path) -> dict[str, Path]:
    """Folders of this process's memory group by version; inside a container its own group is the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for version, wanted, mount in (("v2", "", "sys/fs/cgroup"), ("v1", "memory", "sys/fs/cgroup/memory")):
            if wanted in controllers.split(","):
                own = root / mount / path.lstrip("/")
                found[version] = own if own.is_dir() else root / mount
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path, unit: int) -> dict[str, int]:
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdecimal()}
    except OSError:
        return {}
