"""Peaks of devices, by the names that their drivers give."""

import pytest
import torch

from torchtitan.training.hardware import PEAK_TFLOPS_BF16, PEAK_TFLOPS_FLOAT8, named_peak_tflops, peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H800 PCIe", 756.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),  # a seventh of it
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA L4", None),
    ],
)
def test_peak_follows_the_name_of_the_device(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == peak


def test_float8_doubles_the_peak_of_bfloat16():
    """On every device that has it; data sheets round, L40S's by 1.2 %."""
    ratios = {row: peak / PEAK_TFLOPS_BF16[row] for row, peak in PEAK_TFLOPS_FLOAT8.items()}
    assert all(1.98 < ratio < 2.03 for ratio in ratios.values()), ratios
    of_ampere = {"A100", "RTX A6000", "GeForce RTX 3090"}  # an older architecture, without float8
    assert set(PEAK_TFLOPS_BF16) - set(ratios) == of_ampere


def test_tf32_is_half_of_bfloat16_in_the_data_sheets():
    stated = {"A100": 156.0, "H100": 494.5, "H20": 74.0, "B200": 1125.0, "L40S": 183.0, "RTX A6000": 77.4, "MI300X": 653.7}
    stated |= {f"GeForce RTX {name}": peak for name, peak in (("3090", 35.6), ("4090", 82.6), ("5090", 104.8))}
    for name, peak in stated.items():
        assert named_peak_tflops(name, "tf32") == pytest.approx(peak, rel=0.015)
