"""Share of images drawn by prompt in which a classifier finds the class of the prompt: python benchmarks/prompted_classes.py SET

SET is a set of images that `scripts/sample.py RUN --prompt ... --count N` has drawn, each prompt with the name
of one class of CIFAR-10 in it. The classifier is the extractor `cifar10`, which has never seen them: 80.1 % of held-out real
images are recognised. Shares have Wilson's 95 % interval; chance is one in as many as there are classes.

Writes benchmarks/results/prompted_classes.json.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from torchtitan.data.cifar import Cifar10
from torchtitan.distributed.mesh import compute_device
from torchtitan.fidelity.extractors import open_extractor
from torchtitan.fidelity.images import open_images
from torchtitan.runs.folder import versions
from torchtitan.statistics.interval import Interval, binomial_interval
from torchtitan.training.hardware import device_name

BATCH = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", type=Path, help="folder of a set drawn with --prompt")
    folder = parser.parse_args().set
    record = json.loads((folder / "set.json").read_text())
    classes = [class_of(prompt) for prompt in record["prompts"]]
    drawn = open_images(folder)
    images = drawn.pixels(range(len(drawn)))  # [N, H, W, 3]
    asked = np.array(classes)[np.arange(len(images)) % len(classes)]
    extractor = open_extractor("cifar10")
    batches = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).split(BATCH)
    found = torch.cat([extractor.extract(batch)["logits"].argmax(1) for batch in batches]).numpy()
    names = Cifar10.edition.class_names
    result = {
        "images": len(images), "weights": record["weights"]["label"], "num_steps": record["num_steps"],
        "guidance_scale": record["guidance_scale"], "chance": 1 / len(names), "recognised": share(found == asked),
        "by_class": {names[number]: share(found[asked == number] == number) for number in sorted({*classes})},
        "device": device_name(compute_device()), "date": date.today().isoformat(), "versions": versions(),
    }  # fmt: skip
    path = Path(__file__).parent / "results" / "prompted_classes.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def class_of(prompt: str) -> int:
    """Number of the class that a prompt names."""
    named = [number for number, name in enumerate(Cifar10.edition.class_names) if name in prompt.split()]
    if len(named) != 1:
        raise SystemExit(f"{prompt!r} names {len(named)} classes of CIFAR-10, not one")
    return named[0]


def share(right: np.ndarray) -> dict[str, float]:
    found: Interval = binomial_interval(int(right.sum()), len(right))
    return {"value": found.value, "lower": found.lower, "upper": found.upper}


if __name__ == "__main__":
    main()
