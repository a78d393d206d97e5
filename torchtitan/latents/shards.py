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
from torchtitan.files.shard_files import DamagedShard, whole_tensors
from torchtitan.latents.index import StoreIndex, StorePlan, shard_name
from torchtitan.latents.values import LABELS, LATENTS, SCALES, check_labels, encode, tensor_shapes

_INTEGERS = {1: torch.int8, 2: torch.int16}


@dataclass(frozen=True)
class MappedShard:
    """Memory-mapped arrays of a shard: the system reads pages when they are touched, and shares them between processes.

    Attributes:
        latents: [n, V, P, C, h, w], as integers of the dtype's width.
        scales: float32 [n, V, P, C] of int8, else None.
        labels: int64 [n].
    """

    latents: np.ndarray
    scales: np.ndarray | None
    labels: np.ndarray


def shard_content(plan: StorePlan, number: int, images: Sequence[int], values: Tensor, labels: Tensor) -> bytes:
    """Build the bytes of a shard: a function of its images alone.

    Args:
        images: their numbers in the source, n.
        values: float32 [n, V, P, C, h, w].
        labels: int64 [n].

    Raises:
        LatentStoreError: the arrays contradict the plan, or it cannot hold a value or label.
    """
    shape = tensor_shapes(plan, len(images))[LATENTS][0]
    if values.shape != shape or values.dtype != torch.float32:
        raise LatentStoreError(
            f"{shard_name(number)}: latents are {values.dtype} {list(values.shape)}, not torch.float32 {list(shape)}"
        )
    if labels.shape != (len(images),) or labels.dtype != torch.int64:
        raise LatentStoreError(
            f"{shard_name(number)}: labels are {labels.dtype} {list(labels.shape)}, not torch.int64 [{len(images)}]"
        )
    check_labels(labels.numpy(), images, plan)
    if plan.posterior and (values[:, :, 1] < 0).any():
        raise LatentStoreError(f"{shard_name(number)}: a standard deviation is negative")
    return safetensors.torch.save(encode(values, plan, images) | {LABELS: labels})


def map_shard(folder: Path, number: int, index: StoreIndex) -> MappedShard:
    """Map a shard for reading; only its header is read. Raises LatentStoreError where the index contradicts it."""
    path = folder / shard_name(number)
    try:
        found = whole_tensors([path])
        wanted = tensor_shapes(index, index.shards[number].num_images)
        if found != wanted:
            raise LatentStoreError(f"{path}: {_difference(found, wanted)}; the index does not describe it")
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in wanted}
    except DamagedShard as error:
        raise LatentStoreError(f"{folder}: {error}") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise LatentStoreError(f"{path}: cannot be read: {unwrapped(error)}") from error
    latents = tensors[LATENTS]
    return MappedShard(
        latents.view(_INTEGERS[latents.itemsize]).numpy(),
        tensors[SCALES].numpy() if SCALES in tensors else None,
        tensors[LABELS].numpy(),
    )


def _difference(found: dict, wanted: dict) -> str:
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            return f"has no {name!r}"
        if name not in wanted:
            return f"has a tensor {name[:40]!r}"
        if found[name] != wanted[name]:
            shape, dtype = found[name]
            return f"{name!r} is {dtype} {list(shape)}, not {wanted[name][1]} {list(wanted[name][0])}"
    return "differs"
