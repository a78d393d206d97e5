"""What a network gains and forgets where it is fine-tuned on two new classes: python benchmarks/lora_new_digits.py

A DiT is trained on the digits 0 to 7 alone (train_configs/digits.toml, class numbers of all ten). From its averaged weights
it is then trained further on 8 and 9 alone: adapters of several ranks, with everything else frozen, or the whole network.
Before and after, each group of classes is drawn, 400 images of seeds 0 to 399, and the extractor `digits` says which digit it
sees (it recognises 99.3 % of real held-out ones). Shares have Wilson's 95 % interval over images; one training per row.

Takes half an hour on two cores; interrupted, it goes on. Runs are in outputs/lora_new_digits, the result and a picture in
benchmarks/results.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image

from benchmarks import shared
from benchmarks.shared import ROOT
from torchtitan.fidelity.images import open_images
from torchtitan.pictures.grids import image_grid

OUTPUTS = ROOT / "outputs" / "lora_new_digits"
OLD, NEW = tuple(range(8)), (8, 9)
COUNT, SHOWN = 400, 8
QUIET = (
    "--gns.enable", "false", "--evaluation.enable", "false", "--sampling.enable", "false", "--validation.enable", "false",
    "--metrics.enable_tensorboard", "false",
)  # fmt: skip
# The class embeddings of 8 and 9 are as drawn, so the adapters are of the table too; the whole network's rate is lower.
LORA = ("--lora.enable", "true", "--lora.patterns", '["layers", "label_embed"]')


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of fine-tuning")
    parser.add_argument("--base-steps", type=int, default=900, help="on 0 to 7")
    arguments = parser.parse_args()
    train("base", arguments.base_steps, OLD)
    weights = OUTPUTS / "base.safetensors"
    if not weights.exists():
        command("scripts/checkpoint.py", "export", OUTPUTS / "base", "--format", "safetensors", "--output", weights)
    start = ("--checkpoint.initial_weights", str(weights))
    ways: dict[str, tuple[str, ...]] = {
        f"rank {rank}": (*start, *LORA, "--lora.rank", str(rank), "--optimizer.lr", "2e-3") for rank in (2, 4, 8)
    }
    ways["all weights"] = (*start, "--optimizer.lr", "3e-4")
    for name, options in ways.items():
        train(name.replace(" ", "-"), arguments.steps, NEW, options)
    rows, pictures = {}, []
    for name in ("base", *ways):
        images = {group: drawn(name.replace(" ", "-"), group) for group in (OLD, NEW)}
        rows[name] = {"parameters": num_parameters(name)} | {
            key: share(images[group], group) for key, group in (("0 to 7", OLD), ("8 and 9", NEW))
        }
        pictures.append(np.concatenate([images[group][:SHOWN] for group in (OLD, NEW)]))
    result = {"images of each share": COUNT, "steps": arguments.steps, "rows": rows, **shared.conditions()}
    print(json.dumps(result, indent=1))
    shared.write_results("lora_new_digits", result)
    picture(list(rows), pictures).save(ROOT / "docs" / "images" / "lora_new_digits.png")


def train(name: str, steps: int, classes: tuple[int, ...], options: tuple[str, ...] = ()) -> None:
    command(
        "train.py", "--job.config_file", "train_configs/digits.toml", "--job.dump_folder", OUTPUTS, "--job.name", name,
        "--training.steps", steps, "--lr_scheduler.warmup_steps", min(50, steps // 2), "--data.classes", str(list(classes)),
        *QUIET, *options,
    )  # fmt: skip


def drawn(name: str, group: tuple[int, ...]) -> np.ndarray:
    """Images [N, H, W, 3] uint8 of a run, of the classes by turns."""
    folder = OUTPUTS / "sets" / f"{name}-{group[0]}"
    command("scripts/sample.py", OUTPUTS / name, "--count", COUNT, "--classes", *group, "--output", folder)
    return open_images(folder).pixels(range(COUNT))


def share(images: np.ndarray, group: tuple[int, ...]) -> dict[str, float]:
    """Share of images in which the extractor sees the class that was asked for."""
    return shared.proportion(shared.recognised_classes(images, "digits") == np.array(group)[np.arange(len(images)) % len(group)])


def picture(names: list[str], rows: list[np.ndarray]) -> Image.Image:
    """Picture of images [N, H, W, 3] of each run, a row for each."""
    images = torch.from_numpy(np.concatenate(rows).transpose(0, 3, 1, 2).copy()).float() / 127.5 - 1
    return image_grid(images, len(rows), len(rows[0]), row_labels=names, title="digits 0 to 7, then 8 and 9")


def num_parameters(name: str) -> int:
    """Parameters that a run trains."""
    return json.loads((OUTPUTS / name.replace(" ", "-") / "summary.json").read_text())["num_parameters"]


def command(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
