"""Presets of EDM2's published trainings: noise levels, rates, lengths and averages as published, at the scale of our latents."""

import io
import math
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from torchtitan.config.job import JobConfig, load_config
from torchtitan.data import DATASETS, dataset_info
from torchtitan.diffusion.uncertainty import LogUncertainty
from torchtitan.estimate.memory import model_on_meta
from torchtitan.training.schedules import lr_factor

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "train_configs" / "edm2"
MI = 2**20
# Table 6 and NVlabs' presets: shape, rate, batches before the decay, ln sigma of training for data of deviation 0.5, Mi images,
# parameters without those of u, dropout.
PUBLISHED = {
    "img512_xs": ([4, 64, 64], 0.012, 70_000, -0.4, 1.0, 2048, 124_713_125),
    "img512_s": ([4, 64, 64], 0.010, 70_000, -0.4, 1.0, 2048, 280_212_709),
    "img64_s": ([3, 64, 64], 0.010, 35_000, -0.8, 1.6, 1024, 280_209_253),
}


def preset(name: str, shape: list[int], classes: int = 0) -> JobConfig:
    return load_config([
        "--job.config_file", str(FOLDER / f"{name}.toml"), "--data.name", "synthetic", "--data.shape", str(shape),
        "--data.num_classes", str(classes), *(["--sampling.classes", "[]"] if classes < 1000 else []),
    ], 1)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_of_imagenet_train_as_published(name):
    shape, rate, decay, mean, spread, images, parameters = PUBLISHED[name]
    config = preset(name, shape, 1000)
    assert model_on_meta(config).num_parameters() == parameters
    assert config.model.label_dropout == 0 and config.model.dropout == 0
    training, optimizer = config.training, config.optimizer
    assert (training.global_batch_size, training.steps * 2048) == (2048, images * MI)
    assert training.max_norm == 0.0
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay) == (0.9, 0.99, 1e-8, 0.0)
    for batches in (0, 1, 4882, 4883, decay, decay + 1, 4 * decay):
        seen = 2048 * batches
        wanted = rate / math.sqrt(max(batches / decay, 1)) * min(seen / 10e6, 1)
        found = optimizer.lr * lr_factor(config.lr_scheduler, batches + 1, training.steps, 2048)
        assert found == pytest.approx(wanted, rel=1e-12)
    # Noise levels over the deviation of the data are the published ones, in training and in sampling.
    scale = config.objective.sigma_data / 0.5
    timesteps, schedule = config.objective.timesteps, config.sampling.schedule
    assert (timesteps.p_mean - math.log(scale), timesteps.p_std) == pytest.approx((mean, spread), abs=1e-7)
    assert (schedule.sigma_min / scale, schedule.sigma_max / scale) == pytest.approx((0.002, 80.0))
    assert config.sampling.num_steps == 32 and config.sampling.solver.name == "edm_heun"
    assert {track.sigma_rel for track in config.ema.tracks} == {0.05, 0.10}
    assert config.ema.snapshot_interval == 8 * MI and config.checkpoint.interval * 2048 == 128 * MI
    assert scale == (2 if name.startswith("img512") else 1)  # a latent store gives deviation 1


def test_the_average_of_the_port_is_the_one_that_test_ema_holds_to_the_published_update():
    (track,) = preset("cifar10_e", [3, 32, 32]).ema.tracks
    assert (track.kind, track.decay, track.warmup_power) == ("constant", 0.9993, 2 / 3)


@pytest.mark.parametrize(("name", "waves", "amplitude", "row_norm"), [
    ("cifar10_c", 256, 1.0, 1.0), ("cifar10_e", 256, 1.0, 16.0), ("cifar10_g", 256, math.sqrt(2), 16.0),
    ("img64_s", 128, math.sqrt(2), math.sqrt(128)),
])  # fmt: skip
def test_u_moves_per_step_as_the_published_heads_do(name, waves, amplitude, row_norm):
    shape = [3, 64, 64] if name == "img64_s" else [3, 32, 32]
    config = preset(name, shape, 1000 * (name == "img64_s"))
    objective = config.objective
    assert objective.learned_uncertainty and objective.uncertainty_features == waves
    # Adam moves every weight by the rate at first. A weight of a head has the factor amplitude / row norm in u.
    u = LogUncertainty(waves, waves, (-20.0, 20.0))
    torch.nn.init.eye_(u.weight)  # every wave alone
    factor = math.sqrt(2) * u(torch.linspace(-20, 20, 1001)).square().mean().sqrt().item()
    assert factor == pytest.approx(math.sqrt(2 / waves), rel=0.02)
    assert objective.uncertainty_lr_scale * factor == pytest.approx(amplitude / row_norm, rel=0.02)


def test_tiny_imagenet_of_the_hub_is_read_with_the_documented_keys(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    for split, count in (("train", 12), ("valid", 4)):
        rows = [{"image": {"bytes": file.getvalue(), "path": None}, "label": number % 3} for number in range(count)]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001-0123.parquet")
    page = (ROOT / "docs" / "data.md").read_text()
    (documented,) = re.findall(r"^ +(--data.name huggingface .*image_size 64.*)$", page, re.MULTILINE)
    words = shlex.split(documented.replace("FOLDER", str(tmp_path)))
    config = load_config(["--job.config_file", str(FOLDER / "tiny_imagenet_e.toml"), *words], 1)
    assert not config.data.labels and not config.data.horizontal_flip
    assert dataset_info(config.data).image_shape == (3, 64, 64) and dataset_info(config.data).num_classes == 0
    assert [len(DATASETS["huggingface"](config.data, split)) for split in ("train", "validation")] == [12, 4]
