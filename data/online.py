"""Encoding of a run's images while it trains: what a latent store of them would hold, without the store.

A store of some of the images, made by the same autoencoder, says how: its dtype, posterior and normalisation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, of_latents
from torchtitan.conditions import Entries
from torchtitan.data.base import PIXELS, Batch, DatasetError, DatasetInfo, Draws
from torchtitan.data.latents import VALIDATION_SEED
from torchtitan.errors import LatentStoreError
from torchtitan.latents.index import StoreIndex
from torchtitan.latents.store import LatentStore, check_autoencoder
from torchtitan.latents.values import STORED_DTYPES


def online_store(autoencoder: Any) -> LatentStore:
    """Store that `[autoencoder]` takes its statistics from. Raises DatasetError."""
    try:
        store = LatentStore(autoencoder.statistics)
    except LatentStoreError as error:
        raise DatasetError(f"autoencoder.statistics: {error}") from error
    if store.index.of_features:
        raise DatasetError(f"autoencoder.statistics: {autoencoder.statistics}: is a store of features (give one of latents)")
    return store


def encoded_info(autoencoder: Any, images: DatasetInfo, *, keeps_pixels: bool = False) -> DatasetInfo:
    """Describe the latents of images, which come too if asked for. Raises DatasetError: the store has others."""
    index = online_store(autoencoder).index
    _, height, width = images.image_shape
    downscale = index.autoencoder.get("downscale")
    wanted = f"autoencoder.statistics: {autoencoder.statistics}"
    if images.bucket_shapes:
        advice = "give data.image_size instead of data.resolutions"
        raise DatasetError(f"{wanted}: images of several shapes are encoded before training alone ({advice})")
    if images.image_shape[0] != 3 or (downscale and (height // downscale, width // downscale) != tuple(index.shape[1:])):
        shapes = f"has latents of {list(index.shape)}, and the images are of {list(images.image_shape)}"
        raise DatasetError(f"{wanted} {shapes} (make it of images of that size)")
    return latents_of(images, index.shape, keeps_pixels=keeps_pixels)


def latents_of(images: DatasetInfo, shape: tuple[int, int, int], *, keeps_pixels: bool) -> DatasetInfo:
    """Describe latents of that shape of images, with or without these."""
    pixels: Entries = {PIXELS: (images.image_shape, torch.float32)} if keeps_pixels else {}
    return DatasetInfo(shape, images.condition_kind, images.has_validation, entries=images.entries, training_entries=pixels)


def open_autoencoder(config: Any, index: StoreIndex, place: str, device: torch.device) -> Autoencoder:
    """Open the autoencoder of `[autoencoder]`, which made the latents of an index. Raises AutoencoderError: unusable, another."""
    dtype = getattr(torch, config.dtype) if config.dtype else None
    try:
        if index.autoencoder["name"] != config.name:  # refused before anyone fetches this one's files
            check_autoencoder(index, place, {"name": config.name})
        autoencoder = build_autoencoder(config.name, config.path, dtype, device, config.tile)
        check_autoencoder(index, place, autoencoder.identity())
        _check_shape(index, place, autoencoder)
    except (AutoencoderError, LatentStoreError) as error:
        raise AutoencoderError(f"[autoencoder]: {error}") from error
    return autoencoder


def _check_shape(index: StoreIndex, place: str, autoencoder: Autoencoder) -> None:
    channels, height, _ = index.shape
    if channels != autoencoder.channels:
        raise AutoencoderError(
            f"{place}: latents of {channels} channels, and {autoencoder.name} decodes {autoencoder.channels}"
        )
    pixels = index.image_size
    if pixels is not None and pixels != height * autoencoder.downscale:
        raise AutoencoderError(
            f"{place}: made of images of {pixels} pixels, and {autoencoder.name} decodes them to "
            f"{height * autoencoder.downscale}"
        )


class OnlineEncoder:
    """Encoder of batches of images on a rank's device, without gradient.

    Attributes:
        phase: makes the context of encoding microbatches of training.
    """

    phase: Callable[[], AbstractContextManager] = nullcontext

    def __init__(self, config: Any, seed: int, device: torch.device, *, keeps_pixels: bool) -> None:
        """
        Args:
            config: `[autoencoder]`.
            seed: of the run.
            keeps_pixels: whether batches keep their images, as the entry PIXELS.

        Raises:
            AutoencoderError: it cannot be opened, or made other latents than the store's.
        """
        store = online_store(config)
        self._index: StoreIndex = store.index
        self._autoencoder = open_autoencoder(config, store.index, str(store.folder), device)
        self._seed, self._device, self._keeps_pixels = seed, device, keeps_pixels
        normalization = store.index.normalization
        self._shift, self._scale = (
            of_latents(values, store.index.shape).float().to(device) for values in (normalization.shift, normalization.scale)
        )

    def training(self, batch: Batch, attempt: int) -> Batch:
        """Encode a microbatch of training, by its sample numbers."""
        with self.phase():
            return self._encoded(batch, Draws(self._seed, batch["samples"], attempt))

    def held_out(self, batch: Batch, numbers: Tensor) -> Batch:
        """Encode held-out images of these numbers: the same sample of the posterior whenever."""
        return self._encoded(batch, Draws(VALIDATION_SEED, numbers))

    def _encoded(self, batch: Batch, draws: Draws) -> Batch:
        images = batch["images"].to(self._device, non_blocking=True)
        encoded = self._autoencoder.encode(images)
        latents = self._stored(encoded.mean)
        if self._index.posterior and encoded.std is not None:
            noise = draws.normal("posterior", tuple(latents.shape[1:])).to(self._device)
            latents = torch.addcmul(latents, self._stored(encoded.std), noise)
        pixels = {PIXELS: images} if self._keeps_pixels else {}
        return batch | {"images": (latents - self._shift) * self._scale} | pixels

    def _stored(self, values: Tensor) -> Tensor:
        """Round as the store does, but for 8 bits."""
        dtype = STORED_DTYPES[self._index.dtype]
        return values.float() if dtype == torch.int8 else values.to(dtype).float()
