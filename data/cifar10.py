"""CIFAR-10: ten classes, 32x32 colour."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.data.cifar import Cifar, CifarConfig, CifarEdition
from torchtitan.settings import setting


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
