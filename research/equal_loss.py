"""Slots of timesteps that contribute equally to the loss."""

import numpy as np
import torch
from torch import Tensor


def equal_loss_edges(loss_by_timestep: Tensor, num_slots: int) -> list[int]:
    """Cut the timesteps into slots of equal summed loss, as nearly as whole timesteps allow.

    Args:
        loss_by_timestep: mean loss at each of T timesteps, [T], non-negative.
        num_slots: number of slots K, 1 <= K <= T.

    Returns:
        edges [K + 1], edges[0] = 0 and edges[K] = T. Edge k lies after the first timestep at which the running sum
        reaches k / K of the total, and at least one timestep after edge k - 1.

    Raises:
        ValueError: a loss is negative or not finite, all are zero, or there are more slots than timesteps.

    Source: Xie and Agam, "Rethinking timesteps samplers and prediction types", arXiv 2502.01990, Table 1.
    """
    loss = loss_by_timestep.detach().to("cpu", torch.float64)
    count = len(loss)
    if not 1 <= num_slots <= count:
        raise ValueError(f"{num_slots} slots of {count} timesteps: give 1 to {count}")
    if not (loss.isfinite().all() and (loss >= 0).all() and loss.sum() > 0):
        wrong = (~loss.isfinite() | (loss < 0)).nonzero().flatten().tolist()
        raise ValueError(f"the loss at timestep {wrong[0]} is {loss[wrong[0]]:g}" if wrong else "all losses are zero")
    running = loss.cumsum(0)
    wanted = running[-1] * torch.arange(1, num_slots, dtype=torch.float64) / num_slots
    edges = [0]
    for k, place in enumerate(torch.searchsorted(running, wanted).tolist(), start=1):
        edges.append(min(max(place + 1, edges[-1] + 1), count - num_slots + k))  # no slot is empty
    return [*edges, count]


def interpolate_loss(index: Tensor, loss: Tensor, num_indices: int) -> Tensor:
    """Interpolate the loss at every index of a path from some: ln(loss) is linear in ln(1 + index) between them.

    On the curves of trained models it is more accurate than over the index itself, as few indices near data hold much
    of the loss.

    Args:
        index: N indices, rising, 0 or more; beyond the first and the last of them the loss is theirs.
        loss: at each, positive, [N]; where all indices are given, as it is.
        num_indices: T.

    Returns:
        float64 [T].

    Raises:
        ValueError: a loss is not positive and finite.
    """
    loss = loss.detach().to("cpu", torch.float64)
    if len(loss) == num_indices:
        return loss
    if not (loss.isfinite() & (loss > 0)).all():
        raise ValueError("an error of the curve is not positive and finite")
    known, every = np.log1p(index.numpy().astype(np.float64)), np.log1p(np.arange(num_indices))
    return torch.from_numpy(np.exp(np.interp(every, known, np.log(loss.numpy()))))
