"""CIFAR-10 and CIFAR-100 from parquet files, the official python batches, or the Hugging Face hub."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from torchtitan.conditions import Classes
from torchtitan.data.base import Batch, DataConfig, Dataset, DatasetError, DatasetInfo, Split
from torchtitan.data.class_folders import existing_folder
from torchtitan.data.hub_tables import open_hub_table
from torchtitan.data.image_decoding import decoding_problem, open_image
from torchtitan.data.image_files import LabelledSource, own_pictures_advice
from torchtitan.data.numpy_pickle import read_table
from torchtitan.data.parquet_files import HUB_NAME, read_footers
from torchtitan.data.row_groups import RowGroupImages
from torchtitan.errors import one_line
from torchtitan.files.regular import user_path
from torchtitan.settings import setting

IMAGE_SHAPE = (3, 32, 32)
MAX_HELD_OUT = 5000
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
    maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail
    snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
    tulip turtle wardrobe whale willow_tree wolf woman worm
""".split()


@dataclass(frozen=True)
class CifarEdition:
    """Edition of the collection: folder inside the official archive, and its files by split."""

    title: str
    class_names: tuple[str, ...]
    label_column: str
    folder: str
    train_batches: tuple[str, ...]
    validation_batches: tuple[str, ...]
    label_key: str


@dataclass(kw_only=True)
class CifarConfig(DataConfig):
    """Keys of `[data]` for both names."""

    path: str = setting("", "folder of parquet files or of the official python batches, or a Hugging Face hub name", path=True)
    horizontal_flip: bool = setting(True, "mirror each training image with probability 1/2")


class Cifar(Dataset):
    """60,000 colour images [3, 32, 32]; each edition is a subclass that names it.

    Where the source has no validation images, the last tenth of the training images in stored order, at most
    5,000, is the validation split, and training leaves it out.
    """

    Config: ClassVar[type[CifarConfig]]
    edition: ClassVar[CifarEdition]

    @classmethod
    def info(cls, config: CifarConfig) -> DatasetInfo:
        for split in ("train", "validation"):
            cls(config, split).fetch(np.zeros(1, np.int64))
        names = cls.edition.class_names
        return DatasetInfo(IMAGE_SHAPE, Classes(len(names), names))

    def __init__(self, config: CifarConfig, split: Split) -> None:
        self._source, has_validation = _open(config.path, self.edition, split)
        stored = len(self._source)
        held_out = 0 if has_validation else min(MAX_HELD_OUT, stored // 10)
        if split == "validation" and not has_validation:
            self._first, self._length = stored - held_out, held_out
        else:
            self._first, self._length = 0, stored - held_out
        if self._length == 0:
            raise DatasetError(f"data.path: {config.path!r} has no images for the {split} split")

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: np.ndarray) -> Batch:
        images = np.empty((len(indices), *IMAGE_SHAPE), np.uint8)
        labels = np.empty(len(indices), np.int64)
        for slot, position in enumerate((indices + self._first).tolist()):
            images[slot], labels[slot] = _pixels(self._source, position), self._source.label(position)
        return {"images": torch.from_numpy(images).to(torch.float32) / 127.5 - 1, "class": torch.from_numpy(labels)}


@dataclass(kw_only=True)
class Cifar10Config(CifarConfig):
    """`[data]` with name = "cifar10"."""

    name: Literal["cifar10"] = setting("cifar10", "dataset")


class Cifar10(Cifar):
    """6,000 images of each of ten classes."""

    Config = Cifar10Config
    edition = CifarEdition(
        title="CIFAR-10",
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        label_column="label",
        folder="cifar-10-batches-py",
        train_batches=tuple(f"data_batch_{number}" for number in range(1, 6)),
        validation_batches=("test_batch",),
        label_key="labels",
    )


@dataclass(kw_only=True)
class Cifar100Config(CifarConfig):
    """`[data]` with name = "cifar100"."""

    name: Literal["cifar100"] = setting("cifar100", "dataset")


class Cifar100(Cifar):
    """600 images of each of a hundred classes."""

    Config = Cifar100Config
    edition = CifarEdition(
        title="CIFAR-100",
        class_names=tuple(name.replace("_", " ") for name in _CIFAR100_NAMES),
        label_column="fine_label",
        folder="cifar-100-python",
        train_batches=("train",),
        validation_batches=("test",),
        label_key="fine_labels",
    )


def _pixels(source: LabelledSource, position: int) -> np.ndarray:
    """Pixels uint8 [3, 32, 32]. Raises DatasetError."""
    if isinstance(source, _PythonBatches):
        return source.pixels[position]
    try:
        with open_image(source.content(position)) as image:
            width, height = image.size
            pixels = np.asarray(image.convert("RGB")) if width == height == 32 else None  # [32, 32, 3]
    except DatasetError:
        raise
    except Exception as error:  # decoders raise anything at a damaged image
        reason = decoding_problem(error)
        raise DatasetError(f"{source.shown(position)}: the image cannot be decoded ({reason})") from error
    if pixels is None:
        raise DatasetError(f"{source.shown(position)}: the image is {width}x{height}, not 32x32")
    return pixels.transpose(2, 0, 1)


def _open(path: str, edition: CifarEdition, split: Split) -> tuple[LabelledSource, bool]:
    """Open a split, and say whether there are validation images: else this is all of the training images."""
    if not path:
        raise DatasetError(f"data.path: not given; {edition.title} needs a folder or a Hugging Face hub name")
    folder = user_path(path)
    if not folder.exists() and HUB_NAME.fullmatch(path):
        name = "test" if split == "validation" else "train"
        hub = open_hub_table(path, "", "", name, "", edition.label_column)
        return _with_known_classes(hub, hub.num_classes, path, edition), True
    existing_folder("data.path", path)
    for candidate in (folder, folder / edition.folder):
        if any((candidate / name).exists() for name in edition.train_batches + edition.validation_batches):
            return _PythonBatches(candidate, edition, split), True
    # A copy of a hub repository keeps its files one folder down (data/, plain_text/).
    files = list(folder.glob("*.parquet")) or list(folder.glob("[!.]*/*.parquet"))
    if not files:
        text = f"data.path: {path!r} holds neither parquet files nor {edition.title}'s python batches"
        raise DatasetError(f"{text} ({advice})" if (advice := own_pictures_advice(path)) else text)
    held_out = [name for name in ("test", "validation") if any(file.name.startswith(name) for file in files)]
    name = held_out[0] if split == "validation" and held_out else "train"
    groups = read_footers(str(folder.absolute()), "", name, "", edition.label_column)
    images = RowGroupImages(groups, num_kept=len(groups))
    return _with_known_classes(images, groups.num_classes, path, edition), bool(held_out)


def _with_known_classes(source: LabelledSource, num_classes: int, path: str, edition: CifarEdition) -> LabelledSource:
    if num_classes > len(edition.class_names):
        raise DatasetError(f"data.path: {path!r}: has {num_classes} classes, {edition.title} {len(edition.class_names)}")
    return source


class _PythonBatches:
    """Images of the folder inside cifar-10-python.tar.gz or cifar-100-python.tar.gz."""

    names = None

    def __init__(self, folder: Path, edition: CifarEdition, split: Split) -> None:
        names = edition.train_batches if split == "train" else edition.validation_batches
        for name in edition.train_batches + edition.validation_batches:
            if not (folder / name).is_file():
                archive = f"{edition.title.lower()}-python.tar.gz"
                raise DatasetError(f"data.path: {folder} lacks {name}: unpack the whole {archive}")
        pixels, labels = zip(*(_read_batch(folder / name, edition) for name in names), strict=True)
        self.pixels = np.concatenate(pixels)  # uint8 [N, 3, 32, 32]
        self._labels = np.concatenate(labels)
        self._folder = folder

    def __len__(self) -> int:
        return len(self._labels)

    def content(self, position: int) -> bytes:
        return self.pixels[position].tobytes()

    def label(self, position: int) -> int:
        return int(self._labels[position])

    def shown(self, position: int) -> str:
        return f"{self._folder}: image {position}"


def _read_batch(path: Path, edition: CifarEdition) -> tuple[np.ndarray, np.ndarray]:
    """Read pixels uint8 [N, 3, 32, 32] and labels int64 [N]."""
    try:
        table = read_table(path)
    except (pickle.UnpicklingError, OSError) as error:
        raise DatasetError(f"{path}: not a {edition.title} batch: {one_line(error)}") from error
    try:
        pixels, labels = table["data"].reshape(-1, *IMAGE_SHAPE), np.array(table[edition.label_key], np.int64)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DatasetError(f"{path}: not a {edition.title} batch of images [N, 3072] and labels [N]") from error
    largest = len(edition.class_names) - 1
    wrong = np.flatnonzero((labels < 0) | (labels > largest))
    if len(wrong):
        raise DatasetError(f"{path}: row {wrong[0]}: label {labels[wrong[0]]} is not in 0..{largest}")
    return pixels, labels
