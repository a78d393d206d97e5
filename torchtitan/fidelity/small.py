"""Small classifiers of digits and of CIFAR-10, shipped with the package: features of a real task without a download.

Their numbers compare sets of images with each other; no paper has the same.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn.functional import interpolate

from torchtitan.errors import EvaluationError
from torchtitan.fidelity.feature_extractor import FeatureExtractor, as_rgb


@dataclass(frozen=True)
class SmallArchitecture:
    """Small classifier; stages: channels of each stage's 3x3 convolutions, at half the last's resolution."""

    channels: int
    side: int
    stages: tuple[tuple[int, ...], ...]
    sha256: str
    num_classes: int = 10


ARCHITECTURES: Mapping[str, SmallArchitecture] = MappingProxyType({
    "digits": SmallArchitecture(
        1, 8, ((32, 48), (64,)), "fd83635a97fea439ca3d3f44035a56cf9f85a0d3b42f3fc96b2cc9fbbc546ded"
    ),
    "cifar10": SmallArchitecture(
        3, 32, ((16,), (32,), (48, 64), (64,)), "fb6e71531088cc6699729e993978b93c560255be579dcb205695a9dff05a15c5"
    ),
})


class SmallClassifier(nn.Module):
    """Convolutions with batch norm and ReLU in stages, mean over the image, one linear layer."""

    def __init__(self, architecture: SmallArchitecture) -> None:
        super().__init__()
        self.architecture = architecture
        layers: list[nn.Module] = []
        width = architecture.channels
        for number, stage in enumerate(architecture.stages):
            if number:
                layers.append(nn.MaxPool2d(2))
            for wider in stage:
                layers += [nn.Conv2d(width, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
                width = wider
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Linear(width, architecture.num_classes)

    def prepare(self, images: Tensor) -> Tensor:
        """Bring uint8 images [B, 1 or 3, H, W] to the channels and the side of the classifier, [B, C, S, S] in [-1, 1]."""
        side = self.architecture.side
        if self.architecture.channels == 3:
            pixels = as_rgb(images).float()  # [B, 3, H, W]
        else:
            pixels = images.float().mean(dim=1, keepdim=True)  # [B, 1, H, W]
        if pixels.shape[2:] != (side, side):
            pixels = interpolate(pixels, (side, side), mode="bilinear", antialias=True)  # [B, C, S, S]
        return pixels / 127.5 - 1

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, D] and logits [B, K] of prepared images."""
        maps = self.convolutions(images.contiguous(memory_format=torch.channels_last))
        pooled = maps.mean(dim=(2, 3))  # [B, D]
        return pooled, self.head(pooled)

    def weights(self) -> dict[str, Tensor]:
        """Tensors that the outputs in eval mode depend on, by name; the tensors themselves."""
        return {name: tensor for name, tensor in self.state_dict().items() if tensor.is_floating_point()}


class SmallExtractor(FeatureExtractor):
    """Extractor of a small classifier: `pooled`, its last map averaged over the image, and `logits`."""

    comparable_with = "values by the same weights only; no paper has them"

    def __init__(self, name: str, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        architecture = ARCHITECTURES[name]
        self.name, self.device, self.weights_sha256 = name, device, architecture.sha256
        self.resize = f"torch's bilinear with antialias to {architecture.side}x{architecture.side}, none at that size"
        self.classifier = SmallClassifier(architecture)
        self.dims = {"pooled": self.classifier.head.in_features, "logits": architecture.num_classes}
        with torch.no_grad():
            for key, tensor in self.classifier.weights().items():
                tensor.copy_(tensors[key])
        self.classifier.to(device).eval().requires_grad_(False)

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        pooled, logits = self.classifier(self.classifier.prepare(images))
        return {"pooled": pooled, "logits": logits}


def open_small(name: str, weights: Path | None, device: torch.device) -> SmallExtractor:
    """Open a small extractor of ARCHITECTURES with the package's weights. Raises EvaluationError: they are damaged."""
    if weights is not None:
        raise EvaluationError(f"{weights}: the weights of {name} come with the package (leave --weights out)")
    path = Path(__file__).with_name("weights") / f"{name}.safetensors"
    content = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(content).hexdigest() != ARCHITECTURES[name].sha256:
        raise EvaluationError(f"{path}: is not the file of this version of the package (install the package again)")
    return SmallExtractor(name, load(content), device)
