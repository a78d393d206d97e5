"""Hardware: peaks of known devices, and memory in use."""

import platform
import resource
import sys
from pathlib import Path

import torch

from torchtitan.training.utilisation import Products

# Dense bfloat16 peak in TFLOP/s by name fragment, the first that fits, from the makers' data sheets, without sparsity: NVIDIA's
# of A100, H100 and H200 (SXM, PCIe, NVL), H20, L40S and RTX A6000, of DGX B200 and B300, GB200 NVL72 and GB300 NVL72; AMD's of
# MI300X. Superchips (GB200, GB300) have more power than the same GPUs in a node of eight. GeForce: NVIDIA's whitepapers of GA102,
# Ada and RTX Blackwell, tensor cores with float32 accumulation.
PEAK_TFLOPS_BF16 = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H800 PCIe": 756.0,
    "H800": 989.0,
    "H20": 148.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "L40S": 362.0,
    "RTX A6000": 154.8,
    "GeForce RTX 3090": 71.2,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 5090": 209.5,
    "MI300X": 1307.4,
}
# Float32 peak without tensor cores, in the same way; a device whose maker states none has no entry.
PEAK_TFLOPS_FLOAT32 = {
    "A100": 19.5,
    "H100 PCIe": 51.0,
    "H100 NVL": 60.0,
    "H100": 67.0,
    "H200 NVL": 60.0,
    "H200": 67.0,
    "H800 PCIe": 51.0,
    "H800": 67.0,
    "H20": 44.0,
    "GB200": 90.0,
    "GB300": 80.0,
    "B200": 80.0,
    "L40S": 91.6,
    "RTX A6000": 38.7,
    "GeForce RTX 3090": 35.6,
    "GeForce RTX 4090": 82.6,
    "GeForce RTX 5090": 104.8,
    "MI300X": 163.4,
}
# Dense float8 peak, in the same way; devices without such products (A100, RTX A6000, 3090) have no entry.
PEAK_TFLOPS_FLOAT8 = {
    "H100 PCIe": 1513.0,
    "H100 NVL": 1671.0,
    "H100": 1979.0,
    "H200 NVL": 1671.0,
    "H200": 1979.0,
    "H800 PCIe": 1513.0,
    "H800": 1979.0,
    "H20": 296.0,
    "GB200": 5000.0,
    "GB300": 5000.0,
    "B200": 4500.0,
    "B300": 4500.0,
    "L40S": 733.0,
    "GeForce RTX 4090": 330.3,
    "GeForce RTX 5090": 419.0,
    "MI300X": 2614.9,
}
TF32_OF_BF16 = 0.5  # the peak of TF32 products over that of bfloat16 ones, on every device of these tables

# The tag of memory_metrics, by type of device, that says what a process took from the device.
PEAK_MEMORY = {"cuda": "memory/max_reserved(GiB)", "cpu": "memory/max_resident(GiB)"}
ALLOCATOR_RETRIES = "memory/num_alloc_retries"


def device_name(device: torch.device) -> str:
    """Name of a device by its maker, or the processor architecture and number of threads for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU {platform.machine()}, {threads} thread{'' if threads == 1 else 's'}"


def peak_tflops(device: torch.device, products: Products | None = "bfloat16") -> float | None:
    """Peak of dense products of a known device in TFLOP/s; None for others: no MFU instead of a guess."""
    return named_peak_tflops(torch.cuda.get_device_name(device), products) if device.type == "cuda" else None


def named_peak_tflops(name: str, products: Products | None) -> float | None:
    """Peak of dense products of the device that its driver gives this name, as `peak_tflops`."""
    if products is None:
        return None
    table = PEAK_TFLOPS_FLOAT32 if products == "float32" else PEAK_TFLOPS_BF16
    share = TF32_OF_BF16 if products == "tf32" else 1.0
    return next((share * peak for fragment, peak in table.items() if _is(name, fragment)), None)


def _is(name: str, fragment: str) -> bool:
    if " MIG " in name:  # a part of the device
        return False
    # Another GeForce has its model's name and more: Ti, D, Laptop GPU.
    return name.endswith(fragment) if fragment.startswith("GeForce") else all(word in name for word in fragment.split())


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory of this process since the last reset, by metric tag."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "memory/max_active(GiB)": stats["active_bytes.all.peak"] / 2**30,
            PEAK_MEMORY["cuda"]: stats["reserved_bytes.all.peak"] / 2**30,
            ALLOCATOR_RETRIES: stats["num_alloc_retries"],
            "memory/num_ooms": stats["num_ooms"],
        }
    return {PEAK_MEMORY["cpu"]: peak_resident_gib()}


def peak_resident_gib() -> float:
    """Peak resident memory of this process so far, in GiB."""
    status = Path("/proc/self/status")
    if status.exists():
        # Linux' getrusage would count the process that started this one, if that was larger.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**20  # KiB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of memory_metrics, where the device keeps one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
