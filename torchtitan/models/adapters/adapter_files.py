"""Files of adapters: read in any layout that is known for a network, written in one that is asked for."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.files.regular import read_regular
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import WeightsError, header_of, read_state_dict, written_whole
from torchtitan.models.adapters.adapters import check_shape
from torchtitan.models.adapters.fusing import padded, with_alpha
from torchtitan.models.adapters.layouts import NATIVE, AdapterLayout
from torchtitan.models.adapters.peft_header import FILE, KEY, PeftScales, read_scales
from torchtitan.models.adapters.target import AdapterError, AdapterWeights, LowRankWeights
from torchtitan.models.base import DiffusionModel

DTYPES = ("float32", "float16", "bfloat16")
_TEXT_ENCODERS = ("lora_te", "text_encoder")
_PEFT_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterFile:
    """Content of an adapter's file: float32 weights, and notes on left-out parts, one line each."""

    weights: AdapterWeights
    layout: str
    metadata: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def as_trained(self) -> AdapterWeights:
        """The weights with alpha and B of the training, where the header says that B was scaled; the same function."""
        ranks = {f"{values.rank}" for values in self.weights.values()}
        with suppress(ValueError, ZeroDivisionError):  # several alphas are no number
            if self.metadata.get("layout") == "ai-toolkit" and {self.metadata.get("rank")} == ranks:
                alpha = float(self.metadata.get("alpha", ""))
                return {target: with_alpha(values, alpha) for target, values in self.weights.items()}
        return self.weights


def known_layouts(layouts: Mapping[str, AdapterLayout]) -> dict[str, AdapterLayout]:
    """Layouts of a network's adapters by name: this program's own, and the published ones of its family."""
    return {NATIVE.name: NATIVE, **layouts}


def read_adapter(path: Path, model: DiffusionModel, layouts: Mapping[str, AdapterLayout]) -> AdapterFile:
    """Read an adapter; its layout is recognised by the names of its tensors.

    Args:
        path: safetensors file, a torch file of tensors, or a folder of peft.
        model: the network that it is of, on any device, with or without adapters.
        layouts: published ones of the network's family.

    Raises:
        WeightsError: it cannot be read.
        AdapterError: it is no adapter of this network, or has another update than alpha / rank B A.
    """
    if (path / "config.toml").is_file():
        raise WeightsError(f"{path}: is the folder of a run (give the file of its adapter, of checkpoint.py export --adapter)")
    path = path / _PEFT_WEIGHTS if path.is_dir() else path
    tensors, _ = read_state_dict(path)
    metadata = header_of(path) if path.suffix == ".safetensors" else {}
    try:
        of_network, notes = _without_text_encoders(tensors)
        layout = _recognised(of_network, known_layouts(layouts), model)
        published, scales = _by_layer(of_network, layout), _scales(path, metadata, layout, min(of_network))
        if not scales and "rank" not in metadata and not any(values.alpha for values in published.values()):
            notes.append("it gives no alpha: scale 1, as diffusers and ComfyUI read it")
        weights = layout.own(_with_alphas(published, metadata, scales), model)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from error
    for target, values in weights.items():
        check_shape(model, target, values, str(path))
    return AdapterFile(weights, layout.name, metadata, tuple(f"{path}: {note}" for note in notes))


def write_adapter(
    path: Path, weights: AdapterWeights, model: DiffusionModel, layout: AdapterLayout, *, dtype: str = "float32",
    metadata: Mapping[str, str] | None = None, overwrite: bool = False,
) -> int:  # fmt: skip
    """Write an adapter to safetensors, its layout, rank and alpha in the header; return the number of tensors.

    Args:
        dtype: one of DTYPES, that of A and B; alphas are float32.
        metadata: further entries of the header, such as the step.

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
    ranks, alphas = ({part(values) for values in published.values()} for part in (lambda v: v.rank, lambda v: v.alpha))
    if layout.alphas == "never":
        rank = max(ranks)
        published = {name: padded(with_alpha(values, float(values.rank)), rank) for name, values in published.items()}
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


def _without_text_encoders(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of the network, and a note on those of text encoders, which this program does not adapt."""
    of_network = {name: tensor for name, tensor in tensors.items() if not name.startswith(_TEXT_ENCODERS)}
    left_out = len(tensors) - len(of_network)
    if not of_network:
        raise AdapterError("is an adapter of text encoders alone, which this program does not adapt")
    return of_network, [f"{left_out} tensors of text encoders are left out; this program adapts none"] if left_out else []


def _recognised(names: Collection[str], layouts: Mapping[str, AdapterLayout], model: DiffusionModel) -> AdapterLayout:
    """Layout of all the names: of those with their prefix, that which names most layers of the network. Raises AdapterError."""
    fitting = []
    spellings = [spelling for each in layouts.values() for spelling in (each, *each.spellings)]
    for layout in spellings:
        if all(name.startswith(layout.prefix) for name in names):
            layers = layout.layers(model)
            known = sum(layout.split(name)[0] in layers for name in names)
            fitting += [(known, len(layout.prefix), layout)] if known or layout.prefix else []
    if fitting:
        return max(fitting, key=lambda each: each[:2])[2]
    strange = [name for name in names if not name.startswith(tuple(layout.prefix for layout in layouts.values()))]
    problem = f"{strange[0]} is of no layout of adapters of this network" if strange else "has names of several layouts"
    raise AdapterError(f"{problem} (known: {', '.join(layout.name for layout in spellings)})")


def _by_layer(tensors: Mapping[str, Tensor], layout: AdapterLayout) -> dict[str, LowRankWeights]:
    """A, B and alpha by the layout's name of the layer; alpha is 0 where the file has none."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, part = layout.split(name)
        if "dora_scale" in name or "magnitude_vector" in name:
            raise AdapterError(
                f"{name} is a scale of DoRA, with which the weight is not W + s B A (train without DoRA, or merge it into the"
                " base weights with the program that trained it)"
            )
        if not part:
            raise AdapterError(f"{name} is no part of an update W + s B A, and without it the function would be another")
        if not tensor.is_floating_point() or not tensor.to(torch.float32).isfinite().all():
            raise AdapterError(f"{name} has values that are no finite numbers")
        parts.setdefault(layer, {})[part] = tensor.to(torch.float32)
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


def _scales(path: Path, metadata: Mapping[str, str], layout: AdapterLayout, name: str) -> PeftScales | None:
    """Scales in the header or in the file beside. Raises AdapterError."""
    if KEY in metadata:
        return read_scales(metadata[KEY], layout.prefix)
    if layout.alphas != "beside":
        return None
    beside = path.with_name(FILE)
    if not beside.is_file():
        raise AdapterError(f"is a raw peft file ({name}) with its scale in another file, {FILE} (put that beside it)")
    return read_scales(read_regular(beside).decode("utf-8", "replace"), "", str(beside))


def _with_alphas(
    published: Mapping[str, LowRankWeights], metadata: Mapping[str, str], scales: PeftScales | None
) -> dict[str, LowRankWeights]:
    """Alphas of the header, where it has them, and where there is none the rank: scale 1, as all readers assume."""
    if scales is not None:
        if any(values.alpha for values in published.values()):
            raise AdapterError(f"has alphas both as tensors and in its header's {KEY}, and readers refuse it (remove either)")
        return {
            layer: replace(values, alpha=scales.alpha_of(layer, values.rank)) for layer, values in published.items()
        }
    return {layer: replace(values, alpha=values.alpha or float(values.rank)) for layer, values in published.items()}


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in sorted(numbers))
