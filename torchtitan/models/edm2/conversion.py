"""Conversion of weights between EDM2's U-Nets here and in NVlabs' code: the same numbers under other names.

The layout `edm2` is the state dict of NVlabs' `Precond`: a U-Net, and two tensors of u(sigma), which belongs to the
objective here. Gains are scalars there and vectors of one element here, since a scalar cannot be sharded; the order of the
attention's channels and the waves' factor of 2 pi are the same. A conversion copies numbers, so a round trip is exact.
"""

import re

import torch
from torch import Tensor

from torchtitan.files.weight_files import mismatches, named_weights
from torchtitan.models.edm2.config import FLAVORS
from torchtitan.models.edm2.model import EDM2UNet
from torchtitan.models.published_layouts import ConversionError, PublishedLayout

# Tensors of u(sigma), by which only training weights its loss.
_UNCERTAINTY = ("logvar_fourier.freqs", "logvar_fourier.phases", "logvar_linear.weight")
_MARK = "unet.emb_fourier.freqs"
_INPUT = re.compile(r"unet\.enc\.(\d+)x\1_conv\.weight")
# Options with which the published network was built.
_FIXED = {"config": "G", "middle_blocks": "decoder", "pixel_norm_epsilon": "added_to_norm"}
_TOP = {
    "embedding.waves.freqs": _MARK,
    "embedding.waves.phases": "unet.emb_fourier.phases",
    "embedding.noise.weight": "unet.emb_noise.weight",
    "embedding.label.weight": "unet.emb_label.weight",
    "output.weight": "unet.out_conv.weight",
    "output_gain": "unet.out_gain",
}
_OF_BLOCK = {
    "embedding_gain": "emb_gain",
    "conv0.weight": "conv_res0.weight",
    "embedding.weight": "emb_linear.weight",
    "conv1.weight": "conv_res1.weight",
    "skip.weight": "conv_skip.weight",
    "attention.qkv.weight": "attn_qkv.weight",
    "attention.out.weight": "attn_proj.weight",
}


class NVlabsLayout(PublishedLayout):
    """State dict of NVlabs' Precond."""

    convention = (
        "EDM2's code passes ln(sigma) / 4 as time and predicts EDM's F: objective.path, prediction and preconditioning = edm"
    )
    unrounded = frozenset({_MARK, "unet.emb_fourier.phases"})
    advice = (
        "of a published .pkl: where NVlabs' code is installed, torch.save(pickle.load(open(FILE, 'rb'))['ema']"
        ".state_dict(), 'weights.pt'), and import that"
    )

    def export_weights(self, weights: dict[str, Tensor], model: EDM2UNet) -> tuple[dict[str, Tensor], list[str]]:
        _check(layout_problems(model))
        published = {}
        for name, place in places(model).items():
            tensor = weights[name].reshape(()) if _is_gain(name) else weights[name]
            published[place] = tensor.clone(memory_format=torch.contiguous_format)
        notes = [f"without {', '.join(_UNCERTAINTY)}: u(sigma) is the objective's (load with strict=False)"]
        if model.config.channels * 4 != (widest := model.config.channels * max(model.config.channel_mults)):
            multiple = f"{4 * model.config.channels} channels, theirs has {widest} by default (channel_mult_emb = 4)"
            notes.append(f"the embedding has {multiple}")
        return published, notes

    def import_weights(self, published: dict[str, Tensor], model: EDM2UNet) -> tuple[dict[str, Tensor], list[str]]:
        _check(layout_problems(model) or _layout_mismatch(published) or _size_mismatch(published, model))
        left_out = [name for name in _UNCERTAINTY if name in published]
        published = {name: tensor for name, tensor in published.items() if name not in left_out}
        wanted = {name: () if _is_gain(name) else tuple(t.shape) for name, t in named_weights(model).items()}
        shapes = {place: wanted[name] for name, place in places(model).items()}
        _check(mismatches(shapes, {name: tuple(tensor.shape) for name, tensor in published.items()}))
        _check([
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not floating point"
            for name, tensor in published.items() if not tensor.is_floating_point()
        ])  # fmt: skip
        weights = {}
        for name, place in places(model).items():
            tensor = published[place].reshape(1) if _is_gain(name) else published[place]
            weights[name] = tensor.clone(memory_format=torch.contiguous_format)
        text = "u(sigma) belongs to the objective; sampling does not need it"
        return weights, [f"left out: {', '.join(left_out)} ({text})"] if left_out else []


LAYOUTS: dict[str, PublishedLayout] = {"edm2": NVlabsLayout()}


def places(model: EDM2UNet) -> dict[str, str]:
    """Published name of every parameter and saved buffer of a model."""
    return {name: _place(name, model) for name in named_weights(model)}


def layout_problems(model: EDM2UNet) -> list[str]:
    """Reasons why the layout cannot represent a model: one line each, empty if it can."""
    found = [
        f"model.{key} = {getattr(model.config, key)}: the edm2 layout is of models with {value}"
        for key, value in _FIXED.items() if getattr(model.config, key) != value
    ]
    if not model.config.channels_per_head:
        found.append("model.channels_per_head = 0: the edm2 layout is of heads of one size (64 as published)")
    if model.image_shape[1] != model.image_shape[2]:
        height, width = model.image_shape[1:]
        found.append(f"images of {height} x {width}: the edm2 layout is of square ones")
    return found


def _place(name: str, model: EDM2UNet) -> str:
    side = model.image_shape[1]
    if name in _TOP:
        return _TOP[name]
    if name == "input.weight":
        return f"unet.enc.{side}x{side}_conv.weight"
    part, block, of_block = name.split(".", 2)
    side >>= model.levels[block]
    kind = block.replace("middle", "in") if block.startswith("middle") else block.partition("_")[2]
    return f"unet.{part[:3]}.{side}x{side}_{kind}.{_OF_BLOCK[of_block]}"


def _is_gain(name: str) -> bool:
    return name.endswith("_gain")


def _check(problems: list[str]) -> None:
    if problems:
        raise ConversionError("\n".join(problems))


def _layout_mismatch(published: dict[str, Tensor]) -> list[str]:
    if _MARK in published:
        return []
    if "embedding.waves.freqs" in published:
        return ["is in this program's own layout already"]
    return [f"is not in the edm2 layout: {_MARK} is missing"]


def _size_mismatch(published: dict[str, Tensor], model: EDM2UNet) -> list[str]:
    """Describe the model that the weights belong to, if width or image differ from this one's."""
    found = next((match for name in published if (match := _INPUT.fullmatch(name))), None)
    if found is None or published[found[0]].ndim != 4:
        return ["is not in the edm2 layout: unet.enc.SIDExSIDE_conv.weight is missing"]
    width, inputs, _, _ = published[found[0]].shape
    theirs, ours = (int(found[1]), inputs - 1, width), (model.image_shape[1], model.image_shape[0], model.config.channels)
    if theirs == ours:
        return []
    return [f"these are weights of {_size_name(*theirs)}; the configuration is {_size_name(*ours)}"]


def _size_name(side: int, channels: int, width: int) -> str:
    flavor = next((name for name, row in FLAVORS.items() if row.channels == width and row.channels_per_head == 64), None)
    size = f"{width} base channels for {channels} x {side} x {side}"
    return f"{flavor} ({size})" if flavor else size
