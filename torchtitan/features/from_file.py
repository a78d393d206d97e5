"""Extractors from a file: TorchScript modules, and weights of the small classifiers."""

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.features.base import ExtractorError, FeatureExtractor, as_rgb, file_sha256, full_float32
from torchtitan.features.small import SmallExtractor, read_weights

CONVENTION = "a TorchScript extractor takes uint8 images [B, 3, H, W], values 0 to 255, of any size, and returns float [B, D]"
PROBE_SIDE = 64
# Float32 sums in another order differ by less; batch norm in training mode or dropout by far more.
BATCH_TOLERANCE = 1e-3


class TorchScriptExtractor(FeatureExtractor):
    """Extractor of a TorchScript file by the CONVENTION; its output is `pooled`. Gray images are repeated over the channels.

    Args:
        path: of the file, which is a program: it can use memory, time and the files that this process can use.
        device: where to compute.

    Raises:
        ExtractorError: it is no TorchScript file, does not follow the convention, or mixes the images of a batch.
    """

    resize = "the module's own"
    comparable_with = "values by the same file"

    def __init__(self, path: Path, device: torch.device) -> None:
        self.name, self.device = path.name, device
        self.weights_sha256 = file_sha256(path)
        _refuse_other_archives(path)
        try:
            self._module = torch.jit.load(path, map_location=device)
        except (RuntimeError, ValueError, OSError) as error:
            raise ExtractorError(f"{path}: is no TorchScript file of this version of torch, or is damaged") from error
        self._module.eval()
        self.dims = {"pooled": self._probe(path)}

    @torch.no_grad()
    def _probe(self, path: Path) -> int:
        """Size of the features, found with two images of noise."""
        images = torch.randint(0, 256, (2, 3, PROBE_SIDE, PROBE_SIDE), generator=torch.Generator().manual_seed(0))
        images = images.to(self.device, torch.uint8)
        with full_float32(self.device):
            together, alone = (self._features(each)["pooled"] for each in (images, images[:1]))
        for features, count in ((together, 2), (alone, 1)):
            if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != count or not features.shape[1]:
                shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
                raise ExtractorError(f"{path}: gives {shape} for {count} images ({CONVENTION})")
            if not features.is_floating_point():
                raise ExtractorError(f"{path}: gives features in {features.dtype} ({CONVENTION})")
        if not alone.isfinite().all():
            raise ExtractorError(f"{path}: gives noise features that are not finite (other weights, or a wider dtype)")
        largest = BATCH_TOLERANCE * float(alone.abs().mean())
        if not torch.allclose(together[:1], alone, rtol=BATCH_TOLERANCE, atol=largest):
            raise ExtractorError(
                f"{path}: the features of an image depend on the rest of its batch (save the module in eval mode)"
            )
        return alone.shape[1]

    def _features(self, images: Tensor) -> dict[str, Tensor]:
        try:
            return {"pooled": self._module(as_rgb(images))}
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, torch.jit.Error) as error:  # the latter of an assertion in the file
            shape = list(images.shape)
            raise ExtractorError(f"{self.name}: fails on images {shape}: {_last_line(error)} ({CONVENTION})") from error


def open_file(path: Path, device: torch.device) -> FeatureExtractor:
    """Open an extractor from a TorchScript file, or from a safetensors file of `scripts/train_extractor.py`.

    Raises:
        ExtractorError: it is neither, or cannot be used.
    """
    if path.suffix != ".safetensors":
        return TorchScriptExtractor(path, device)
    return SmallExtractor(path.name, read_weights(path), device)


def _refuse_other_archives(path: Path) -> None:
    """Refuse what torch.save wrote, before anything reads its pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            script = any(name.endswith("/constants.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        script = False
    if not script:
        raise ExtractorError(
            f"{path}: is no TorchScript file; pickled modules and weights without a network are not opened "
            "(torch.jit.script or torch.jit.trace, then .save, makes one)"
        )


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
