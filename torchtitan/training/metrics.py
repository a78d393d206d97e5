"""Metrics."""

from dataclasses import dataclass

from torchtitan.settings import setting


@dataclass(kw_only=True)
class MetricsConfig:
    """`[metrics]`"""

    log_freq: int = setting(10, "steps between logged points; losses are means over them", ge=1, trajectory=False)
    enable_tensorboard: bool = setting(True, "write TensorBoard events to <run>/tb", trajectory=False)
    enable_wandb: bool = setting(False, "log to Weights & Biases (WANDB_* variables apply)", trajectory=False)
    peak_tflops: float | None = setting(
        None, "dense peak of one device for MFU, in TFLOP/s; default: the table of known devices", gt=0,
        trajectory=False,
    )
    loss_bins: int = setting(10, "timestep bins of equal training mass for loss_by_bin", ge=1, trajectory=False)
