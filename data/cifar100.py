"""CIFAR-100: a hundred classes (the fine labels), 32x32 colour."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.data.cifar import Cifar, CifarConfig, CifarEdition
from torchtitan.settings import setting

CLASS_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
    maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail
    snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout
    tulip turtle wardrobe whale willow_tree wolf woman worm
""".split()


@dataclass(kw_only=True)
class Cifar100Config(CifarConfig):
    """`[data]` with name = "cifar100"."""

    name: Literal["cifar100"] = setting("cifar100", "dataset")


class Cifar100(Cifar):
    """600 images of each of a hundred classes."""

    Config = Cifar100Config
    edition = CifarEdition(
        title="CIFAR-100",
        class_names=tuple(name.replace("_", " ") for name in CLASS_NAMES),
        label_column="fine_label",
        folder="cifar-100-python",
        train_batches=("train",),
        validation_batches=("test",),
        label_key="fine_labels",
    )
