"""Feature extractors by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.dinov2 import DGM_EVAL, EDM2, DinoV2
from torchtitan.fidelity.feature_extractor import FeatureExtractor
from torchtitan.fidelity.inception import Inception2015
from torchtitan.fidelity.small import open_small

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
        weights: file of its weights; None is the place where scripts/download.py puts them, or the package's own.

    Raises:
        EvaluationError: an unknown name, or missing, damaged or wrong weights.
    """
    if name not in EXTRACTORS:
        raise EvaluationError(f"{name[:60]!r} is no feature extractor (there are {', '.join(EXTRACTORS)})")
    with torch.random.fork_rng(devices=[]):  # networks are filled with random numbers before their weights
        return EXTRACTORS[name](weights, torch.device(device))
