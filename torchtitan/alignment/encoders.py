"""Frozen encoders of images as teachers: patch features of the images that are trained on, on the grid of the network's tokens.

An encoder takes images [B, 1 or 3, H, W] in [-1, 1] and a grid (h, w), and returns features [B, h w, C]. A vision
transformer sees the images resized to whole patches on that grid, bicubic without antialias, as REPA's (arXiv 2410.06940) sees
224 pixels for 256; a small classifier takes images of its shape alone, and has the maps of its resolutions.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from torchtitan.errors import EvaluationError, first_line
from torchtitan.extras import install, quiet_torchao
from torchtitan.fidelity.dinov2 import EDM2, MEAN, STD, DinoV2, VisionTransformer
from torchtitan.fidelity.feature_extractor import as_rgb
from torchtitan.fidelity.small import ARCHITECTURES, SmallClassifier, open_small
from torchtitan.files.hub import local_folder
from torchtitan.files.regular import user_path
from torchtitan.pictures.number_text import first_named

_FILES = ["config.json", "preprocessor_config.json", "model*.safetensors", "model.safetensors.index.json"]


class PatchFeatures(nn.Module):
    """Patch features of a vision transformer.

    Args:
        tokens: (images [B, 3, patch h, patch w], normalised) -> tokens, the h w patches last, [B, extra + h w, C].
        mean, std: of pixels in [0, 1], by channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, tokens: Callable[[Tensor], Tensor], patch: int, mean: Sequence[float], std: Sequence[float],
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.network, self._tokens, self._patch = network, tokens, patch
        self.register_buffer("mean", torch.tensor(mean, device=device).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std, device=device).view(3, 1, 1))

    def forward(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        pixels = interpolate(as_rgb(images), [self._patch * side for side in grid], mode="bicubic")
        found = self._tokens((0.5 * pixels + 0.5 - self.mean) / self.std)
        return found[:, found.shape[1] - grid[0] * grid[1] :]


class ClassifierMaps(nn.Module):
    """Maps of a small classifier: the last ones on the grid. Raises EvaluationError: none are, or images of another shape."""

    def __init__(self, classifier: SmallClassifier) -> None:
        super().__init__()
        self._classifier = classifier

    def forward(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        architecture, shape = self._classifier.architecture, tuple(images.shape[1:])
        if shape != (wanted := (architecture.channels, architecture.side, architecture.side)):
            text = f"encodes images of {times(wanted)}, and these are of {times(shape)}"
            raise EvaluationError(f"{text} (choose another teacher)")
        maps, found, sides = self._classifier.prepare(127.5 * images + 127.5), None, dict[str, None]()
        for layer in self._classifier.convolutions:
            maps = layer(maps)
            sides[times(maps.shape[2:])] = None
            found = maps if tuple(maps.shape[2:]) == grid else found
        if found is None:
            text = f"has features on {', '.join(sides)}, and tokens are on {times(grid)}"
            raise EvaluationError(f"{text} (choose another teacher, or model.patch_size)")
        return found.flatten(2).transpose(1, 2)  # [B, T, C]


def times(sides: Sequence[int]) -> str:
    """Sides in words, as 4 x 4."""
    return " x ".join(map(str, sides))


def _open_classifier(name: str, path: str, device: torch.device) -> nn.Module:
    if device.type != "meta":
        return ClassifierMaps(open_small(name, None, device).classifier)
    with device:
        return ClassifierMaps(SmallClassifier(ARCHITECTURES[name]).eval())


open_digits, open_cifar10 = (partial(_open_classifier, name) for name in ("digits", "cifar10"))


def open_dinov2(path: str, device: torch.device) -> nn.Module:
    """Open DINOv2's ViT-L/14. Raises EvaluationError: its published weights are not there."""
    if device.type == "meta":
        with device:
            network = VisionTransformer()
    else:
        network = DinoV2.open(EDM2, user_path(path) if path else None, device, "--alignment.path").network
    return PatchFeatures(network, network.patch_tokens, network.patch_embed.proj.kernel_size[0], MEAN, STD, device)


@quiet_torchao()
def open_transformers(path: str, device: torch.device) -> nn.Module:
    """Open a vision transformer of transformers, as DINOv2, DINOv3, SigLIP's or MAE's. Raises EvaluationError.

    Features are the last hidden state, after the last norm; positions are resampled to the grid as that package does.
    """
    try:
        import transformers
    except ImportError as error:
        raise EvaluationError(f"{path}: needs the package transformers ({install('text')})") from error
    folder = local_folder("teacher", path, _FILES, EvaluationError)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if device.type == "meta":
            with device:
                network, report = transformers.AutoModel.from_config(config, trust_remote_code=False), {}
        else:
            network, report = transformers.AutoModel.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
            )
        file = folder / "preprocessor_config.json"
        said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
        raise EvaluationError(f"{folder}: cannot be opened by transformers: {first_line(error)}") from error
    if missing := [name for name in sorted(report.get("missing_keys", ())) if "pooler" not in name]:
        raise EvaluationError(f"{folder}: its weights lack {first_named(missing, 1)}")
    if not isinstance(patch := getattr(config, "patch_size", None), int):
        raise EvaluationError(f"{folder}: {config.model_type} has no patches (give a vision transformer)")
    named = inspect.signature(network.forward).parameters
    options: dict[str, Any] = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in named else {}
    network.to(device).eval()

    def tokens(images: Tensor) -> Tensor:
        return network(pixel_values=images, **options).last_hidden_state

    return PatchFeatures(network, tokens, patch, said.get("image_mean", MEAN), said.get("image_std", STD), device)
