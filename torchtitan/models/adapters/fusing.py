"""Adapters of layers that one program has in several parts and another in one: cut and joined, the same function.

    cut     each part has all of A, and its rows of B; where B is block-diagonal, its rows of A and its block
    joined  B is block-diagonal: the rank is the parts' times their number, and so is alpha, as their scale stays

Cutting what was joined gives the parts back. Source: kohya's networks/convert_flux_lora.py, for facts.
"""

from collections.abc import Sequence

import torch

from torchtitan.models.adapters.target import LowRankWeights


def cut(whole: LowRankWeights, rows: Sequence[int]) -> list[LowRankWeights | None]:
    """Cut a layer's update into its parts of `rows` rows, in order; None for a part that was joined without one."""
    ups = whole.up.split(list(rows))
    rank = whole.rank // len(rows)
    blocks = [slice(place * rank, (place + 1) * rank) for place in range(len(rows))]
    if whole.rank % len(rows) or not all(_only(up, block) for up, block in zip(ups, blocks, strict=True)):
        return [LowRankWeights(whole.down, up, whole.alpha) for up in ups]
    parts = [
        LowRankWeights(whole.down[block], up[:, block], whole.alpha / len(rows)) for up, block in zip(ups, blocks, strict=True)
    ]
    return [part if part.down.any() else None for part in parts]


def join(parts: Sequence[LowRankWeights | None], rows: Sequence[int]) -> LowRankWeights:
    """Join the updates of a layer's parts to one of all rows.

    Args:
        parts: update of each part, None where it has none; at least one has. Smaller ranks are filled up with zeros.

    Returns:
        of the parts' rank where they have one A and one scale in common, as those of `cut`; else of the sum of ranks.
    """
    given = [part for part in parts if part is not None]
    alike = [part for part in given if part.alpha == given[0].alpha and torch.equal(part.down, given[0].down)]
    if len(alike) == len(parts):
        return LowRankWeights(given[0].down, torch.cat([part.up for part in alike]), given[0].alpha)
    first, rank = given[0], max(part.rank for part in given)
    down = first.down.new_zeros(rank * len(rows), *first.down.shape[1:])
    up = first.up.new_zeros(sum(rows), rank * len(rows))
    begin = 0
    for place, (part, count) in enumerate(zip(parts, rows, strict=True)):
        if part is not None:
            columns = slice(place * rank, place * rank + part.rank)
            down[columns] = part.down
            up[begin : begin + count, columns] = part.up if part.scale == first.scale else part.up * (part.scale / first.scale)
        begin += count
    return LowRankWeights(down, up, first.alpha * (rank * len(rows) / first.rank))


def with_alpha(values: LowRankWeights, alpha: float) -> LowRankWeights:
    """The same update with another alpha: B is scaled instead."""
    up = values.up if values.alpha == alpha else values.up * (values.alpha / alpha)
    return LowRankWeights(values.down, up, alpha)


def padded(values: LowRankWeights, rank: int) -> LowRankWeights:
    """The same update at a higher rank, filled up with zeros."""
    if values.rank == rank:
        return values
    down = values.down.new_zeros(rank, *values.down.shape[1:])
    up = values.up.new_zeros(len(values.up), rank)
    down[: values.rank], up[:, : values.rank] = values.down, values.up
    return LowRankWeights(down, up, values.scale * rank)


def _only(up: torch.Tensor, block: slice) -> bool:
    """Check whether B has values in one block of its columns alone."""
    return not up[:, : block.start].any() and not up[:, block.stop :].any()
