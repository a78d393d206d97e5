"""Cost of encoding images in every step (`autoencoder.encode`), from the autoencoder's layers without their weights."""

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import pixels_of


def online_encoder(config: JobConfig) -> tuple[Autoencoder | None, str]:
    """Autoencoder that a run encodes its images with, on the meta device, None without one; or why it is not known, in a line."""
    section = config.autoencoder
    if not section.encode:
        return None, ""
    dtype = getattr(torch, section.dtype) if section.dtype else None
    try:
        return build_autoencoder(section.name, section.path, dtype, "meta", section.tile), ""
    except AutoencoderError as error:
        return None, str(error)


def encoding(encoder: Autoencoder, image_shape: Sequence[int]) -> tuple[int, tuple[int, int, int]]:
    """Floating-point operations of encoding an image (C, H, W), and the shape of its latent."""
    with FlopCounterMode(display=False) as counter:
        channels, height, width = encoder.encode(torch.empty(1, *image_shape, device="meta")).mean.shape[1:]
    return counter.get_total_flops(), (channels, height, width)


def encoding_flops_per_image(config: JobConfig) -> int:
    """Floating-point operations of encoding an image of a run; 0 where none is encoded, or they are not known."""
    encoder, pixels = online_encoder(config)[0], pixels_of(config)
    return 0 if encoder is None or pixels is None else encoding(encoder, pixels)[0]
