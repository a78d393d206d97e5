"""Conversion of weights between this model and published layouts: the same function, other names and orders.

`dit` and `sit` are the state dicts of facebookresearch/DiT and of SiT, which share their names; `diffusers` is that
of DiTTransformer2DModel. A conversion copies numbers and computes none, so a round trip is exact. Differences:

    patch embedding      a convolution [D, C, p, p] there, the same numbers as a linear [D, C p p] here
    output channels      (p, p, C) there, (C, p, p) here
    position table       a tensor of `dit` and `sit`, computed here; diffusers computes it too
    queries, keys, values   packed in this order; three linears in diffusers
    timestep and class embedding   one per block in diffusers: copies where the weights come from a DiT, else
        `embedding_per_block` here
    eps of the norms       1e-6, but config.json's `norm_eps` before diffusers' feed-forward layers
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchtitan.conditions import Classes
from torchtitan.models.dit.config import FLAVORS, DiTConfig
from torchtitan.models.dit.model import DiT
from torchtitan.models.dit.positions import sincos_table
from torchtitan.models.published_layouts import ConversionError, PublishedLayout
from torchtitan.settings.record import value_text

_NORM_EPS = 1e-5  # of diffusers' feed-forward norms where config.json has none
_POSITION = {"dit": "pos_embed", "sit": "pos_embed", "diffusers": "pos_embed.pos_embed"}
_POSITION_TOLERANCE = 1e-6  # of a table in float32: sines of other libraries differ in the last digits
# What the published networks are, besides their sizes.
_FIXED = {
    "mlp": "gelu",
    "norm": "layernorm",
    "norm_affine": False,
    "norm_eps": 1e-6,
    "qk_norm": False,
    "attention_bias": True,
    "position": "sincos",
    "patch_bottleneck": 0,
    "class_tokens": 0,
    "value_residual": False,
    "wide_dim": 0,
    "final_modulation": True,
    "num_predictions": 1,
    "duration_embedding": False,
    "guidance_embedding": False,
}

# How the code of each layout trains and samples.
_DDPM: dict[str, dict[str, Any]] = {
    "objective": {"path": "ddpm_linear", "prediction": "noise", "preconditioning": "index"},
    "sampling": {"num_steps": 250, "solver": {"name": "ddim"}, "schedule": {"name": "ddpm"}},
}
_FLOW: dict[str, dict[str, Any]] = {
    "objective": {"path": "rectified_flow", "prediction": "velocity", "preconditioning": "sit"},
    "sampling": {"num_steps": 250, "solver": {"name": "heun"}},
}
_CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")  # the second as facebook/DiT-XL-2-256 has it, from before the first
_SCALE_OF_SD = 0.18215  # of the latents that DiT's and SiT's code trains on, four channels of Stable Diffusion's autoencoder
_EMBEDDING = "norm1.emb."  # in a block of diffusers
# Tensors that show the sizes: patch embedding, class table, output, prefix of the blocks.
_SIZES = {
    "diffusers": (
        "pos_embed.proj.weight", "transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight", "proj_out_2.weight",
        "transformer_blocks.",
    ),
    "dit": ("x_embedder.proj.weight", "y_embedder.embedding_table.weight", "final_layer.linear.weight", "blocks."),
}  # fmt: skip

# Tensor of this model -> its copies there -> the pieces of each copy, to be joined along the first dimension.
Places = dict[str, list[list[str]]]


@dataclass(frozen=True)
class DiTLayout(PublishedLayout):
    """One of the layouts of a DiT; name: key of LAYOUTS."""

    name: str
    convention: str

    unrounded = frozenset({"pos_embed"})  # a table, not a weight
    latents = {4: (0.0, _SCALE_OF_SD)}
    _frequencies: ClassVar[str] = "dit"

    def export_weights(self, weights: Mapping[str, Tensor], model: DiT) -> tuple[dict[str, Tensor], list[str]]:
        notes = []
        if model.config.intermediate_head:
            notes = [f"model.intermediate_head: left out, the {self.name} network has one output layer"]
        return export_weights(weights, model, self.name), notes

    def import_weights(self, published: dict[str, Tensor], model: DiT) -> tuple[dict[str, Tensor], list[str]]:
        if model.config.intermediate_head:
            raise ConversionError(f"model.intermediate_head: the {self.name} network has one output layer (leave it out)")
        weights, notes = import_weights(published, model, self.name)
        if model.config.timestep_frequencies != self._frequencies:
            notes.append(
                f"model.timestep_frequencies = {model.config.timestep_frequencies}: not those of the {self.name} "
                "network (right for weights that were trained as DiT and converted to diffusers)"
            )
        return weights, notes

    def constants(self, model: DiT) -> dict[str, Any]:
        config = model.config
        flavor = _flavor_of(config.dim, config.num_layers, config.patch_size)
        trained = _FLOW if self.name == "sit" else _DDPM
        found = {f"objective.{key}": value for key, value in trained["objective"].items()}
        return found | ({"model.num_heads": FLAVORS[flavor].num_heads} if flavor else {})

    def settings(self, published: Mapping[str, Tensor], document: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        patch, classes, output, prefix = _SIZES.get(self.name, _SIZES["dit"])
        if any(name not in published or published[name].ndim < 2 for name in (patch, classes, output)):
            return None
        if published[patch].ndim != 4 or published[patch].shape[2] != published[patch].shape[3]:
            return None
        dim, channels, size, _ = published[patch].shape
        flavor = _flavor_of(dim, _num_blocks(published, prefix), size)
        side = self._side(published, document, size)
        if flavor is None or side is None:
            return None
        # SiT's code leaves the second half of its output aside, as the import does.
        learned = self.name != "sit" and published[output].shape[0] == 2 * channels * size**2
        model = {"flavor": flavor, "learned_variance": learned, "timestep_frequencies": self._frequencies}
        model |= self._own_embeddings(published, document)
        data: dict[str, Any] = {"shape": [channels, side, side], "num_classes": published[classes].shape[0] - 1}
        data |= {"scale": [_SCALE_OF_SD] * 4} if channels == 4 else {}
        return {"model": model, "data": data} | (_FLOW if self.name == "sit" else _DDPM)

    def _side(self, published: Mapping[str, Tensor], document: Mapping[str, Any], patch_size: int) -> int | None:
        """Rows of an image, from the table of positions or from config.json."""
        table = published.get(_POSITION[self.name])
        if table is None or table.ndim != 3:
            return None
        return round(table.shape[1] ** 0.5) * patch_size

    def _own_embeddings(self, published: Mapping[str, Tensor], document: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of a model with an embedding in each block; none for others."""
        return {}

    def problems(self, model: DiT) -> list[str]:
        return layout_problems(model, self.name)

    def approximation(self, model: DiT) -> str:
        given = model.config.timestep_frequencies
        if given == self._frequencies:
            return ""
        return (
            f"model.timestep_frequencies = {given}: the {self.name} network computes others, which gives another output "
            f"(train with model.timestep_frequencies = {self._frequencies})"
        )


class DiffusersLayout(DiTLayout):
    """Folder of diffusers' DiTTransformer2DModel."""

    folder_files = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
    _frequencies = "diffusers"

    def _side(self, published: Mapping[str, Tensor], document: Mapping[str, Any], patch_size: int) -> int | None:
        side = document.get("sample_size")
        return side if isinstance(side, int) and 0 < side <= 1 << 16 else None

    def _own_embeddings(self, published: Mapping[str, Tensor], document: Mapping[str, Any]) -> dict[str, Any]:
        if not _differ_by_block(published):
            return {}
        eps = document.get("norm_eps", _NORM_EPS)
        own = {"mlp_norm_eps": eps} if isinstance(eps, float) and eps != _FIXED["norm_eps"] else {}
        return {"embedding_per_block": True} | own

    def folder_config(self, model: DiT) -> dict:
        return diffusers_config(model)

    def folder_config_problems(self, document: dict, model: DiT) -> list[str]:
        return diffusers_config_problems(document, model)


LAYOUTS: dict[str, PublishedLayout] = {
    "dit": DiTLayout("dit", "DiT's code passes its index 0..999 as time and predicts noise"),
    "sit": DiTLayout(
        "sit",
        "SiT's code passes its time in 0..1, 1 being data, and predicts data - noise: objective.preconditioning = sit",
    ),
    "diffusers": DiffusersLayout("diffusers", "DiTPipeline passes its index 0..999 as time and predicts noise"),
}


def export_weights(weights: Mapping[str, Tensor], model: DiT, layout: str) -> dict[str, Tensor]:
    """Export weights to a published layout.

    Args:
        weights: every parameter of `model` by name.
        model: gives the shapes; may be on the meta device.

    Returns:
        the published state dict, its tensors contiguous and sharing memory with nothing.

    Raises:
        ConversionError: the layout cannot represent this model.
    """
    if problems := layout_problems(model, layout):
        raise ConversionError("\n".join(problems))
    published: dict[str, Tensor] = {}
    for name, copies in _places(model.config, layout).items():
        tensor = weights[name]
        if name == "patch_embed.weight":
            tensor = tensor.unflatten(1, (-1, model.config.patch_size, model.config.patch_size))
        elif name.startswith("output.linear."):
            tensor = _channels_last(tensor, model.config.patch_size)
        for pieces in copies:
            published |= {
                piece: part.clone(memory_format=torch.contiguous_format)
                for piece, part in zip(pieces, tensor.chunk(len(pieces)), strict=True)
            }
    if layout != "diffusers":
        published["pos_embed"] = _position_table(model)[None]
    return published


def import_weights(published: dict[str, Tensor], model: DiT, layout: str) -> tuple[dict[str, Tensor], list[str]]:
    """Import weights from a published layout.

    Args:
        model: gives the shapes; may be on the meta device.

    Returns:
        every parameter of `model` by name, and a line for each omission.

    Raises:
        ConversionError: tensors are missing, superfluous, of another model, or against this model's computation.
    """
    if problems := layout_problems(model, layout) or _layout_mismatch(published, layout):
        raise ConversionError("\n".join(problems))
    if problem := _size_mismatch(published, model, layout):
        raise ConversionError(problem)
    places = _places(model.config, layout)
    wanted = {piece for copies in places.values() for pieces in copies for piece in pieces}
    missing, extra = sorted(wanted - published.keys()), sorted(published.keys() - wanted - {_POSITION[layout]})
    if layout != "diffusers" and "pos_embed" not in published:
        missing.append("pos_embed")
    problems = [
        f"{len(names)} tensors {text}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for names, text in ((missing, "are missing"), (extra, f"are not of the {layout} layout of this model")) if names
    ]
    if problems:
        raise ConversionError("\n".join(problems))
    _check_position(published, model, layout)

    weights, notes = {}, []
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, copies in places.items():
        tensor = _joined(published, copies)
        if name == "patch_embed.weight":
            tensor = tensor.flatten(1)
        elif name.startswith("output.linear."):
            tensor, note = _output_channels(tensor, shapes[name][0], model.config)
            notes += [note] if note and note not in notes else []
        if tensor.shape != shapes[name]:
            raise ConversionError(f"{copies[0][0]} makes {name} {list(tensor.shape)} instead of {list(shapes[name])}")
        if not tensor.is_floating_point():
            raise ConversionError(f"{copies[0][0]} is {str(tensor.dtype).removeprefix('torch.')}, not floating point")
        weights[name] = tensor.clone(memory_format=torch.contiguous_format)
    return weights, notes


def layout_problems(model: DiT, layout: str) -> list[str]:
    """Reasons why a layout cannot represent a model: one line each, empty if it can."""
    if not isinstance(model, DiT):
        return [f"model.magnitude_preserving = true: the {layout} layout is of plain transformers"]
    found = [
        f"model.{key} = {value_text(getattr(model.config, key))}: the {layout} layout is of models with {value_text(value)}"
        for key, value in _FIXED.items() if getattr(model.config, key) != value
    ]
    if layout == "diffusers" and model.config.mlp_hidden_dim != 4 * model.config.dim:
        found.append(f"model.mlp_hidden_dim = {model.config.mlp_hidden_dim}: diffusers has 4 model.dim always")
    if layout != "diffusers":
        own = {"embedding_per_block": (False,), "mlp_norm_eps": (None, _FIXED["norm_eps"])}
        found += [
            f"model.{key} = {value_text(getattr(model.config, key))}: only the diffusers layout has that"
            for key, values in own.items() if getattr(model.config, key) not in values
        ]
    if model.config.score_scale is not None:
        heads = model.config.mup_base_heads
        found.append(f"model.mup_base_heads = {heads}: the {layout} layout has no factor on attention's scores")
    if model.config.timestep_frequencies == "fourier":
        found.append(f"model.timestep_frequencies = fourier: the {layout} layout is of models with sinusoids")
    if model.config.routing.name == "sprint":
        found.append(f"model.routing.name = sprint: the {layout} layout has no mask token and fusion")
    if not isinstance(model.condition_kind, Classes):
        found.append(f"the dataset has no classes: the {layout} layout is of models with a class table")
    if model.grid[0] != model.grid[1]:
        height, width = model.image_shape[1:]
        found.append(f"images of {height} x {width}: the {layout} layout is of square ones")
    return found


def diffusers_config(model: DiT) -> dict:
    """Build the config.json of DiTTransformer2DModel for this model."""
    config = model.config
    return {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.dim // config.num_heads,
        "in_channels": model.image_shape[0],
        "out_channels": model.patch_channels // config.patch_size**2,
        "num_layers": config.num_layers,
        "attention_bias": True,
        "sample_size": model.image_shape[1],
        "patch_size": config.patch_size,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": model.condition_kind.choices,
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "norm_eps": config.mlp_norm_eps or config.norm_eps,
    }


def diffusers_config_problems(document: dict, model: DiT) -> list[str]:
    """Differences between a config.json and this model that weights do not show: one line each."""
    wanted = diffusers_config(model)
    defaults = {"norm_type": "ada_norm_zero", "activation_fn": "gelu-approximate", "attention_bias": True}
    document = dict(document)
    if model.config.embedding_per_block:
        # Not of a DiT's weights: they were trained with DiT's eps, whatever their folder says.
        defaults["norm_eps"] = _NORM_EPS
        document = defaults | document
    if document.get("_class_name") in _CLASSES:
        document["_class_name"] = wanted["_class_name"]
    return [
        f"{key} is {document[key]} there and {wanted[key]} in this configuration"
        for key in ("_class_name", "num_attention_heads", "in_channels", "patch_size", "sample_size", *defaults)
        if key in document and document[key] != wanted[key]
    ]


def _places(config: DiTConfig, layout: str) -> Places:
    modules = _diffusers_modules(config) if layout == "diffusers" else _dit_modules(config.num_layers)
    return {
        f"{module}.{kind}": [[f"{piece}.{kind}" for piece in pieces] for pieces in copies]
        for module, copies in modules.items()
        for kind in (("weight",) if module.endswith("label_embed") else ("weight", "bias"))
    }


def _dit_modules(num_layers: int) -> Places:
    modules = {
        "patch_embed": "x_embedder.proj",
        "time_embed.hidden": "t_embedder.mlp.0",
        "time_embed.out": "t_embedder.mlp.2",
        "label_embed": "y_embedder.embedding_table",
        "output.modulation": "final_layer.adaLN_modulation.1",
        "output.linear": "final_layer.linear",
    }
    for i in range(num_layers):
        modules |= {
            f"layers.{i}.attention.qkv": f"blocks.{i}.attn.qkv",
            f"layers.{i}.attention.out": f"blocks.{i}.attn.proj",
            f"layers.{i}.mlp.hidden": f"blocks.{i}.mlp.fc1",
            f"layers.{i}.mlp.out": f"blocks.{i}.mlp.fc2",
            f"layers.{i}.modulation": f"blocks.{i}.adaLN_modulation.1",
        }
    return {ours: [[theirs]] for ours, theirs in modules.items()}


def _diffusers_modules(config: DiTConfig) -> Places:
    blocks = [f"transformer_blocks.{i}" for i in range(config.num_layers)]
    modules = {"patch_embed": [["pos_embed.proj"]], "output.modulation": [["proj_out_1"]], "output.linear": [["proj_out_2"]]}
    embeddings = {
        "time_embed.hidden": "timestep_embedder.linear_1",
        "time_embed.out": "timestep_embedder.linear_2",
        "label_embed": "class_embedder.embedding_table",
    }
    for ours, theirs in embeddings.items():
        copies = [[f"{block}.{_EMBEDDING}{theirs}"] for block in blocks]
        own = {f"layers.{i}.{ours}": [copy] for i, copy in enumerate(copies)}
        modules |= own if config.embedding_per_block else {ours: copies}
    for i, block in enumerate(blocks):
        modules |= {
            f"layers.{i}.attention.qkv": [[f"{block}.attn1.to_{letter}" for letter in "qkv"]],
            f"layers.{i}.attention.out": [[f"{block}.attn1.to_out.0"]],
            f"layers.{i}.mlp.hidden": [[f"{block}.ff.net.0.proj"]],
            f"layers.{i}.mlp.out": [[f"{block}.ff.net.2"]],
            f"layers.{i}.modulation": [[f"{block}.norm1.linear"]],
        }
    return modules


def _differ_by_block(published: Mapping[str, Tensor]) -> bool:
    first = f"transformer_blocks.0.{_EMBEDDING}"
    return any(
        name.split(".", 2)[-1].startswith(_EMBEDDING)
        and not torch.equal(tensor, published.get(first + name.split(_EMBEDDING)[1], tensor))
        for name, tensor in published.items()
    )


def _joined(published: dict[str, Tensor], copies: list[list[str]]) -> Tensor:
    first, *others = copies
    for other in others:
        for piece, same in zip(other, first, strict=True):
            if not torch.equal(published[piece], published[same]):
                one = "this model has one for all blocks (add model.embedding_per_block = true)"
                raise ConversionError(f"{piece} is not equal to {same}: {one}")
    pieces = [published[piece] for piece in first]
    if any(piece.ndim != pieces[0].ndim or piece.shape[1:] != pieces[0].shape[1:] for piece in pieces):
        raise ConversionError(f"{', '.join(first)} do not fit together")
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _channels_last(tensor: Tensor, patch_size: int) -> Tensor:
    """Reorder rows (C, p, p) to (p, p, C)."""
    return tensor.unflatten(0, (-1, patch_size, patch_size)).movedim(0, 2).flatten(0, 2)


def _channels_first(tensor: Tensor, patch_size: int) -> Tensor:
    """Reorder rows (p, p, C) to (C, p, p)."""
    return tensor.unflatten(0, (patch_size, patch_size, -1)).movedim(2, 0).flatten(0, 2)


def _output_channels(tensor: Tensor, rows: int, config: DiTConfig) -> tuple[Tensor, str | None]:
    """Output layer's rows (C, p, p), without the variance's if this model has none."""
    if tensor.shape[0] % config.patch_size**2:
        return tensor, None  # refused for its shape
    tensor = _channels_first(tensor, config.patch_size)
    if tensor.shape[0] == 2 * rows and not config.learned_variance:
        return tensor[:rows], "the learned variance's half of the output layer was dropped"
    return tensor, None


def _position_table(model: DiT) -> Tensor:
    return sincos_table(model.config.dim, model.grid).to(torch.float32)


def _check_position(published: dict[str, Tensor], model: DiT, layout: str) -> None:
    name = _POSITION[layout]
    if name not in published:
        return
    given = published[name]
    found, wanted = given.to(torch.float64), _position_table(model)[None].to(torch.float64)
    if found.shape != wanted.shape:
        shapes = f"{list(found.shape)} instead of {list(wanted.shape)}"
        raise ConversionError(f"{name} is {shapes}: these weights are for images of another size")
    # Rounding to nearest moves a number by half of eps of it at most.
    rounding = torch.finfo(given.dtype).eps / 2 if given.is_floating_point() else 0.0
    difference = (found - wanted).abs()
    if not (difference <= _POSITION_TOLERANCE + rounding * wanted.abs()).all():
        raise ConversionError(f"{name} differs by {difference.max().item():.2g} from the table that this model computes")


def _layout_mismatch(published: dict[str, Tensor], layout: str) -> list[str]:
    marks = {"dit": "x_embedder.proj.weight", "diffusers": "pos_embed.proj.weight", "safetensors": "patch_embed.weight"}
    expected = "diffusers" if layout == "diffusers" else "dit"
    if marks[expected] in published:
        return []
    other = next((name for name, mark in marks.items() if mark in published), None)
    if other == "safetensors":
        return ["is in this program's own layout already"]
    if other:
        return [f"is in the {other} layout (give --format {other})"]
    return [f"is not in the {layout} layout: {marks[expected]} is missing"]


def _size_mismatch(published: dict[str, Tensor], model: DiT, layout: str) -> str | None:
    """Describe the model that the weights belong to, if width, depth or patch differ from this one's."""
    names = {"diffusers": ("pos_embed.proj.weight", "transformer_blocks.")}
    patch, prefix = names.get(layout, ("x_embedder.proj.weight", "blocks."))
    if published[patch].ndim != 4:
        return f"{patch} is {list(published[patch].shape)} instead of a convolution's [D, C, p, p]"
    dim, _, _, patch_size = published[patch].shape
    found = (dim, _num_blocks(published, prefix), patch_size)
    wanted = (model.config.dim, model.config.num_layers, model.config.patch_size)
    if found == wanted:
        return None
    return f"these are weights of {_size_name(*found)}; the configuration is {_size_name(*wanted)}"


def _num_blocks(published: Mapping[str, Tensor], prefix: str) -> int:
    return len({int(name.split(".")[1]) for name in published if _is_block(name, prefix)})


def _is_block(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.split(".")[1].isdecimal()


def _size_name(dim: int, num_layers: int, patch_size: int) -> str:
    size = f"dim {dim}, {num_layers} layers, patch {patch_size}"
    name = _flavor_of(dim, num_layers, patch_size) or "no flavor's size"
    return f"{name} ({size})"


def _flavor_of(dim: int, num_layers: int, patch_size: int) -> str | None:
    """Flavor of these sizes that is as the published networks are; None where there is none."""
    for name, flavor in FLAVORS.items():
        same_size = (flavor.dim, flavor.num_layers, flavor.patch_size) == (dim, num_layers, patch_size)
        if same_size and all(getattr(flavor, key) == value for key, value in _FIXED.items()):
            return name
    return None
