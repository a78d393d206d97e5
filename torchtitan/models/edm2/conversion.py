"""Conversion of weights between EDM2's U-Nets here and in published code: the same function under other names.

The layout `edm2` is the state dict of NVlabs' `Precond`: a U-Net, and three tensors of u(sigma), which belongs to the
objective here. `edm2_port` is that of the multi-GPU port FutureXiang/edm2, of its U-Net alone or in its checkpoints.
Differences:

    gains                   scalars there, vectors of one element here, since a scalar cannot be sharded
    queries, keys, values   (head, channel, query | key | value) here and in `edm2`; (head, query | key | value, channel)
                            in `edm2_port`
    waves                   radians here and in `edm2`, turns in `edm2_port`
    time                    ln(sigma) / 4 of data of deviation 0.5 there; of deviation sigma_data here, which is more by
                            ln(sigma_data / 0.5) / 4: the phases are moved by the frequencies times that

A conversion copies numbers, so a round trip is exact; but turns, and phases that are moved, are rounded to float32.
"""

import copy
import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from torchtitan.files.weight_files import mismatches, named_weights
from torchtitan.models.edm2.config import FLAVORS
from torchtitan.models.edm2.layers import Attention
from torchtitan.models.edm2.model import EDM2UNet
from torchtitan.models.published_layouts import ConversionError, PublishedLayout

_WAVES = FREQS, PHASES = "embedding.waves.freqs", "embedding.waves.phases"
_SIGMA_DATA = 0.5
# Tensors of u(sigma), by which only training weights its loss.
_UNCERTAINTY = ("logvar_fourier.freqs", "logvar_fourier.phases", "logvar_linear.weight")
_INPUT = re.compile(r"unet\.enc\.(\d+)x\1_conv\.weight")

_NVLABS = {
    "embedding.waves.freqs": "unet.emb_fourier.freqs",
    "embedding.waves.phases": "unet.emb_fourier.phases",
    "embedding.noise.weight": "unet.emb_noise.weight",
    "embedding.label.weight": "unet.emb_label.weight",
    "output.weight": "unet.out_conv.weight",
    "output_gain": "unet.out_gain",
}
_NVLABS_BLOCK = {
    "embedding_gain": "emb_gain",
    "conv0.weight": "conv_res0.weight",
    "embedding.weight": "emb_linear.weight",
    "conv1.weight": "conv_res1.weight",
    "skip.weight": "conv_skip.weight",
    "attention.qkv.weight": "attn_qkv.weight",
    "attention.out.weight": "attn_proj.weight",
}
_PORT = {
    "embedding.waves.freqs": "embedding.fourier.frequencies",
    "embedding.waves.phases": "embedding.fourier.phases",
    "embedding.noise.weight": "embedding.linear1.weight",
    "embedding.hidden.weight": "embedding.linear2.weight",
    "input.weight": "image_proj.weight",
    "output_gain": "final.1.g",
}
_PORT_BLOCK = {
    "embedding_gain": "res.gain.g",
    "conv0.weight": "res.conv1.weight",
    "embedding.weight": "res.linear.weight",
    "conv1.weight": "res.conv2.1.weight",
    "skip.weight": "res.shortcut.weight",
    "attention.qkv.weight": "attn.projection.weight",
    "attention.out.weight": "attn.output.weight",
}
# Where the port's checkpoints have the U-Net, the average first.
_PORT_PREFIXES = ("ema_model.nn_model.", "module.nn_model.", "nn_model.")


class EDM2Layout(PublishedLayout):
    """Layout of one published code; mark: tensor that shows it; heads: channels of an attention head there."""

    name: str
    mark: str
    heads: int
    _delay = 0.0  # of the time here

    def at(self, sigma_data: float) -> Self:
        found = copy.copy(self)
        found._delay = math.log(sigma_data / _SIGMA_DATA) / 4
        return found

    def constants(self, model: EDM2UNet) -> dict[str, Any]:
        published = any(model.config.channels == flavor.channels for flavor in FLAVORS.values())
        return {"objective.preconditioning": "edm"} | ({"model.channels_per_head": self.heads} if published else {})

    def export_weights(self, weights: Mapping[str, Tensor], model: EDM2UNet) -> tuple[dict[str, Tensor], list[str]]:
        _check(self.problems(model))
        published = {
            place: self.exported(name, weights[name], model).clone(memory_format=torch.contiguous_format)
            for name, place in self.places(model).items()
        }
        if self._delay:
            published[self.place(PHASES, model)] = self.exported(PHASES, _delayed(weights, self._delay), model)
        return published, self.notes(model)

    def import_weights(self, published: dict[str, Tensor], model: EDM2UNet) -> tuple[dict[str, Tensor], list[str]]:
        published, notes = self.network_of(published)
        _check(self.problems(model) or self._mismatch(published) or self.size_mismatch(published, model))
        places, wanted = self.places(model), named_weights(model)
        shapes = {place: () if _is_gain(name) else tuple(wanted[name].shape) for name, place in places.items()}
        _check(mismatches(shapes, {name: tuple(tensor.shape) for name, tensor in published.items()}))
        _check([
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not floating point"
            for name, tensor in published.items() if not tensor.is_floating_point()
        ])  # fmt: skip
        weights = {
            name: self.imported(name, published[place], model).clone(memory_format=torch.contiguous_format)
            for name, place in places.items()
        }
        return weights | ({PHASES: _delayed(weights, -self._delay)} if self._delay else {}), notes

    def places(self, model: EDM2UNet) -> dict[str, str]:
        """Published name of every parameter and saved buffer of a model."""
        return {name: self.place(name, model) for name in named_weights(model)}

    @abstractmethod
    def place(self, name: str, model: EDM2UNet) -> str:
        """Published name of a parameter or saved buffer."""

    @abstractmethod
    def problems(self, model: EDM2UNet) -> list[str]:
        """Reasons why the layout cannot represent a model: one line each, empty if it can."""

    @abstractmethod
    def network_of(self, published: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Tensors of the network alone, and a line for each omission."""

    def exported(self, name: str, tensor: Tensor, model: EDM2UNet) -> Tensor:
        """Published tensor of one of the model."""
        return tensor.reshape(()) if _is_gain(name) else tensor

    def imported(self, name: str, tensor: Tensor, model: EDM2UNet) -> Tensor:
        """Tensor of the model from the published one."""
        return tensor.reshape(1) if _is_gain(name) else tensor

    def notes(self, model: EDM2UNet) -> list[str]:
        """What an export leaves out or changes: one line each."""
        return []

    def size_mismatch(self, published: dict[str, Tensor], model: EDM2UNet) -> list[str]:
        """Describe the model that the weights belong to, if its size is another than this one's."""
        return []

    def _mismatch(self, published: dict[str, Tensor]) -> list[str]:
        if self.mark in published:
            return []
        if FREQS in published:
            return ["is in this program's own layout already"]
        return [f"is not in the {self.name} layout: {self.mark} is missing"]

    def _fixed(self, model: EDM2UNet, fixed: dict[str, str]) -> list[str]:
        return [
            f"model.{key} = {getattr(model.config, key)}: the {self.name} layout is of models with {value}"
            for key, value in fixed.items() if getattr(model.config, key) != value
        ]


class NVlabsLayout(EDM2Layout):
    """State dict of NVlabs' Precond."""

    name, mark, heads = "edm2", _NVLABS[FREQS], 64
    convention = (
        "EDM2's code passes ln(sigma) / 4 as time and predicts EDM's F: objective.path, prediction and preconditioning = edm"
    )
    unrounded = frozenset(_NVLABS[name] for name in _WAVES)
    advice = (
        "of a published .pkl: where NVlabs' code is installed, torch.save(pickle.load(open(FILE, 'rb'))['ema']"
        ".state_dict(), 'weights.pt'), and import that"
    )

    def place(self, name: str, model: EDM2UNet) -> str:
        side = model.image_shape[1]
        if name in _NVLABS:
            return _NVLABS[name]
        if name == "input.weight":
            return f"unet.enc.{side}x{side}_conv.weight"
        part, block, of_block = name.split(".", 2)
        side >>= model.levels[block]
        kind = block.replace("middle", "in") if block.startswith("middle") else block.partition("_")[2]
        return f"unet.{part[:3]}.{side}x{side}_{kind}.{_NVLABS_BLOCK[of_block]}"

    def problems(self, model: EDM2UNet) -> list[str]:
        found = self._fixed(model, {"config": "G", "middle_blocks": "decoder", "pixel_norm_epsilon": "added_to_norm"})
        if not model.config.channels_per_head:
            found.append("model.channels_per_head = 0: the edm2 layout is of heads of one size (64 as published)")
        if model.image_shape[1] != model.image_shape[2]:
            height, width = model.image_shape[1:]
            found.append(f"images of {height} x {width}: the edm2 layout is of square ones")
        return found

    def network_of(self, published: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        left_out = [name for name in _UNCERTAINTY if name in published]
        text = "u(sigma) belongs to the objective; sampling does not need it"
        notes = [f"left out: {', '.join(left_out)} ({text})"] if left_out else []
        return {name: tensor for name, tensor in published.items() if name not in left_out}, notes

    def notes(self, model: EDM2UNet) -> list[str]:
        found = [f"without {', '.join(_UNCERTAINTY)}: u(sigma) is the objective's (load with strict=False)"]
        width, widest = 4 * model.config.channels, model.config.channels * max(model.config.channel_mults)
        if width != widest:
            found.append(f"the embedding has {width} channels, theirs {widest} by default (channel_mult_emb = 4)")
        return found

    def size_mismatch(self, published: dict[str, Tensor], model: EDM2UNet) -> list[str]:
        found = next((match for name in published if (match := _INPUT.fullmatch(name))), None)
        if found is None or published[found[0]].ndim != 4:
            return ["is not in the edm2 layout: unet.enc.SIDExSIDE_conv.weight is missing"]
        width, inputs, _, _ = published[found[0]].shape
        theirs = (int(found[1]), inputs - 1, width)
        ours = (model.image_shape[1], model.image_shape[0], model.config.channels)
        if theirs == ours:
            return []
        return [f"these are weights of {_size_name(*theirs)}; the configuration is {_size_name(*ours)}"]


class PortLayout(EDM2Layout):
    """State dict of the port's UNetC, UNetE or UNetG."""

    name, mark, heads = "edm2_port", _PORT[FREQS], 0
    convention = (
        "the port passes ln(sigma) / 4 as time and predicts EDM's F: objective.path, prediction and preconditioning = edm"
    )
    unrounded = frozenset(_PORT[name] for name in _WAVES)

    def place(self, name: str, model: EDM2UNet) -> str:
        if name in _PORT:
            return _PORT[name]
        if name == "output.weight":
            return "final.0.weight" if model.config.config == "G" else "final.2.weight"
        part, block, of_block = name.split(".", 2)
        if block.startswith("middle"):
            return f"middle{int(block[-1]) + 1}.{_PORT_BLOCK[of_block]}"
        blocks = model.encoder if part == "encoder" else model.decoder
        numbered = [each for each in blocks if not each.startswith("middle")]
        return f"{'down' if part == 'encoder' else 'up'}.{numbered.index(block)}.{_PORT_BLOCK[of_block]}"

    def problems(self, model: EDM2UNet) -> list[str]:
        middle = {"middle_blocks": "encoder"} if model.config.config == "G" else {}
        found = self._fixed(model, {**middle, "pixel_norm_epsilon": "added_to_square"})
        if model.embedding.label is not None:
            found.append("data.labels = true: the edm2_port layout is of models without classes")
        return found

    def network_of(self, published: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        for prefix in _PORT_PREFIXES:
            network = {name.removeprefix(prefix): t for name, t in published.items() if name.startswith(prefix)}
            if network:
                others = f"{len(published) - len(network)} tensors without the prefix {prefix}"
                return network, [f"left out: {others}, as of u(sigma), which belongs to the objective"]
        return published, []

    def exported(self, name: str, tensor: Tensor, model: EDM2UNet) -> Tensor:
        if name in _WAVES:
            return (tensor.to(torch.float64) / (2.0 * math.pi)).to(tensor.dtype)
        if name.endswith("qkv.weight"):
            return tensor.unflatten(0, (_heads(name, model), -1, 3)).transpose(1, 2).flatten(0, 2)
        return super().exported(name, tensor, model)

    def imported(self, name: str, tensor: Tensor, model: EDM2UNet) -> Tensor:
        if name in _WAVES:
            return (tensor.to(torch.float64) * (2.0 * math.pi)).to(tensor.dtype)
        if name.endswith("qkv.weight"):
            return tensor.unflatten(0, (_heads(name, model), 3, -1)).transpose(1, 2).flatten(0, 2)
        return super().imported(name, tensor, model)


LAYOUTS: dict[str, PublishedLayout] = {layout.name: layout for layout in (NVlabsLayout(), PortLayout())}


def _heads(name: str, model: EDM2UNet) -> int:
    attention = model.get_submodule(name.removesuffix(".qkv.weight"))
    assert isinstance(attention, Attention)
    return attention.num_heads


def _delayed(weights: Mapping[str, Tensor], delay: float) -> Tensor:
    """Phases that make the same waves of a time that is less by `delay`, float32."""
    return (weights[PHASES].to(torch.float64) + delay * weights[FREQS].to(torch.float64)).to(torch.float32)


def _is_gain(name: str) -> bool:
    return name.endswith("_gain")


def _check(problems: list[str]) -> None:
    if problems:
        raise ConversionError("\n".join(problems))


def _size_name(side: int, channels: int, width: int) -> str:
    flavor = next((name for name, row in FLAVORS.items() if row.channels == width and row.channels_per_head == 64), None)
    size = f"{width} base channels for {channels} x {side} x {side}"
    return f"{flavor} ({size})" if flavor else size
