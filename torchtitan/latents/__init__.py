"""Latent stores: encoded images on disk, with their reader and writer."""

from torchtitan.latents.index import Normalization, SkippedImage, StoreIndex, StorePlan, images_per_shard
from torchtitan.latents.store import LatentStore, check_autoencoder, verify_shards
from torchtitan.latents.values import pack_views
from torchtitan.latents.writer import StoreWriter

__all__ = [
    "LatentStore", "Normalization", "SkippedImage", "StoreIndex", "StorePlan", "StoreWriter",
    "check_autoencoder", "images_per_shard", "pack_views", "verify_shards",
]  # fmt: skip
