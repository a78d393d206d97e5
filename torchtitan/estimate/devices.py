"""Devices and their peaks, as their makers state them."""

from dataclasses import dataclass

from torchtitan.training.hardware import PEAK_TFLOPS_BF16, PEAK_TFLOPS_FLOAT32, TF32_OF_BF16
from torchtitan.training.utilisation import Products


@dataclass(frozen=True)
class Device:
    """Device: one accelerator in a node of several.

    Attributes:
        name: key of DEVICES, or "CPU" for numbers of the user's own.
        memory_gib: memory that a process can see.
        tflops_bf16, tflops_float32: dense peaks of matrix products; float32 without TF32.
        memory_gb_per_s: bandwidth of the memory.
        node_gb_per_s: of the links within a node, per device and direction.
        network_gb_per_s: of the network between nodes, per device and direction.
        per_node: devices of a node.
    """

    name: str
    memory_gib: float
    tflops_bf16: float
    tflops_float32: float
    memory_gb_per_s: float
    node_gb_per_s: float
    network_gb_per_s: float
    per_node: int = 8

    def peak_tflops(self, products: Products | None) -> float:
        """Dense peak of matrix products of a kind."""
        if products == "tf32":
            return TF32_OF_BF16 * self.tflops_bf16
        return self.tflops_bf16 if products == "bfloat16" else self.tflops_float32


# Sources: NVIDIA's data sheets of A100, H100 and H200 (SXM); DGX A100 (8 network ports of 200 Gb/s) and DGX H100, H200
# (8 of 400 Gb/s). Memory is what CUDA reports of 40, 80 and 141 GB. NVLink: half of both directions.
# Blackwell: data sheets of DGX B200, GB200 NVL72 and GB300 NVL72, 72 devices in one NVLink domain, a port of 400 Gb/s per
# device (GB300: 800). Memory is 180 GB, 13.4 TB / 72 and 20 TB / 72 in GiB, the least that these can mean.
DEVICES = {
    "H200": Device("H200", 139.8, PEAK_TFLOPS_BF16["H200"], PEAK_TFLOPS_FLOAT32["H200"], 4800.0, 450.0, 50.0),
    "H100": Device("H100", 79.1, PEAK_TFLOPS_BF16["H100"], PEAK_TFLOPS_FLOAT32["H100"], 3350.0, 450.0, 50.0),
    "B200": Device("B200", 167.6, PEAK_TFLOPS_BF16["B200"], PEAK_TFLOPS_FLOAT32["B200"], 8000.0, 900.0, 50.0),
    "GB200": Device("GB200", 173.3, PEAK_TFLOPS_BF16["GB200"], PEAK_TFLOPS_FLOAT32["GB200"], 8000.0, 900.0, 50.0, per_node=72),
    "GB300": Device("GB300", 258.7, PEAK_TFLOPS_BF16["GB300"], PEAK_TFLOPS_FLOAT32["GB300"], 8000.0, 900.0, 100.0, per_node=72),
    "A100-80": Device("A100-80", 79.1, PEAK_TFLOPS_BF16["A100"], PEAK_TFLOPS_FLOAT32["A100"], 2039.0, 300.0, 25.0),
    "A100-40": Device("A100-40", 39.4, PEAK_TFLOPS_BF16["A100"], PEAK_TFLOPS_FLOAT32["A100"], 1555.0, 300.0, 25.0),
}
