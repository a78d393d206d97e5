"""Stored values of latents: half precision, or 8-bit integers with scales.

Arrays are [N, V, P, C, h, w]: V views (the image, its mirror image), P parts (mean, standard deviation). A training
sample is one view of one image, [P, C, h, w], and is contiguous.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchtitan.errors import LatentStoreError
from torchtitan.latents.index import StorePlan

STORED_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
LATENTS, SCALES, LABELS, CAPTIONS = "latents", "scales", "labels", "captions"


def pack_views(views: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Pack encoded images into the layout of the store's writer.

    Args:
        views: (mean, standard deviation or None) of images, and of mirror images if kept, each [N, C, h, w].

    Returns:
        float32 [N, V, P, C, h, w].
    """
    packed = [torch.stack([part for part in view if part is not None], dim=1) for view in views]  # [N, P, C, h, w]
    return torch.stack(packed, dim=1).to(torch.float32)


def tensor_shapes(plan: StorePlan, num_images: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a shard, by name."""
    rows = (num_images, plan.views, plan.parts, plan.shape[0])
    shapes = {LATENTS: ((*rows, *plan.shape[1:]), STORED_DTYPES[plan.dtype]), LABELS: ((num_images,), torch.int64)}
    shapes |= {SCALES: (rows, torch.float32)} if plan.dtype == "int8" else {}
    return shapes | ({CAPTIONS: ((num_images,), torch.int64)} if plan.captions else {})


def encode(values: Tensor, plan: StorePlan, images: Sequence[int]) -> dict[str, Tensor]:
    """Encode values to the stored dtype, rounded.

    An int8 has a step: `plan.int8_step`, or for each image, view, part and channel the largest magnitude / 127.

    Args:
        values: float32 [N, V, P, C, h, w].

    Returns:
        the tensors LATENTS and, of int8, SCALES, float32 [N, V, P, C].

    Raises:
        LatentStoreError: a value is not finite, or outside the dtype's range.
    """
    if plan.dtype != "int8":
        stored = values.to(STORED_DTYPES[plan.dtype])
        _refuse(~torch.isfinite(stored), values, images, f"is no finite number of {plan.dtype}")
        return {LATENTS: stored.contiguous()}
    _refuse(~torch.isfinite(values), values, images, "is not finite")
    if plan.int8_step is None:
        scales = values.abs().amax(dim=(-2, -1)) / 127  # [N, V, P, C]
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    else:
        scales = torch.full(values.shape[:4], plan.int8_step)
    steps = torch.round(values / scales[..., None, None])
    _refuse((steps < -128) | (steps > 127), values, images, f"is beyond an int8 of step {plan.int8_step}")
    return {LATENTS: steps.to(torch.int8).contiguous(), SCALES: scales}


def decode(stored: np.ndarray, scales: np.ndarray | None, dtype: str) -> Tensor:
    """Decode integers [..., C, h, w] of the dtype's width, with float32 scales [..., C] of int8, to float32."""
    values = torch.from_numpy(stored).view(STORED_DTYPES[dtype]).to(torch.float32)
    return values if scales is None else values.mul_(torch.from_numpy(scales)[..., None, None])


def check_numbers(labels: np.ndarray, captions: np.ndarray | None, images: np.ndarray | Sequence[int], plan: StorePlan) -> None:
    """Check labels and caption numbers, int64 [N]. Raises LatentStoreError, with the image's number: out of range."""
    limits = [("label", labels, max(plan.num_classes, 1))]
    if captions is not None:
        limits.append(("caption", captions, plan.captions.num_texts if plan.captions else 0))
    for name, numbers, count in limits:
        bad = np.flatnonzero((numbers < 0) | (numbers >= count))
        if len(bad):
            raise LatentStoreError(f"image {images[bad[0]]}: {name} {numbers[bad[0]]} is not in 0..{count - 1}")


def _refuse(bad: Tensor, values: Tensor, images: Sequence[int], why: str) -> None:
    if bad.any():
        place = bad.nonzero()[0]
        raise LatentStoreError(f"image {images[int(place[0])]}: {float(values[tuple(place)]):g} {why}")
