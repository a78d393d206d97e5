"""Layouts of adapters of Flux that other programs read.

    diffusers   transformer.transformer_blocks.0.attn.to_q.lora_A.weight, .lora_B.weight; .alpha unless the scale is 1
    ai-toolkit  the same without alphas, as it reads none: B is scaled
    kohya       lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, .lora_up.weight, .alpha
    comfyui     diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight, .lora_up.weight, .alpha

Others are read: the names of diffusers and of black-forest-labs without a prefix, peft's, fal's, OneTrainer's and XLabs'.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.models.adapters.fusing import cut, join
from torchtitan.models.adapters.layouts import AdapterLayout
from torchtitan.models.adapters.target import AdapterError, AdapterWeights, LowRankWeights, Target
from torchtitan.models.flux.conversion import SWAPPED, published_linears, swap_halves


@dataclass(frozen=True)
class FluxAdapterLayout(AdapterLayout):
    """Layout of adapters of Flux; network: of flux/conversion.py, with the layers' names; separator: of their parts."""

    network: str
    separator: str

    def layers(self, model: Any) -> Collection[str]:
        return self._linears(model)

    def own(self, published: Mapping[str, LowRankWeights], model: Any) -> dict[Target, LowRankWeights]:
        linears = self._linears(model)
        for name in published:
            if name not in linears:
                raise AdapterError(f"is an adapter of another network: {self.prefix}{name} is no layer of this one")
        return {
            target: self._reordered(target, published[name]) for name, target in linears.items() if name in published
        }

    def _linears(self, model: Any) -> dict[str, Target]:
        return {
            name.replace(".", self.separator): target for name, target in published_linears(model, self.network).items()
        }

    def _reordered(self, target: Target, values: LowRankWeights) -> LowRankWeights:
        """Update with the halves of its rows as in the other layout; its own inverse."""
        if self.network == "diffusers" and target.module == SWAPPED:
            return LowRankWeights(values.down, swap_halves(values.up), values.alpha)
        return values


class SplitLayout(FluxAdapterLayout):
    """Layout with an adapter for each of diffusers' linears."""

    def published(self, weights: AdapterWeights, model: Any) -> dict[str, LowRankWeights]:
        names = {target: name for name, target in self._linears(model).items()}
        parts = parts_of(weights, list(names))
        found = {name: self._reordered(target, parts[target]) for target, name in names.items() if target in parts}
        if self.alphas == "where needed":
            _check_alphas(found)
        return found


class FusedLayout(FluxAdapterLayout):
    """Layout with an adapter for each of black-forest-labs' linears."""

    def published(self, weights: AdapterWeights, model: Any) -> dict[str, LowRankWeights]:
        pieces = defaultdict(list)
        for target in published_linears(model, "diffusers").values():
            pieces[target.module].append(target)
        found = {}
        for name, whole in self._linears(model).items():
            of_module = {target: values for target, values in weights.items() if target.module == whole.module}
            if whole in of_module:
                found[name] = of_module[whole]
            elif of_module:
                places = pieces[whole.module]
                parts = parts_of(of_module, places)
                found[name] = join([parts.get(place) for place in places], [place.stop - place.start for place in places])
        return found


class XLabsLayout(FusedLayout):
    """Layout of XLabs' processors of attention: queries, keys and values of single blocks without the hidden layer."""

    def _linears(self, model: Any) -> dict[str, Target]:
        found = {}
        for name, target in published_linears(model, self.network).items():
            *block, layer = name.split(".", 2)
            if layer in _XLABS:
                place = ".".join((*block, "processor", _XLABS[layer]))
                found[place] = replace(target, stop=min(target.stop, 3 * model.config.dim))
        return found


def parts_of(weights: AdapterWeights, places: list[Target]) -> dict[Target, LowRankWeights]:
    """Updates of these places, also of a joint update of neighbours. Raises AdapterError: not of whole places."""
    found: dict[Target, LowRankWeights] = {}
    for target, values in weights.items():
        inside = [
            place for place in places
            if place.module == target.module and target.start <= place.start and place.stop <= target.stop
        ]  # fmt: skip
        rows = [place.stop - place.start for place in inside]
        if sum(rows) != target.stop - target.start:
            raise AdapterError(f"the layout has no layer of the rows {target}")
        parts = [values] if len(inside) == 1 else cut(values, rows)
        found |= {place: part for place, part in zip(inside, parts, strict=True) if part is not None}
    return found


def _check_alphas(published: Mapping[str, LowRankWeights]) -> None:
    """Raise AdapterError if diffusers would apply an alpha to other layers too: it compares endings of names."""
    last = published.get("proj_out")
    others = {name: values for name, values in published.items() if name.endswith(".proj_out")}
    for name, values in others.items():
        if last is not None and values.alpha != last.alpha:
            raise AdapterError(
                f"diffusers would take the alpha of proj_out, {last.alpha:g}, for {name} too, which has {values.alpha:g}"
                " (write the ai-toolkit layout, in which B is scaled instead)"
            )


_XLABS = {
    "img_attn.qkv": "qkv_lora1", "txt_attn.qkv": "qkv_lora2", "img_attn.proj": "proj_lora1", "txt_attn.proj": "proj_lora2",
    "linear1": "qkv_lora", "linear2": "proj_lora",
}  # fmt: skip
_PEFT, _KOHYA = ("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")
LAYOUTS: dict[str, AdapterLayout] = {
    layout.name: layout
    for layout in (
        SplitLayout("diffusers", "transformer.", *_PEFT, "where needed", "diffusers", ".", spellings=(
            SplitLayout("diffusers without prefix", "", *_PEFT, "where needed", "diffusers", "."),
            SplitLayout("peft", "base_model.model.", *_PEFT, "beside", "diffusers", "."),
            SplitLayout("onetrainer", "lora_transformer_", *_KOHYA, "always", "diffusers", "_"),
        )),
        SplitLayout("ai-toolkit", "transformer.", *_PEFT, "never", "diffusers", "."),
        FusedLayout("kohya", "lora_unet_", *_KOHYA, "always", "bfl", "_"),
        FusedLayout("comfyui", "diffusion_model.", *_KOHYA, "always", "bfl", ".", spellings=(
            FusedLayout("bfl", "", *_KOHYA, "always", "bfl", "."),
            FusedLayout("fal", "base_model.model.", *_PEFT, "never", "bfl", "."),
            XLabsLayout("xlabs", "", "down.weight", "up.weight", "never", "bfl", "."),
        )),
    )
}  # fmt: skip
