"""Linears over tokens with float8 matrix products, by torchao: dynamic scales, weights kept as they are.

Converted are the linears over tokens inside the blocks. Linears with one vector per sample (adaLN, embedders) have too
few rows to gain speed, and the projections into and out of the token stream are narrow and the most sensitive.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from torchtitan.extras import install, quiet_torchao
from torchtitan.models.base import DiffusionModel
from torchtitan.models.converters import convert
from torchtitan.settings import only_enabled, setting

# The matrix products of the hardware take multiples of this in every dimension but the first.
_MULTIPLE = 16
_LEAST_CAPABILITY = (8, 9)


@only_enabled()
@dataclass(kw_only=True)
class Float8Config:
    """`[float8]`"""

    enable: bool = setting(False, "compute the blocks' linears over tokens in float8 (needs torchao)")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = setting(
        "tensorwise", "scale per tensor (fastest); per row; per row, with the weights' gradients in high precision",
    )
    emulate: bool = setting(False, "round to float8 but multiply in high precision: slow, for any device")
    enable_fsdp_float8_all_gather: bool = setting(
        False, "shards are rounded to float8 before they are gathered, with one scale of the whole weight",
        applies={"recipe": ("tensorwise",)}, because="only a scale of the whole tensor is the same before and after",
        trajectory=False,
    )
    filter_fqns: list[str] = setting(
        [], "linears whose name contains one of these are not converted, such as \"attention.out\"",
    )


class Float8Error(Exception):
    """Model that cannot be converted as configured; the message is one line."""


def float8_problems(
    config: Float8Config, param_dtype: str, single_pass_taps: bool, shards: int = 1, plain_weights: str = "", *,
    elsewhere: bool = False,
) -> Iterator[tuple[str, str]]:
    """Find reasons against float8 on this device and with the other sections: (dotted key, reason).

    Args:
        single_pass_taps: whether the gradients of single samples are tapped at the linears (gns.single_pass).
        shards: processes that share the parameters of one replica.
        plain_weights: the setting that needs weights without torchao's wrapper, if any.
        elsewhere: whether the run is of another machine: packages and the device of this one do not count.
    """
    if not elsewhere and importlib.util.find_spec("torchao") is None:
        text = f"needs the package torchao, which is not installed ({install('lowbit')}, or set it to false)"
        yield "float8.enable", text
    if single_pass_taps:
        yield "float8.enable", (
            "the single-pass noise estimate replaces the same linears by ones that tap exact gradients (set"
            " gns.single_pass to false with gns.rank_gradients, or one of the two sections' enable to false)"
        )
    gathers = config.enable_fsdp_float8_all_gather and config.recipe == "tensorwise"
    if gathers and shards == 1:
        text = "has no effect without shards, whose weights FSDP2 gathers"
        yield "float8.enable_fsdp_float8_all_gather", f"{text} (set it to false, or data_parallel_shard_degree above 1)"
    if gathers and plain_weights:
        text = f"{plain_weights} handles plain weights, and these are torchao's"
        yield "float8.enable_fsdp_float8_all_gather", f"{text} (set one of the two to its default)"
    if config.emulate:
        return
    if not elsewhere and not torch.cuda.is_available():
        text = "the CPU has no float8 matrix products (set float8.emulate to true, or float8.enable to false)"
        yield "float8.enable", text
    elif not elsewhere and (capability := torch.cuda.get_device_capability()) < _LEAST_CAPABILITY:
        name, found = torch.cuda.get_device_name(), ".".join(map(str, capability))
        yield "float8.enable", (
            f"{name} (compute capability {found}) has no float8 matrix products, which begin with 8.9"
            " (set float8.emulate to true, or float8.enable to false)"
        )
    elif param_dtype != "bfloat16":
        yield "float8.enable", "its products come out as bfloat16 (set training.mixed_precision_param to bfloat16)"


def check_convertible(
    model: DiffusionModel, config: Float8Config, local_batch_size: int,
    shapes: Sequence[tuple[int, int, int]] = (), context_degree: int = 1,
) -> None:  # fmt: skip
    """Raise Float8Error where nothing would be converted, or a batch's shape cannot be multiplied.

    Args:
        shapes: (C, H, W) of the images, those of a batch alike; by default the model's.
        context_degree: processes that share the tokens of an image.
    """
    if not any(isinstance(model.get_submodule(name), nn.Linear) for name in _over_tokens(model)):
        raise Float8Error(
            f"float8.enable: no product of the model ({type(model).__name__}) is of a plain linear over tokens, the kind"
            " that float8 computes (set it to false)"
        )
    if not _names(model, config):
        raise Float8Error(
            "float8.enable: no linear over tokens is left to convert: features must be multiples of 16,"
            " and no name in float8.filter_fqns (take a part out)"
        )
    for shape in shapes or (model.image_shape,):
        rows = local_batch_size * model.tokens_per_image(shape) // context_degree
        if rows % _MULTIPLE and not config.emulate:
            of_shape = f" of {'x'.join(map(str, shape))}" if shapes else ""
            raise Float8Error(
                f"training.local_batch_size: {local_batch_size} images{of_shape} are {rows} tokens, and float8 needs a multiple"
                f" of {_MULTIPLE} (change it, or model.patch_size)"
            )


def convert_to_float8(model: DiffusionModel, config: Float8Config) -> list[str]:
    """Replace the linears over tokens by float8 ones of the same parameters, in place; return their names.

    Args:
        model: an initialised model, before checkpointing, compilation and sharding.
    """
    with quiet_torchao():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = replace(
        Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate,
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
    )  # fmt: skip
    wanted = _names(model, config)

    def to_float8(name: str, module: nn.Module) -> nn.Module | None:
        if name not in wanted:
            return None
        converted = convert_to_float8_training(module, config=recipe)
        converted.register_forward_pre_hook(_cast_as_autocast_would)
        return converted

    return list(convert(model, to_float8))


def compute_gather_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8 by one collective, after they have changed."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _names(model: DiffusionModel, config: Float8Config) -> set[str]:
    def fits(name: str) -> bool:
        linear = model.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            return False
        return linear.in_features % _MULTIPLE == 0 and linear.out_features % _MULTIPLE == 0

    return {name for name in _over_tokens(model) if fits(name) and not any(part in name for part in config.filter_fqns)}


def _over_tokens(model: DiffusionModel) -> list[str]:
    return [name for name, role in model.linear_roles().items() if role == "token"]


def _cast_as_autocast_would(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    # torchao looks at CUDA's autocast alone, so that on the CPU forward and backward would differ in dtype.
    (x,) = inputs
    return (x.to(torch.get_autocast_dtype(x.device.type)),) if torch.is_autocast_enabled(x.device.type) else (x,)
