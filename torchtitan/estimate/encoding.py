"""Cost of encoding images in every step (`autoencoder.encode`), from the autoencoder's layers without their weights."""

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import trained_info
from torchtitan.data import DatasetInfo, dataset_info
from torchtitan.data.online import latents_of
from torchtitan.files.regular import user_path


def online_encoder(config: JobConfig) -> Autoencoder | None:
    """Autoencoder that a run encodes its images with, on the meta device; None without one, and where it cannot be counted."""
    counted = config.autoencoder.encode and not uncounted(config)
    return _on_meta(*_key(config)) if counted else None


def uncounted(config: JobConfig) -> str:
    """Report in one line why encoding cannot be counted; "" where it can, and where nothing is encoded."""
    found = _encoding(config) if config.autoencoder.encode else ""
    return found if isinstance(found, str) else ""


def encoding_flops_per_image(config: JobConfig) -> int:
    """Floating-point operations of encoding an image of a run; 0 where none is encoded, or they are not known."""
    found = _encoding(config) if config.autoencoder.encode else ""
    return 0 if isinstance(found, str) else found[0]


def estimated_info(config: JobConfig) -> DatasetInfo:
    """Describe what a configuration trains on, latents of a store that is not here by the autoencoder's layers.

    Raises:
        DatasetError: as `trained_info`, which opens all else.
    """
    if not config.autoencoder.encode or user_path(config.autoencoder.statistics).is_dir():
        return trained_info(config)
    found = _encoding(config)
    if isinstance(found, str):
        return trained_info(config)
    return latents_of(dataset_info(config.data), found[1], keeps_pixels=config.alignment.encodes_images)


_Key = tuple[str, str, torch.dtype | None, int]


def _key(config: JobConfig) -> _Key:
    section = config.autoencoder
    return section.name, section.path, getattr(torch, section.dtype) if section.dtype else None, section.tile


def _encoding(config: JobConfig) -> tuple[int, tuple[int, int, int]] | str:
    return _counted(_key(config), dataset_info(config.data).image_shape)


def _on_meta(name: str, path: str, dtype: torch.dtype | None, tile: int) -> Autoencoder:
    return build_autoencoder(name, path, dtype, "meta", tile)


@functools.lru_cache(maxsize=4)
def _counted(key: _Key, image_shape: tuple[int, int, int]) -> tuple[int, tuple[int, int, int]] | str:
    """Floating-point operations of encoding an image and the shape of its latent; or why these are not known."""
    try:
        encoder = _on_meta(*key)
        with FlopCounterMode(display=False) as counter:
            channels, height, width = encoder.encode(torch.empty(1, *image_shape, device="meta")).mean.shape[1:]
    except AutoencoderError as error:
        return str(error)
    return counter.get_total_flops(), (channels, height, width)
