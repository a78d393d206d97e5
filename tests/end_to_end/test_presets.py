"""Every shipped configuration trains, samples and validates; made small, and all else as it stands."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.decoding import write_encoded_store
from tests.launcher import ROOT, run_on_ranks

SMALL = [
    "--model.num_layers", "2", "--model.dim", "64", "--model.num_heads", "4", "--model.mlp_hidden_dim", "128",
    "--training.steps", "3", "--training.global_batch_size", "4", "--training.mixed_precision_param", "float32",
    "--lr_scheduler.warmup_steps", "1", "--checkpoint.enable", "false", "--metrics.log_freq", "1",
    "--metrics.enable_tensorboard", "false", "--sampling.num_steps", "3", "--sampling.images_per_class", "1",
    "--sampling.classes", "[1, 2]", "--sampling.judge_images", "0",
]
PRESETS = sorted(path.name for path in (ROOT / "train_configs").glob("*.toml"))


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """Forty images of noise in CIFAR-10's layout."""
    folder, draw = tmp_path_factory.mktemp("cifar10"), np.random.default_rng(0)
    rows = []
    for number in range(40):
        buffer = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, format="PNG")
        rows.append({"img": {"bytes": buffer.getvalue(), "path": ""}, "label": number % 10})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """A store of tiny latents in Cosmos' number of channels, and keys that put it and its tokenizer in place."""
    folder = tmp_path_factory.mktemp("latents")
    write_encoded_store(folder / "store", folder / "tokenizer", num_images=100)
    tokenizer = str(folder / "tokenizer")
    return [
        "--data.path", str(folder / "store"), "--data.num_workers", "0",
        "--autoencoder.name", "cosmos", "--autoencoder.path", tokenizer,
    ]  # fmt: skip


def test_shipped_configurations_train_when_made_small(cifar10, latents, tmp_path):
    arguments = {}
    for name in PRESETS:
        text = (ROOT / "train_configs" / name).read_text()
        arguments[name] = ["--job.config_file", str(ROOT / "train_configs" / name), "--job.dump_folder", str(tmp_path), *SMALL]
        if 'name = "cifar10"' in text:
            arguments[name] += ["--data.path", str(cifar10), "--data.num_workers", "0"]
        if 'name = "latents"' in text:
            arguments[name] += latents
        if "validation_path" in text:
            arguments[name] += ["--data.validation_path", latents[1]]
        if "[gns]" in text:
            arguments[name] += ["--gns.num_bins", "2", "--gns.interval", "2"]
        if "[validation]" in text:
            arguments[name] += ["--validation.num_images", "4"]
    run_on_ranks("tests.end_to_end.test_presets:train_all", 1, {"arguments": list(arguments.values())})
    for name in PRESETS:
        folder = tmp_path / name.removesuffix(".toml")
        points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [point["loss_metrics/global_avg_loss"] for point in points if "grad_norm" in point]
        assert len(losses) == 3 and all(0 < loss < 10 for loss in losses), (name, losses)
        assert (folder / "samples" / "step-00000003.png").exists(), name
        assert (folder / "samples" / "held-out.png").exists() == name.startswith("imagenet"), name
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed", name


def train_all(arguments: list[list[str]]) -> None:
    from torchtitan.config.job import load_config
    from torchtitan.trainer import Trainer

    for argv in arguments:
        trainer = Trainer(load_config(argv, 1))
        assert trainer.train() == 0
        trainer.close()
