"""Target of a low-rank adapter."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Target:
    """Rows of a layer's weight that have a low-rank update in common.

    Attributes:
        module: qualified name of the layer.
        start, stop: rows of its weight, 0 <= start < stop <= outputs. A layer that published networks have in several
            parts, as one for queries, keys and values, has a target for each.
    """

    module: str
    start: int
    stop: int
