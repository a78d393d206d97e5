"""Efficiency measured on a device, if the checkout has results of benchmarks/gpu_day.sh for it."""

import json
from dataclasses import replace
from pathlib import Path

from torchtitan.estimate.devices import Device
from torchtitan.estimate.roofline import Efficiency

RESULTS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results" / "gpu_day.json"
_STAGE = "XL/2 compiled"


def efficiency_on(device: Device) -> Efficiency:
    """Efficiency of a device: compute as measured on a compiled step of DiT-XL/2 in bfloat16, the rest assumed.

    Args:
        device: row of DEVICES; a result counts for it if its driver's name has the row's, as "NVIDIA H200" has "H200".
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, stages in results.items():
        percent = stages.get(_STAGE, {}).get(_STAGE, {}).get("mfu_percent")
        if percent and device.name in name.split():
            return replace(Efficiency(), compute=percent / 100, measured=f"{name}, {stages[_STAGE]['machine']['date']}")
    return Efficiency()
