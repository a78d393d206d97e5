"""Images encoded while a run trains: equal to a run on a latent store of them, on every layout, resumed and sampled."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torchtitan_dit.commands import extract_latents, sample, train

SIDE, STEPS = 16, 6
MODEL = [
    "--model.flavor", "debug", "--model.num_layers", "1", "--training.local_batch_size", "8", "--training.steps", str(STEPS),
    "--metrics.log_freq", "1", "--metrics.enable_tensorboard", "false", "--sampling.interval", str(STEPS),
    "--sampling.num_steps", "2", "--sampling.images_per_class", "1", "--lr_scheduler.warmup_steps", "0",
    "--validation.enable", "true", "--validation.interval", str(STEPS), "--validation.num_images", "4",
    "--checkpoint.enable", "true", "--checkpoint.interval", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("online"), np.random.default_rng(0)
    for part, count in (("train", 16), ("held_out", 4)):
        for number in range(count):
            image = folder / part / f"class{number % 2}" / f"{number}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(image)
        words = ["--output", str(folder / f"{part}_latents"), "--autoencoder", "identity"]
        words += ["--data.name", "image_folder", "--data.path", str(folder / part), "--data.image_size", str(SIDE)]
        assert extract_latents.main([*words, "--data.validation_fraction", "0"]) == 0
    return folder


def images(place: Path) -> list[str]:
    return [
        "--data.name", "image_folder", "--data.path", str(place / "train"), "--data.validation_path", str(place / "held_out"),
        "--data.image_size", str(SIDE), "--data.horizontal_flip", "true", "--autoencoder.name", "identity",
        "--autoencoder.encode", "true", "--autoencoder.statistics", str(place / "train_latents"),
    ]  # fmt: skip


def trained(place: Path, name: str, words: list[str]) -> dict[str, list[float]]:
    """Losses, gradient norms and held-out losses of a run."""
    assert train.main(["--job.dump_folder", str(place / "runs"), "--job.name", name, *MODEL, *words]) == 0
    points = list(map(json.loads, (place / "runs" / name / "metrics.jsonl").read_text().splitlines()))
    tags = ("loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/loss")
    return {tag: [point[tag] for point in points if tag in point] for tag in tags}


def test_losses_are_those_of_a_run_on_the_store_bit_for_bit(place):
    stored = ["--data.name", "latents", "--data.path", str(place / "train_latents"), "--autoencoder.name", "identity"]
    stored += ["--data.validation_path", str(place / "held_out_latents")]
    wanted, found = trained(place, "stored", stored), trained(place, "online", images(place))
    assert len(wanted["grad_norm"]) == STEPS and wanted["validation_metrics/loss"] and found == wanted


def test_a_finished_run_is_resumed_and_sampled_as_images(place, capsys):
    longer = trained(place, "longer", [*images(place), "--training.steps", "9"])
    trained(place, "resumed", images(place))
    resumed = trained(place, "resumed", [*images(place), "--training.steps", "9"])
    assert resumed["grad_norm"][-3:] == longer["grad_norm"][-3:] and len(longer["grad_norm"]) == 9
    assert sample.main([str(place / "runs" / "resumed"), "--output", str(place / "drawn")]) == 0
    with Image.open(next((place / "drawn").glob("*.png"))) as grid:
        assert grid.width >= SIDE
