"""Description of the hardware that a run finds, for its record."""

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchtitan.training.hardware import device_name
from torchtitan.training.host_memory import host_memory


def describe_hardware(device: torch.device, num_devices: int) -> dict[str, Any]:
    """Hardware as found: device, num_devices, cpu, threads, torch; memory_gib of a device if known; cuda on a GPU."""
    found: dict[str, Any] = {
        "device": device_name(device), "num_devices": num_devices, "cpu": cpu_name(), "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }  # fmt: skip
    if memory := _memory(device):
        found["memory_gib"] = round(memory / 2**30, 3)
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
    return found


def cpu_name(information: Path = Path("/proc/cpuinfo")) -> str:
    """Model of the CPU by its maker, or its architecture where the system has no name for it."""
    with suppress(OSError):
        for line in information.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _memory(device: torch.device) -> int:
    """Bytes of a device's memory, of the host's what this process may use; 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min((total for _, _, total in host_memory()), default=0)
