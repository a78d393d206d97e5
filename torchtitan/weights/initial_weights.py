"""Initial weights of a run: checked by their header before anything is encoded, then by all ranks, each its share.

With more ranks than tensors a rank reads one, whatever the size of the network is.
"""

import logging
import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from torchtitan.checkpoint.checkpointer import checkpoint_path, checkpoint_steps, newest_good, read_state
from torchtitan.checkpoint.finding import shares_of
from torchtitan.checkpoint.manifest import MANIFEST
from torchtitan.conditions import TEXT, Embeddings
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import normalization_of_weights, store_of_latents, trained_info
from torchtitan.data.base import DatasetInfo
from torchtitan.distributed.collectives import from_first_rank, of_all_ranks, on_all_ranks
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.weight_files import (
    WeightsError,
    check_fits,
    each_tensor,
    header_of,
    named_weights,
    recorded_data,
    refuse_not_finite,
    tensor_sizes,
)
from torchtitan.files.weight_hash import joined_sha256, tensor_sha256
from torchtitan.models import MODELS
from torchtitan.models.adapters.layouts import are_of_an_adapter
from torchtitan.models.base import DiffusionModel, ModelConfig
from torchtitan.models.published_layouts import ConversionError
from torchtitan.pictures.number_text import first_named
from torchtitan.programs import pasted
from torchtitan.runs.folder import RunFolder
from torchtitan.runs.ownership import CONFIG_FILE
from torchtitan.settings.sections import flattened
from torchtitan.weights.model_record import class_names_of_weights, trained_for
from torchtitan.weights.network import check_base, check_objective, network_on_meta
from torchtitan.weights.pipeline_folder import is_published_folder

logger = logging.getLogger(__name__)


def check_start(config: JobConfig) -> None:
    """Check that the objective fits the network, by headers that the files that a run starts from do, and that it can have
    the adapters; on the meta device, by this process alone. Nothing is checked that the run does not need, finished or resumed.

    Raises:
        CheckpointError, ConfigError, DatasetError.
    """
    path, frozen, folder = config.checkpoint.initial_weights, config.lora.enable, RunFolder(config)
    if folder.is_finished():
        return
    info = trained_info(config)
    check_objective(config, info)
    if path and (frozen or not checkpoint_steps(folder.checkpoints)):
        model = network_on_meta(config, info)
        with _of_key(config, model):
            check_own(Path(path), model, config.checkpoint.initial_weights_strict)
    if frozen:
        from torchtitan.weights.adapted_network import check_adapters

        check_adapters(config, info)


def check_initial_weights(config: JobConfig, info: DatasetInfo, checkpoints: AnyPath) -> str:
    """Check that a run's initial weights fit, are finite and, of a run that trained adapters before, are those that it
    trained them with; collective, before the run's folder is made. They are not read where the run does not need them.

    Returns:
        the hash of frozen ones; "" where there are none, or they are drawn.

    Raises:
        CheckpointError: on every rank.
    """
    path, frozen = config.checkpoint.initial_weights, config.lora.enable
    if not path or not from_first_rank(lambda: frozen or not checkpoint_steps(checkpoints)):
        return ""
    model = network_on_meta(config, info)
    strict = config.checkpoint.initial_weights_strict
    with _of_key(config, model):
        if not strict:
            for line in from_first_rank(check_own, Path(path), model, False):
                logger.warning(f"checkpoint.initial_weights: {path}: {line}")
        digest = check_together(Path(path), model, hashed=frozen, strict=strict)
    from_first_rank(_check_classes, Path(path), info)
    others = [from_first_rank(other, Path(path), config) for other in (_other_latents, _other_objective)]
    others += [from_first_rank(_other_texts, Path(path), info)] if frozen else []
    for line in filter(None, others):
        logger.warning(f"checkpoint.initial_weights: {path}: {line}")
    if frozen:
        from torchtitan.weights.adapted_network import frozen_sha256

        from_first_rank(_check_base, checkpoints, frozen_sha256(config, digest), config)
    return digest


def _check_classes(path: Path, info: DatasetInfo) -> None:
    """Check that classes are in the order in which the file's header has them. Raises WeightsError."""
    names = class_names_of_weights(path)
    if names != list(info.class_names) and sorted(names) == sorted(info.class_names):
        number = next(number for number, name in enumerate(names) if name != info.class_names[number])
        text = f"class {number} is {names[number]!r} there and {info.class_names[number]!r} in the data"
        raise WeightsError(f"checkpoint.initial_weights: {path}: {text} (data.classes_file orders classes)")


def _other_latents(path: Path, config: JobConfig) -> str:
    """Line on images that are shifted or scaled otherwise than those that a file of weights was trained on; "" where none are."""
    there, store = normalization_of_weights(path), store_of_latents(config)
    recorded = recorded_data(path) if path.suffix == ".safetensors" else {}
    if not there and (store is None or not recorded or "scale" in recorded):  # pixels, or it does not say
        return ""
    of_file, of_run = "latents" if there else "pixels", "pixels" if store is None else "latents"
    cached = store is None and config.lora.enable and config.data.name == "captioned_folder"
    differing = []
    for name, plain in (("shift", 0.0), ("scale", 1.0)):
        pairs = [*zip_longest(there.get(name, []), getattr(store.index.normalization, name) if store else [], fillvalue=plain)]
        if any(abs(one - other) > 1e-3 * abs(other) for other, one in pairs):
            differing.append([name, *(first_named([f"{value:.3g}" for value in each], 4) for each in zip(*pairs, strict=True))])
    if not differing:
        return ""
    had, have = (", ".join(f"{name} {values[place]}" for name, *values in differing) for place in (0, 1))
    advice = "draw with this run, not with that file and --lora" if config.lora.enable else "the network has to adapt to that"
    advice += "; with cache.enable, and its autoencoder, they are the file's" * cached
    return f"its {of_file} had {had}, the run's {of_run} have {have} ({advice})"


def _other_objective(path: Path, config: JobConfig) -> str:
    """Line on another objective in the header of a file of weights; "" where it has none or the run's."""
    there = header_of(path).get("trained_for", "") if path.suffix == ".safetensors" else ""
    here = trained_for(config)
    return f"its network was {there}; this run's is {here}" if there not in ("", here) else ""


def _other_texts(path: Path, info: DatasetInfo) -> str:
    """Line on texts of another length than those that a file of weights was trained on; "" where it does not say."""
    there = recorded_data(path).get("text_length") if path.suffix == ".safetensors" else None
    if not there or not isinstance(info.condition_kind, Embeddings) or TEXT not in info.condition_kind.entries:
        return ""
    (here, _), _ = info.condition_kind.entries[TEXT]
    advice = "draw with this run, or export it whole: that file and --lora draw with as many as it had"
    return f"its texts had {there} tokens, the run's have {here} ({advice})" if there != here else ""


@contextmanager
def _of_key(config: JobConfig, model: DiffusionModel) -> Iterator[None]:
    checkpoint = config.checkpoint
    try:
        yield
    except WeightsError as error:
        asks = checkpoint.initial_weights_strict and not config.lora.enable and _would_do(Path(checkpoint.initial_weights), model)
        advice = " (--checkpoint.initial_weights_strict false accepts that)" if asks else ""
        lines = (f"{line}{advice if ' tensors are ' in line else ''}" for line in str(error).splitlines())
        raise WeightsError("\n".join(f"checkpoint.initial_weights: {line}" for line in lines)) from error


def _would_do(path: Path, model: DiffusionModel) -> bool:
    """Whether a file fits a model but for tensors that are missing or superfluous."""
    try:
        check_fits(path, model, strict=False)
    except WeightsError:
        return False
    return True


def check_own(path: Path, model: DiffusionModel, strict: bool = True) -> list[str]:
    """Check by its header that a safetensors file has a model's weights under their names here; returns as `check_fits` does.

    Raises:
        WeightsError: it has not; of published weights it names the command that imports them.
    """
    command, quoted = f"{pasted('checkpoint')} import", shlex.quote(str(path))
    for name, what in ((CONFIG_FILE, "the folder of a run"), (MANIFEST, "a checkpoint")):
        if (path / name).is_file():
            export = f"{pasted('checkpoint')} export {quoted} --format safetensors --output FILE.safetensors"
            raise WeightsError(f"{path}: is {what} (export its weights: {export})")
    if is_published_folder(path) or (path / "transformer").is_dir():
        raise WeightsError(f"{path}: is a folder (import it: {command} {quoted} --format diffusers --output FILE.safetensors)")
    if os.path.isdir(path):
        raise WeightsError(f"{path}: is a folder, not of weights that are known (give a safetensors file)")
    if not os.path.exists(path):  # False also of what is no path
        raise WeightsError(f"{path}: no such file (published weights: {command})")
    try:
        return check_fits(path, model, strict)
    except WeightsError as error:
        if path.suffix != ".safetensors":
            raise WeightsError(f"{error} (published weights: {command})") from error
        if are_of_an_adapter(tensor_sizes(path)):
            raise WeightsError(f"{path}: is an adapter (give it as lora.initial_adapter, with its network here)") from error
        if layout := _published_layout(tensor_sizes(path), model):
            advice = f"import it: {command} {quoted} --format {layout} --output FILE.safetensors"
            raise WeightsError(f"{path}: is in the {layout} layout, not in this program's ({advice})") from error
        if differing := _differing_network(path, cast(ModelConfig, model.config)):
            raise WeightsError(f"{error}\n{path}: its network has {differing}") from error
        raise


def _differing_network(path: Path, here: ModelConfig) -> str:
    """Keys of the network by the header of a file of weights that differ from a model's; "" where none do, or it has none."""
    there, own = (dict(flattened(table)) for table in (recorded_data(path, "model"), asdict(here)))
    differing = {key: value for key, value in there.items() if key != "label_dropout" and key in own and value != own[key]}
    return ", ".join(f"model.{key} = {value} (the run's: {own[key]})" for key, value in differing.items())


def _published_layout(names: Collection[str], model: DiffusionModel) -> str:
    """Published layout that most of these names are of; "" if they are of none."""
    family = MODELS[cast(ModelConfig, model.config).name]
    for name, layout in family.layouts.items():
        with suppress(ConversionError):
            published, _ = layout.export_weights(named_weights(model), model)
            if 2 * len(published.keys() & names) > len(names):
                return name
    return ""


def check_together(path: Path, model: DiffusionModel, *, hashed: bool, strict: bool = True) -> str:
    """Check a safetensors file for a model's weights, all finite; collective. Raises WeightsError on every rank.

    Returns:
        `file_sha256` of it; "" if it is not wanted.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def own_share() -> tuple[list[str], dict[str, str]]:
        check_own(path, model, strict)
        return inspect(path, share_of(path, rank, world_size), hashed=hashed)

    found = of_all_ranks(on_all_ranks(own_share, (WeightsError,), None))
    refuse_not_finite(path, sorted(name for bad, _ in found for name in bad))
    return joined_sha256({name: digest for _, digests in found for name, digest in digests.items()}) if hashed else ""


def share_of(path: Path, rank: int, world_size: int) -> list[str]:
    """Share of a rank: names of its tensors; each is one rank's, and all ranks have about as many elements."""
    sizes = {name: {"size": size} for name, size in tensor_sizes(path).items()}
    return shares_of(sizes, world_size)[rank]


def inspect(path: Path, names: list[str], *, hashed: bool) -> tuple[list[str], dict[str, str]]:
    """Names of non-finite tensors, read singly, and all hashes if wanted. Raises WeightsError: unreadable."""
    bad, digests = [], {}
    for name, tensor in each_tensor(path, names):
        if not tensor.to(torch.float32).isfinite().all():
            bad.append(name)
        if hashed:
            digests[name] = tensor_sha256(name, tensor)
    return bad, digests


def _check_base(checkpoints: AnyPath, digest: str, config: JobConfig) -> None:
    step = newest_good(checkpoints)[0]
    if step is not None:
        checkpoint = checkpoint_path(checkpoints, step)
        check_base(read_state(checkpoint), digest, str(checkpoint), config)
