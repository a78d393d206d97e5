"""Passes of a linear probe over images: features of all cells from one forward, kept on the disk or trained on at once.

    features/<key>/train-0-00000.safetensors   features, labels and positions of a part of the images, in pass 0
                   test-0-00000.safetensors
                   adam.safetensors            classifiers of the probe `port` after its last whole epoch
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from research.block_features import BlockFeatures
from research.linear_classifiers import AdamClassifiers, LinearClassifier, choose_and_fit
from research.offline_gradients import GradientError
from torchtitan import philox
from torchtitan.data.base import Batch, Dataset, DatasetError, Draws, UnreadableImage
from torchtitan.experiments.folder import StudyError
from torchtitan.files.durable import make_folder, replacing
from torchtitan.files.removal import remove_folder
from torchtitan.training.data_loading import fetch, joined

FEATURES = "features"  # folder of parts
IMAGES_PER_PART = 256  # what a kill can lose
HELD_OUT_EVERY = 5  # of the training images, to choose the penalty
# Of the port's Adam, with batches of PORT_BATCH on each of its processes; the rate grows with their number.
LEARNING_RATE, PORT_BATCH = 1e-3, 128
MOST_INPUTS, POOLED_SIDE = 12_288, 32  # larger images are averaged to this side, for the baseline
# Numbers of test images, so that their noise is apart from that of training images.
_TEST_NUMBERS = 1 << 41
_ADAM = "adam.safetensors"
_PART = re.compile(r"(adam|(train|test)-\d+-\d{5})\.safetensors")

# (clean images [B, C, H, W] on the device, their numbers, pass) -> features [B, D] by name
Source = Callable[[Tensor, Tensor, int], dict[str, Tensor]]


@dataclass(frozen=True)
class ProbeImages:
    """Images of a split, each of which a pass reads once.

    Attributes:
        dataset: the split.
        positions: of the images in it, rising, int64 [N].
        test: whether they are those that classifiers are tested on.
    """

    dataset: Dataset
    positions: np.ndarray
    test: bool = False

    def numbers(self, positions: np.ndarray) -> Tensor:
        """Numbers of images by which noise is drawn."""
        return torch.from_numpy(positions) + (_TEST_NUMBERS if self.test else 0)

    def parts(self) -> list[np.ndarray]:
        """Positions of each part."""
        return [self.positions[first : first + IMAGES_PER_PART] for first in range(0, len(self.positions), IMAGES_PER_PART)]

    def fetch(self, positions: np.ndarray, draws: Draws | None = None) -> tuple[Batch | None, np.ndarray]:
        """Fetch images, with draws as for training; those that cannot be read are left out.

        Returns:
            the batch, None without images, and the positions in it.

        Raises:
            DatasetError: beyond single unreadable images.
        """
        try:
            return fetch(self.dataset, positions, draws), positions
        except UnreadableImage:
            pass  # find out which, one by one
        found, kept = [], []
        for number, position in enumerate(positions):
            try:
                one = slice(number, number + 1)
                found.append(fetch(self.dataset, positions[one], None if draws is None else draws[one]))
                kept.append(position)
            except UnreadableImage:
                continue
        return (joined(found) if found else None), np.array(kept, np.int64)


def chosen_images(dataset: Dataset, count: int | None, seed: int, test: bool = False) -> ProbeImages:
    """Choose the first `count` images of an order fixed by the seed, all by default; count <= len(dataset)."""
    order = philox.uniform(seed, "evaluation", torch.arange(len(dataset))).argsort().numpy()
    return ProbeImages(dataset, np.sort(order[:count]), test)


def block_source(reader: BlockFeatures, levels: Sequence[str]) -> Source:
    """Source of the features of blocks at noise levels, named `level/block`."""

    def read(images: Tensor, numbers: Tensor, attempt: int) -> dict[str, Tensor]:
        found = zip(levels, reader.read(images, numbers, attempt), strict=True)
        return {f"{level}/{block}": features for level, of_level in found for block, features in of_level.items()}

    return read


def pixel_source(name: str) -> Source:
    """Source of the clean images' own values; large images are averaged to POOLED_SIDE x POOLED_SIDE."""

    def read(images: Tensor, numbers: Tensor, attempt: int) -> dict[str, Tensor]:
        if images[0].numel() > MOST_INPUTS:
            images = F.adaptive_avg_pool2d(images, POOLED_SIDE)
        return {name: images.flatten(1)}

    return read


@dataclass
class Passes:
    """Passes of one source over the images of both splits.

    Attributes:
        source: of the features.
        train, test: images.
        num_classes: C.
        num_passes: over the training images, each with its own noise.
        batch_size: images at a time.
        seed: of everything random.
        device: of the source.
        folder: of this source's parts.
        title: for the progress bar.
    """

    source: Source
    train: ProbeImages
    test: ProbeImages
    num_classes: int
    num_passes: int
    batch_size: int
    seed: int
    device: torch.device
    folder: Path
    title: str
    _adam: dict[str, LinearClassifier] = field(default_factory=dict, repr=False)
    _tested: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    # ------------------------------------------------------------------ features taken once

    def logistic(self, name: str) -> tuple[LinearClassifier, dict[str, float]]:
        """Fit logistic regression to the features of a name, and test it.

        Returns:
            the classifier, and `correct`, `tested`, `left_out` and `train_accuracy`.

        Raises:
            GradientError: a feature is not finite.
            DatasetError, StudyError: images or parts cannot be read.
        """
        self._read_missing_parts()
        features, labels, positions = self._of_parts(name, "train", self.num_passes)
        held_out = positions % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if not 0 < int(held_out.sum()) < len(held_out):
            raise DatasetError(f"{len(positions)} training images: none of them can be held out to choose a penalty")
        classifier = choose_and_fit(features, labels, self.num_classes, held_out)
        train_accuracy = (classifier.predict(features) == labels).double().mean().item()
        features, labels, _ = self._of_parts(name, "test", 1)
        correct = int((classifier.predict(features) == labels).sum())
        left_out = len(self.test.positions) - len(labels)
        return classifier, {
            "correct": correct, "tested": len(labels), "left_out": left_out, "train_accuracy": train_accuracy
        }  # fmt: skip

    def _read_missing_parts(self) -> None:
        """Read the features that no part has yet, all names at once."""
        wanted = [("train", number) for number in range(self.num_passes)] + [("test", 0)]
        missing = [
            (self._part(split, attempt, number), split, positions, attempt)
            for split, attempt in wanted for number, positions in enumerate(self._images(split).parts())
            if not self._part(split, attempt, number).exists()
        ]  # fmt: skip
        if not missing:
            return
        make_folder(self.folder)
        with self._bar(sum(len(positions) for _, _, positions, _ in missing)) as bar:
            for path, split, positions, attempt in missing:
                tensors = self._features(self._images(split), positions, attempt, bar)
                with replacing(path) as unfinished:
                    save_file(tensors, unfinished)

    def _features(self, images: ProbeImages, positions: np.ndarray, attempt: int, bar: tqdm) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {"labels": [], "positions": []}
        for some in np.split(positions, range(self.batch_size, len(positions), self.batch_size)):
            batch, kept = images.fetch(some)
            bar.update(len(some))
            if batch is None:
                continue
            features = self.source(batch["images"].to(self.device), images.numbers(kept), attempt)
            parts = features | {"labels": batch["class"], "positions": torch.from_numpy(kept)}
            for name, values in parts.items():
                found.setdefault(name, []).append(values.cpu())
        return {name: torch.cat(parts) for name, parts in found.items() if parts}

    def _of_parts(self, name: str, split: str, num_passes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features, labels and positions of all parts."""
        found: list[tuple[Tensor, ...]] = []
        for attempt in range(num_passes):
            for number in range(len(self._images(split).parts())):
                path = self._part(split, attempt, number)
                try:
                    with safe_open(path, "pt") as part:
                        if "labels" in set(part.keys()):  # else no image of the part can be read
                            found.append(tuple(part.get_tensor(key) for key in (name, "labels", "positions")))
                except (OSError, SafetensorError) as error:
                    raise StudyError(f"{path}: is missing or damaged (remove {self.folder} to read anew)") from error
        if not found:
            raise DatasetError(f"no image of the {split} split can be read")
        features, labels, positions = (torch.cat(parts) for parts in zip(*found, strict=True))
        _check_finite(name, features)
        return features.to(self.device), labels.to(self.device), positions.to(self.device)

    def _part(self, split: str, attempt: int, number: int) -> Path:
        return self.folder / f"{split}-{attempt}-{number:05d}.safetensors"

    def _images(self, split: str) -> ProbeImages:
        return self.test if split == "test" else self.train

    # ------------------------------------------------------------------ features taken anew in every pass

    def port(self, name: str, horizontal_flip: bool) -> tuple[LinearClassifier, dict[str, float]]:
        """Train classifiers of all names by Adam, once, as the multi-GPU port of EDM2, and test that of a name.

        Returns, raises: as `logistic`, without `train_accuracy`.
        """
        if not self._adam:
            self._adam = self._train_by_adam(horizontal_flip)
            self._tested = self._test(self._adam)
        correct, tested = self._tested[name]
        left_out = len(self.test.positions) - tested
        return self._adam[name], {"correct": correct, "tested": tested, "left_out": left_out}

    def _train_by_adam(self, horizontal_flip: bool) -> dict[str, LinearClassifier]:
        batch, kept = self.train.fetch(self.train.positions[: self.batch_size])
        if batch is None:
            raise DatasetError("none of the first training images can be read")
        features = self.source(batch["images"].to(self.device), self.train.numbers(kept), 0)
        dims = {name: values.shape[1] for name, values in features.items()}
        classifiers = AdamClassifiers(
            dims, self.num_classes, learning_rate=LEARNING_RATE * self.batch_size / PORT_BATCH, epochs=self.num_passes,
            seed=self.seed, device=self.device,
        )  # fmt: skip
        begun = self._resume(classifiers)
        make_folder(self.folder)
        with self._bar((self.num_passes - begun) * len(self.train.positions)) as bar:
            for epoch in range(begun, self.num_passes):
                for features, labels in self._drawn(epoch, horizontal_flip, bar):
                    classifiers.train(features, labels, epoch)
                with replacing(self.folder / _ADAM) as unfinished:
                    save_file(classifiers.state() | {"epochs": torch.tensor([epoch + 1])}, unfinished)
        found = classifiers.classifiers()
        for name, classifier in found.items():
            _check_finite(name, classifier.weight)
        return found

    def _drawn(self, epoch: int, horizontal_flip: bool, bar: tqdm) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Features and labels of the batches of an epoch, in random order, mirrored at random."""
        order = philox.uniform(self.seed, "data_order", self.train.numbers(self.train.positions), epoch).argsort().numpy()
        for some in np.split(self.train.positions[order], range(self.batch_size, len(order), self.batch_size)):
            draws = Draws(self.seed, self.train.numbers(some), epoch)
            batch, kept = self.train.fetch(some, draws)
            bar.update(len(some))
            if batch is None:
                continue
            images, numbers = batch["images"], self.train.numbers(kept)
            if horizontal_flip:
                mirrored = philox.uniform(self.seed, "horizontal_flip", numbers, epoch) < 0.5
                images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
            yield self.source(images.to(self.device), numbers, epoch), batch["class"].to(self.device)

    def _resume(self, classifiers: AdamClassifiers) -> int:
        """Load the state of an earlier start, if there is one; returns its number of epochs."""
        path = self.folder / _ADAM
        if not path.exists():
            return 0
        try:
            state = load_file(path)
            epochs = int(state.pop("epochs"))
            classifiers.load_state(state)
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise StudyError(f"{path}: is damaged (remove {self.folder} to train anew)") from error
        return epochs

    def _test(self, classifiers: dict[str, LinearClassifier]) -> dict[str, tuple[int, int]]:
        """Numbers of images that are classified correctly, and of those tested, by name."""
        correct, tested = dict.fromkeys(classifiers, 0), 0
        with self._bar(len(self.test.positions)) as bar:
            for positions in self.test.parts():
                part = self._features(self.test, positions, 0, bar)
                if "labels" not in part:
                    continue
                tested += len(part["labels"])
                for name, classifier in classifiers.items():
                    _check_finite(name, part[name])
                    predicted = classifier.predict(part[name].to(self.device)).cpu()
                    correct[name] += int((predicted == part["labels"]).sum())
        if not tested:
            raise DatasetError("no image of the test split can be read")
        return {name: (count, tested) for name, count in correct.items()}

    def _bar(self, total: int) -> tqdm:
        return tqdm(total=total, desc=self.title, unit="image", leave=False, position=1, mininterval=0.5, dynamic_ncols=True)


def remove_features(folder: Path) -> None:
    """Remove the parts of all passes from the folder of a study's results."""
    for of_passes in sorted((folder / FEATURES).glob("*-*/")):
        remove_folder(of_passes, lambda name: _PART.fullmatch(name) is not None)
    remove_folder(folder / FEATURES, lambda name: False)


def _check_finite(name: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise GradientError(f"{name}: a feature or weight is not finite")
