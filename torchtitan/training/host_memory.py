"""Host memory in use and its limits."""

from pathlib import Path


def host_memory(root: Path = Path("/")) -> list[tuple[str, int, int]]:
    """Host memory in use and in total, of the control group's limits and of the machine.

    Returns:
        (name, bytes in use that cannot be freed, bytes in total) of every limit that the system has.
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
