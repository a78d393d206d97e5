"""Description of the hardware in a run's summary."""

from types import SimpleNamespace

import torch

from torchtitan.training.hardware_description import cpu_name, describe_hardware


def test_hardware_is_described_on_either_device(monkeypatch):
    found = describe_hardware(torch.device("cpu"), 2)
    assert found["num_devices"] == 2 and found["threads"] == torch.get_num_threads() and found["cpu"]
    assert found["torch"] == torch.__version__ and found["memory_gib"] > 0.1 and "cuda" not in found
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    found = describe_hardware(torch.device("cuda", 1), 8)
    assert found["device"] == "NVIDIA H100" and found["memory_gib"] == 80 and found["num_devices"] == 8 and "cuda" in found


def test_the_cpu_is_named_by_its_maker(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Fine CPU @ 3 GHz\nflags : a b\n")
    assert cpu_name(tmp_path / "cpuinfo") == "A Fine CPU @ 3 GHz"
    (tmp_path / "cpuinfo").write_text("processor : 0\n")
    assert cpu_name(tmp_path / "cpuinfo") == cpu_name(tmp_path / "missing") != ""
