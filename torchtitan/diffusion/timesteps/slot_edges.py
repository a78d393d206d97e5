"""Edges of slots of timesteps, and their file.

The file is JSON: {"unit": "index" or "t", "edges": [...]}, with edges rising from 0 to the number of indices, or to 1.
Slot k is [edges[k], edges[k + 1]).
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan.diffusion.paths import Path as NoisePath
from torchtitan.diffusion.paths import indexed
from torchtitan.diffusion.timesteps.placement import SmoothDensity

_LARGEST_FILE = 1 << 20  # bytes


def write_slot_edges(path: Path, edges: Sequence[float], unit: str) -> None:
    """Write edges so that `objective.timesteps.edges_path` can name the file; unit is "index" or "t"."""
    path.write_text(json.dumps({"unit": unit, "edges": list(edges)}) + "\n", encoding="utf-8")


def read_slot_edges(path: Path, unit: str) -> list[float]:
    """Read the edges of a file. Raises ValueError, one line: unreadable, no such file, or edges in another unit."""
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
