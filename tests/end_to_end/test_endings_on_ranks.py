"""Runs of two ranks end as those of one process: final weights, pictures, scores, summary and exit code are left behind."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.drawing import results_of, start_command
from tests.end_to_end.runs import checkpoint_tensors, write_config
from tests.faults.forked import ForkedRun
from tests.forked import run_script
from tests.unit.test_latent_cache import write_pictures

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--metrics.log_freq", "1", "--sampling.num_steps", "2",
    "--checkpoint.final_weights", "float32", "--comm.train_timeout_seconds", "20",
)  # fmt: skip
EVERYTHING = (
    *QUICK, "--sampling.interval", "1", "--sampling.previews", "true",
    "--validation.enable", "true", "--validation.num_images", "20", "--gns.enable", "true",
    "--gns.num_bins", "4", "--evaluation.enable", "true", "--evaluation.extractor", "digits",
    "--evaluation.reference", "train", "--evaluation.count", "20", "--evaluation.allow_small", "true",
)  # fmt: skip


def ended(config: Path, name: str, *words: str, **layout: int) -> ForkedRun:
    run = ForkedRun(config, name, *words, ranks=2, **layout)
    run.finish()
    assert run.summary()["status"] == "completed"
    return run


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("ends"))


def test_everything_that_ends_a_run_is_left_behind(config):
    run = ended(config, "all", *EVERYTHING, replicas=2)
    found = load_file(run.folder / f"{run.folder.name}-step-00000002.safetensors")
    wanted = checkpoint_tensors(run.folder / "checkpoint" / "step-00000002")
    assert found and all(torch.equal(found[name], wanted[f"ema.ema.{name}"]) for name in found)
    summary = run.summary()
    assert summary["evaluation"]["step"] == 2 and "fd" in summary["evaluation"]
    assert {"preview_change_percent", "validation_metrics/loss"} <= summary.keys()
    samples = {path.name for path in (run.folder / "samples").iterdir()}
    assert {"training.gif", "previews.html", "step-00000002.png"} <= samples


def test_the_adapter_of_captioned_pictures_is_what_one_process_exports(tmp_path):
    config = Path(shutil.copy(ROOT / "train_configs" / "flux_lora_tiny.toml", tmp_path))
    words = ("--data.path", str(write_pictures(tmp_path / "pictures")), "--data.trigger_word", "sks")
    words += ("--data.resolutions", "[64]", "--sampling.interval", "2")
    run = ended(config, "adapter", *QUICK, "--training.global_batch_size", "2", *words, shards=2)
    one = tmp_path / "one.safetensors"
    result = run_script("scripts/checkpoint.py", "export", str(run.folder), "--adapter", "diffusers", "--output", str(one))
    assert result.returncode == 0, result.stderr
    found, wanted = load_file(run.folder / "adapter-step-00000002.safetensors"), load_file(one)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(tensor.any() for name, tensor in found.items() if "lora_B" in name)
    assert (run.folder / "samples" / "previews.html").exists()
    drawn = results_of(start_command("sample", run.folder, "--count", 2, "--num-steps", 1, "--output", tmp_path / "set", ranks=2))
    assert [code for code, _ in drawn] == [0, 0] and (tmp_path / "set").is_dir(), drawn
