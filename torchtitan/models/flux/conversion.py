"""Conversion of weights between this model and published layouts: the same function, other names and orders.

`bfl` is the state dict of black-forest-labs' own code, `diffusers` that of FluxTransformer2DModel. A conversion copies numbers
and computes none, so a round trip is exact. Differences of diffusers:

    queries, keys, values   three linears; of a single block also the hidden layer that is packed with them here
    output modulation       (scale, shift) there, (shift, scale) here
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models.adapters.target import Target
from torchtitan.models.flux.config import FLAVORS, FluxConfig
from torchtitan.models.flux.model import Flux
from torchtitan.models.published_layouts import ComputedTensors, ConversionError, PublishedLayout

SWAPPED = "output.modulation"  # layer with its halves of rows in the other order in diffusers
_DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"
_MARKS = {"bfl": "img_in.weight", "diffusers": "x_embedder.weight", "safetensors": "patch_embed.weight"}
# Latents of FLUX.1: (raw - shift) * scale of its autoencoder's, 1024 x 1024 pixels as its pipeline draws unless asked.
_CHANNELS, _SIDE, _SHIFT, _SCALE = 16, 128, 0.1159, 0.3611


@dataclass(frozen=True)
class FluxLayout(PublishedLayout):
    """One of the layouts of Flux; name: key of LAYOUTS."""

    name: str
    convention: str

    latents = {_CHANNELS: (_SHIFT, _SCALE)}

    def constants(self, model: Flux) -> dict[str, Any]:
        trained = {"path": "rectified_flow", "prediction": "velocity", "preconditioning": "identity"}
        found = {f"objective.{key}": value for key, value in trained.items()}
        published = FLAVORS["dev"]
        return found | ({"model.axes_dim": published.axes_dim} if model.config.dim == published.dim else {})

    def settings(self, published: Mapping[str, Tensor], document: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        sizes = [*FLAVORS.values(), *(replace(flavor, guidance_embedding=True) for flavor in FLAVORS.values())]
        config = next((size for size in sizes if not _other_flavor(published, self.name, size)), None)
        patch = published.get(_MARKS[self.name])
        if config is None or patch is None or patch.shape[1:] != (_CHANNELS * config.patch_size**2,):
            return None
        guided = config.guidance_embedding
        data = {
            "shape": [_CHANNELS, _SIDE, _SIDE], "num_classes": 0, "shift": [_SHIFT] * _CHANNELS, "scale": [_SCALE] * _CHANNELS,
            "text_length": 512 if guided else 256, "text_dim": config.text_dim, "pooled_dim": config.pooled_dim,
        }  # fmt: skip
        model = {"flavor": config.flavor, "guidance_embedding": guided}
        return {"model": model, "objective": {"path": "rectified_flow", "prediction": "velocity"}, "data": data}

    def export_weights(self, weights: Mapping[str, Tensor], model: Flux) -> tuple[ComputedTensors, list[str]]:
        _require_flux(model)
        published: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
        for name, pieces in self._tensors(model).items():
            rows = self._rows(name, model, len(pieces))
            for place, piece in enumerate(pieces):
                shape = (rows[place], *model.get_parameter(name).shape[1:])
                published[piece] = shape, partial(self._piece, name, weights, rows, place)
        return ComputedTensors(published), _packing(model)

    def import_weights(self, published: Mapping[str, Tensor], model: Flux) -> tuple[ComputedTensors, list[str]]:
        _require_flux(model)
        tensors = self._tensors(model)
        self._check_names(published, {piece for pieces in tensors.values() for piece in pieces}, model)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        weights: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
        for name, pieces in tensors.items():
            parts = [published[piece] for piece in pieces]
            rows = self._rows(name, model, len(pieces))
            for piece, part, count in zip(pieces, parts, rows, strict=True):
                wanted = (count, *shapes[name][1:])
                if tuple(part.shape) != wanted:
                    raise ConversionError(f"{piece} is {list(part.shape)}, this model needs {list(wanted)}")
                if not part.is_floating_point():
                    raise ConversionError(f"{piece} is {str(part.dtype).removeprefix('torch.')}, not floating point")
            weights[name] = tuple(shapes[name]), partial(self._joined, name, parts)
        return ComputedTensors(weights), _packing(model)

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        joined = torch.cat(parts) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
        return self._reordered(name, joined)

    def _piece(self, name: str, weights: Mapping[str, Tensor], rows: list[int], place: int) -> Tensor:
        return self._reordered(name, weights[name]).split(rows)[place].clone(memory_format=torch.contiguous_format)

    def _tensors(self, model: Flux) -> dict[str, list[str]]:
        """Published pieces, to be joined along the first dimension, of each parameter."""
        modules = MODULES[self.name](model.config)
        found = {}
        for name, _ in model.named_parameters():
            module, _, kind = name.rpartition(".")
            if module.endswith(("q_norm", "k_norm")) and self.name == "bfl":
                kind = "scale"
            found[name] = [f"{piece}.{kind}" for piece in modules[module]]
        return found

    def _rows(self, name: str, model: Flux, pieces: int) -> list[int]:
        return _rows_of_pieces(model.config, model.get_parameter(name).shape[0], pieces)

    def _reordered(self, name: str, tensor: Tensor) -> Tensor:
        """Swap the halves that diffusers has in another order; its own inverse."""
        return swap_halves(tensor) if self.name == "diffusers" and name.startswith(SWAPPED) else tensor

    def _check_names(self, published: Mapping[str, Tensor], wanted: set[str], model: Flux) -> None:
        if problem := _other_layout(published, self.name) or _other_flavor(published, self.name, model.config):
            raise ConversionError(problem)
        missing, extra = sorted(wanted - published.keys()), sorted(published.keys() - wanted)
        lines = [
            f"{len(names)} tensors {text}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for names, text in ((missing, "are missing"), (extra, f"are not of the {self.name} layout of this model"))
            if names
        ]
        if lines:
            raise ConversionError("\n".join(lines))


class DiffusersLayout(FluxLayout):
    """Folder of diffusers' FluxTransformer2DModel."""

    folder_files = (_DIFFUSERS_FILE,)

    def folder_config(self, model: Flux) -> dict:
        config = model.config
        return {
            "_class_name": "FluxTransformer2DModel",
            "patch_size": 1,  # its pipeline packs 2 x 2 patches
            "in_channels": model.image_shape[0] * config.patch_size**2,
            "num_layers": config.num_double_layers,
            "num_single_layers": config.num_single_layers,
            "attention_head_dim": config.dim // config.num_heads,
            "num_attention_heads": config.num_heads,
            "joint_attention_dim": config.text_dim,
            "pooled_projection_dim": config.pooled_dim,
            "guidance_embeds": config.guidance_embedding,
            "axes_dims_rope": list(config.axes_dim),
        }

    def folder_config_problems(self, document: dict, model: Flux) -> list[str]:
        return [
            f"{key} is {document[key]} there and {value} in this configuration"
            for key, value in self.folder_config(model).items() if key in document and document[key] != value
        ]

    def approximation(self, model: Flux) -> str:
        config = model.config
        found = []
        if config.mlp_hidden_dim != 4 * config.dim:
            found.append(f"model.mlp_hidden_dim = {config.mlp_hidden_dim}: diffusers has 4 model.dim always")
        return "; ".join(found)


_CONVENTION = "FLUX.1's code passes its time in 0..1, 1 being noise, and predicts noise - data"
LAYOUTS: dict[str, PublishedLayout] = {
    "bfl": FluxLayout("bfl", _CONVENTION),
    "diffusers": DiffusersLayout("diffusers", _CONVENTION),
}


def published_linears(model: Flux, layout: str) -> dict[str, Target]:
    """Linears of a published layout by name, in its order of the network: the rows of this model's linears that they are."""
    found = {}
    for name, pieces in MODULES[layout](model.config).items():
        if name.endswith("_norm") or (name.startswith("guidance_embed") and model.guidance_embed is None):
            continue
        linear, start = model.get_submodule(name), 0
        assert isinstance(linear, nn.Linear)
        for piece, rows in zip(pieces, _rows_of_pieces(model.config, linear.out_features, len(pieces)), strict=True):
            found[piece] = Target(name, start, start + rows)
            start += rows
    return found


def swap_halves(rows: Tensor) -> Tensor:
    """Swap the first half of the rows and the second; its own inverse."""
    return torch.cat(tuple(reversed(rows.chunk(2))))


def _rows_of_pieces(config: FluxConfig, rows: int, pieces: int) -> list[int]:
    if pieces == 4:  # queries, keys, values and the hidden layer
        return [config.dim] * 3 + [config.mlp_hidden_dim]
    return [rows // pieces] * pieces


def _bfl_modules(config: FluxConfig) -> dict[str, list[str]]:
    modules = {"patch_embed": "img_in", "text_embed": "txt_in"}
    for ours, theirs in (("time", "time_in"), ("pooled", "vector_in"), ("guidance", "guidance_in")):
        modules |= {f"{ours}_embed.hidden": f"{theirs}.in_layer", f"{ours}_embed.out": f"{theirs}.out_layer"}
    for i in range(config.num_double_layers):
        for stream, short in (("image", "img"), ("text", "txt")):
            ours, theirs = f"double_layers.{i}.{stream}", f"double_blocks.{i}.{short}"
            modules |= {
                f"{ours}.modulation": f"{theirs}_mod.lin",
                f"{ours}.qkv": f"{theirs}_attn.qkv",
                f"{ours}.q_norm": f"{theirs}_attn.norm.query_norm",
                f"{ours}.k_norm": f"{theirs}_attn.norm.key_norm",
                f"{ours}.out": f"{theirs}_attn.proj",
                f"{ours}.hidden": f"{theirs}_mlp.0",
                f"{ours}.mlp_out": f"{theirs}_mlp.2",
            }
    for i in range(config.num_single_layers):
        ours, theirs = f"single_layers.{i}", f"single_blocks.{i}"
        modules |= {
            f"{ours}.modulation": f"{theirs}.modulation.lin",
            f"{ours}.qkv_hidden": f"{theirs}.linear1",
            f"{ours}.q_norm": f"{theirs}.norm.query_norm",
            f"{ours}.k_norm": f"{theirs}.norm.key_norm",
            f"{ours}.out": f"{theirs}.linear2",
        }
    modules |= {"output.modulation": "final_layer.adaLN_modulation.1", "output.linear": "final_layer.linear"}
    return {ours: [theirs] for ours, theirs in modules.items()}


def _diffusers_modules(config: FluxConfig) -> dict[str, list[str]]:
    modules = {"patch_embed": ["x_embedder"], "text_embed": ["context_embedder"]}
    for ours, theirs in (("time", "timestep"), ("pooled", "text"), ("guidance", "guidance")):
        embedder = f"time_text_embed.{theirs}_embedder"
        modules |= {f"{ours}_embed.hidden": [f"{embedder}.linear_1"], f"{ours}_embed.out": [f"{embedder}.linear_2"]}
    for i in range(config.num_double_layers):
        block = f"transformer_blocks.{i}"
        image, text = f"double_layers.{i}.image", f"double_layers.{i}.text"
        modules |= {
            f"{image}.modulation": [f"{block}.norm1.linear"],
            f"{image}.qkv": [f"{block}.attn.to_{letter}" for letter in "qkv"],
            f"{image}.q_norm": [f"{block}.attn.norm_q"],
            f"{image}.k_norm": [f"{block}.attn.norm_k"],
            f"{image}.out": [f"{block}.attn.to_out.0"],
            f"{image}.hidden": [f"{block}.ff.net.0.proj"],
            f"{image}.mlp_out": [f"{block}.ff.net.2"],
            f"{text}.modulation": [f"{block}.norm1_context.linear"],
            f"{text}.qkv": [f"{block}.attn.add_{letter}_proj" for letter in "qkv"],
            f"{text}.q_norm": [f"{block}.attn.norm_added_q"],
            f"{text}.k_norm": [f"{block}.attn.norm_added_k"],
            f"{text}.out": [f"{block}.attn.to_add_out"],
            f"{text}.hidden": [f"{block}.ff_context.net.0.proj"],
            f"{text}.mlp_out": [f"{block}.ff_context.net.2"],
        }
    for i in range(config.num_single_layers):
        ours, block = f"single_layers.{i}", f"single_transformer_blocks.{i}"
        modules |= {
            f"{ours}.modulation": [f"{block}.norm.linear"],
            f"{ours}.qkv_hidden": [*(f"{block}.attn.to_{letter}" for letter in "qkv"), f"{block}.proj_mlp"],
            f"{ours}.q_norm": [f"{block}.attn.norm_q"],
            f"{ours}.k_norm": [f"{block}.attn.norm_k"],
            f"{ours}.out": [f"{block}.proj_out"],
        }
    return modules | {SWAPPED: ["norm_out.linear"], "output.linear": ["proj_out"]}


# Layout -> this model's module -> the layout's modules that its rows are divided into.
MODULES: dict[str, Callable[[FluxConfig], dict[str, list[str]]]] = {"bfl": _bfl_modules, "diffusers": _diffusers_modules}


def _packing(model: Flux) -> list[str]:
    patch = model.config.patch_size
    return [f"model.patch_size = {patch}: FLUX.1's code packs latents in patches of 2 x 2"] if patch != 2 else []


def _require_flux(model: object) -> None:
    if not isinstance(model, Flux):
        raise ConversionError("the layout is of model.name = flux")


def _other_layout(published: Mapping[str, Tensor], layout: str) -> str:
    if _MARKS[layout] in published:
        return ""
    other = next((name for name, mark in _MARKS.items() if mark in published), None)
    if other == "safetensors":
        return "is in this program's own layout already"
    return f"is in the {other} layout (give --format {other})" if other else f"is no Flux: {_MARKS[layout]} is missing"


def _other_flavor(published: Mapping[str, Tensor], layout: str, config: FluxConfig) -> str:
    prefixes = ("transformer_blocks.", "single_transformer_blocks.")
    double, single = prefixes if layout == "diffusers" else ("double_blocks.", "single_blocks.")
    guided = any(name.startswith(("guidance_in.", "time_text_embed.guidance_embedder.")) for name in published)
    doubles, singles = (
        len({name.split(".")[1] for name in published if name.startswith(prefix)}) for prefix in (double, single)
    )
    found = _described(guided, doubles, singles)
    wanted = _described(config.guidance_embedding, config.num_double_layers, config.num_single_layers)
    return "" if found == wanted else f"these are weights of {found}; the configuration is {wanted}"


def _described(guided: bool, doubles: int, singles: int) -> str:
    size = f"{doubles} double and {singles} single blocks, with{'' if guided else 'out'} a guidance embedding"
    for name, flavor in FLAVORS.items():
        if (flavor.guidance_embedding, flavor.num_double_layers, flavor.num_single_layers) == (guided, doubles, singles):
            return f"{name} ({size})"
    return f"no flavor ({size})"
