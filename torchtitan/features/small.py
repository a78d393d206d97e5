"""Small classifiers of digits and of CIFAR-10, shipped with the package: features of a real task without a download.

`scripts/train_extractor.py` trains them. Their numbers compare sets of images with each other; no paper has the same.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn.functional import interpolate

from torchtitan.errors import first_line, reason
from torchtitan.features.base import ExtractorError, FeatureExtractor, as_rgb
from torchtitan.features.state_dicts import check_tensors
from torchtitan.files.regular import check_regular, read_regular, user_path
from torchtitan.programs import program

# The one entry of the metadata of a file of weights, JSON: several would be in another order in each file.
METADATA = "small_extractor"
LARGEST_FILE = 4 << 20  # bytes
PROGRAM = program("train_extractor")


@dataclass(frozen=True)
class SmallArchitecture:
    """Architecture of a small classifier.

    Attributes:
        channels, side: of the images.
        stages: output channels of the 3x3 convolutions of each stage; the resolution is halved between stages.
        num_classes: of the logits.
    """

    channels: int
    side: int
    stages: tuple[tuple[int, ...], ...]
    num_classes: int = 10


ARCHITECTURES: Mapping[str, SmallArchitecture] = MappingProxyType({
    "digits": SmallArchitecture(1, 8, ((32, 48), (64,))),
    "cifar10": SmallArchitecture(3, 32, ((16,), (32,), (48, 64), (64,))),
})
SHIPPED_SHA256: Mapping[str, str] = MappingProxyType({
    "digits": "fd83635a97fea439ca3d3f44035a56cf9f85a0d3b42f3fc96b2cc9fbbc546ded",
    "cifar10": "fb6e71531088cc6699729e993978b93c560255be579dcb205695a9dff05a15c5",
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


@dataclass(frozen=True)
class SmallWeights:
    """Content of a file of weights.

    Attributes:
        sha256: of the file.
        architecture: name in ARCHITECTURES, of its metadata.
        training: held-out accuracy, data, program, seed and recipe, of its metadata.
        tensors: by name, in the dtype of the file.
    """

    sha256: str
    architecture: str
    training: dict
    tensors: dict[str, Tensor]


class SmallExtractor(FeatureExtractor):
    """Extractor of a small classifier: `pooled`, its last map averaged over the image, and `logits`."""

    comparable_with = "values by the same weights only; no paper has them"

    def __init__(self, name: str, weights: SmallWeights, device: torch.device) -> None:
        """
        Args:
            name: of the registry, or the path of the file.
            weights: of a file.
            device: where to compute.

        Raises:
            ExtractorError: tensors are missing, superfluous, of another shape or not finite.
        """
        architecture = ARCHITECTURES[weights.architecture]
        self.name, self.device = name, device
        self.weights_sha256, self.training = weights.sha256, weights.training
        self.resize = f"torch's bilinear with antialias to {architecture.side}x{architecture.side}, none at that size"
        self._classifier = SmallClassifier(architecture)
        self.dims = {"pooled": self._classifier.head.in_features, "logits": architecture.num_classes}
        wanted = self._classifier.weights()
        check_tensors(name, {key: tuple(tensor.shape) for key, tensor in wanted.items()}, weights.tensors)
        if broken := [key for key, tensor in weights.tensors.items() if not tensor.float().isfinite().all()]:
            raise ExtractorError(f"{name}: its weights {broken[0]} are not finite")
        with torch.no_grad():
            for key, tensor in wanted.items():
                tensor.copy_(weights.tensors[key])
        self._classifier.to(device).eval().requires_grad_(False)

    def record(self) -> dict:
        return super().record() | {"training": self.training}

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        pooled, logits = self._classifier(self._classifier.prepare(images))
        return {"pooled": pooled, "logits": logits}


def open_small(name: str, weights: Path | None, device: torch.device) -> SmallExtractor:
    """Open a small extractor of ARCHITECTURES, with the package's weights or those of a file.

    Raises:
        ExtractorError: the package's file is missing or not the one it was made with, or the given one does not fit.
    """
    path = user_path(weights) if weights else shipped_file(name)
    content = read_weights(path)
    if weights is None and content.sha256 != SHIPPED_SHA256[name]:
        raise ExtractorError(f"{path}: is not the file of this version of the package (install the package again)")
    if content.architecture != name:
        raise ExtractorError(f"{path}: holds weights of {content.architecture}, not of {name}")
    return SmallExtractor(name, content, device)


def shipped_file(name: str) -> Path:
    """File of the package with the weights of an architecture."""
    return Path(__file__).with_name("weights") / f"{name}.safetensors"


def read_weights(path: Path) -> SmallWeights:
    """Read a file of weights. Raises ExtractorError: it cannot be read, or is of no architecture here."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        architecture = str(record.pop("architecture", "")) if isinstance(record, dict) else ""
        if architecture not in ARCHITECTURES:
            raise ExtractorError(
                f"{path}: its metadata name no architecture ({', '.join(ARCHITECTURES)}), and tensors alone are no network "
                f"(weights of a named extractor: --extractor NAME --weights FILE; {PROGRAM} writes files with the name)"
            )
        content = read_regular(path, LARGEST_FILE)
        tensors = load(content)
    except OSError as error:
        raise ExtractorError(f"{path}: cannot be read: {reason(error)}") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ExtractorError(f"{path}: is no safetensors file of {PROGRAM}: {first_line(error)}") from error
    return SmallWeights(hashlib.sha256(content).hexdigest(), architecture, record, tensors)


def weights_metadata(architecture: str, training: dict) -> dict[str, str]:
    """Metadata of a file of weights."""
    return {METADATA: json.dumps({"architecture": architecture, **training})}
