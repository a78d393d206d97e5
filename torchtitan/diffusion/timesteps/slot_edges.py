"""Slots of timesteps that contribute equally to the loss: their edges, and the file of edges.

The file is JSON: {"unit": "index" or "t", "edges": [...]}, with edges rising from 0 to the number of indices, or to 1.
Slot k is [edges[k], edges[k + 1]).
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchtitan.diffusion.paths import Path as NoisePath
from torchtitan.diffusion.paths import indexed
from torchtitan.diffusion.timesteps.contract import SmoothDensity

_LARGEST_FILE = 1 << 20  # bytes


def equal_loss_edges(loss_by_timestep: Tensor, num_slots: int) -> list[int]:
    """Cut the timesteps into slots whose summed losses are equal, as nearly as whole timesteps can be.

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


def write_slot_edges(path: Path, edges: Sequence[float], unit: str) -> None:
    """Write edges so that `objective.timesteps.edges_path` can name the file; unit is "index" or "t"."""
    path.write_text(json.dumps({"unit": unit, "edges": list(edges)}) + "\n", encoding="utf-8")


def read_slot_edges(path: Path, unit: str) -> list[float]:
    """Read the edges of a file.

    Args:
        path: of the file.
        unit: required, "index" or "t".

    Raises:
        ValueError: it cannot be read, is no such file, or has edges in another unit; a line that says so.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        content = json.loads(text) if len(text) <= _LARGEST_FILE else None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # a null byte in the path among them
        raise ValueError(f"{path}: is no JSON of slot edges") from error
    content = content if isinstance(content, dict) else {}
    edges = content.get("edges")
    if not (isinstance(edges, list) and all(_is_number(edge) for edge in edges)):
        raise ValueError(f'{path}: is no file of slot edges ({{"unit": "{unit}", "edges": [...]}} is needed)')
    if content.get("unit") != unit:
        raise ValueError(f"{path}: the edges' unit is {content.get('unit')!r}, objective.path needs {unit!r}")
    return [float(edge) for edge in edges]


def slot_unit(path: NoisePath) -> str:
    """Unit of edges on a path: "index" on a DDPM path, else "t"."""
    return "index" if path.num_indices else "t"


def slot_positions(edges: Sequence[float], path: NoisePath, base: SmoothDensity) -> list[float]:
    """Probability below each edge under the base density, [K + 1] from 0 to 1.

    Args:
        edges: rising from 0 to 1 in t, or to T in indices, where they are whole numbers on a discrete path.
        path: of the objective.
        base: uniform on it.

    Raises:
        ValueError: the edges are otherwise.
    """
    end, unit = (float(path.num_indices), "indices") if path.num_indices else (1.0, "t")
    rising = all(low < high for low, high in itertools.pairwise(edges))
    if len(edges) < 2 or not rising or edges[0] != 0 or edges[-1] != end:
        raise ValueError(f"must rise from 0 to {end:g}, in {unit}: {_shown(edges)}")
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    if not path.num_indices:
        return list(map(float, edges))
    if path.discrete and not (inner == inner.round()).all():
        raise ValueError(f"must be whole numbers, indices of the path: {_shown(edges)}")
    if not path.discrete and len(inner) and inner[-1] >= path.num_indices - 1:
        raise ValueError(f"the last slot holds no index: the path ends at {path.num_indices - 1}")
    below = base.distribution(indexed(path).index_to_log_sigma(inner - 0.5 if path.discrete else inner))
    return [0.0, *below.tolist(), 1.0]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _shown(edges: Sequence[float]) -> str:
    shown = ", ".join(f"{edge:g}" for edge in edges[:12])
    return f"is [{shown}{', ...' if len(edges) > 12 else ''}]"
