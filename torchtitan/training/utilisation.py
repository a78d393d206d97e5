"""Model FLOPs utilisation (MFU): defined here for runs, estimates and analyses.

MFU = model FLOPs per second and device / dense peak of the products' kind, in per cent.

    model FLOPs   those of training on the images (`training_flops`), without recomputation
    kind          bfloat16, float32, or TF32 where `training.float32_matmul_precision` is not "highest"; products in float8
                  count against the peak of bfloat16: only part of a step's products are in float8, so that no one peak
                  is theirs, and its gain is seen against a run in bfloat16. It can pass 100 %.

Source: Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

Products = Literal["bfloat16", "float32", "tf32"]


def products_of(training: Mapping[str, Any]) -> Products | None:
    """Kind of a run's matrix products, by `vars` of `[training]` or a record of it; None where that does not tell."""
    dtype = training.get("mixed_precision_param")
    if dtype == "float32" and training.get("float32_matmul_precision", "highest") != "highest":
        return "tf32"
    return dtype if dtype in get_args(Products) else None


def mfu_percent(tflops: float, peak_tflops: float) -> float:
    """MFU in per cent: model FLOPs over the products' peak, of one device, in TFLOP/s."""
    return 100.0 * tflops / peak_tflops
