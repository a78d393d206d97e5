"""Features of images, extracted by any number of ranks, with the result of one."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from torchtitan.distributed.collectives import on_all_ranks
from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.images import ImageSet, read_ahead

BATCH_SIZE = 64
# Rows of features, float32 [N, D], by extractor and output.
Rows = dict[tuple[str, str], np.ndarray]


def own_batches(count: int, batch_size: int, group: dist.ProcessGroup | None = None) -> list[range]:
    """Numbers of the images in each batch of this rank, which has every R-th batch of R ranks.

    The batches are the same on any number of ranks. Each rank has as many: some have the last one again.
    """
    rank, ranks = _place(group)
    last = -(-count // batch_size) - 1
    batches = [min(first + rank, last) for first in range(0, last + 1, ranks)]
    return [range(batch * batch_size, min((batch + 1) * batch_size, count)) for batch in batches]


def extract_features(
    pixels: Iterator[np.ndarray], count: int, batch_size: int, extractors: Mapping[str, FeatureExtractor],
    outputs: Mapping[str, Sequence[str]], group: dist.ProcessGroup | None = None, progress: bool = False,
) -> Rows:  # fmt: skip
    """Extract the features of batches of images; collective.

    Args:
        pixels: images of each batch of `own_batches`, uint8 [B, H, W, 3]; may raise EvaluationError.
        outputs: those to keep, by extractor.
        group: of all ranks, for CPU tensors, with a timeout above the duration of the work; None: one process.

    Returns:
        rows of all images in order, on the first rank; nothing on the others.

    Raises:
        EvaluationError: images cannot be read, or do not fit the extractor; on every rank.
    """
    rank, ranks = _place(group)
    needed = [(name, output) for name in extractors for output in outputs[name]]
    rows = {(name, output): np.empty((count, extractors[name].dims[output]), np.float32) for name, output in needed}
    rounds = own_batches(count, batch_size, group)
    with tqdm(total=count, desc="features", unit="image", disable=not (progress and rank == 0), leave=False) as bar:
        for batch in range(0, len(rounds) * ranks, ranks):
            features = on_all_ranks(lambda: _extracted(next(pixels), extractors), (EvaluationError,), group)
            for name, output in needed:
                for offset, part in enumerate(_gathered(features[name][output].cpu(), batch_size, group)):
                    start = (batch + offset) * batch_size
                    kept = max(0, min(count - start, batch_size))
                    rows[name, output][start : start + kept] = part[:kept].numpy()
            bar.update(min(ranks * batch_size, count - batch * batch_size))
    return rows if rank == 0 else {}


def extract_images(
    images: ImageSet, extractors: Mapping[str, FeatureExtractor], outputs: Mapping[str, Sequence[str]],
    batch_size: int = BATCH_SIZE, group: dist.ProcessGroup | None = None, progress: bool = False,
) -> Rows:  # fmt: skip
    """Extract the features of a set of images, which are read ahead; collective. Args, Returns, Raises: `extract_features`."""
    pixels = read_ahead(images, own_batches(len(images), batch_size, group))
    return extract_features(pixels, len(images), batch_size, extractors, outputs, group, progress)


def _extracted(pixels: np.ndarray, extractors: Mapping[str, FeatureExtractor]) -> dict[str, dict[str, Tensor]]:
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))  # [B, 3, H, W]
    return {name: extractor.extract(images) for name, extractor in extractors.items()}


def _gathered(part: Tensor, batch_size: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Parts of all ranks, filled up to a whole batch, on the first; nothing on the others."""
    rank, ranks = _place(group)
    if ranks == 1:
        return [part]
    whole = part.new_zeros(batch_size, part.shape[1])
    whole[: len(part)] = part
    parts = [torch.empty_like(whole) for _ in range(ranks)] if rank == 0 else None
    dist.gather(whole, parts, dst=0, group=group)
    return parts or []


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
