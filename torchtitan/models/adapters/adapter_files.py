"""Files of adapters: read in any layout that is known for a network, written in one that is asked for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan.errors import first_line
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import WeightsError, read_state_dict, written_whole
from torchtitan.models.adapters.adapters import check_shape
from torchtitan.models.adapters.fusing import folded, padded
from torchtitan.models.adapters.layouts import NATIVE, AdapterLayout
from torchtitan.models.adapters.peft_header import KEY, read_scales
from torchtitan.models.adapters.target import AdapterError, AdapterWeights, LowRankWeights
from torchtitan.models.base import DiffusionModel

DTYPES = ("float32", "float16", "bfloat16")
_PARTS = {"lora_A.weight": "down", "lora_down.weight": "down", "lora_B.weight": "up", "lora_up.weight": "up"}
_TEXT_ENCODERS = ("lora_te", "text_encoder")
_RAW_PEFT = "base_model."


@dataclass(frozen=True)
class AdapterFile:
    """Content of a file of an adapter.

    Attributes:
        weights: float32, of the network that it was read for.
        layout: name of the file's layout.
        metadata: texts of its header.
        notes: left-out parts, one line each.
    """

    weights: AdapterWeights
    layout: str
    metadata: Mapping[str, str]
    notes: tuple[str, ...]


def known_layouts(layouts: Mapping[str, AdapterLayout]) -> dict[str, AdapterLayout]:
    """Layouts of a network's adapters by name: this program's own, and the published ones of its family."""
    return {NATIVE.name: NATIVE, **layouts}


def read_adapter(path: Path, model: DiffusionModel, layouts: Mapping[str, AdapterLayout]) -> AdapterFile:
    """Read an adapter; its layout is recognised by the names of its tensors.

    Args:
        path: safetensors file, or a torch file of tensors.
        model: the network that it is of, on any device, with or without adapters.
        layouts: published ones of the network's family.

    Raises:
        WeightsError: it cannot be read.
        AdapterError: it is no adapter of this network, or has another update than alpha / rank B A.
    """
    tensors, _ = read_state_dict(path)
    metadata = _metadata(path)
    try:
        of_network, notes = _without_text_encoders(tensors)
        layout = _recognised(of_network, known_layouts(layouts))
        published = _by_layer(of_network, layout)
        weights = layout.own(_with_alphas(published, metadata, layout), model)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from error
    for target, values in weights.items():
        check_shape(model, target, values, str(path))
    return AdapterFile(weights, layout.name, metadata, tuple(f"{path}: {note}" for note in notes))


def write_adapter(
    path: Path, weights: AdapterWeights, model: DiffusionModel, layout: AdapterLayout, *, dtype: str = "float32",
    metadata: Mapping[str, str] | None = None, overwrite: bool = False,
) -> int:  # fmt: skip
    """Write an adapter to a safetensors file, with layout, rank and alpha in its header besides the metadata.

    Args:
        dtype: one of DTYPES, that of A and B; alphas are float32.
        metadata: further entries of the header, such as the step.

    Returns:
        number of tensors.

    Raises:
        AdapterError: the layout has no names for it, or the dtype no range.
        WeightsError: the file cannot be written.
    """
    if path.suffix != ".safetensors":
        raise AdapterError(f"{path}: must end in .safetensors, the format of the output")
    try:
        published = layout.published(weights, model)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from error
    if layout.alphas == "never":
        rank = max(values.rank for values in published.values())
        published = {name: padded(folded(values), rank) for name, values in published.items()}
    ranks, alphas = ({part(values) for values in published.values()} for part in (lambda v: v.rank, lambda v: v.alpha))
    plain = all(values.scale == 1 for values in published.values()) and len(ranks) == 1
    tensors: dict[str, Tensor] = {}
    for name, values in published.items():
        for part, tensor in ((layout.down, values.down), (layout.up, values.up)):
            cast = tensor.detach().to(getattr(torch, dtype))
            if not cast.isfinite().all():
                advice = " (give --dtype float32)" if tensor.isfinite().all() else ""
                raise AdapterError(f"{path}: {layout.prefix}{name} has values that are not finite in {dtype}{advice}")
            tensors[f"{layout.prefix}{name}.{part}"] = cast
        if layout.alphas == "always" or layout.alphas == "where needed" and not plain:
            tensors[f"{layout.prefix}{name}.alpha"] = torch.tensor(values.alpha, dtype=torch.float32)
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    header = {
        "layout": layout.name, "rank": _listed(ranks), "alpha": _listed(alphas), **(metadata or {})
    }  # fmt: skip
    with written_whole(path, overwrite) as temporary:
        write_tensors(temporary, entries, tensors.values(), header)
    return len(tensors)


def _metadata(path: Path) -> dict[str, str]:
    if path.suffix != ".safetensors":
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: is not a readable safetensors file: {first_line(error)}") from error


def _without_text_encoders(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of the network, and a note on those of text encoders, which this program does not adapt."""
    of_network = {name: tensor for name, tensor in tensors.items() if not name.startswith(_TEXT_ENCODERS)}
    left_out = len(tensors) - len(of_network)
    if not of_network:
        raise AdapterError("is an adapter of text encoders alone, which this program does not adapt")
    return of_network, [f"{left_out} tensors of text encoders are left out; this program adapts none"] if left_out else []


def _recognised(names: Iterable[str], layouts: Mapping[str, AdapterLayout]) -> AdapterLayout:
    """Layout of all the names. Raises AdapterError."""
    for name in names:
        if name.startswith(_RAW_PEFT):
            raise AdapterError(
                f"is a raw peft file ({name}) with its scale in another file, adapter_config.json: load it in diffusers with"
                " peft and save it with FluxPipeline.save_lora_weights, or name its tensors transformer.LAYER.lora_A.weight"
                " and .lora_B.weight, with lora_alpha as transformer.LAYER.alpha"
            )
    prefixes = {layout.prefix: layout for layout in reversed(list(layouts.values()))}
    found = {prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)}
    strange = [name for name in names if not name.startswith(tuple(prefixes))]
    if strange or len(found) != 1:
        examples = ", ".join(f"{prefix}... of {layout.name}" for prefix, layout in prefixes.items())
        problem = f"{strange[0]} is of no layout of adapters of this network" if strange else "has names of several layouts"
        raise AdapterError(f"{problem} (known: {examples})")
    return prefixes[found.pop()]


def _by_layer(tensors: Mapping[str, Tensor], layout: AdapterLayout) -> dict[str, LowRankWeights]:
    """A, B and alpha by the layout's name of the layer; alpha is 0 where the file has none."""
    endings = {**_PARTS, layout.down: "down", layout.up: "up", "alpha": "alpha"}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        ending = next((ending for ending in endings if name.endswith(f".{ending}")), None)
        if "dora_scale" in name or "magnitude_vector" in name:
            raise AdapterError(
                f"{name} is a scale of DoRA, with which the weight is not W + s B A (train without DoRA, or merge it into the"
                " base weights with the program that trained it)"
            )
        if ending is None:
            raise AdapterError(f"{name} is no part of an update W + s B A, and without it the function would be another")
        if not tensor.is_floating_point() or not tensor.to(torch.float32).isfinite().all():
            raise AdapterError(f"{name} has values that are no finite numbers")
        layer = name.removeprefix(layout.prefix).removesuffix(f".{ending}")
        parts.setdefault(layer, {})[endings[ending]] = tensor.to(torch.float32)
    return {layer: _joined(layout.prefix + layer, of_layer) for layer, of_layer in parts.items()}


def _joined(name: str, parts: Mapping[str, Tensor]) -> LowRankWeights:
    for part, meaning in (("down", "A"), ("up", "B")):
        if part not in parts:
            raise AdapterError(f"{name} lacks {meaning}, its {part} projection")
    down, up, alpha = parts["down"], parts["up"], parts.get("alpha")
    ranked = down.ndim > 1 and up.ndim > 1 and down.numel() and up.shape[1] == down.shape[0]
    if not ranked or up.shape[2:].numel() != 1:  # B of a convolution has a kernel of 1 x 1, or none
        raise AdapterError(f"{name} has A {list(down.shape)} and B {list(up.shape)}, which have no rank in common")
    if alpha is not None and (alpha.numel() != 1 or alpha.item() == 0):
        raise AdapterError(f"{name}.alpha is no number, or 0")
    return LowRankWeights(down, up.flatten(1), 0.0 if alpha is None else alpha.item())


def _with_alphas(
    published: Mapping[str, LowRankWeights], metadata: Mapping[str, str], layout: AdapterLayout
) -> dict[str, LowRankWeights]:
    """Alphas of the header, where it has them, and where there is none the rank: scale 1, as all readers assume."""
    scales = read_scales(metadata[KEY], layout.prefix) if KEY in metadata else None
    if scales is not None:
        if any(values.alpha for values in published.values()):
            raise AdapterError(f"has alphas both as tensors and in its header's {KEY}, and readers refuse it (remove either)")
        return {
            layer: replace(values, alpha=scales.alpha_of(layer, values.rank)) for layer, values in published.items()
        }
    return {layer: replace(values, alpha=values.alpha or float(values.rank)) for layer, values in published.items()}


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in sorted(numbers))
