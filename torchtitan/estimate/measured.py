"""Shares of a device's peaks that a visit to such a device measured; benchmarks/gpu_day.sh writes them."""

import json
from pathlib import Path
from typing import Any

from torchtitan.estimate.devices import Device
from torchtitan.training.hardware import named_peak_tflops
from torchtitan.training.utilisation import Products

_SMALL = "XL/2 compiled, 32 images"
# Bytes of the update of XL/2's 675 M float32 weights: gradients are read, weights, moments and an average read and written.
_UPDATED = 675e6 * 4 * (1 + 2 * 4)
# A link to benchmarks/results, of which a package has a copy: device's name -> stage -> row -> values.
RESULTS = Path(__file__).with_name("gpu_day.json")


def measured_shares(device: Device, products: Products | None, float8: bool, compiled: bool) -> dict[str, tuple[float, str]]:
    """Measured shares, by `Efficiency`'s names: each with device and date; none where no such device was visited.

    The share of compute is the MFU of train steps of DiT-XL/2 in bfloat16 without their update, which an estimate counts apart,
    compiled or eager, and holds for such products alone, with float8, which was measured compiled, or without; that of memory is
    the rate of a copy.
    """
    kind = "compiled, float8" if float8 else "compiled" if compiled else "eager"
    row = f"XL/2 {kind}"
    found = {}
    for name, stages in _visits().items():
        if not _is(name, device):
            continue
        step = stages.get(row, {}).get(row, {})
        copy = stages.get("ceilings", {}).get("copy", {}).get("TB_per_s")
        if step and products == "bfloat16":
            how = f"measured with XL/2 of {step['images']} images, {kind}"
            update = _UPDATED / (1e9 * copy) / step["ms"] if copy else 0.0  # share of the step
            found["compute"] = step["mfu_percent"] / 100 / (1 - update), f"{how}, {name}, {stages[row]['machine']['date']}"
        if copy:
            found["memory"] = 1000 * copy / device.memory_gb_per_s, f"measured, {name}, {stages['ceilings']['machine']['date']}"
    return found


def waiting_step() -> tuple[float, str]:
    """Seconds of a train step that a GPU spent waiting for its host, and which; 0 where no visit has measured one."""
    for name, stages in _visits().items():
        if row := stages.get(_SMALL, {}).get(_SMALL):
            seconds = row["ms"] / 1000
            return seconds, f"{_SMALL} took {seconds:.3f} s on {name}"
    return 0.0, ""


def _visits() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _is(name: str, device: Device) -> bool:
    """Whether a driver's name is that of a device of the table: "NVIDIA H100 PCIe" is another than H100."""
    same_words = all(word in name for word in device.name.split("-"))
    return same_words and named_peak_tflops(name, "bfloat16") == device.tflops_bf16
