"""What the tests of extraction share: small folders of photographs, the command, and stores as bytes."""

import os
import signal
from pathlib import Path

import numpy as np
from PIL import Image

from tests.unit.autoencoder_files import write_tokenizer

SIDE = 16
SHARD_IMAGES, BATCH = 3, 2  # batches of two and of one


def write_photographs(folder: Path, num_images: int, classes: int = 3, bad: tuple[int, ...] = ()) -> Path:
    """Images of random pixels, the same number in each class; those in `bad`, by place, are cut short."""
    random = np.random.default_rng(0)
    per_class = num_images // classes
    for number in range(num_images):
        path = folder / f"class{number // per_class}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(path)
        if number in bad:
            path.write_bytes(path.read_bytes()[:200])
    return folder


def write_inputs(folder: Path, num_images: int, bad: tuple[int, ...] = ()) -> list[str]:
    """Photographs and a tokenizer; returns the words of the command but for --output."""
    write_photographs(folder / "photographs", num_images, bad=bad)
    write_tokenizer(folder / "tokenizer")
    return [
        "--autoencoder", "cosmos", "--path", str(folder / "tokenizer"), "--num-workers", "2",
        "--images-per-shard", str(SHARD_IMAGES), "--batch-size", str(BATCH),
        "--data.name", "image_folder", "--data.path", str(folder / "photographs"),
        "--data.image_size", str(SIDE), "--data.validation_fraction", "0",
    ]  # fmt: skip


def content(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def run_rank(words: list[str], kill_at: int) -> int:
    """The command as one process, which dies as by SIGKILL before it renames its file number `kill_at`, from 0."""
    from torchtitan_dit.commands.extract_latents import main

    die_at_rename(kill_at)
    return main(words)


def die_at_rename(number: int) -> None:
    """Have this process die as by SIGKILL before it renames its file of that number, from 0; below 0: never."""
    replace, left = os.replace, iter(range(number, -1, -1))

    def counted(*names):
        if next(left, None) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*names)

    if number >= 0:
        os.replace = counted
