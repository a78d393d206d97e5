"""Feature extractors by name."""

from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan.features.base import ExtractorError, FeatureExtractor

EXTRACTORS: dict[str, Callable[[Path | None, torch.device], FeatureExtractor]] = {}


def open_extractor(name: str, weights: Path | None = None, device: torch.device | str = "cpu") -> FeatureExtractor:
    """Open an extractor for use.

    Args:
        name: of an entry of EXTRACTORS.
        weights: file of its weights; None is the place where scripts/download.py puts them, or the package's own.
        device: where it computes.

    Raises:
        ExtractorError: an unknown name, or missing, damaged or wrong weights.
    """
    if name not in EXTRACTORS:
        raise ExtractorError(f"no feature extractor is called {name!r} (there are {', '.join(EXTRACTORS)})")
    return EXTRACTORS[name](weights, torch.device(device))
