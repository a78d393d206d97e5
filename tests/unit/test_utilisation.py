"""Model FLOPs utilisation: one number for one run, whichever of run, estimate and analysis tells it."""

import json

import pytest
import torch

from torchtitan import reports
from torchtitan.config.job import load_config
from torchtitan.estimate.devices import DEVICES, Device
from torchtitan.estimate.memory import estimate_memory, model_on_meta
from torchtitan.estimate.roofline import Efficiency, estimate_step_time
from torchtitan.run import run
from torchtitan.runs.analysis.report import analyse
from torchtitan.training.hardware import named_peak_tflops, peak_tflops
from torchtitan.training.utilisation import mfu_percent, products_of

ARGUMENTS = (
    "--model.flavor", "debug", "--job.name", "one", "--training.local_batch_size", "8", "--training.steps", "4",
    "--metrics.log_freq", "1", "--metrics.enable_tensorboard", "false", "--checkpoint.enable", "false", "--sampling.enable",
    "false",
)  # fmt: skip
H200 = {"bfloat16": 989.0, "float32": 67.0, "tf32": 494.5}  # the maker's data sheet, dense


@pytest.mark.parametrize(
    ("training", "products"),
    [
        ({"mixed_precision_param": "bfloat16"}, "bfloat16"),
        ({"mixed_precision_param": "bfloat16", "float32_matmul_precision": "high"}, "bfloat16"),
        ({"mixed_precision_param": "float32"}, "float32"),
        ({"mixed_precision_param": "float32", "float32_matmul_precision": "highest"}, "float32"),
        ({"mixed_precision_param": "float32", "float32_matmul_precision": "high"}, "tf32"),
        ({"mixed_precision_param": "float32", "float32_matmul_precision": "medium"}, "tf32"),
        ({"mixed_precision_param": "float16"}, None),
        ({}, None),
    ],
)
def test_kind_of_products_follows_the_training_section(training, products):
    assert products_of(training) == products


def test_peaks_are_of_the_kind_of_products(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for products, peak in H200.items():
        assert peak_tflops(torch.device("cuda"), products) == DEVICES["H200"].peak_tflops(products) == peak
    assert peak_tflops(torch.device("cpu"), "float32") is None and named_peak_tflops("NVIDIA H200", None) is None
    assert named_peak_tflops("NVIDIA A100-SXM4-80GB", "float32") == 19.5
    assert named_peak_tflops("NVIDIA A100-SXM4-80GB", "tf32") == 156.0


ROUNDED = 8 * 2.0**-53  # eight float64 operations lie between the two


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_estimate_and_analysis_give_one_number(dtype, tmp_path, monkeypatch):
    """Of one speed: MFU is in proportion to it, so each is divided by its own images/s."""
    monkeypatch.setattr(reports, "peak_tflops", lambda device, products: H200[products])
    words = (*ARGUMENTS, "--job.dump_folder", str(tmp_path), "--training.mixed_precision_param", dtype)
    config = load_config(list(words), 1)
    assert run(config) == 0
    folder = tmp_path / "one"
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    per_image = mfu_percent(summary["flops_per_image"] / 1e12, H200[dtype])
    of_run = [point["mfu(%)"] / point["throughput(img/s)"] for point in points]
    assert of_run == pytest.approx([per_image] * len(points), rel=ROUNDED)

    config, model = load_config(list(words), 1), model_on_meta(config)
    device = Device("H200", 139.8, H200["bfloat16"], H200["float32"], 4800.0, 450.0, 50.0)
    time = estimate_step_time(config, model, estimate_memory(config, 1), device, Efficiency())
    assert 100 * time.mfu / time.images_per_second == pytest.approx(per_image, rel=ROUNDED)

    (folder / "summary.json").write_text(json.dumps(summary | {"device": "NVIDIA H200"}))
    lines = [json.dumps(point | {"mfu(%)": point["tflops"] / 9.89}) for point in points]  # as versions before logged it
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (found,) = analyse([folder], warmup_steps=0).runs
    of_analysis = found.measures["mfu_percent"].value / found.measures["images_per_second"].value
    assert of_analysis == pytest.approx(per_image, rel=8 * ROUNDED)  # of logarithms below 8, and their exponentials


def test_the_analysis_takes_the_peak_that_the_run_was_given(tmp_path):
    (tmp_path / "config.toml").write_text('metrics.peak_tflops = 0.5\ntraining.mixed_precision_param = "float32"\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "throughput(img/s)": 9.0, "tflops": 0.2, "mfu(%)": 7.0}\n')
    (tmp_path / "summary.json").write_text('{"status": "completed", "device": "CPU x86_64, 2 threads"}')
    (found,) = analyse([tmp_path], warmup_steps=0).runs
    assert found.measures["mfu_percent"].value == pytest.approx(40.0)
