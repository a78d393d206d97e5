"""Fine-tuning on captioned pictures in one command: cache, adapters, previews, final file and page, killed and resumed."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.extractions import die_at_rename
from tests.forked import ForkedProcess
from tests.unit.test_latent_cache import write_pictures
from torchtitan.checkpoint.checkpointer import read_state
from torchtitan.config.job import load_config
from torchtitan.diffusion.paths import PATHS
from torchtitan.models.adapters.adapters import adapter_weights
from torchtitan.runs.previews import pixel_change, preview_path
from torchtitan.sampling.prompts import filled_prompts
from torchtitan.sampling.setup import _with_adapters
from torchtitan.weights.adapted_network import adapted_network
from torchtitan.weights.network import BASE_SHA256
from torchtitan.weights.trained_model import load_run

CONFIG = Path(__file__).resolve().parents[2] / "train_configs" / "flux_lora_tiny.toml"
ROWS = 3
FOR_LARGE = [  # what needs no download
    "--data.trigger_word", "sks", "--data.resolutions", "[64]", "--data.text_encoder", "stub:4096", "--data.pooled_encoder",
    "stub:768", "--autoencoder.name", "identity",
]  # fmt: skip


def train(given, kill_at=-1):
    from torchtitan_dit.commands.train import main

    die_at_rename(kill_at)
    return main(given)


def run(folder, pictures, kill_at=-1, *more):
    """The command of docs/fine_tuning.md in small; returns its exit code, and what it said."""
    given = [
        "--job.config_file", str(CONFIG), "--data.path", str(pictures), "--data.trigger_word", "sks",
        "--data.resolutions", "[64]", "--job.dump_folder", str(folder), "--training.steps", "4", "--checkpoint.interval", "2",
        "--sampling.interval", "2", "--metrics.log_freq", "1", "--metrics.enable_tensorboard", "false", "--lora.alpha", "4",
        *more,
    ]  # fmt: skip
    process = ForkedProcess(train, (given, kill_at), dict(os.environ))
    return process.wait(120), process.said()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("given") / "pictures")


@pytest.fixture(scope="module")
def straight(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    code, said = run(folder, pictures)
    assert code == 0 and "label_dropout = 0.05), 154,496 parameters of adapters (alpha / rank 0.25), on latents" in said, said
    assert "sample grid at step 0, next sample grid at step 2: " in said
    return folder / "flux_lora_tiny"


def test_the_file_without_its_cache_encodes_captions_while_it_trains(pictures):
    given = ["--data.path", str(pictures), "--data.trigger_word", "sks", "--cache.enable", "false"]
    assert load_config(["--job.config_file", str(CONFIG), *given], 1).autoencoder.name == "none"


def outputs(run_folder):
    """What must not depend on kills: pictures, the page, the final file, and the numbers of every step."""
    kept = ("samples/previews/*.png", "samples/previews.*", "*.safetensors")
    files = {path.relative_to(run_folder): path.read_bytes() for pattern in kept for path in run_folder.glob(pattern)}
    points = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return files, [{tag: point[tag] for tag in point if tag.startswith(("step", "loss", "grad_norm"))} for point in points]


def test_a_run_leaves_previews_of_every_interval_and_a_final_file_that_carries_its_step(straight):
    names = sorted(path.name for path in (straight / "samples" / "previews").iterdir())
    assert names == [f"step-{step:08d}-{row:02d}.png" for step in (0, 2, 4) for row in range(ROWS)]
    final = straight / "flux_lora_tiny-step-00000004.safetensors"
    with safe_open(final, "pt") as file:
        header, names = file.metadata(), list(file.keys())
    assert header["layout"] == "ai-toolkit" and header["step"] == "4" and header["trigger_word"] == "sks"
    assert header["weights"] == "flux_lora_tiny, step 4, ema"
    assert all(name.startswith("transformer.") and name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)


def test_the_final_file_reloaded_is_the_adapter_that_was_trained(straight):
    device = torch.device("cpu")
    trained = load_run(straight, None, None, device)
    config = trained.config
    config.lora.initial_adapter = str(straight / "flux_lora_tiny-step-00000004.safetensors")
    again, digest = adapted_network(config, trained.info, device)
    assert digest == read_state(straight / "checkpoint" / "step-00000004")[BASE_SHA256]
    wanted, found = adapter_weights(trained.model), adapter_weights(again)
    assert found.keys() == wanted.keys() and any(values.up.any() for values in wanted.values())
    for target, values in wanted.items():
        assert torch.equal(found[target].down, values.down) and torch.equal(found[target].up, values.up)


def test_a_drawn_adapter_brings_its_trigger_word(straight):
    trained = load_run(straight, None, None, torch.device("cpu"))
    trained.config.data.trigger_word = ""  # as of a file of weights
    _with_adapters(trained, [str(straight / "flux_lora_tiny-step-00000004.safetensors")])
    assert filled_prompts(trained, ["a [trigger]"]) == ["a sks"]


def test_changes_in_the_summary_are_those_of_the_pictures(straight):
    changes = json.loads((straight / "summary.json").read_text())["preview_change_percent"]
    for row, (prompt, change) in enumerate(changes.items()):
        pair = [Image.open(preview_path(straight / "samples", step, row)) for step in (0, 4)]
        assert change == round(pixel_change(*pair), 4)
        assert ("sks" in prompt) == (row < 2)
    page = (straight / "samples" / "previews.html").read_text()
    drift = page[page.index('id="drift"') : page.index('id="previews"')]
    assert "lighthouse" in drift and "sks on a beach" not in drift


def test_a_run_killed_three_times_is_the_uninterrupted_one(pictures, straight, tmp_path):
    for kill_at in (3, 14, 13):  # in the cache, before the first checkpoint, and after it
        code, said = run(tmp_path, pictures, kill_at)
        assert code == -signal.SIGKILL, said
    assert not (tmp_path / "flux_lora_tiny" / "summary.json").exists()
    code, said = run(tmp_path, pictures)
    assert code == 0, said
    assert outputs(tmp_path / "flux_lora_tiny") == outputs(straight)


def test_a_lost_final_file_is_written_again_from_the_last_checkpoint(pictures, straight, tmp_path):
    shutil.copytree(straight.parent, tmp_path / "copy")
    run_folder = tmp_path / "copy" / "flux_lora_tiny"
    final = run_folder / "flux_lora_tiny-step-00000004.safetensors"
    content = final.read_bytes()
    final.unlink()
    (run_folder / "summary.json").unlink()
    # The copy's cache lies elsewhere, which is another data.path.
    code, said = run(tmp_path / "copy", pictures, -1, "--job.allow_config_change", "true")
    assert code == 0, said
    assert final.read_bytes() == content


@pytest.mark.parametrize("name", ["schnell", "dev"])
def test_a_fine_tuning_without_its_base_is_refused(pictures, tmp_path, monkeypatch, name, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--job.config_file", str(CONFIG.with_name(f"flux_{name}_lora.toml")), *FOR_LARGE, "--data.path", str(pictures)]
    assert train([*given, "--check-only"]) == 2
    said = f"checkpoint.initial_weights: downloads/flux_{name}.safetensors: no such file (published weights: "
    assert capsys.readouterr().err == f"{said}.venv/bin/python scripts/checkpoint.py import)\n"


@pytest.mark.parametrize(("flavor", "steps", "times"), [
    ("schnell", 4, [1.0, 0.75, 0.5, 0.25, 0.0]),
    # [dev] at 1024 x 1024, 4096 tokens: mu = 1.15.
    ("dev", 4, [1.0, 0.904531, 0.759511, 0.512844, 0.0]),
])  # fmt: skip
def test_previews_are_drawn_by_the_schedule_with_which_the_network_is_used(pictures, tmp_path, flavor, steps, times):
    given = [
        "--job.config_file", str(CONFIG.with_name(f"flux_{flavor}_lora.toml")), *FOR_LARGE, "--data.path", str(pictures),
        "--job.dump_folder", str(tmp_path),
    ]  # fmt: skip
    sampling = load_config(given, 1).sampling
    assert sampling.previews and sampling.guidance_scale == 1 and sampling.ema_track == "ema"
    assert sampling.num_steps == {"schnell": 4, "dev": 50}[flavor]
    found = sampling.schedule.times(PATHS["rectified_flow"](), steps, lambda: 4096)
    assert found.tolist() == pytest.approx(times, abs=1e-6)
