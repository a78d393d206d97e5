"""Filling of a run's `[cache]`: its latent stores are completed before the run is built."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from torchtitan.autoencoders import build_autoencoder
from torchtitan.autoencoders.base import Autoencoder, AutoencoderError
from torchtitan.conditions import POOLED, TEXT, Embeddings
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import cache_folder, images_only, is_finished, normalization_of_base, splits_of
from torchtitan.data import dataset_info
from torchtitan.data.base import DatasetError
from torchtitan.data.captioned_folder import CaptionedFolderConfig
from torchtitan.data.online_text import in_keys
from torchtitan.distributed.collectives import from_first_rank, group_for_work, on_all_ranks
from torchtitan.distributed.mesh import compute_device, init_process_group
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.extraction import (
    CaptionOptions,
    begin_stores,
    finish_store,
    finish_stores,
    plan_stores,
    write_store,
)
from torchtitan.extraction.extraction_plan import ExtractionOptions
from torchtitan.extraction.image_source import SourceSplit, open_sources
from torchtitan.files.durable import make_folder
from torchtitan.files.run_lock import RunLock
from torchtitan.latents.index import Normalization
from torchtitan.models import MODELS
from torchtitan.pictures.number_text import counted
from torchtitan.settings.schema import quoted
from torchtitan.texts import TextEncoderError, TextEncoders, open_encoders
from torchtitan.texts.opening import open_encoder

logger = logging.getLogger(__name__)

_UNUSABLE = (AutoencoderError, DatasetError, LatentStoreError, TextEncoderError, OSError)


def fill_cache(config: JobConfig) -> None:
    """Complete the stores of a configuration with a cache; collective.

    The ranks share the work as in scripts/extract_latents.py, and wait for one another as long as it lasts. An interrupted
    filling resumes at the first file that is not whole, to the same bytes. The encoders are gone from memory afterwards.

    Raises:
        AutoencoderError, DatasetError: an encoder or the images cannot be used, or one of them is damaged.
        OSError: the stores cannot be written.
        RuntimeError: another rank was lost, or the device's memory has run out.
    """
    init_process_group(config.comm)
    group = group_for_work()
    folder = cache_folder(config)
    with _fixed_threads(), _one_at_a_time(folder, group):
        try:
            autoencoder = on_all_ranks(lambda: _open_autoencoder(config), _UNUSABLE, group)
            encoders = on_all_ranks(lambda: _open_text_encoders(config.data), _UNUSABLE, group)
            if encoders:
                _check_widths(config, encoders)
            for split in splits_of(dataset_info(images_only(config.data))):
                if not from_first_rank(is_finished, folder / split, group=group):
                    _fill(folder / split, split, config, autoencoder, encoders, group)
        except LatentStoreError as error:
            raise DatasetError(f"cache.folder: {error}") from error
        except TextEncoderError as error:
            raise DatasetError(in_keys(error)) from error
        finally:
            open_encoder.cache_clear()
            autoencoder = encoders = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _fill(
    store: Path, split: SourceSplit, config: JobConfig, autoencoder: Autoencoder, encoders: TextEncoders | None,
    group: dist.ProcessGroup | None,
) -> None:  # fmt: skip
    data = config.data
    images = images_only(data)
    options = ExtractionOptions(
        mirrored=data.horizontal_flip,
        normalization=_normalization(config, autoencoder),
        batch_size=1,  # the largest bucket fits wherever the network does
        num_workers=data.num_workers,
        max_skipped_share=0.0,  # of images with captions by hand, each is meant
    )
    null_caption, prompts = data.filled_texts()

    def planned() -> list:
        sources = open_sources(images, dataset_info(images), split)
        return plan_stores(store, sources, autoencoder, encoders, options, CaptionOptions(None, null_caption, prompts))

    stores = on_all_ranks(planned, _UNUSABLE, group)
    begin_stores(store, stores, group)
    if _first():
        count = sum(len(each.source) for each in stores)
        sizes = f" of {len(stores)} sizes" if len(stores) > 1 else ""
        logger.info(f"encoding {count:,} images{sizes} for {split} into {store}")
    cut: dict[str, None] = {}  # buckets share captions
    for each in stores:
        try:
            cut |= dict.fromkeys(write_store(each, autoencoder, encoders, options, group)[0])
            finish_store(each, options.max_skipped_share, group)
        except DatasetError as error:
            raise DatasetError(f"data.{_key(split, data)}: {error}") from error
    if cut and _first():
        first = ", ".join(map(quoted, list(cut)[:3]))
        text = f"{counted(len(cut), 'caption')} longer than data.text_length = {data.text_length} tokens, cut there: {first}"
        logger.warning(text)
    finish_stores(store, stores, group)


def _check_widths(config: JobConfig, encoders: TextEncoders) -> None:
    """Check, before anything is encoded, that the network takes these embeddings. Raises DatasetError: it takes others."""
    nulls = {TEXT: torch.zeros(encoders.text_shape), POOLED: torch.zeros(encoders.pooled_shape)}
    if found := MODELS[config.model.name].condition_problems(config.model, Embeddings(nulls, {}, ())):
        raise DatasetError("\n".join(found))


def _normalization(config: JobConfig, autoencoder: Autoencoder) -> Literal["measured", "autoencoder"] | Normalization:
    """A frozen network takes latents as it was trained on them; published ones are of the autoencoder's own scale."""
    if base := normalization_of_base(config):
        return Normalization(shift=base["shift"], scale=base["scale"], source="given")
    return "measured" if autoencoder.normalization is None else "autoencoder"


def _key(split: SourceSplit, data: CaptionedFolderConfig) -> str:
    return "validation_path" if split == "validation" and data.validation_path else "path"


def _open_autoencoder(config: JobConfig) -> Autoencoder:
    section = config.autoencoder
    dtype = getattr(torch, section.dtype) if section.dtype else None
    return build_autoencoder(section.name, section.path, dtype, compute_device(), section.tile)


def _open_text_encoders(data: CaptionedFolderConfig) -> TextEncoders | None:
    if not data.text_encoder:
        return None
    return open_encoders(data.text_encoder, data.pooled_encoder, data.text_length, torch.bfloat16, compute_device())


@contextlib.contextmanager
def _fixed_threads() -> Iterator[None]:
    """One thread of torch per rank: the last bits of latents depend on their number, and a resumed filling may have others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _one_at_a_time(folder: Path, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let one run at a time fill a folder; another one waits, and then finds it filled."""
    lock = RunLock(folder)

    def acquire() -> None:
        make_folder(folder)
        if owner := lock.acquire():
            logger.info(f"{folder}: waiting for the process that writes it: {owner}")
            lock.wait()

    from_first_rank(acquire, group=group)
    try:
        yield
    finally:
        lock.release()


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
