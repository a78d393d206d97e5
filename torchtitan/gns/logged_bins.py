"""Tags of logged noise scales: those that are drawn, and those of the bins, as a run may be resumed with others."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_COUNT, _EDGE = "gns/bins", "gns/edges"
DRAWN = ("b_simple", "lower", "upper")  # of a bin


def bin_tags(edges: Sequence[float]) -> dict[str, float]:
    """Tags that say which bins a point's noise scales are of.

    Args:
        edges: inner edges of the bins in t, rising.
    """
    return {_COUNT: float(len(edges) + 1)} | {f"{_EDGE}/{k}": edge for k, edge in enumerate(edges)}


def is_bin_tag(tag: str) -> bool:
    return tag == _COUNT or tag.startswith(f"{_EDGE}/")


def is_drawn(tag: str) -> bool:
    """Check whether a logged value is drawn, or needed for it."""
    parts = tag.split("/")
    of_a_bin = len(parts) == 5 and parts[0] == "gns" and parts[2] == "composite" and parts[3] != "all"
    return is_bin_tag(tag) or (of_a_bin and parts[4] in DRAWN)


def of_bins(point: Mapping[str, Any], edges: Sequence[float]) -> bool:
    """Check whether a point's noise scales are of these bins; True where it does not say, as formerly.

    Args:
        point: of metrics.jsonl.
        edges: as of `bin_tags`.
    """
    if _COUNT not in point:
        return True
    return point[_COUNT] == len(edges) + 1 and all(
        math.isclose(point.get(f"{_EDGE}/{k}", math.nan), edge, abs_tol=1e-6) for k, edge in enumerate(edges)
    )
