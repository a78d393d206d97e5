"""Autoencoders of the diffusers package: AutoencoderKL (SD, SDXL, SD3, Flux) and AutoencoderDC."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents, Normalization, compute_dtype
from torchtitan.extras import install, quiet_torchao
from torchtitan.files.hub import local_folder
from torchtitan.files.weight_hash import weights_sha256

STOCHASTIC, DETERMINISTIC = "AutoencoderKL", "AutoencoderDC"
FILES = [
    "config.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model-*.safetensors",
]


class DiffusersAutoencoder(Autoencoder):
    """Autoencoder around a diffusers model; scale and shift are those of the model's config.json."""

    name = "diffusers"

    def __init__(self, path: str, dtype: torch.dtype | None, device: torch.device) -> None:
        """
        Args:
            path: folder with config.json and safetensors weights, a pipeline's folder that holds one as `vae`, or a
                name on the hub: owner/repository or owner/repository/vae.

        Raises:
            AutoencoderError: diffusers is not installed, or the folder holds no complete model of the two kinds.
        """
        super().__init__(compute_dtype(self.name, dtype), device)
        folder = local_folder(self.name, path, [*FILES, *(f"vae/{name}" for name in FILES)], AutoencoderError)
        if not (folder / "config.json").is_file() and (folder / "vae" / "config.json").is_file():
            folder = folder / "vae"
        self.kind = model_kind(folder / "config.json", (STOCHASTIC, DETERMINISTIC))
        self.model: Any = load_model(folder, self.kind, device)
        config: Any = self.model.config
        if config.in_channels != 3:
            raise AutoencoderError(f"diffusers: {folder}: takes {config.in_channels} channels, not RGB images")
        self.channels = config.latent_channels
        stages = config.block_out_channels if self.kind == STOCHASTIC else config.encoder_block_out_channels
        self.downscale = 2 ** (len(stages) - 1)
        self.normalization = _normalization(config, self.channels)
        self.weights_sha256 = weights_sha256(self.model.state_dict())
        self.freeze()

    def identity(self) -> dict:
        return super().identity() | {"kind": self.kind}

    def _encode(self, images: Tensor) -> Latents:
        if self.kind == DETERMINISTIC:
            return Latents(self.model.encode(images).latent)
        posterior = self.model.encode(images).latent_dist
        return Latents(posterior.mean, torch.exp(0.5 * posterior.logvar.float()))

    def _decode(self, latents: Tensor) -> Tensor:
        return self.model.decode(latents).sample


def model_kind(file: Path, kinds: tuple[str, ...]) -> str:
    """Class of the model that a config.json describes. Raises AutoencoderError: it is none of `kinds`."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise AutoencoderError(f"diffusers: {file}: cannot be read: {reason}") from error
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind not in kinds:
        raise AutoencoderError(f"diffusers: {file}: describes {kind or 'no model'}; {' and '.join(kinds)} can be used")
    return kind


@quiet_torchao()  # which the package imports where there is one
def load_model(folder: Path, kind: str, device: torch.device) -> torch.nn.Module:
    """Load a model of diffusers in float32, on the host or on meta. Raises AutoencoderError: no package, or no complete model."""
    try:
        import diffusers
    except ImportError as error:
        raise AutoencoderError(
            f"diffusers: needs the package diffusers, which is not installed ({install('diffusers')})"
        ) from error
    if not hasattr(diffusers, kind):
        raise AutoencoderError(f"diffusers: version {diffusers.__version__} has no {kind} (install a newer one)")
    of_kind = getattr(diffusers, kind)
    try:
        if device.type == "meta":
            with device:
                return of_kind.from_config(of_kind.load_config(folder))
        # Only safetensors: the other kind of file is a pickle. In float32, which the hash is taken in.
        model, found = of_kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False,
            torch_dtype=torch.float32, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        # torch heads its list of wrong shapes with a line that says nothing.
        reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
        raise AutoencoderError(f"diffusers: {folder}: cannot be loaded: {reason}") from error
    # diffusers fills missing weights of a file with random ones, and does not stop.
    for key, text in (
        ("missing_keys", "are missing"), ("unexpected_keys", "are not of this model"),
        ("mismatched_keys", "have another shape"),
    ):  # fmt: skip
        if names := sorted(str(name) for name in found[key]):
            raise AutoencoderError(f"diffusers: {folder}: {len(names)} weights {text}: {names[0]}")
    return model


def _normalization(config: Any, channels: int) -> Normalization | None:
    """Normalisation (shift and scale) as the pipelines of diffusers apply it, from the model's own configuration.

    With per-channel statistics: (raw - latents_mean) * scaling_factor / latents_std; else (raw - shift_factor) *
    scaling_factor, with no shift where there is none.
    """
    if config.scaling_factor is None:
        return None
    mean, std, shift = config.get("latents_mean"), config.get("latents_std"), config.get("shift_factor") or 0.0
    if mean is not None and std is not None:
        return {"shift": [float(value) for value in mean], "scale": [config.scaling_factor / value for value in std]}
    return {"shift": [float(shift)] * channels, "scale": [float(config.scaling_factor)] * channels}
