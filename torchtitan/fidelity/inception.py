"""Inception-2015: the classifier of TensorFlow's inception-2015-12-05, in whose features FID, sFID, KID and IS are defined.

The networks called Inception-v3 elsewhere have other weights and other pooling; their features are not comparable.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, linear, max_pool2d

from torchtitan.fidelity.feature_extractor import FeatureExtractor, as_rgb, read_published
from torchtitan.fidelity.published import INCEPTION
from torchtitan.fidelity.resizing import resize_bilinear_tf1

SIDE = 299
CLASSES = 1008
NORM_EPSILON = 1e-3
SPATIAL_CHANNELS = 7

average_pool = partial(avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
max_pool = partial(max_pool2d, kernel_size=3, stride=1, padding=1)
_halve = partial(max_pool2d, kernel_size=3, stride=2)


class Inception2015(FeatureExtractor):
    """Inception-2015's pooled features, logits without bias, and the spatial features of sFID."""

    name = "inception"
    dims = MappingProxyType({"pooled": 2048, "logits": CLASSES, "spatial": 17 * 17 * SPATIAL_CHANNELS})
    resize = "TensorFlow 1's bilinear to 299 x 299, no antialias"
    comparable_with = "FID, KID, IS, precision and recall of most papers; sFID of ADM"

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        with torch.device("meta"):
            network = InceptionNetwork()
        # CUDA's float32 kernels want channels first; channels last serves those of TF32 and half precision.
        self._layout = torch.channels_last if device.type == "cpu" else torch.contiguous_format
        folded = fold_convolutions(network, tensors) | {name: tensors[name].float() for name in ("fc.weight", "fc.bias")}
        laid_out = {
            name: tensor.contiguous(memory_format=self._layout) if tensor.ndim == 4 else tensor
            for name, tensor in folded.items()
        }
        network.load_state_dict(laid_out, assign=True)
        self.network = network.eval().requires_grad_(False).to(device)
        self.device = device
        self.weights_sha256 = INCEPTION.sha256

    @classmethod
    def open(cls, weights: Path | None, device: torch.device) -> "Inception2015":
        """Open the published weights: a file, or where scripts/download.py puts it. Raises EvaluationError."""
        return cls(read_published(INCEPTION, weights), device)

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        x = resize_bilinear_tf1(as_rgb(images), SIDE).sub_(128).div_(128)  # [B, 3, 299, 299]
        pooled, logits, spatial = self.network(x.contiguous(memory_format=self._layout))
        return {"pooled": pooled, "logits": logits, "spatial": spatial}


class Convolution(nn.Conv2d):
    """Convolution and ReLU; the batch norm between them, of fixed statistics, is folded into weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu_()


class InceptionNetwork(nn.Module):
    """The network from normalised images to its features; modules have the published names."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3)
        self.Mixed_5b = FineBlock(192, pool_width=32)
        self.Mixed_5c = FineBlock(256, pool_width=64)
        self.Mixed_5d = FineBlock(288, pool_width=64)
        self.Mixed_6a = FineReduction()
        self.Mixed_6b = MiddleBlock(128)
        self.Mixed_6c = MiddleBlock(160)
        self.Mixed_6d = MiddleBlock(160)
        self.Mixed_6e = MiddleBlock(192)
        self.Mixed_7a = MiddleReduction()
        self.Mixed_7b = CoarseBlock(1280, average_pool)
        self.Mixed_7c = CoarseBlock(2048, max_pool)  # the graph's last block alone takes the maximum
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of images.

        Args:
            x: [B, 3, 299, 299], (pixel - 128) / 128.

        Returns:
            pooled [B, 2048], logits [B, 1008] without bias, spatial [B, 2023].
        """
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))  # [B, 64, 147, 147]
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(_halve(x)))  # [B, 192, 71, 71]
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(_halve(x))))  # [B, 288, 35, 35]
        x = self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x))))  # [B, 768, 17, 17]
        # ADM reads mixed_6/conv, the first branch of this block; TensorFlow's channels are last.
        spatial = x[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)  # [B, 2023]
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(self.Mixed_6e(x))))  # [B, 2048, 8, 8]
        pooled = x.mean(dim=(2, 3))
        return pooled, linear(pooled, self.fc.weight), spatial


class FineBlock(nn.Module):
    """Block at 35 x 35: branches 1x1, 5x5, twice 3x3, and average pool."""

    def __init__(self, channels: int, pool_width: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(channels, 64, 1)
        self.branch5x5_1 = Convolution(channels, 48, 1)
        self.branch5x5_2 = Convolution(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Convolution(channels, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, padding=1)
        self.branch_pool = Convolution(channels, pool_width, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), wide, double, self.branch_pool(average_pool(x))], 1)


class FineReduction(nn.Module):
    """Reduction from 35 x 35, 288 channels, to 17 x 17, 768 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3 = Convolution(288, 384, 3, stride=2)
        self.branch3x3dbl_1 = Convolution(288, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, _halve(x)], 1)


class MiddleBlock(nn.Module):
    """Block at 17 x 17: branches 1x1, 7x7 and twice 7x7 in lines and columns, and average pool; 768 channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(768, 192, 1)
        self.branch7x7_1 = Convolution(768, width, 1)
        self.branch7x7_2 = _lines(width, width, 7)
        self.branch7x7_3 = _columns(width, 192, 7)
        self.branch7x7dbl_1 = Convolution(768, width, 1)
        self.branch7x7dbl_2 = _columns(width, width, 7)
        self.branch7x7dbl_3 = _lines(width, width, 7)
        self.branch7x7dbl_4 = _columns(width, width, 7)
        self.branch7x7dbl_5 = _lines(width, 192, 7)
        self.branch_pool = Convolution(768, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(average_pool(x))], 1)


class MiddleReduction(nn.Module):
    """Reduction from 17 x 17, 768 channels, to 8 x 8, 1280 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1 = Convolution(768, 192, 1)
        self.branch3x3_2 = Convolution(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Convolution(768, 192, 1)
        self.branch7x7x3_2 = _lines(192, 192, 7)
        self.branch7x7x3_3 = _columns(192, 192, 7)
        self.branch7x7x3_4 = Convolution(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), wide, _halve(x)], 1)


class CoarseBlock(nn.Module):
    """Block at 8 x 8: branches 1x1, 3x3 and twice 3x3 whose ends are split in lines and columns, and a pool."""

    def __init__(self, channels: int, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool
        self.branch1x1 = Convolution(channels, 320, 1)
        self.branch3x3_1 = Convolution(channels, 384, 1)
        self.branch3x3_2a = _lines(384, 384, 3)
        self.branch3x3_2b = _columns(384, 384, 3)
        self.branch3x3dbl_1 = Convolution(channels, 448, 1)
        self.branch3x3dbl_2 = Convolution(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = _lines(384, 384, 3)
        self.branch3x3dbl_3b = _columns(384, 384, 3)
        self.branch_pool = Convolution(channels, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        return torch.cat([
            self.branch1x1(x), self.branch3x3_2a(single), self.branch3x3_2b(single), self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double), self.branch_pool(self.pool(x)),
        ], 1)  # fmt: skip


def _lines(channels_in: int, channels_out: int, length: int) -> Convolution:
    return Convolution(channels_in, channels_out, (1, length), padding=(0, length // 2))


def _columns(channels_in: int, channels_out: int, length: int) -> Convolution:
    return Convolution(channels_in, channels_out, (length, 1), padding=(length // 2, 0))


def fold_convolutions(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weight and bias of each Convolution with its batch norm folded in, float32, computed in float64 from published tensors."""
    folded = {}
    for name in [name for name, module in network.named_modules() if isinstance(module, Convolution)]:
        weight, gain, bias, mean, variance = (
            tensors[f"{name}.{part}"].double()
            for part in ("conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
        )
        scale = gain / torch.sqrt(variance + NORM_EPSILON)
        folded[f"{name}.weight"] = (weight * scale[:, None, None, None]).float()
        folded[f"{name}.bias"] = (bias - mean * scale).float()
    return folded
