"""What is recorded of a dataset beside trained weights: enough to sample where the images are not, and no image."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, cast

import numpy as np

from torchtitan.conditions import Classes, Unconditional, class_kind
from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Split
from torchtitan.data.synthetic import text_kind
from torchtitan.settings import setting

if TYPE_CHECKING:
    from torchtitan.latents.index import StoreIndex
    from torchtitan.latents.store import LatentStore

RECORDS = ("recorded", "recorded_latents")  # values of data.name
_TO_TRAIN = "is what a model knows of its data, and holds no images (to train, name a dataset)"


@dataclass(kw_only=True)
class RecordedConfig(DataConfig):
    """`[data]` with name = "recorded"."""

    name: Literal["recorded"] = setting("recorded", "dataset")
    shape: list[int] = setting([3, 32, 32], "channels, height and width")
    num_classes: int = setting(0, "classes of the images; 0: none", ge=0, le=100_000_000)
    class_names: list[str] = setting([], "one per class, or none", applies={"num_classes": ">0"})


@dataclass(kw_only=True)
class RecordedLatentsConfig(DataConfig):
    """`[data]` with name = "recorded_latents"."""

    name: Literal["recorded_latents"] = setting("recorded_latents", "dataset")
    shape: list[int] = setting([4, 32, 32], "channels, height and width")
    num_classes: int = setting(0, "classes of the images; 0: none", ge=0, le=100_000_000)
    class_names: list[str] = setting([], "one per class, or none", applies={"num_classes": ">0"})
    text_length: int = setting(
        0, "tokens of the text embeddings that condition the network instead of the class; 0: the class", ge=0, le=8192
    )
    text_dim: int = setting(4096, "width of each token's embedding", ge=1, le=65536, applies={"text_length": ">0"})
    pooled_dim: int = setting(768, "width of the embedding of the whole text", ge=1, le=65536, applies={"text_length": ">0"})
    shift: list[float] = setting([], "subtracted from each channel of the autoencoder's latents; empty: 0")
    scale: list[float] = setting([], "then multiplied with each channel; empty: 1")
    encoder: str = setting("", "the autoencoder that made the latents, as JSON; empty: unknown")
    image_size: int = setting(0, "pixels of each side of the encoded images; 0: unknown", ge=0, le=1_000_000)


class Recorded(Dataset):
    """Record of images: their shape and classes. It opens no split."""

    Config: ClassVar[Any] = RecordedConfig
    holds_images = False

    @staticmethod
    def info(config: Any) -> DatasetInfo:
        if len(config.shape) != 3 or min(config.shape) < 1:
            raise DatasetError(f"data.shape: {config.shape} is not three positive numbers: channels, height, width")
        if len(config.class_names) not in (0, config.num_classes):
            raise DatasetError(f"data.class_names: {len(config.class_names)} names of {config.num_classes} classes")
        channels, height, width = config.shape
        kind = class_kind(config.num_classes, config.class_names)
        return DatasetInfo((channels, height, width), kind, has_validation=False)

    def __init__(self, config: Any, split: Split) -> None:
        raise DatasetError(f"data.name: {config.name} {_TO_TRAIN}")

    def __len__(self) -> NoReturn:
        raise DatasetError(f"data.name: a record {_TO_TRAIN}")

    def fetch(self, indices: np.ndarray) -> Batch:
        raise DatasetError(f"data.name: a record {_TO_TRAIN}")


class RecordedLatents(Recorded):
    """Record of latents: also their normalisation, and their autoencoder."""

    Config = RecordedLatentsConfig
    holds_latents = True

    @staticmethod
    def info(config: RecordedLatentsConfig) -> DatasetInfo:
        info = Recorded.info(config)
        return replace(info, condition_kind=text_kind(config)) if config.text_length else info

    @staticmethod
    def store(config: RecordedLatentsConfig) -> LatentStore:
        """What is known of the store: an index without shards, and no captions. Raises DatasetError."""
        return cast("LatentStore", _RecordedStore(Path("the recorded latents"), _index(config)))


@dataclass(frozen=True)
class _RecordedStore:
    """Of a LatentStore, what decoding asks for."""

    folder: Path
    index: StoreIndex
    captions: None = None


def record_of(config: DataConfig, info: DatasetInfo, index: StoreIndex | None) -> DataConfig | None:
    """Record of the data of a training.

    Args:
        config: its `[data]`.
        info: of its images.
        index: of the latent store that it is trained on; None for images.

    Returns:
        the section to sample with; None where images are conditioned on more than a class, as captions, and it is no such record.
    """
    if isinstance(config, RecordedLatentsConfig) and config.text_length:
        return config
    kind = info.condition_kind
    if not isinstance(kind, Classes | Unconditional):
        return None
    common: dict[str, Any] = {
        "shape": list(info.image_shape), "num_classes": info.num_classes, "class_names": list(info.class_names),
        "labels": config.labels,
    }  # fmt: skip
    if index is None:
        return RecordedConfig(**common)
    return RecordedLatentsConfig(
        **common, shift=index.normalization.shift, scale=index.normalization.scale,
        encoder=json.dumps(index.autoencoder), image_size=index.image_size or 0,
    )  # fmt: skip


def _index(config: RecordedLatentsConfig) -> StoreIndex:
    from torchtitan.latents.index import Normalization, StoreIndex

    channels = config.shape[0]
    for key in ("shift", "scale"):
        if len(getattr(config, key)) not in (0, channels):
            raise DatasetError(f"data.{key}: {len(getattr(config, key))} numbers for {channels} channels")
    try:
        encoder = json.loads(config.encoder) if config.encoder else {"name": "unknown"}
        if not isinstance(encoder, dict) or not isinstance(encoder.get("name"), str):
            raise ValueError("names none")
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"data.encoder: is no autoencoder's record ({error})") from error
    normalization = Normalization.model_construct(
        shift=config.shift or [0.0] * channels, scale=config.scale or [1.0] * channels, source="given"
    )
    return StoreIndex.model_construct(
        shape=tuple(config.shape), num_classes=config.num_classes, class_names=list(config.class_names),
        image_size=config.image_size or None, autoencoder=encoder, normalization=normalization, captions=None,
        num_images=0, shards=[], posterior=False, mirrored=False,
    )  # fmt: skip
