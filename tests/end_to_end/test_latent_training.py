"""Training on a latent store: two ranks, loader processes, killed and started again."""

import signal
import time

import pytest
import torch
from safetensors import safe_open

from tests.end_to_end.runs import checkpoint_tensors
from tests.faults.forked import FAULT, ForkedRun
from tests.forked import run_script
from tests.latent_stores import plan_of, write_store
from torchtitan.autoencoders.base import normalize
from torchtitan.autoencoders.latent_files import open_latents
from torchtitan.latents import LatentStore

CONFIG = """
[model]
flavor = "debug"
[data]
name = "latents"
path = "{path}"
num_workers = 4
[training]
steps = 14
local_batch_size = 4
global_batch_size = 16
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 1
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
interval = 5
[sampling]
interval = 14
num_steps = 2
images_per_class = 1
[validation]
enable = true
interval = 14
num_images = 4
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent_training")
    write_store(folder / "store", plan_of(100, images_per_shard=16))
    path = folder / "latents.toml"
    path.write_text(CONFIG.format(path=folder / "store"))
    return path


def learned(run) -> list[dict]:
    """What was logged of the losses, trained and held out, and of the gradients."""
    tags = ("step", "loss", "grad_norm", "validation_metrics")
    return [{tag: value for tag, value in point.items() if tag.startswith(tags)} for point in run.points()]


def test_run_on_latents_that_is_killed_and_resumed_equals_a_straight_one_bit_for_bit(config, monkeypatch):
    layout = {"ranks": 2, "replicas": 2}
    straight = ForkedRun(config, "straight", "--data.num_workers", "0", **layout)
    straight.finish()
    assert straight.summary()["n_images_seen"] == 14 * 16  # two epochs of 95 images and a part
    monkeypatch.setenv(FAULT, "0:after the optimizer:8")
    killed = ForkedRun(config, "killed", **layout)
    while killed.processes[0].poll() is None:
        time.sleep(0.02)
    killed.send(signal.SIGKILL)
    killed.wait()
    monkeypatch.delenv(FAULT)
    resumed = ForkedRun(config, "killed", **layout)
    assert "resumed after step 5" in resumed.finish()[0]
    assert learned(resumed) == learned(straight)
    runs = [checkpoint_tensors(run.folder / "checkpoint" / "step-00000014") for run in (straight, resumed)]
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    grids = [run.folder / "samples" / "step-00000014.png" for run in (straight, resumed)]
    assert grids[0].read_bytes() == grids[1].read_bytes()
    assert any("validation_metrics/loss" in point for point in learned(straight))
    check_drawn_latents(straight.folder)


def check_drawn_latents(run):
    """Latents drawn by the model say how they were normalised, so that a decoder finds the raw ones."""
    words = ("--classes", "1", "--images-per-class", "2", "--latents", "--num-steps", "2")
    result = run_script("scripts/sample.py", str(run), *words)
    assert result.returncode == 0, result.stderr
    store = LatentStore(run.parent.parent / "store").index
    (path,) = (run / "samples" / "drawn").glob("latents-*.safetensors")
    file = open_latents(path)
    assert file.normalization == {"shift": store.normalization.shift, "scale": store.normalization.scale}
    assert file.autoencoder == store.autoencoder
    with safe_open(path, framework="pt") as content:
        drawn = content.get_tensor("latents")
    assert torch.allclose(normalize(file.read(0, 2), file.normalization), drawn, atol=1e-5)
    here = run.parent.parent / "store"
    away = here.rename(here.with_name("taken away"))
    result = run_script("scripts/sample.py", str(run), *words, "--output", str(run.parent / "again"))
    away.rename(here)
    assert result.returncode == 0 and "(the checkpoint's record of the data is used)" in result.stderr, result.stderr
    (again,) = (run.parent / "again").glob("latents-*.safetensors")
    with safe_open(again, framework="pt") as content:
        assert torch.equal(content.get_tensor("latents"), drawn)
    assert open_latents(again).normalization == file.normalization and open_latents(again).autoencoder == file.autoencoder
