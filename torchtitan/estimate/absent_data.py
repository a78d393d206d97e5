"""Synthetic data in place of a dataset that is not on this machine: an estimate needs its shape and its condition alone.

Of the frozen networks that shipped configurations name, PUBLISHED has the layers, one folder for each name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.job import JobConfig, unchecked_config
from torchtitan.config.latent_cache import images_only
from torchtitan.data import DatasetError, DatasetInfo, dataset_info
from torchtitan.estimate.encoding import estimated_info
from torchtitan.evaluation.config import WITH_WEIGHTS
from torchtitan.files.regular import user_path
from torchtitan.settings.sources import split_keys

PUBLISHED = Path(__file__).parent / "published"
# Side in pixels, and classes, of data sets that have one size.
_IMAGES = {"cifar10": (32, 10), "cifar100": (32, 100), "tinyimagenet": (64, 200), "imagenet": (0, 1000)}
_OF_A_FOLDER = ("captioned_folder", "image_folder", "latents")
# Shape, classes and tokens of text of the latent stores that shipped configurations name, as their first lines make them.
_STORES = {
    "latents/imagenet256": ([4, 32, 32], 1000, 0),
    "latents/imagenet512": ([4, 64, 64], 1000, 0),
    "latents/imagenet256_cosmos": ([16, 32, 32], 1000, 0),
    "latents/imagenet256_vavae": ([32, 16, 16], 1000, 0),
    "latents/imagenet256_rae": ([768, 16, 16], 1000, 0),
    "latents/cc12m_256": ([16, 32, 32], 0, 256),
    "latents/cifar10_captions": ([3, 32, 32], 0, 8),
}


def without_data(words: list[str]) -> tuple[list[str], str, DatasetInfo | None]:
    """Words of a configuration, with synthetic data where its own, or the autoencoder of its cache, are not here.

    Returns:
        the words, a note on what is assumed, and the latents that images would be encoded to while training; the words given,
        "" and None where nothing is missing, or its shape is not known.

    Raises:
        ConfigError: they cannot be read.
    """
    words = words + _published(unchecked_config(words))
    config = unchecked_config(words)
    data, encoder, cached = config.data, config.autoencoder, config.cache.enable
    missing = data.name in (*_IMAGES, *_OF_A_FOLDER) and not (data.path and user_path(data.path).exists())
    no_store = encoder.encode and not user_path(encoder.statistics).is_dir()
    no_encoder = cached and encoder.name in WITH_WEIGHTS and not user_path(encoder.path).is_dir()
    if not missing and not no_encoder:
        latents = _latents(words) if no_store else None
        return words, f"{encoder.statistics}: not here; {_by(latents.image_shape)} are assumed" if latents else "", latents
    shape, classes, tokens = _cached(config, missing) if cached else _known(data)
    tokens = tokens if data.labels else 0
    if not shape:
        return words, "", None
    own, _ = split_keys(words, "data")
    made = {"name": "synthetic", "shape": shape, "num_classes": classes if data.labels else 0}
    if tokens:
        made |= {"text_length": tokens, "text_dim": config.model.text_dim, "pooled_dim": config.model.pooled_dim}
    own += ["--cache.enable", "false"] if cached else []
    what = f"{tokens} tokens of text" if tokens else f"{made['num_classes']} classes"
    place = (data.path or data.name) if missing else encoder.path
    own += [word for key, value in made.items() for word in (f"--data.{key}", str(value))]
    own_words = [f"--data.{key} {value}" for key, value in made.items() if key not in ("name", "shape")]
    advice = f"others: --data.name synthetic --data.shape '[C, H, W]' {' '.join(own_words)}"
    latents = _latents(own) if no_store else None
    shown = f"{_by(shape)} pixels, latents of {_by(latents.image_shape)}," if latents else _by(shape)
    every = " for every image, so that FLOPs and hours are of the largest" if cached and data.resolutions else ""
    return own, f"{place}: not here; {shown} and {what} are assumed{every} ({advice})", latents


def _published(config: JobConfig) -> list[str]:
    """Words that name published layers instead of frozen networks that are not here."""
    found = []
    for key, path in (
        ("alignment.path", config.alignment.path), ("autoencoder.path", config.autoencoder.encode and config.autoencoder.path),
    ):  # fmt: skip
        layers = PUBLISHED / Path(path or ".").name
        if path and layers.is_dir() and not user_path(path).is_dir():
            found += [f"--{key}", str(layers)]
    return found


def _latents(words: list[str]) -> DatasetInfo | None:
    """Latents of images that are encoded while training; None where they are not known."""
    try:
        return estimated_info(unchecked_config(words))
    except DatasetError:
        return None  # which the checks report


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _known(data: Any) -> tuple[list[int], int, int]:
    """Shape, classes and tokens of text of images, or of a store; no shape where they are not known."""
    if data.path in _STORES:
        return _STORES[data.path]
    side, classes = _IMAGES.get(data.name, (0, 0))
    side = getattr(data, "image_size", None) or side
    return [3, side, side] if side else [], classes, 0


def _cached(config: JobConfig, missing: bool) -> tuple[list[int], int, int]:
    """The same of the largest latents that a cache will hold, squares of the largest resolution without the pictures."""
    data = config.data
    height = width = data.image_size or max(data.resolutions, default=0)
    if not missing:
        try:
            _, height, width = dataset_info(images_only(data)).image_shape
        except DatasetError:
            return [], 0, 0  # which the checks report
    channels, factor = (3, 1) if config.autoencoder.name == "identity" else (16 if config.model.name == "flux" else 4, 8)
    return [channels, height // factor, width // factor], 0, data.text_length if data.text_encoder else 0
