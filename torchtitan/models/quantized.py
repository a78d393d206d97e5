"""Frozen linears with quantised weights: codes and scales of torchao are kept, and multiplied out where they are used.

Quantised are the linears of the blocks: nearly all weights of a transformer. What lies outside, the embedders and the
projections into and out of the token stream, is small and the most sensitive, and stays bfloat16 with all biases and norms.

    float8   e4m3, one scale per output                     8 bits a weight
    int8     symmetric, one scale per output                8 bits
    int4     groups of 64 inputs with a scale and a zero    4.375 bits

A product computes the weight of one layer in the dtype of its input, and again in the backward: the backward keeps codes and
scales, which exist anyway. That takes no kernels of the device, so every kind runs on every device.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.extras import install, quiet_torchao
from torchtitan.models.adapters.target import AdapterError
from torchtitan.models.base import DiffusionModel

Kind = Literal["float8", "int8", "int4"]
KINDS: tuple[Kind, ...] = ("float8", "int8", "int4")

_GROUP = 64  # inputs that have a scale and a zero of int4 in common
_NIBBLES = 16
_LEAST_SHARE = 0.5


class QuantizationError(AdapterError):
    """Weights that cannot be quantised; the message is one line."""


def quantization_problems(kind: str) -> Iterator[str]:
    """Find reasons against quantised weights in this installation."""
    if kind in KINDS and importlib.util.find_spec("torchao") is None:
        yield f"needs the package torchao, which is not installed ({install('lowbit')}, or set it to bfloat16)"


class QuantizedWeight(nn.Module):
    """Quantised weight [outputs, inputs], without values until `quantize`.

    Attributes:
        codes: int8 [outputs, inputs]; of float8 its bytes, uint8; of int4 two a byte, uint8 [outputs, inputs / 2].
        scale: [outputs, 1]; of int4 [outputs, inputs / 64].
        zero: code of the value 0, as `scale`, of int4 alone.
        dtype: of the weight that was quantised.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, shape: tuple[int, int], kind: Kind, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.kind, self.dtype = torch.Size(shape), kind, dtype
        outputs, inputs = shape
        packed = kind == "int4"
        groups = inputs // _GROUP if packed else 1
        codes = torch.empty(outputs, inputs // 2 if packed else inputs, dtype=torch.int8 if kind == "int8" else torch.uint8,
                            device=device)  # fmt: skip
        # In no checkpoint: they are made again from the weights that were quantised.
        self.register_buffer("codes", codes, persistent=False)
        scale = torch.empty(outputs, groups, dtype=torch.float32 if kind == "float8" else torch.bfloat16, device=device)
        self.register_buffer("scale", scale, persistent=False)
        zero = torch.empty(outputs, groups, dtype=torch.uint8, device=device) if packed else None
        self.register_buffer("zero", zero, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @torch.no_grad()
    def quantize(self, weight: Tensor) -> None:
        """Set the values to those of a weight [outputs, inputs], on any device, rounded to bfloat16 first."""
        with quiet_torchao():
            from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, PerRow
            from torchao.quantization.quant_primitives import MappingType

        weight = weight.detach().to(self.device, torch.bfloat16)
        if self.kind == "int8":
            found = Int8Tensor.from_hp(weight, PerRow())
            codes = found.qdata
        elif self.kind == "float8":
            found = Float8Tensor.from_hp(weight, granularity=PerRow())
            codes = found.qdata.view(torch.uint8)
        else:
            four_bits = cast(Any, torch).int4  # unknown to type checkers
            found = IntxUnpackedToInt8Tensor.from_hp(weight, (1, _GROUP), four_bits, mapping_type=MappingType.ASYMMETRIC)
            unsigned = (found.qdata + _NIBBLES // 2).to(torch.uint8)
            codes = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
            cast(Tensor, self.zero).copy_(found.zero_point + _NIBBLES // 2)
        self.codes.copy_(codes)
        self.scale.copy_(found.scale)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Weight [outputs, inputs] that the codes stand for, rounded to a dtype once."""
        return _dequantized(self.codes, self.scale, self.zero, self.kind, dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Output [..., outputs] of inputs [..., inputs], in their dtype or, with autocast, in autocast's."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if bias is None else bias.to(x.dtype)
        return cast(Tensor, _Product.apply(x, bias, self.codes, self.scale, self.zero, self.kind))


class QuantizedLinear(nn.Linear):
    """Linear with a frozen, quantised weight."""

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        shape = (linear.out_features, linear.in_features)
        # Typed as nn.Linear's parameter; whatever asks it for shape, dtype or device is answered alike.
        self.weight: Any = QuantizedWeight(shape, kind, linear.weight.device, linear.weight.dtype)
        self.register_parameter("bias", linear.bias)
        self.requires_grad_(False)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.weight.product(x, self.bias))


def quantize_base(model: DiffusionModel, kind: Kind, *, values: bool = True) -> None:
    """Replace the linears of the blocks by quantised ones, one after the other, so that one float weight at a time exists twice.

    Args:
        model: without adapters, sharding or compilation.
        values: whether it has values; otherwise the new ones have none either.

    Raises:
        QuantizationError: as `check_quantizable`.
    """
    check_quantizable(model, kind)
    for name in _names(model, kind):
        linear = cast(nn.Linear, model.get_submodule(name))
        quantized = QuantizedLinear(linear, kind)
        if values:
            quantized.weight.quantize(linear.weight)
        parent, _, child = name.rpartition(".")
        model.get_submodule(parent).register_module(child, quantized)


def check_quantizable(model: DiffusionModel, kind: Kind) -> None:
    """Raise QuantizationError if less than half of the blocks' weights would be quantised."""
    names = _names(model, kind)
    quantized = sum(cast(nn.Linear, model.get_submodule(name)).weight.numel() for name in names)
    total = sum(parameter.numel() for block in model.blocks() for parameter in block.parameters())
    if quantized < _LEAST_SHARE * total:
        what = f"linears with multiples of {_GROUP} inputs" if kind == "int4" else "plain linears"
        raise QuantizationError(
            f"lora.base_dtype: {kind} quantises {what}, which are {quantized / max(total, 1):.0%} of the blocks' weights in"
            f" {type(model).__name__} (set it to bfloat16)"
        )


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Quantised weights of a network, by the names that they had as parameters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def quantized_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Codes, scales and zeros of a network, by name; the tensors themselves."""
    return {
        f"{name}.{part}": buffer for name, weight in quantized_weights(model).items() for part, buffer in weight.named_buffers()
    }


class _Product(torch.autograd.Function):
    """x W' + bias of a quantised W; the backward has the gradient of x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, zero: Tensor | None, kind: Kind
    ) -> Tensor:
        ctx.save_for_backward(codes, scale, zero)
        ctx.kind = kind
        return F.linear(x, _dequantized(codes, scale, zero, kind, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        codes, scale, zero = ctx.saved_tensors
        return gradient @ _dequantized(codes, scale, zero, ctx.kind, gradient.dtype), None, None, None, None, None


def _dequantized(codes: Tensor, scale: Tensor, zero: Tensor | None, kind: Kind, dtype: torch.dtype) -> Tensor:
    if kind == "float8":
        return codes.view(torch.float8_e4m3fn).to(dtype).mul_(scale)
    if kind == "int8":
        return codes.to(dtype).mul_(scale)
    nibbles = torch.stack((codes & (_NIBBLES - 1), codes >> 4), dim=-1)  # [outputs, inputs / 2, 2]
    grouped = nibbles.view(codes.shape[0], -1, _GROUP).to(dtype)  # [outputs, groups, 64]
    return grouped.sub_(cast(Tensor, zero)[..., None]).mul_(scale[..., None]).flatten(1)


def _names(model: DiffusionModel, kind: Kind) -> list[str]:
    within = {module for block in model.blocks() for module in block.modules()}
    return [
        name for name, module in model.named_modules()
        if type(module) is nn.Linear and module in within and (kind != "int4" or module.in_features % _GROUP == 0)
    ]  # fmt: skip
