"""Dataset of encoded images: reads a latent store, draws from each posterior, normalises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from torchtitan.autoencoders.base import of_latents
from torchtitan.conditions import ConditionKind, Embeddings, Entries, class_kind
from torchtitan.data.base import FEATURES, Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Draws, Split
from torchtitan.data.left_out import say_once
from torchtitan.data.splits import spread_evenly
from torchtitan.errors import LatentStoreError
from torchtitan.files.regular import user_path
from torchtitan.pictures.number_text import counted
from torchtitan.programs import program
from torchtitan.settings import setting

if TYPE_CHECKING:
    from torchtitan.latents.index import StoreIndex
    from torchtitan.latents.store import LatentStore

NUMBERS_AT_A_TIME = 2**18  # keeps the generator's 64-bit intermediates in the cache
VALIDATION_SEED = 0


@dataclass(kw_only=True)
class LatentsConfig(DataConfig):
    """`[data]` with name = "latents"."""

    name: Literal["latents"] = setting("latents", "dataset")
    path: str = setting("", "folder of a latent store", path=True)
    sample_posterior: bool | None = setting(
        None, "draw each latent anew from its posterior; false: take the mean; "
        "default: true where the store keeps standard deviations",
    )  # fmt: skip
    condition: Literal["captions", "class"] | None = setting(
        None, "what conditions each image: its encoded caption, or its class; default: captions where the store has them"
    )
    trigger_word: str = setting(
        "", "word that was trained on; previews of prompts without it show what training changed besides", trajectory=False
    )
    features_path: str = setting(
        "", "latent store of a teacher's features of the images of data.path, for alignment.teacher = stored", path=True
    )
    validation_path: str = setting("", "latent store of held-out images", path=True)
    validation_fraction: float = setting(
        0.05, "share of data.path held out, spread evenly over its order", ge=0, lt=1,
        applies={"validation_path": ("",)},
    )  # fmt: skip


class Latents(Dataset):
    """Latents [C, h, w] at unit scale.

    Training draws the view and the posterior's sample of each sample number; a validation image is always the
    unmirrored one and the same sample of its posterior. Without `validation_path` image i of the store is held out
    where floor((i + 1) f) > floor(i f), f = `validation_fraction`: of images in the order of their classes every class
    gives its share to within one.
    """

    Config = LatentsConfig

    @staticmethod
    def info(config: LatentsConfig) -> DatasetInfo:
        stores = _open(config, "train")
        parts = [] if config.validation_path else _held_out(config, stores)
        has_validation = bool(config.validation_path) or any(bool(part.any()) for part in parts)
        for store in stores:
            with _of_store("path"):
                store.read(np.zeros(1, np.int64))  # a wrong shape is found before a model is built
        if config.validation_path and user_path(config.validation_path).resolve() == user_path(config.path).resolve():
            say_once(f"{config.validation_path}: the held-out images are those that are trained on (data.validation_path)")
        for store in _open(config, "validation") if config.validation_path else []:
            with _of_store("validation_path"):
                store.read(np.zeros(1, np.int64))
        shapes = tuple(store.index.shape for store in stores)
        kind, features = _condition_kind(config, stores[0]), _open_features(config, stores)
        entries: Entries = {FEATURES: (features.index.shape, torch.float32)} if features else {}
        buckets = shapes if len(shapes) > 1 else ()
        return DatasetInfo(_largest(stores).index.shape, kind, has_validation, buckets, training_entries=entries)

    def __init__(self, config: LatentsConfig, split: Split) -> None:
        self._stores = _open(config, split)
        index = self._stores[0].index
        self._features = _open_features(config, self._stores) if split == "train" else None
        self._sample = index.posterior if config.sample_posterior is None else config.sample_posterior
        self._mirror = index.mirrored
        if config.validation_path:
            numbers = [np.arange(len(store)) for store in self._stores]
        else:
            parts = _held_out(config, self._stores)
            numbers = [np.flatnonzero(part if split == "validation" else ~part) for part in parts]
        self._numbers = np.concatenate(numbers)  # in its store, of each image
        if len(self._numbers) == 0:
            raise DatasetError(f"data.validation_fraction: {config.validation_fraction} leaves no image for {split}")
        counts = np.array([len(part) for part in numbers])
        self._firsts = np.cumsum(counts) - counts  # of each store
        self.buckets = self._of_each_bucket(config, counts)
        self._captioned = _is_captioned(config, self._stores[0])
        # Held-out images are seen through the same map as those that are trained on.
        normalization = _open(config, "train")[0].index.normalization
        self._shift = of_latents(normalization.shift, index.shape).float()  # [C, 1, 1] or [C, h, w]
        self._scale = of_latents(normalization.scale, index.shape).float()

    @staticmethod
    def store(config: LatentsConfig) -> LatentStore:
        """Store for training; of images in buckets that with most pixels. Raises DatasetError."""
        return _largest(_open(config, "train"))

    def __len__(self) -> int:
        return len(self._numbers)

    def fetch(self, indices: np.ndarray) -> Batch:
        return self._read(indices, None, Draws(VALIDATION_SEED, torch.from_numpy(self._numbers[indices])))

    def fetch_drawn(self, indices: np.ndarray, draws: Draws) -> Batch:
        views = (draws.uniform("horizontal_flip") < 0.5).to(torch.int64).numpy() if self._mirror else None
        batch = self._read(indices, views, draws)
        if self._features is None:
            return batch
        with _of_store("features_path"):
            values, _ = self._features.read(self._numbers[indices], views)
        return batch | {FEATURES: values[:, 0]}

    def _of_each_bucket(self, config: LatentsConfig, counts: np.ndarray) -> np.ndarray | None:
        """Number of images of each shape of the training store, of which a held-out one may lack some."""
        shapes = [store.index.shape for store in _open(config, "train")]
        if len(shapes) == 1:
            return None
        found = {store.index.shape: int(count) for store, count in zip(self._stores, counts, strict=True)}
        return np.array([found.get(shape, 0) for shape in shapes])

    def _store_of(self, indices: np.ndarray) -> LatentStore:
        return self._stores[int(np.searchsorted(self._firsts, indices[0], side="right")) - 1]

    def _stored(self, indices: np.ndarray, views: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
        with _of_store():
            return self._store_of(indices).read(self._numbers[indices], views)  # [B, P, C, h, w]

    def _read(self, indices: np.ndarray, views: np.ndarray | None, draws: Draws) -> Batch:
        values, labels = self._stored(indices, views)
        latents = values[:, 0]
        if self._sample:
            at_a_time = max(1, NUMBERS_AT_A_TIME // latents[0].numel())
            for first in range(0, len(latents), at_a_time):
                slots = slice(first, first + at_a_time)
                noise = draws[slots].normal("posterior", tuple(latents.shape[1:]))
                latents[slots].addcmul_(values[slots, 1], noise)
        return self._batch(indices, latents, labels)

    def _batch(self, indices: np.ndarray, latents: torch.Tensor, labels: torch.Tensor) -> Batch:
        store, numbers = self._store_of(indices), self._numbers[indices]
        batch = {"images": (latents - self._shift) * self._scale}
        if self._captioned and store.captions:
            with _of_store():
                return batch | store.captions.read(store.caption_numbers(numbers))
        return batch | {"class": labels} if store.index.num_classes else batch

    def captions(self, indices: np.ndarray) -> list[str]:
        store = self._store_of(indices)
        if store.captions is None:
            return super().captions(indices)
        with _of_store():
            numbers = store.caption_numbers(self._numbers[indices]).tolist()
            return [store.captions.text(number) for number in numbers]


@contextmanager
def _of_store(key: str = "") -> Iterator[None]:
    try:
        yield
    except LatentStoreError as error:
        raise DatasetError(f"data.{key}: {error}" if key else str(error)) from error


def _open(config: LatentsConfig, split: Split) -> list[LatentStore]:
    """Open the store that holds a split, one for each shape of its images. Raises DatasetError."""
    from torchtitan.latents.bucketed import open_stores  # which no other dataset's configuration needs
    from torchtitan.latents.index import HOW_TO_MAKE

    key = "validation_path" if split == "validation" and config.validation_path else "path"
    path = getattr(config, key)
    if not path:
        raise DatasetError(f"data.{key}: not given; latents needs a latent store ({HOW_TO_MAKE})")
    with _of_store(key):
        stores = open_stores(path)
    if stores[0].index.of_features:
        raise DatasetError(f"data.{key}: {path} is a store of features (give one of latents, and this as data.features_path)")
    if config.sample_posterior and not stores[0].index.posterior:
        raise DatasetError(f"data.sample_posterior: {path} keeps no standard deviations; leave the key out")
    if key == "validation_path":
        _check_alike(config, stores, _open(config, "train"))
    return stores


def _open_features(config: LatentsConfig, stores: list[LatentStore]) -> LatentStore | None:
    """Open the store of a teacher's features of the training images, if there is one. Raises DatasetError: of others."""
    from torchtitan.latents.store import LatentStore  # which no other dataset's configuration needs

    if not config.features_path:
        return None
    with _of_store("features_path"):
        features = LatentStore(config.features_path)
    index, wanted = features.index, stores[0].index
    place = f"data.features_path: {features.folder}"
    if not index.of_features:
        raise DatasetError(f"{place} is a store of latents ({program('extract_latents')} --features makes one of features)")
    for name in ("num_source_images", "num_images", "image_size", "origin"):
        found, other = (_images_alone(getattr(each, name)) for each in (index, wanted))
        if found != other:
            advice = "extract both of the same data with the same keys of [data]"
            raise DatasetError(f"{place}: features of other images than those of {stores[0].folder}, {name} differs ({advice})")
    if wanted.mirrored and not index.mirrored:
        text = f"has features of no mirror images, and {stores[0].folder} has both views"
        raise DatasetError(f"{place} {text} (extract either both or one in both stores)")
    return features


def _images_alone(value: Any) -> Any:
    """Origin of a store's images without the settings of its encoder."""
    return {key: value[key] for key in value if key != "encoding"} if isinstance(value, dict) else value


def _held_out(config: LatentsConfig, stores: list[LatentStore]) -> list[np.ndarray]:
    """Which images of each training store are held out, bool [N].

    Of a captioned folder's none that is there again: as the next image, where pictures are repeated, or in another size.
    """
    parts = [spread_evenly(len(store), config.validation_fraction) for store in stores]
    source = stores[0].index.origin.get("data", {})
    if source.get("name") != "captioned_folder":
        return parts
    in_sizes = len(source.get("resolutions", ())) > 1 and len(stores) > 1
    with _of_store():
        again = [part if in_sizes else _is_repeated(store, part) for store, part in zip(stores, parts, strict=True)]
    if count := sum(int(each.sum()) for each in again):
        advice = f"{program('extract_latents')} --split train and --split validation make stores of different pictures"
        text = f"trained, not held out, as the same pictures are there again: {counted(count, 'image')}"
        say_once(f"{config.path}: {text} ({advice}, the second for data.validation_path)")
    return [part & ~each for part, each in zip(parts, again, strict=True)]


def _is_repeated(store: LatentStore, held_out: np.ndarray) -> np.ndarray:
    """Which held-out images are the ones beside them, bool [N], but for the last bits, in which batches may differ."""
    found = np.zeros(len(store), bool)
    for number in np.flatnonzero(held_out).tolist():
        values, _ = store.read(np.array([number]))
        for other in (each for each in (number - 1, number + 1) if 0 <= each < len(store)):
            difference = (values - store.read(np.array([other]))[0]).abs().max()
            found[number] |= bool(difference <= 0.02 * values.abs().max())
    return found


def _largest(stores: list[LatentStore]) -> LatentStore:
    """Store of the largest images, the first of equals."""
    return max(stores, key=lambda store: store.index.shape[1] * store.index.shape[2])


def _is_captioned(config: LatentsConfig, store: LatentStore) -> bool:
    return store.index.captions is not None and config.condition != "class"


def _condition_kind(config: LatentsConfig, store: LatentStore) -> ConditionKind:
    """Kind of condition of a store's images. Raises DatasetError."""
    from torchtitan.latents.captions import NULL_CAPTION

    index, captions = store.index, store.captions
    if config.condition == "captions" and captions is None:
        text = f"keeps no captions ({program('extract_latents')} with --text-encoder keeps them)"
        raise DatasetError(f"data.condition: {store.folder} {text}")
    if config.condition == "class" and not index.num_classes:
        raise DatasetError(f"data.condition: {store.folder} keeps no classes; leave the key out")
    if captions is None or not _is_captioned(config, store):
        return class_kind(index.num_classes, index.class_names)
    with _of_store("path"):
        nulls = {name: values[0] for name, values in captions.read([NULL_CAPTION]).items()}
        prompts = captions.read(captions.plan.prompts) if captions.plan.prompts else {}
        names = tuple(captions.text(number) for number in captions.plan.prompts)
    return Embeddings(nulls, prompts, names)


def _check_alike(config: LatentsConfig, stores: list[LatentStore], trained_stores: list[LatentStore]) -> None:
    """Check that held-out images are as those of training; of images in buckets, each of a shape that is there too."""
    by_shape = {trained.index.shape: trained for trained in trained_stores}
    order = [shape for shape in by_shape if shape in {store.index.shape for store in stores}]
    stores.sort(key=lambda store: order.index(store.index.shape) if store.index.shape in order else len(order))
    for store in stores:
        trained = by_shape.get(store.index.shape, trained_stores[0])
        found, wanted = (_properties(each.index, _is_captioned(config, trained)) for each in (store, trained))
        if differing := next((name for name in wanted if wanted[name] != found[name]), None):
            raise DatasetError(f"data.validation_path: {store.folder}: its {differing} is not that of {trained.folder}")


def _properties(index: StoreIndex, captioned: bool) -> dict[str, Any]:
    """Properties that held-out images have in common with those of training."""
    found = {name: getattr(index, name) for name in ("shape", "posterior", "num_classes", "class_names", "autoencoder")}
    if captioned:
        found["captions"] = index.captions is None
        parts = ("encoders", "text_shape", "pooled_shape", "dtype")
        found |= {f"captions.{part}": getattr(index.captions, part, None) for part in parts}
    return found
