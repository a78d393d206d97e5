"""Base of feature extractors: uint8 images to float32 vectors, and the identity of what made them."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.errors import EvaluationError, reason
from torchtitan.fidelity.published import PublishedWeights
from torchtitan.files.regular import check_regular, user_path
from torchtitan.files.weight_files import WeightsError, read_state_dict
from torchtitan.programs import pasted


class FeatureExtractor(ABC):
    """Base of every extractor: in eval mode, without gradients, on one device, in float32.

    A subclass sets the attributes and implements `_features`.

    Attributes:
        name: of its entry in the registry, or of the file it was opened from.
        dims: size of each output, by its name: "pooled", "logits" or "spatial".
        device: where it computes; images are brought there.
        weights_sha256: hash of the file of its weights; "" without weights.
        resize: how images get the network's size, in words.
        comparable_with: published numbers that this extractor's features may be compared with, in words.
    """

    name: str
    dims: Mapping[str, int]
    device: torch.device
    weights_sha256: str
    resize: str
    comparable_with: str

    @torch.no_grad()
    def extract(self, images: Tensor) -> dict[str, Tensor]:
        """Extract the features of a batch; those of an image depend on the rest of its batch by rounding only.

        Args:
            images: uint8 [B, C, H, W], C 1 (gray) or 3 (RGB), of any size.

        Returns:
            each output of `dims`, float32 [B, D], on the extractor's device.
        """
        with full_float32(self.device):
            return {name: values.float() for name, values in self._features(images.to(self.device)).items()}

    def record(self) -> dict:
        """Identity of the extractor, for JSON; equal on every machine."""
        return {
            "name": self.name,
            "sha256": self.weights_sha256,
            "resize": self.resize,
            "dims": dict(self.dims),
            "comparable_with": self.comparable_with,
        }

    @abstractmethod
    def _features(self, images: Tensor) -> dict[str, Tensor]:
        """Outputs [B, D] of `dims` for uint8 images [B, 1 or 3, H, W] on the extractor's device."""


def as_rgb(images: Tensor) -> Tensor:
    """Repeat the channel of gray images; [B, 1 or 3, H, W] -> [B, 3, H, W]."""
    return images.expand(-1, 3, -1, -1)


def read_published(weights: PublishedWeights, path: Path | None, option: str = "") -> dict[str, Tensor]:
    """Read published weights; no code of the file is run.

    Args:
        path: of the file, of any name; None is where scripts/download.py puts it.
        option: that names it, for messages.

    Raises:
        EvaluationError: the file is missing, cannot be read, or is not the published one.
    """
    file = weights.path if path is None else user_path(path)
    advice = f"{pasted('download')} {weights.name} fetches it, {weights.size / 1e6:,.0f} MB"
    advice += f"; {option} names a copy" if option else ""
    if not file.exists():
        raise EvaluationError(f"{weights.name}: {file}: no such file of weights ({advice})")
    try:
        check_regular(file)
        with open(file, "rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise EvaluationError(f"{file}: cannot be read: {reason(error)}") from error
    if found != weights.sha256:
        raise EvaluationError(
            f"{weights.name}: {file}: is not the published file: SHA-256 {found[:12]}..., not {weights.sha256[:12]}... "
            f"({advice})"
        )
    try:
        return read_state_dict(file)[0]
    except WeightsError as error:
        raise EvaluationError(f"{weights.name}: {error}") from error


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32, whatever the process allows: no TF32, no bfloat16, no autocast.

    The settings are the process's, and are restored after the block.
    """
    backends: Any = torch.backends  # whose settings of oneDNN have no types
    settings = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [each.fp32_precision for each in settings]
    try:
        for each in settings:
            each.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for each, precision in zip(settings, before, strict=True):
            each.fp32_precision = precision
