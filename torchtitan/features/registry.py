"""Feature extractors by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from torchtitan.features.base import ExtractorError, FeatureExtractor
from torchtitan.features.dinov2 import DGM_EVAL, EDM2, DinoV2
from torchtitan.features.from_file import open_file
from torchtitan.features.inception import Inception2015
from torchtitan.features.small import open_small
from torchtitan.files.regular import user_path

EXTRACTORS: dict[str, Callable[[Path | None, torch.device], FeatureExtractor]] = {
    "inception": Inception2015.open,
    EDM2.name: partial(DinoV2.open, EDM2),
    DGM_EVAL.name: partial(DinoV2.open, DGM_EVAL),
    "digits": partial(open_small, "digits"),
    "cifar10": partial(open_small, "cifar10"),
}


def open_extractor(name: str, weights: Path | None = None, device: torch.device | str = "cpu") -> FeatureExtractor:
    """Open an extractor for use.

    Args:
        name: of an entry of EXTRACTORS, or the path of a TorchScript file or of one of scripts/train_extractor.py.
        weights: file of its weights; None is the place where scripts/download.py puts them, or the package's own.
        device: where it computes.

    Raises:
        ExtractorError: an unknown name, or missing, damaged or wrong weights.
    """
    if name in EXTRACTORS:
        return EXTRACTORS[name](weights, torch.device(device))
    path = user_path(name)
    if not path.exists():
        raise ExtractorError(f"{name}: is neither a file nor a feature extractor (there are {', '.join(EXTRACTORS)})")
    if weights:
        raise ExtractorError(f"{weights}: {name} is a file, which holds its weights itself; leave --weights out")
    return open_file(path, torch.device(device))
