"""Shard of a latent store: safetensors with the tensors that `values.tensor_shapes` lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torchtitan.errors import LatentStoreError, unwrapped
from torchtitan.files.shard_headers import DamagedShard, whole_tensors
from torchtitan.latents.index import StoreIndex, StorePlan, shard_name
from torchtitan.latents.values import (
    CAPTIONS,
    LABELS,
    LATENTS,
    SCALES,
    check_numbers,
    encode,
    tensor_shapes,
)

_INTEGERS = {1: torch.int8, 2: torch.int16}


@dataclass(frozen=True)
class MappedShard:
    """Memory-mapped arrays of a shard: the system reads pages when they are touched, and shares them between processes.

    Attributes:
        latents: [n, V, P, C, h, w], as integers of the dtype's width.
        scales: float32 [n, V, P, C] of int8, else None.
        captions: numbers of the captions, int64 [n], where the store has captions, else None.
    """

    latents: np.ndarray
    scales: np.ndarray | None
    labels: np.ndarray
    captions: np.ndarray | None


def shard_content(
    plan: StorePlan, images: Sequence[int], values: Tensor, labels: Tensor, captions: Tensor | None
) -> bytes:
    """Build the bytes of a shard: a function of its images alone.

    Args:
        images: their numbers in the source, n.
        values: float32 [n, V, P, C, h, w].
        captions: numbers of the captions, int64 [n]; None where the plan has no captions.

    Raises:
        LatentStoreError: the plan has no such label, or its dtype cannot hold a value.
    """
    check_numbers(labels.numpy(), None if captions is None else captions.numpy(), images, plan)
    beside = {LABELS: labels} | ({} if captions is None else {CAPTIONS: captions})
    return safetensors.torch.save(encode(values, plan, images) | beside)


def map_shard(folder: Path, number: int, index: StoreIndex) -> MappedShard:
    """Map a shard for reading; only its header is read. Raises LatentStoreError where the index contradicts it."""
    tensors = map_tensors(folder / shard_name(number), tensor_shapes(index, index.shards[number].num_images))
    latents = tensors[LATENTS]
    return MappedShard(
        latents.view(_INTEGERS[latents.itemsize]).numpy(),
        tensors[SCALES].numpy() if SCALES in tensors else None,
        tensors[LABELS].numpy(),
        tensors[CAPTIONS].numpy() if CAPTIONS in tensors else None,
    )


def map_tensors(path: Path, wanted: dict[str, tuple[tuple[int, ...], torch.dtype]], letters: str = "") -> dict[str, Tensor]:
    """Map a file's tensors to read; `letters`, if named, has any length. Raises LatentStoreError: it holds others."""
    try:
        found = whole_tensors([path])
        if {name: found[name] for name in found if name != letters} != wanted:
            raise LatentStoreError(f"{path}: holds other tensors than the index describes; take a good copy of it")
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in found}
    except DamagedShard as error:
        raise LatentStoreError(f"{path.parent}: {error}") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise LatentStoreError(f"{path}: cannot be read: {unwrapped(error)}") from error
