"""On Gaussian images the best loss of any model is known at every timestep: a trained one comes close, never below."""

import json
from pathlib import Path

import pytest
import torch

from data.synthetic import Synthetic, optimal_velocity_loss
from tests.launcher import run_on_ranks
from torchtitan.config import load_config
from torchtitan.diffusion.objective import Objective
from torchtitan.evaluation.validation import held_out_draw
from torchtitan.training.metrics import METRICS_FILE

BINS, HELD_OUT = 5, 10_000

CONFIG = f"""
[model]
flavor = "debug"
label_dropout = 0.0
[data]
name = "synthetic"
kind = "gaussian"
shape = [1, 8, 8]
[objective]
timestep_sampler = "uniform"
spread = "stratified"
[optimizer]
lr = 3e-3
beta2 = 0.99
[lr_scheduler]
warmup_steps = 100
decay_type = "cosine"
[training]
steps = 4000
local_batch_size = 64
[[ema.tracks]]
name = "ema"
decay = 0.99
[metrics]
enable_tensorboard = false
loss_bins = {BINS}
log_freq = 500
[checkpoint]
enable = false
[sampling]
enable = false
[validation]
enable = true
interval = 4000
num_images = {HELD_OUT}
"""


@pytest.mark.long
def test_trained_loss_approaches_the_closed_form_in_every_bin(tmp_path):
    path = tmp_path / "gaussian.toml"
    path.write_text(CONFIG)
    arguments = ["--job.config_file", str(path), "--job.dump_folder", str(tmp_path)]
    run_on_ranks("tests.end_to_end.test_gaussian:train", 1, {"arguments": arguments}, timeout=900)
    last = json.loads((tmp_path / "gaussian" / METRICS_FILE).read_text().splitlines()[-1])
    found = torch.tensor([last[f"validation_metrics/ema/loss_by_bin/{k}"] for k in range(BINS)], dtype=torch.float64)

    config = load_config(arguments, 1)
    pixels = Synthetic.info(config.data).image_shape
    draw = held_out_draw(Objective(config.objective, 0), 0, torch.arange(HELD_OUT), HELD_OUT, pixels)
    best = optimal_velocity_loss(config.data, draw.t.to(torch.float64))
    bins = torch.bucketize(draw.t, torch.arange(1, BINS) / BINS)
    wanted = torch.stack([best[bins == k].mean() for k in range(BINS)])
    ratio = found / wanted
    # An error of n independent Gaussian pixels has relative variance 2 / n; modes of unequal size leave fewer.
    noise = (2 / 16 / (HELD_OUT / BINS)) ** 0.5
    print("trained loss / closed form by bin:", [round(value, 4) for value in ratio.tolist()])
    assert ratio.min() > 1 - 3 * noise, ratio
    assert ratio.max() < 1.10, ratio


def train(arguments: list[str]) -> None:
    from torchtitan.trainer import Trainer

    trainer = Trainer(load_config(arguments, 1))
    assert trainer.train() == 0
    trainer.close()
    assert Path(trainer.folder.summary).exists()
