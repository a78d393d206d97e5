"""`[training]`, `[optimizer]`, `[lr_scheduler]`, `[ema]` and `[metrics]`: their keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.distributed.kernel_choices import AttentionBackend, Float32MatmulPrecision
from torchtitan.pictures.number_text import counted
from torchtitan.programs import program
from torchtitan.settings import OneOf, Registry, setting


@dataclass(kw_only=True)
class TrainingConfig:
    """`[training]`"""

    steps: int = setting(10000, "optimizer steps", ge=1)
    local_batch_size: int = setting(
        32, "images per rank in one forward; -1: the rank's share of global_batch_size", ge=-1, le=16_777_216,
        trajectory=False,
    )
    max_local_batch_size: int = setting(
        0, "most images per rank in one forward where local_batch_size is -1: a larger share of global_batch_size "
        "accumulates; 0: no limit", ge=0, le=16_777_216, trajectory=False,
    )
    global_batch_size: int = setting(
        -1, "images per optimizer step; above ranks x local_batch_size, gradients accumulate; -1: ranks x local", ge=-1
    )
    double_batch_after: list[int] = setting(
        [], "numbers of images, rising, after each of which the global batch doubles by accumulating more; steps counts steps of "
        "the first batch size, and Adam's learning rate grows with the square root of the batch",
    )
    max_norm: float = setting(1.0, "gradient norm above which gradients are scaled down; 0: no clipping", ge=0)
    max_skipped_steps: int = setting(
        10, "skipped steps (loss or gradient not finite) tolerated between checkpoints; above it, "
        "the run is rolled back to the checkpoint, and stops if it was rolled back to it before", ge=0,
        trajectory=False,
    )
    mixed_precision_param: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of compute; weights, optimizer state and EMA are float32 always"
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of the sum of gradients over ranks; bfloat16 with FSDP or HSDP only"
    )
    float32_matmul_precision: Float32MatmulPrecision = setting(
        "highest", "matrix products of float32 on CUDA: exact, or in TF32 (high, medium); convolutions are in TF32"
    )
    enable_cpu_offload: bool = setting(
        False, "keep sharded weights, gradients, optimizer state and averages in host memory, and update them there",
        trajectory=False,
    )
    attention_backend: AttentionBackend = setting(
        "auto", "attention kernels of forward, backward and sampling; auto: torch chooses", trajectory=False
    )

    def describe_batch(self, ranks: int) -> str:
        """Describe resolved batch sizes in words, for ranks with different images."""
        microbatches = counted(self.global_batch_size // (ranks * self.local_batch_size), "microbatch", "es")
        images = counted(self.global_batch_size, "image")
        return f"{images} per step, {microbatches} of {self.local_batch_size}{' a rank' * (ranks > 1)}"


@dataclass(kw_only=True)
class ParameterGroupConfig:
    """One entry of `optimizer.param_groups`."""

    pattern: str = setting("", "regular expression, found anywhere in a parameter's name; the first match counts")
    lr_scale: float = setting(1.0, "learning rate of these parameters, as a multiple of optimizer.lr", ge=0)
    weight_decay: float | None = setting(None, "decay of these parameters, vectors too; default: as for others", ge=0)


@dataclass(frozen=True)
class UpdateRule:
    """What others than the optimizer must know of an update rule.

    Attributes:
        averages: per element of the gradient that it keeps; the second, if any, is of squares, as Adam's.
        quantised: whether they are kept in 8 bits, of large tensors.
        orthogonalises: whether it is for the matrices of the blocks alone, and AdamW for the rest.
        any_weights: whether it updates weights in host memory too, and those that are gathered in float8.
        build: makes the optimizer of parameter groups and this section; None: torchtitan/training/optimizer.py has it.
        eps: whether it reads optimizer.eps; None: as Adam's, and AdamW of the rest, do.
    """

    averages: int
    quantised: bool = False
    orthogonalises: bool = False
    any_weights: bool = False
    build: Callable[[list[dict[str, Any]], Any], Any] | None = None
    eps: bool | None = None

    @property
    def is_adams(self) -> bool:
        """True if updates are divided by the root of a second moment."""
        return self.averages == 2

    @property
    def has_eps(self) -> bool:
        return self.is_adams or self.orthogonalises if self.eps is None else self.eps


ADAMW, ADAMW_8BIT = UpdateRule(2, any_weights=True), UpdateRule(2, quantised=True)
MUON = UpdateRule(1, orthogonalises=True)
UPDATE_RULES: Registry[UpdateRule] = Registry(
    "torchtitan.training", {"AdamW": "config.ADAMW", "AdamW8bit": "config.ADAMW_8BIT", "Muon": "config.MUON"}, UpdateRule
)


@dataclass(kw_only=True)
class OptimizerConfig:
    """`[optimizer]`"""

    name: OneOf[str, UPDATE_RULES] = setting(
        "AdamW", "update rule; Muon is for the matrices of the blocks, AdamW8bit for large tensors, AdamW for the rest"
    )
    muon_scale: Literal["rms", "fan"] = setting(
        "rms", "size of Muon's updates: as AdamW's at the same rate; or sqrt(outputs / inputs), with adaLN and embeddings left "
        "to AdamW", applies={"name": ("Muon",)},
    )  # fmt: skip
    lr: float = setting(1e-4, "peak learning rate", gt=0)
    beta1: float = setting(0.9, "decay of the first moment per step", ge=0, lt=1)
    beta2: float = setting(0.999, "decay of the second moment per step", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.0, "decoupled decay of matrices; gains and biases have none", ge=0)
    param_groups: list[ParameterGroupConfig] = setting([], "groups of parameters with another learning rate or decay")

    @property
    def rule(self) -> UpdateRule:
        return UPDATE_RULES[self.name]


TO_THE_END = ("linear", "cosine")  # decays that end with the run


@dataclass(kw_only=True)
class LRSchedulerConfig:
    """`[lr_scheduler]`"""

    unit: Literal["steps", "images"] = setting("steps", "what warm-up and reference are counted in")
    warmup_steps: int = setting(0, "steps of linear warm-up from 0 to the peak", ge=0, applies={"unit": ("steps",)})
    warmup_images: int = setting(0, "images of linear warm-up from 0 to the peak", ge=0, applies={"unit": ("images",)})
    decay_type: Literal["constant", "linear", "cosine", "inverse_sqrt"] = setting("constant", "shape after warm-up")
    min_lr_factor: float = setting(
        0.0, "learning rate at the end, as a fraction of the peak", ge=0, le=1,
        applies={"decay_type": TO_THE_END},
    )
    decay_between: list[int] = setting(
        [], "steps or images, by unit, between which the rate falls, staying at its ends before and after; empty: from the "
        "warm-up to the end of the run", applies={"decay_type": TO_THE_END},
    )  # fmt: skip
    reference_steps: int = setting(
        10000, "steps at the peak, warm-up included, before it falls with the root of the steps done", ge=1,
        applies={"decay_type": ("inverse_sqrt",), "unit": ("steps",)},
    )
    reference_images: int = setting(
        10_000_000, "images at the peak, warm-up included, before it falls with the root of the images seen", ge=1,
        applies={"decay_type": ("inverse_sqrt",), "unit": ("images",)},
    )
    epoch_images: int = setting(
        0, "images of an epoch, in which the rate is constant; 0: it changes with every step", ge=0,
        applies={"unit": ("images",)},
    )


@dataclass(kw_only=True)
class EMATrackConfig:
    """One entry of `ema.tracks`."""

    name: str = setting("ema", "name of the track, by which sampling and validation select it")
    kind: Literal["constant", "half_life", "power"] = setting(
        "constant", "unit of its length: a decay per step, a half-life in images, a share of the training so far"
    )
    decay: float = setting(0.9999, "share of the average kept per step", ge=0, lt=1, applies={"kind": ("constant",)})
    warmup_power: float = setting(
        0.6667, "the share kept after n steps is at most 1 - (1 + n)^-power; 0: no warm-up", ge=0,
        applies={"kind": ("constant",)},
    )
    half_life: float = setting(
        500_000.0, "images after which a weight counts half", gt=0, applies={"kind": ("half_life",)}
    )
    rampup_ratio: float = setting(
        0.05, "the half-life is at most this share of the images seen; 0: no ramp-up", ge=0,
        applies={"kind": ("half_life",)},
    )
    sigma_rel: float = setting(
        0.1, "standard deviation of the power-function profile, as a share of the training so far", gt=0, lt=0.288675,
        applies={"kind": ("power",)},
    )


@dataclass(kw_only=True)
class EMAConfig:
    """`[ema]`"""

    tracks: list[EMATrackConfig] = setting([EMATrackConfig()], "averages to keep, each sharded like the weights")
    snapshot_interval: int = setting(
        0, f"images between snapshots of the power tracks, for {program('ema')}; the last step has one too; 0: none", ge=0,
        trajectory=False,
    )
    snapshot_dtype: Literal["float32", "float16", "bfloat16"] = setting(
        "float32", "dtype of snapshots; float16 serves for lengths from 0.05 up", applies={"snapshot_interval": ">0"},
        trajectory=False,
    )


@dataclass(kw_only=True)
class MetricsConfig:
    """`[metrics]`"""

    log_freq: int = setting(10, "steps between logged points; losses are means over them", ge=1, trajectory=False)
    enable_tensorboard: bool = setting(True, "write TensorBoard events to <run>/tb", trajectory=False)
    enable_wandb: bool = setting(False, "log to Weights & Biases (WANDB_* variables apply)", trajectory=False)
    peak_tflops: float | None = setting(
        None, "dense peak of one device in the dtype of the products, for MFU, in TFLOP/s; default: a table of devices", gt=0,
        trajectory=False,
    )
    loss_bins: int = setting(10, "timestep bins of equal training mass for loss_by_bin", ge=1, le=1000, trajectory=False)
