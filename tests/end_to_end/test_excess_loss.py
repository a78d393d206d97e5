"""A run that measures its excess over the optimal loss, on the console and in its metrics."""

import json
import re

from tests.forked import run_script
from torchtitan.evaluation.optimal_draws import OPTIMAL_FOLDER

WORDS = (
    "train.py", "--job.config_file", "train_configs/digits.toml", "--model.flavor", "debug", "--training.steps", "2",
    "--lr_scheduler.warmup_steps", "1", "--training.global_batch_size", "8", "--gns.enable", "false",
    "--sampling.enable", "false", "--evaluation.enable", "false", "--checkpoint.enable", "false", "--validation.interval", "1",
    "--validation.num_images", "32", "--validation.excess_images", "200",
)  # fmt: skip


def test_excess_loss_is_one_number_on_the_console_and_by_bin_in_the_metrics(tmp_path):
    kept = set()
    for seed in ("0", "1"):
        done = run_script(*WORDS, "--job.dump_folder", str(tmp_path), "--job.name", f"run{seed}", "--debug.seed", seed)
        assert done.returncode == 0, done.stdout + done.stderr
        said = [line for line in (done.stdout + done.stderr).splitlines() if "held-out" in line and "step" in line]
        shown = [re.findall(r"excess over the optimal training loss ([\d.]+) ±", line) for line in said]
        lines = [json.loads(line) for line in (tmp_path / f"run{seed}" / "metrics.jsonl").read_text().splitlines()]
        points = [
            {name.removeprefix("validation_metrics/"): value for name, value in line.items()}
            for line in lines if "validation_metrics/excess_loss" in line
        ]  # fmt: skip
        assert len(said) == len(points) == 2
        for values, point in zip(shown, points, strict=True):
            assert values == [f"{point['excess_loss']:.4f}"]
            assert {f"{name}_loss_by_bin/{k}" for name in ("excess", "optimal", "training") for k in range(10)} <= set(point)
            # Of a network near its start the noise's share of the loss is small, and the deviation of the sum below a tenth.
            whole = point["excess_loss"] + point["optimal_loss"]
            assert abs(point["training_loss"] - whole) < 4 * point["training_loss_stderr"]
            assert point["ema/excess_loss"] > 0 and "ema/optimal_loss" not in point
        assert points[0]["optimal_loss"] == points[1]["optimal_loss"]
        kept |= {path.name for path in (tmp_path / OPTIMAL_FOLDER).iterdir()}
    assert len(kept) == 1  # of both runs, whatever their seeds
