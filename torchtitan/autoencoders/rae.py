"""Representation autoencoders of the diffusers package: a frozen vision transformer's patch features as latents.

Source: Zheng et al., "Diffusion Transformers with Representation Autoencoders", arXiv 2510.11690, section 3.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents, Normalization, compute_dtype
from torchtitan.autoencoders.diffusers_models import FILES, load_model, model_kind
from torchtitan.extras import install
from torchtitan.files.hub import local_folder
from torchtitan.files.weight_hash import weights_sha256

KIND = "AutoencoderRAE"
_ADDED_TO_STD = 1e-5  # by diffusers; the paper's code adds it to the variance, which differs by 1e-5 of the value at most


class RepresentationAutoencoder(Autoencoder):
    """Autoencoder around AutoencoderRAE: deterministic latents [B, width of the encoder, h, w] of images of one size.

    The normalisation is that of the model's files: a mean and a deviation of each element [C, h, w].
    """

    name = "rae"

    def __init__(self, path: str, dtype: torch.dtype | None, device: torch.device) -> None:
        """
        Args:
            path: folder with config.json and safetensors weights, or a name on the hub: owner/repository.

        Raises:
            AutoencoderError: diffusers or transformers is not installed, or the folder holds no complete model.
        """
        super().__init__(compute_dtype(self.name, dtype), device)
        folder = local_folder(self.name, path, FILES, AutoencoderError)
        kind = model_kind(folder / "config.json", (KIND,))
        try:
            import transformers  # noqa: F401 (diffusers builds the encoder of it)
        except ImportError as error:
            raise AutoencoderError(f"rae: needs the package transformers, which is not installed ({install('text')})") from error
        model: Any = load_model(folder, kind, device)
        self.channels: int = model.config.encoder_hidden_size
        self.downscale: int = model.decoder_patch_size
        self.side: int = model.decoder_image_size
        self.weights_sha256 = weights_sha256(model.state_dict())
        self.normalization = self._take_normalization(model)
        if self.normalization:
            _refuse_half_precision(folder)
        model.reshape_to_2d = True
        self.model = model
        self.freeze()

    def check_images(self, images: Tensor) -> None:
        """Check also that the images have the decoder's size, to which every other one would be resized."""
        super().check_images(images)
        if tuple(images.shape[2:]) != (self.side, self.side):
            height, width = images.shape[2:]
            raise AutoencoderError(f"rae encodes images of {self.side} x {self.side} pixels, not {height} x {width}")

    def check_latents(self, latents: Tensor) -> None:
        """Check also that the latents have the decoder's size."""
        super().check_latents(latents)
        if latents.shape[2:].numel() * self.downscale**2 != self.side**2:
            side = self.side // self.downscale
            raise AutoencoderError(f"rae decodes latents of {side} x {side}, not {latents.shape[2]} x {latents.shape[3]}")

    def _take_normalization(self, model: Any) -> Normalization | None:
        """Take the statistics out of the model, which then encodes to raw latents; None where it has none."""
        config, side = model.config, self.side // self.downscale
        mean, std = (getattr(model, name).double() for name in ("_latents_mean", "_latents_std"))
        model._latents_mean, model._latents_std = torch.zeros(1), torch.full((1,), 1 - _ADDED_TO_STD)
        scaling = config.scaling_factor
        model.register_to_config(scaling_factor=1.0)
        if mean.is_meta or config.latents_mean is None and config.latents_std is None:
            return None
        shape = (self.channels, side, side)
        return {
            "shift": mean.expand(shape).flatten().tolist(),
            "scale": (scaling / (std + _ADDED_TO_STD)).expand(shape).flatten().tolist(),
        }

    def _encode(self, images: Tensor) -> Latents:
        return Latents(self.model.encode((images + 1) / 2).latent)

    def _decode(self, latents: Tensor) -> Tensor:
        return self.model.decode(latents).sample * 2 - 1


def _refuse_half_precision(folder: Path) -> None:
    """Refuse a mean and a deviation that were rounded to half precision: they scale every latent."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as weights:
            for name in {"_latents_mean", "_latents_std"} & set(weights.keys()):
                if (dtype := weights.get_slice(name).get_dtype()) in ("F16", "BF16"):
                    raise AutoencoderError(f"rae: {path}: {name} is in half precision ({dtype}; save these two in float32)")
