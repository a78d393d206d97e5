"""Devices and their peaks, as their makers state them."""

from dataclasses import dataclass

from torchtitan.training.hardware import PEAK_TFLOPS_BF16, PEAK_TFLOPS_FLOAT8, PEAK_TFLOPS_FLOAT32, TF32_OF_BF16
from torchtitan.training.utilisation import Products


@dataclass(frozen=True)
class Device:
    """Device: one accelerator in a node of several.

    Attributes:
        name: key of DEVICES, or "CPU" for numbers of the user's own.
        memory_gib: memory that a process can see.
        tflops_bf16, tflops_float32: dense peaks of matrix products; float32 without TF32.
        node_gb_per_s: of the links within a node, per device and direction.
        network_gb_per_s: of the network between nodes, per device and direction.
        tflops_float8: dense peak of float8 products; None: there are none.
    """

    name: str
    memory_gib: float
    tflops_bf16: float
    tflops_float32: float
    memory_gb_per_s: float
    node_gb_per_s: float
    network_gb_per_s: float
    per_node: int = 8
    tflops_float8: float | None = None

    def peak_tflops(self, products: Products | None) -> float:
        """Dense peak of matrix products of a kind."""
        if products == "tf32":
            return TF32_OF_BF16 * self.tflops_bf16
        return self.tflops_bf16 if products == "bfloat16" else self.tflops_float32


# Sources: NVIDIA's data sheets of A100, H100 and H200 (SXM); DGX A100 (8 network ports of 200 Gb/s) and DGX H100, H200
# (8 of 400 Gb/s). Memory is what CUDA reports of 40, 80 and 141 GB. NVLink: half of both directions.
# Blackwell: data sheets of DGX B200, GB200 NVL72 and GB300 NVL72, 72 devices in one NVLink domain, a port of 400 Gb/s per
# device (GB300: 800). Memory is 180 GB, 13.4 TB / 72 and 20 TB / 72 in GiB, the least that these can mean.
# H20 (as an HGX H100) and MI300X (AMD's data sheet: 7 links of 64 GB/s a direction to the others of a node), likewise 96 and
# 192 GB. L40S and RTX A6000 by PCIe 4.0 x16; their servers differ: two devices with a port of 200 Gb/s are assumed.
# GeForce RTX 3090, 4090 (PCIe 4.0) and 5090 (5.0) by the whitepapers of GA102, Ada and RTX Blackwell, likewise; 24 and 32 GB.
_ROWS: dict[str, tuple[str, float, float, float, float, int]] = {
    # row of the tables of peaks, memory (GiB), bandwidths of memory, node and network (GB/s), devices of a node
    "H200": ("H200", 139.8, 4800.0, 450.0, 50.0, 8),
    "H100": ("H100", 79.1, 3350.0, 450.0, 50.0, 8),
    "H20": ("H20", 89.4, 4000.0, 450.0, 50.0, 8),
    "B200": ("B200", 167.6, 8000.0, 900.0, 50.0, 8),
    "GB200": ("GB200", 173.3, 8000.0, 900.0, 50.0, 72),
    "GB300": ("GB300", 258.7, 8000.0, 900.0, 100.0, 72),
    "A100-80": ("A100", 79.1, 2039.0, 300.0, 25.0, 8),
    "A100-40": ("A100", 39.4, 1555.0, 300.0, 25.0, 8),
    "MI300X": ("MI300X", 178.8, 5300.0, 448.0, 50.0, 8),
    "L40S": ("L40S", 44.4, 864.0, 32.0, 12.5, 8),
    "A6000": ("RTX A6000", 44.7, 768.0, 32.0, 12.5, 8),
    "3090": ("GeForce RTX 3090", 23.7, 936.0, 32.0, 12.5, 8),
    "4090": ("GeForce RTX 4090", 23.6, 1008.0, 32.0, 12.5, 8),
    "5090": ("GeForce RTX 5090", 31.4, 1792.0, 64.0, 12.5, 8),
}
DEVICES = {
    name: Device(
        name, memory, PEAK_TFLOPS_BF16[row], PEAK_TFLOPS_FLOAT32[row], memory_bandwidth, node, network, per_node,
        PEAK_TFLOPS_FLOAT8.get(row),
    )
    for name, (row, memory, memory_bandwidth, node, network, per_node) in _ROWS.items()
}  # fmt: skip
