"""`[cache]`: train on the latents of a folder of images and captions, which a run encodes by itself before it trains.

The store lies in a folder named by a digest of all that decides its content: another picture, caption, encoder or size has
another store. Once it is finished, the configuration is that of a run on this store: `data.name = "latents"`.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.conditions import POOLED, TEXT, Embeddings, Unconditional
from torchtitan.data import DATASETS, LATENT_DATASETS, dataset_info
from torchtitan.data.base import DatasetError, DatasetInfo, Split
from torchtitan.data.left_out import say_once
from torchtitan.files.regular import user_path
from torchtitan.files.weight_files import WeightsError, recorded_data
from torchtitan.programs import program
from torchtitan.settings import only_enabled, setting

if TYPE_CHECKING:
    from torchtitan.data.captioned_folder import CaptionedFolderConfig
    from torchtitan.data.latents import LatentsConfig
    from torchtitan.latents.store import LatentStore

CACHED_DATASETS = ("captioned_folder",)
SPLITS: tuple[Split, ...] = ("train", "validation")
_VERSION = 1  # of the encoding that equal keys stand for
_NAME_LENGTH = 40
_SAME_CACHE = re.compile(r"data\.(?:validation_)?path: .*(-[0-9a-f]{16}/\w+) -> .*\1")  # its name is of a folder that was renamed


@only_enabled()
@dataclass(kw_only=True)
class CacheConfig:
    """`[cache]`"""

    enable: bool = setting(
        False, "encode images and captions once, before training, into a latent store, and train on that",
        applies={"data.name": CACHED_DATASETS}, because=f"of other data, {program('extract_latents')} makes stores",
    )  # fmt: skip
    folder: str = setting(
        "", "folder of the stores; default: latents in job.dump_folder", trajectory=False, writes="shared", path=True
    )


def say_uncached() -> None:
    """Say that pixels are trained on where the command line turns the cache of a file off."""
    advice = "autoencoder.encode = true with autoencoder.statistics encodes them in every step"
    say_once(f"cache.enable = false: the file's autoencoder is left out, and pixels are trained on ({advice})")


def images_only(data: "CaptionedFolderConfig") -> "CaptionedFolderConfig":
    """`[data]` of the images alone: their captions are read, and condition nothing."""
    return dataclasses.replace(data, text_encoder="", pooled_encoder="", null_caption="", prompts=[])


def cache_folder(config: Any) -> Path:
    """Folder of the stores of a JobConfig, one for each split. Raises DatasetError: the images cannot be used."""
    from torchtitan.data.captioned_folder import content_digest

    data, autoencoder = config.data, config.autoencoder
    images = [content_digest(data), data.resolutions, data.image_size, data.horizontal_flip]
    null_caption, prompts = data.filled_texts()
    texts = [data.text_encoder, data.pooled_encoder, data.text_length, null_caption, prompts]
    decisive: dict[str, Any] = {
        "version": _VERSION,
        "images": images,
        "held_out": data.validation_fraction if not data.validation_path else "path",
        "autoencoder": [autoencoder.name, autoencoder.path, autoencoder.dtype, autoencoder.tile],
        "texts": texts if data.text_encoder else [],
    } | normalization_of_base(config)
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
    place = user_path(config.cache.folder) if config.cache.folder else Path(config.job.dump_folder) / "latents"
    name = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in user_path(data.path).resolve().name)
    return place / f"{name[:_NAME_LENGTH]}-{digest}"


def normalization_of_base(config: Any) -> dict[str, list[float]]:
    """Shift and scale of the latents that a frozen network was trained on, by its file; none where the file does not say."""
    return normalization_of_weights(Path(config.checkpoint.initial_weights)) if config.lora.enable else {}


def normalization_of_weights(path: Path) -> dict[str, list[float]]:
    """Shift and scale of the latents by the record in a file of weights; none where it has none, or cannot be read."""
    try:
        data = recorded_data(path)
        return {name: [float(value) for value in data[name]] for name in ("shift", "scale")}
    except (WeightsError, ValueError, TypeError, KeyError):
        return {}


def without_moved_caches(changes: list[str]) -> list[str]:
    """Lines of `config_differences` but for those of one cache by its digest, wherever it lies."""
    return [line for line in changes if not _SAME_CACHE.fullmatch(line)]


def splits_of(info: DatasetInfo) -> tuple[Split, ...]:
    """Splits of a dataset that have images."""
    return SPLITS if info.has_validation else SPLITS[:1]


def stored_section(config: Any) -> "LatentsConfig | None":
    """`[data]` of the finished store; None while there is none. Raises DatasetError: the images cannot be used."""
    from torchtitan.data.latents import LatentsConfig

    folder, data = cache_folder(config), config.data
    splits = splits_of(dataset_info(images_only(data)))
    if not all(is_finished(folder / split) for split in splits):
        return None
    held_out = {"validation_path": str(folder / SPLITS[1])} if SPLITS[1] in splits else {"validation_fraction": 0.0}
    return LatentsConfig(
        path=str(folder / SPLITS[0]), trigger_word=data.trigger_word, labels=data.labels, num_workers=data.num_workers,
        **held_out,
    )  # fmt: skip


def is_finished(store: Path) -> bool:
    """Check whether a store has its index, which is written last."""
    from torchtitan.latents.bucketed import BUCKETS_FILE  # which most configurations do not need
    from torchtitan.latents.index import INDEX_FILE

    return any((store / name).is_file() for name in (INDEX_FILE, BUCKETS_FILE))


def cached_info(config: Any) -> DatasetInfo:
    """Describe the latents that a configuration trains on: those of its store, or those that will be in it.

    Raises:
        DatasetError: the images, their captions, the autoencoder or a finished store cannot be used.
    """
    stored = stored_section(config)
    if stored is not None:
        try:
            return dataset_info(stored)
        except DatasetError as error:
            raise DatasetError(f"{error}, or remove {cache_folder(config)}: the same command encodes it anew") from error
    images = dataset_info(images_only(config.data))
    if config.data.validation_path:
        from torchtitan.data.captioned_folder import check_held_out_sizes

        check_held_out_sizes(config.data)
    channels, downscale = _channels_and_downscale(config.autoencoder.name, config.autoencoder.path, config.autoencoder.dtype)

    def latent(shape: tuple[int, int, int]) -> tuple[int, int, int]:
        _, height, width = shape
        if height % downscale or width % downscale:
            text = f"{height} x {width} pixels are not divided by {downscale}, of which {config.autoencoder.name} makes a latent"
            raise DatasetError(f"data.image_size: {text} (give a multiple)")
        return channels, height // downscale, width // downscale

    kind = _text_kind(config) if config.data.text_encoder else Unconditional()
    if not config.data.labels:
        kind = Unconditional()
    buckets = tuple(map(latent, images.bucket_shapes))
    return DatasetInfo(latent(images.image_shape), kind, images.has_validation, buckets)


def trained_info(config: Any) -> DatasetInfo:
    """Describe the images or latents that a resolved JobConfig trains on, without filling its cache; raises as `cached_info`."""
    if config.cache.enable:
        return cached_info(config)
    info = dataset_info(config.data)
    if not config.autoencoder.encode:
        return info
    from torchtitan.data.online import encoded_info

    return encoded_info(config.autoencoder, info, keeps_pixels=config.alignment.encodes_images)


def has_latents(config: Any) -> bool:
    """Whether a configuration, or its view, trains on latents once its cache is filled."""
    return config.data.name in LATENT_DATASETS or config.autoencoder.encode


def store_of_latents(config: Any) -> "LatentStore | None":
    """Store of a run's latents, or of their statistics; None where it trains on images. Raises DatasetError."""
    if config.autoencoder.encode:
        from torchtitan.data.online import online_store

        return online_store(config.autoencoder)
    return DATASETS[config.data.name].store(config.data) if config.data.name in LATENT_DATASETS else None


def _text_kind(config: Any) -> Embeddings:
    """Kind of the captions that will be encoded; their widths are those that the network wants until encoders are open."""
    data, model = config.data, config.model
    if not data.pooled_encoder:
        raise DatasetError("data.pooled_encoder: not given; captions need an encoder of tokens and one of whole texts")
    shapes = {
        TEXT: (data.text_length, getattr(model, "text_dim", 1)),
        POOLED: (getattr(model, "pooled_dim", 1),),
    }  # fmt: skip
    nulls = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    _, prompts = data.filled_texts()
    values = {name: null.expand(len(prompts), *null.shape) for name, null in nulls.items()} if prompts else {}
    return Embeddings(nulls, values, tuple(prompts))


@functools.lru_cache(maxsize=4)
def _channels_and_downscale(name: str, path: str, dtype: str | None) -> tuple[int, int]:
    """Channels of an autoencoder's latents, and pixels per latent position. Raises DatasetError."""
    from torchtitan.autoencoders import build_autoencoder
    from torchtitan.autoencoders.base import AutoencoderError

    try:
        autoencoder = build_autoencoder(name, path, getattr(torch, dtype) if dtype else None)
    except AutoencoderError as error:
        raise DatasetError(f"autoencoder.path: {error}") from error
    return autoencoder.channels, autoencoder.downscale


def cache_problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield problems of a cache with other sections: dotted key, and cause with remedy."""
    if config.cache.enable and config.autoencoder.name == "none":
        yield "autoencoder.name", "is none, and cache.enable encodes images (name the autoencoder of their latents)"
    if config.autoencoder.encode:
        if config.autoencoder.name == "none":
            yield "autoencoder.name", "is none, and autoencoder.encode needs one (name the autoencoder of the latents)"
        if not config.autoencoder.statistics and config.data.name not in LATENT_DATASETS:
            how = program("extract_latents")
            yield "autoencoder.statistics", f"is missing (give a latent store of some of the images; {how} makes one)"
        if config.cache.enable:
            yield "autoencoder.encode", "encodes while training, and cache.enable before it (set one of the two to false)"
    if (config.cache.enable or config.autoencoder.encode) and config.sampling.clip_x0:
        yield "sampling.clip_x0", "latents have no such limits (set it to false)"
