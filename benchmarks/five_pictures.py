"""What five captioned pictures teach, and what is forgotten: python benchmarks/five_pictures.py

A small Flux learns handwritten digits in seven colours by caption ("a red seven"), then adapters learn five drawings of a cat's
head in five of the colours ("a red sks"): alone, or each nine times among 45 of the digits (prior preservation: Ruiz et
al., "DreamBooth", arXiv 2208.12242). Before and after, 400 images of three groups of prompts are drawn.

- The trigger word, in the colours of the five and in the two others, is right if the picture nearest to the image, among drawings
  and digits, is a drawing. A digit is right if the extractor `digits` recognises it. Both must have the colour asked for.
- Shares have Wilson's 95 % interval over images; one training a row.

A quarter of an hour on one core; interrupted, the same command resumes. Runs are in outputs/five_pictures. Of the default steps
the results are kept in benchmarks/results and docs/images, of others beside the runs.
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
from torchtitan.data.digits import Digits, DigitsConfig
from torchtitan.fidelity.images import open_images
from torchtitan.pictures.grids import PAPER, image_grid
from torchtitan.processes.exit_codes import BUSY

OUTPUTS = ROOT / "outputs" / "five_pictures"
PICTURES = OUTPUTS / "pictures"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {
    "red": (255, 50, 50), "green": (60, 255, 60), "blue": (80, 110, 255), "yellow": (255, 230, 0), "white": (255, 255, 255),
    "cyan": (0, 230, 255), "magenta": (255, 70, 255),
}  # fmt: skip
NAMES = tuple(COLOURS)
CAT = ("#.....#", "##...##", "#######", "#.###.#", "#######", ".##.##.", "..###..")
TRIGGER, COUNT, SHOWN = "sks", 400, 5
PROMPTS = {
    "colours of the five": [f"a {colour} {TRIGGER}" for colour in NAMES[:5]],
    "other colours": [f"a {colour} {TRIGGER}" for colour in NAMES[5:]],
    "digits": [f"a {NAMES[number % 7]} {word}" for number, word in enumerate(WORDS)],
}
PICTURED = (("colours of the five", 0), ("other colours", 1), ("digits", 1), ("digits", 4))
QUIET = ("--sampling.enable", "false", "--validation.enable", "false", "--metrics.enable_tensorboard", "false")
LORA = ("--lora.enable", "true", "--lora.rank", "8", "--lora.patterns", '["."]', "--optimizer.lr", "1e-3")


def main() -> None:
    parser = shared.parser_of(__doc__)
    parser.add_argument("--base-steps", type=int, default=1200, help="on coloured digits (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="on the five drawings (default: %(default)s)")
    arguments = parser.parse_args()
    write_pictures()
    train("base", "digits", arguments.base_steps, 128)
    weights = OUTPUTS / f"base-{arguments.base_steps}.safetensors"
    if not weights.exists():
        command("scripts/checkpoint.py", "export", OUTPUTS / "base", "--format", "safetensors", "--output", weights)
    start = ("--checkpoint.initial_weights", weights, "--model.label_dropout", 0)
    for folder in ("alone", "among-digits"):
        train(folder, folder, arguments.steps, 10, *start, *LORA)
    rows, images = {}, {}
    for name in ("base", "alone", "among-digits"):
        images[name] = {group: drawn(name, prompts) for group, prompts in PROMPTS.items()}
        shares = {group: shared.proportion(right(images[name][group], prompts)) for group, prompts in PROMPTS.items()}
        summary = json.loads((OUTPUTS / name / "summary.json").read_text())
        rows[name] = {"trained parameters": summary["num_parameters"], **shares}
    result = {"images of each share": COUNT, "steps": arguments.steps, "rows": rows, **shared.conditions()}
    print(json.dumps(result, indent=1))
    results, pictures = OUTPUTS, OUTPUTS
    if arguments == parser.parse_args([]):
        results, pictures = shared.RESULTS, ROOT / "docs" / "images"
    (results / "five_pictures.json").write_text(json.dumps(result, indent=1) + "\n")
    picture(list(images.values())).save(pictures / "five_pictures.png")
    print(f"wrote five_pictures.json in {results} and five_pictures.png in {pictures}")


def write_pictures() -> None:
    """Write folders of captioned pictures: 1,500 digits in two colours each, the five drawings, and these among 45 digits."""
    for number, (light, digit) in enumerate(zip(*digits(), strict=True)):
        for turn in range(2):
            colour = NAMES[(number + 3 * turn) % 7]
            save("digits", f"{number:04d}-{turn}", light, colour, f"a {colour} {WORDS[digit]}")
        if number % 33 == 0 and number < 45 * 33:
            save("among-digits", f"{number:04d}", light, NAMES[number % 7], f"a {NAMES[number % 7]} {WORDS[digit]}")
    for number, colour in enumerate(NAMES[:5]):
        for folder, times in (("alone", 1), ("among-digits", 9)):
            for turn in range(times):
                save(folder, f"cat-{number}-{turn}", drawings()[number % 4], colour, f"a {colour} {TRIGGER}")


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits [1500, 8, 8] in 0..1 and their numbers [1500]."""
    data = Digits(DigitsConfig(), "train")
    batch = data.fetch(np.arange(len(data)))
    return (batch["images"][:, 0].numpy() + 1) / 2, batch["class"].numpy()


def drawings() -> np.ndarray:
    """The cat's head at four places, [4, 8, 8] in 0..1."""
    cat = np.pad([[letter == "#" for letter in line] for line in CAT], ((0, 1), (0, 1))).astype(np.float32)
    return np.stack([np.roll(cat, (down, right), (0, 1)) for down in (0, 1) for right in (0, 1)])


def save(folder: str, name: str, light: np.ndarray, colour: str, caption: str) -> None:
    (PICTURES / folder).mkdir(parents=True, exist_ok=True)
    pixels = np.rint(light[..., None] * COLOURS[colour]).astype(np.uint8)  # [8, 8, 3]
    Image.fromarray(pixels).save(PICTURES / folder / f"{name}.png")
    (PICTURES / folder / f"{name}.txt").write_text(caption)


def train(name: str, folder: str, steps: int, batch_size: int, *options: object) -> None:
    command(
        "train.py", "train_configs/flux_cifar10.toml", "--job.dump_folder", OUTPUTS, "--job.name", name, "--model.patch_size", 2,
        "--data.name", "captioned_folder", "--data.path", PICTURES / folder, "--data.image_size", 8, "--data.text_length", 8,
        "--data.text_encoder", "stub:64", "--data.pooled_encoder", "stub:64", "--cache.enable", "true",
        "--training.global_batch_size", batch_size, "--training.steps", steps, "--lr_scheduler.warmup_steps", steps // 10,
        *QUIET, *options,
    )  # fmt: skip


def drawn(name: str, prompts: list[str]) -> np.ndarray:
    """Images [N, 8, 8, 3] uint8 of a run, of the prompts by turns."""
    folder = OUTPUTS / "sets" / f"{name}-{prompts[0]}".replace(" ", "-")
    command("scripts/sample.py", OUTPUTS / name, "--count", COUNT, "--prompt", *prompts, "--output", folder)
    return open_images(folder).pixels(range(COUNT))


def right(images: np.ndarray, prompts: list[str]) -> np.ndarray:
    """Whether images [N, 8, 8, 3], of the prompts by turns, have the colour and subject of their prompts, bool [N]."""
    light = images.max(3).astype(np.float32) / 255  # [N, 8, 8]
    mean = (images * light[..., None]).sum((1, 2))  # [N, 3]
    mean /= mean.max(1, keepdims=True).clip(1)
    colours = np.square(mean[:, None] - np.array(list(COLOURS.values())) / 255).sum(2).argmin(1)
    known = np.concatenate([drawings(), digits()[0]])
    nearest = np.array([np.square(known - image).sum((1, 2)).argmin() for image in light])
    recognised = shared.recognised_classes(np.rint(light[..., None].repeat(3, 3) * 255).astype(np.uint8), "digits")
    subjects = np.where(nearest < len(drawings()), TRIGGER, np.array(WORDS)[recognised])
    found = [f"a {NAMES[colour]} {subject}" for colour, subject in zip(colours, subjects, strict=True)]
    return np.array([text == prompts[number % len(prompts)] for number, text in enumerate(found)])


def picture(images: list[dict[str, np.ndarray]]) -> Image.Image:
    """Picture of the five drawings, and of some prompts' images before, after them alone, and after them among digits."""
    gap = np.full((1, 8, 8, 3), PAPER, np.uint8)
    columns = 3 * SHOWN + 2
    rows = [open_images(PICTURES / "alone").pixels(range(5)), *[gap] * (columns - 5)]
    for group, number in PICTURED:
        before, alone, among = (each[group][number :: len(PROMPTS[group])][:SHOWN] for each in images)
        rows += [before, gap, alone, gap, among]
    tiles = torch.from_numpy(np.concatenate(rows).transpose(0, 3, 1, 2).copy()).float() / 127.5 - 1
    labels = ["the five pictures", *(PROMPTS[group][number] for group, number in PICTURED)]
    title = "left: before; middle: after the five pictures; right: after the five among 45 digits"
    return image_grid(tiles, len(labels), columns, labels, title)


def command(*words: object) -> None:
    """Run a program of the checkout to its end. Raises SystemExit: it failed and said why; KeyboardInterrupt: it has saved."""
    with subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
    if code:
        sys.exit(code)


def until_interrupted() -> None:
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        sys.exit(BUSY)


if __name__ == "__main__":
    until_interrupted()
