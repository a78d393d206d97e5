"""Train a small feature extractor: scripts/train_extractor.py digits|cifar10 [--data PATH] --output FILE.safetensors

The classifier sees the training split of the dataset only; its accuracy on the held-out one, with a 95 % interval, is in the
file's metadata. On one machine a seed gives the same file again. The files of the package were made with the defaults.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchtitan.data.base import DatasetError
from torchtitan.data.labelled_pixels import read_labelled_pixels
from torchtitan.features.base import ExtractorError
from torchtitan.features.small import ARCHITECTURES, SmallClassifier, SmallExtractor, read_weights, weights_metadata
from torchtitan.files.weight_files import WeightsError, refuse_existing, written_whole
from torchtitan.pictures.number_text import significant
from torchtitan.processes.command_line import OneLineParser, interrupt_by_signals, run_program
from torchtitan.processes.exit_codes import REFUSED
from torchtitan.programs import program
from torchtitan.statistics.interval import Interval, binomial_interval

EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Recipe:
    """Recipe of a training: SGD with Nesterov's momentum 0.9; the learning rate rises for a fifth of the steps, then falls to 0.

    Attributes:
        epochs, batch_size: of the training split.
        peak_lr, weight_decay: of the optimizer.
        shift: largest shift of an image, in pixels, along either axis.
        mirror: whether an image is mirrored with probability 1/2.
    """

    epochs: int
    batch_size: int
    peak_lr: float
    weight_decay: float
    shift: int
    mirror: bool


RECIPES = {
    "digits": Recipe(epochs=30, batch_size=50, peak_lr=0.1, weight_decay=5e-4, shift=1, mirror=False),
    "cifar10": Recipe(epochs=11, batch_size=125, peak_lr=0.1, weight_decay=5e-4, shift=2, mirror=True),
}


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    name, output = arguments.name, arguments.output
    try:
        refuse_existing(output, overwrite=False)
        images, labels = read_labelled_pixels(name, arguments.data, "train")
        held_out, held_out_labels = read_labelled_pixels(name, arguments.data, "validation")
        # The order of sums, and with it every weight, depends on the number of threads.
        torch.set_num_threads(1)
        classifier = train(name, images, labels, arguments.seed)
        with written_whole(output, overwrite=False) as unfinished:
            save(unfinished, classifier, name, {})
            accuracy = held_out_accuracy(unfinished, held_out, held_out_labels)
            save(unfinished, classifier, name, training_record(arguments, len(images), accuracy))
    except (DatasetError, ExtractorError, WeightsError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"stopped; {output} was not written", file=sys.stderr)
        return 130
    print(f"{output}: held-out accuracy {in_percent(accuracy)}, sha256 {read_weights(output).sha256}")
    return 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="train_extractor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=list(ARCHITECTURES), help="architecture, and the dataset that it is trained on")
    parser.add_argument("--data", default="", metavar="PATH", help="the dataset's place (data.path); digits have none")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.safetensors", help="new file of weights")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, order and augmentation (default: 0)")
    arguments = parser.parse_args(words)
    if arguments.output.suffix != ".safetensors":
        parser.error(f"--output: {arguments.output}: its name must end in .safetensors")
    if arguments.seed < 0:
        parser.error(f"--seed: must not be negative, is {arguments.seed}")
    return arguments


# ---------------------------------------------------------------------- training


def train(name: str, images: np.ndarray, labels: np.ndarray, seed: int) -> SmallClassifier:
    recipe, generator = RECIPES[name], np.random.default_rng(seed)
    classifier = SmallClassifier(ARCHITECTURES[name])
    initialise(classifier, generator)
    optimizer = torch.optim.SGD(
        classifier.parameters(), lr=recipe.peak_lr, momentum=0.9, nesterov=True, weight_decay=recipe.weight_decay
    )
    steps_per_epoch = len(images) // recipe.batch_size
    steps = recipe.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: triangle((step + 1) / steps))
    for epoch in range(recipe.epochs):
        losses = []
        for chosen, batch in augmented_batches(images, recipe, generator):
            _, logits = classifier(classifier.prepare(batch))
            loss = cross_entropy(logits, torch.from_numpy(labels[chosen]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}/{recipe.epochs}: loss {significant(sum(losses) / len(losses), 3)}", flush=True)
    return classifier


def triangle(part: float) -> float:
    """Share of the peak learning rate after a part of the training, in [0, 1]."""
    return max(0.0, min(part / 0.2, (1 - part) / 0.8))


def initialise(classifier: SmallClassifier, generator: np.random.Generator) -> None:
    """Draw convolutions by He's rule; the head begins at zero."""
    with torch.no_grad():
        for module in classifier.modules():
            if isinstance(module, nn.Conv2d):
                deviation = math.sqrt(2 / module.weight[0].numel())
                drawn = generator.standard_normal(tuple(module.weight.shape), dtype=np.float32)
                module.weight.copy_(deviation * torch.from_numpy(drawn))
            elif isinstance(module, nn.Linear):
                module.weight.zero_()
                module.bias.zero_()


def augmented_batches(
    images: np.ndarray, recipe: Recipe, generator: np.random.Generator
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Batches of an epoch: positions [B] of the images, and these shifted and mirrored, uint8 [B, 3, S, S]."""
    side, shift = images.shape[1], recipe.shift
    padded = np.pad(images, ((0, 0), (shift, shift), (shift, shift), (0, 0)), mode="edge")
    order = generator.permutation(len(images))
    span = np.arange(side)
    for first in range(0, len(order) - recipe.batch_size + 1, recipe.batch_size):
        chosen = order[first : first + recipe.batch_size]
        rows, columns = generator.integers(0, 2 * shift + 1, (2, len(chosen), 1)) + span  # [B, S] each
        if recipe.mirror:
            mirrored = generator.random(len(chosen)) < 0.5
            columns = np.where(mirrored[:, None], columns[:, ::-1], columns)
        batch = padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]  # [B, S, S, 3]
        yield chosen, torch.from_numpy(batch).permute(0, 3, 1, 2)


# ---------------------------------------------------------------------- the file


def save(path: Path, classifier: SmallClassifier, name: str, record: dict) -> None:
    tensors = {key: tensor.detach().half().contiguous() for key, tensor in classifier.weights().items()}
    save_file(tensors, path, weights_metadata(name, record))


def held_out_accuracy(path: Path, images: np.ndarray, labels: np.ndarray) -> Interval:
    """Share of images that the weights of a file recognise, as users of the extractor meet them."""
    extractor = SmallExtractor("trained", read_weights(path), torch.device("cpu"))
    right = 0
    for first in range(0, len(images), EVALUATION_BATCH):
        batch = torch.from_numpy(images[first : first + EVALUATION_BATCH]).permute(0, 3, 1, 2)
        found = extractor.extract(batch)["logits"].argmax(dim=1).numpy()
        right += int(np.sum(found == labels[first : first + EVALUATION_BATCH]))
    return binomial_interval(right, len(images))


def training_record(arguments: argparse.Namespace, num_images: int, accuracy: Interval) -> dict:
    return {
        "held_out_accuracy": asdict(accuracy),
        "data": f"{arguments.name}: {num_images} images of the training split",
        "program": f"{program('train_extractor')} {arguments.name}",
        "seed": arguments.seed,
        **asdict(RECIPES[arguments.name]),
        "torch": torch.__version__,
    }


def in_percent(share: Interval) -> str:
    value, lower, upper = (significant(100 * each, 3) for each in (share.value, share.lower, share.upper))
    return f"{value} % [{lower}, {upper}]"


def run() -> NoReturn:
    """Run as a program, and end the process."""
    interrupt_by_signals()
    run_program(main)
