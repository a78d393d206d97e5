"""`[checkpoint]`: its keys."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import only_enabled, setting


@only_enabled("initial_weights", "initial_weights_strict")
@dataclass(kw_only=True)
class CheckpointConfig:
    """`[checkpoint]`"""

    enable: bool = setting(True, "save checkpoints and resume from the newest good one", trajectory=False)
    folder: str = setting(
        "", "path, or URL of a store (s3://bucket/prefix, gs://, hf:// and others), for checkpoints, "
        "in a subfolder of the run's name; default: the run's own folder", trajectory=False,
        writes="run", path=True,
    )
    interval: int = setting(1000, "steps between checkpoints; the last step is always saved", ge=1, trajectory=False)
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = setting(
        "disabled", "write checkpoints while training continues, from a copy in host memory; "
        "pinned: on CUDA, the copy is asynchronous too", trajectory=False,
    )
    keep_latest_k: int = setting(3, "checkpoints kept, older ones are deleted; 0 keeps all", ge=0, trajectory=False)
    load_step: int = setting(
        -1, "step to resume from, once: the same command again resumes from what it saved since; -1 is the newest good one",
        ge=-1, trajectory=False,
    )
    final_weights: Literal["none", "float32", "bfloat16"] = setting(
        "none", "dtype of the final weights, NAME-step-STEP.safetensors in the run's folder, of the average sampling.ema_track; "
        "none: no such file", trajectory=False,
    )  # fmt: skip
    initial_weights: str = setting(
        "", "safetensors file of initial weights, named as the model's parameters; not read when a run resumes", path=True
    )
    initial_weights_strict: bool = setting(
        True, "false: tensors that the file of initial weights lacks are drawn, and others in it are not read", trajectory=False
    )
