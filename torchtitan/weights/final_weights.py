"""Final weights of a run: one safetensors file in its folder, with the step in the name."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torchtitan.checkpoint.comparison import TensorSource, open_checkpoint
from torchtitan.checkpoint.reading import read_state
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import trained_info
from torchtitan.distributed.precision import DTYPES
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.shard_files import write_tensors
from torchtitan.files.weight_files import written_whole
from torchtitan.models import MODELS
from torchtitan.weights.model_record import record_of
from torchtitan.weights.network import BASE_SHA256

if TYPE_CHECKING:
    from torchtitan.models.adapters.layers import LowRank
    from torchtitan.models.adapters.layouts import AdapterLayout

_MODEL = "model."


def write_final_weights(path: Path, checkpoint: AnyPath, config: JobConfig, step: int, buffers: Collection[str]) -> None:
    """Write the weights that `sampling.ema_track` names, as scripts/checkpoint.py export does, from the last checkpoint.

    One tensor at a time is in memory; saved buffers keep their dtype. With adapters, they alone, in `final_layout`.

    Raises:
        CheckpointError: the checkpoint is damaged.
        WeightsError: the file cannot be written.
    """
    source = open_checkpoint(checkpoint)
    if config.lora.enable:
        _write_adapter(path, checkpoint, source, config, step)
        return
    track, dtype = config.sampling.ema_track, DTYPES[config.checkpoint.final_weights]
    prefix = _MODEL if track == "none" else f"ema.{track}."
    places = {name.removeprefix(prefix): name for name in source.shapes if name.startswith(prefix)}
    places |= {name: f"{_MODEL}{name}" for name in buffers}
    entries = {
        name: (source.shapes[place][0], source.shapes[place][1] if name in buffers else dtype) for name, place in places.items()
    }
    entries = dict(sorted(entries.items(), key=lambda item: (-item[1][1].itemsize, item[0])))
    label = f"{config.job.name}, step {step}, {_track_name(track)}"
    metadata = {"layout": "safetensors", "weights": label, "model": config.model.flavor}
    metadata |= record_of(config).header()
    with written_whole(path, overwrite=True) as unfinished:
        write_tensors(unfinished, entries, _read(source, places, entries), metadata)


def _write_adapter(path: Path, checkpoint: AnyPath, source: TensorSource, config: JobConfig, step: int) -> None:
    from torchtitan.models.adapters.adapter_files import write_adapter
    from torchtitan.models.adapters.adapters import TRAINED, adapted_layers
    from torchtitan.models.adapters.target import LowRankWeights, Target
    from torchtitan.weights.adapted_network import adapted_network_on_meta

    model = adapted_network_on_meta(config, trained_info(config))
    track = config.sampling.ema_track
    prefix = _MODEL if track == "none" else f"ema.{track}."
    weights = {}
    for name, layer in adapted_layers(model):
        for number, update in enumerate(cast("list[LowRank]", layer.adapters[TRAINED])):
            down, up = (f"{prefix}{name}.adapters.{TRAINED}.{number}.{part}" for part in ("down", "up"))
            values = source.read([down, up])
            weights[Target(name, update.start, update.stop)] = LowRankWeights(values[down], values[up], update.alpha)
    header = adapter_header(config, step, f"{config.job.name}, step {step}, {_track_name(track)}", read_state(checkpoint))
    layout, dtype = final_layout(config.model.name), config.checkpoint.final_weights
    write_adapter(path, weights, model, layout, dtype=dtype, metadata=header, overwrite=True)


def final_layout(family: str) -> "AdapterLayout":
    """Layout of the adapter that a run leaves behind: ai-toolkit's, since some readers know no alpha, else this program's."""
    from torchtitan.models.adapters.layouts import NATIVE

    return MODELS[family].adapter_layouts.get("ai-toolkit", NATIVE)


def adapter_header(config: JobConfig, step: int | None, label: str, state: Mapping[str, Any]) -> dict[str, str]:
    """Header of a file of a run's adapter, by the state of a checkpoint."""
    trigger_word = config.data.trigger_word
    known = {} if config.lora.extra else {"base_sha256": state.get(BASE_SHA256, "")}  # the hash has the further adapters in it
    return {
        "step": str(step), "weights": label, "model": f"{config.model.name} {config.model.flavor}",
        "base": config.checkpoint.initial_weights.rpartition("/")[2] or "drawn at random",
        **known, **({"trigger_word": trigger_word} if trigger_word else {}),
    }  # fmt: skip


def _track_name(track: str) -> str:
    return "trained weights" if track == "none" else track


def _read(
    source: TensorSource, places: dict[str, str], entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[Tensor]:
    for name, (_, dtype) in entries.items():
        yield source.read([places[name]])[places[name]].to(dtype)
