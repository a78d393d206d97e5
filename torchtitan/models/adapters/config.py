"""`[lora]`: its keys."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.settings import only_enabled, setting


@dataclass(kw_only=True)
class ExtraAdapterConfig:
    """One entry of `lora.extra`."""

    path: str = setting("", "file of an adapter, in any layout that lora.initial_adapter may have", path=True)
    weight: float = setting(1.0, "multiple of its update in training")
    sampling_weight: float = setting(
        0.0, "multiple of its update in sampling and validation; 0: it only assists the training"
    )


@only_enabled()
@dataclass(kw_only=True)
class LoRAConfig:
    """`[lora]`"""

    enable: bool = setting(False, "freeze the network and train low-rank adapters of its layers")
    rank: int = setting(16, "rank of each layer's update", ge=1, le=65536)
    alpha: float | None = setting(None, "the update is scaled by alpha / rank; default: as the rank, scale 1", gt=0)
    targets: str = setting(
        "blocks", "layers with adapters: blocks (all linears and convolutions of the blocks) or, of flux, a published"
        " set: ai-toolkit, diffusers, kohya", applies={"patterns": ([],)},
    )  # fmt: skip
    patterns: list[str] = setting(
        [], "regular expressions, found anywhere in the names of the layers with adapters; default: lora.targets"
    )
    base_dtype: Literal["float32", "bfloat16", "float8", "int8", "int4"] = setting(
        "float32", "dtype of the frozen weights; float8, int8 and int4 quantise the linears of the blocks (needs torchao), the"
        " rest is then bfloat16; adapters are float32",
    )
    initial_adapter: str = setting("", "file of an adapter to start from; default: one drawn anew", path=True)
    extra: list[ExtraAdapterConfig] = setting([], "further adapters, frozen, such as one that assists the training")

    @property
    def quantized_kind(self) -> Literal["float8", "int8", "int4"] | None:
        """Kind of the frozen network's quantised weights; None: there are none."""
        if not self.enable or self.base_dtype == "float32" or self.base_dtype == "bfloat16":
            return None
        return self.base_dtype
