"""Share of images drawn by prompt in which a classifier finds the class of the prompt: python benchmarks/prompted_classes.py SET

SET is a set of images that `scripts/sample.py RUN --count N` has drawn, by the run's prompts or by --prompt, each with the name
of one class of CIFAR-10 in it. The classifier is the extractor `cifar10`, which has never seen them: 80.1 % of held-out real
images are recognised. Shares have Wilson's 95 % interval; chance is the share that the best constant answer recognises: of
prompts of equal number, one in as many as there are.

Prints the result; --record writes it to benchmarks/results/prompted_classes.json.
"""

import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import shared
from torchtitan.data.cifar import Cifar10
from torchtitan.fidelity.images import open_images


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("set", type=Path, help="folder of a set drawn by prompts")
    parser.add_argument("--record", action="store_true", help="replace the result in the repository")
    arguments = parser.parse_args()
    folder = arguments.set
    record = json.loads((folder / "set.json").read_text())
    with (folder / "labels.csv").open(newline="") as file:
        asked = np.array([class_of(row.get("prompt", "")) for row in csv.DictReader(file)])
    drawn = open_images(folder)
    images = drawn.pixels(range(len(drawn)))  # [N, H, W, 3]
    found = shared.recognised_classes(images, "cifar10")
    names = Cifar10.edition.class_names
    result = {
        "images": len(images), "weights": record["weights"]["label"], "num_steps": record["num_steps"],
        "guidance_scale": record["guidance_scale"],
        "chance": np.bincount(asked).max() / len(asked), "recognised": shared.proportion(found == asked),
        "by_class": {
            names[number]: shared.proportion(found[asked == number] == number) for number in sorted({*asked.tolist()})
        },
        **shared.conditions(),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if arguments.record:
        shared.write_results("prompted_classes", result)


def class_of(prompt: str) -> int:
    """Number of the class that a prompt names."""
    named = [number for number, name in enumerate(Cifar10.edition.class_names) if name in prompt.split()]
    if len(named) != 1:
        raise SystemExit(f"{prompt!r} names {len(named)} classes of CIFAR-10, not one")
    return named[0]


if __name__ == "__main__":
    main()
