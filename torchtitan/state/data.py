"""Data of a run: the dataset, its loader, and what could not be read of it."""

from collections.abc import Callable
from typing import Any

from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import trained_info
from torchtitan.data import DATASETS, dataset_info
from torchtitan.data.base import Batch, DatasetError, images_of_shapes
from torchtitan.distributed.mesh import Layout
from torchtitan.runs.folder import RunFolder
from torchtitan.training.corrupt_images import CorruptImages
from torchtitan.training.data_loading import TrainingData
from torchtitan.weights.model_record import record_of


class RunData:
    """Data that a run trains on.

    Attributes:
        record: what sampling needs of the data, for a checkpoint that is taken elsewhere.
        teacher: identity of the encoder of the stored features that are trained on; empty without.
        images_of_shapes: shape (C, H, W) -> number of its images: one shape, or those of the buckets with images.
        corrupt_images: record of images that could not be read.
        loader: global batches, this process's share of each.
    """

    def __init__(
        self, config: JobConfig, layout: Layout, folder: RunFolder, encode: Callable[[Batch, int], Batch] | None
    ) -> None:
        """Open the training images; encode: as of TrainingData. Raises DatasetError."""
        dataset = DATASETS[config.data.name](config.data, "train")
        self.info, images = trained_info(config), dataset_info(config.data)
        self.record = record_of(config, self.info).data_table()
        self.teacher: dict[str, Any] = {}
        if path := getattr(config.data, "features_path", ""):
            from torchtitan.latents.store import LatentStore  # which no other dataset needs

            self.teacher = LatentStore(path).index.autoencoder
        self.images_per_epoch, self.listing = len(dataset), dataset.listing_digest()[:16]
        if not self.images_per_epoch:
            raise DatasetError(f"dataset {config.data.name}: has no images to train on")
        self.images_of_shapes = images_of_shapes(dataset, self.info)
        self.corrupt_images = CorruptImages(folder.path)
        self.loader = TrainingData(
            dataset,
            config.data,
            info=images,
            seed=config.debug.seed,
            end_sample=config.training.steps * config.training.global_batch_size,
            global_batch_size=config.training.global_batch_size,
            local_batch_size=config.training.local_batch_size,
            rank=layout.data_rank,
            world_size=layout.data_ranks,
            pin_memory=layout.device.type == "cuda",
            on_unreadable=self.corrupt_images.record,
            encode=encode,
        )
