"""Timestep bins of logged noise scales: a run may be resumed with others, under the same tags."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_COUNT, _EDGE = "gns/bins", "gns/edges"


def bin_tags(edges: Sequence[float]) -> dict[str, float]:
    """Tags that say which bins a point's noise scales are of.

    Args:
        edges: inner edges of the bins in t, rising.
    """
    return {_COUNT: float(len(edges) + 1)} | {f"{_EDGE}/{k}": edge for k, edge in enumerate(edges)}


def is_bin_tag(tag: str) -> bool:
    return tag == _COUNT or tag.startswith(f"{_EDGE}/")


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
