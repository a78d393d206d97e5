"""Decode latents for grids by the autoencoder of `[autoencoder]`, every rank its share."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from torchtitan.autoencoders.base import Autoencoder, Normalization, denormalize
from torchtitan.data import Dataset
from torchtitan.data.online import open_autoencoder
from torchtitan.distributed.mesh import compute_device
from torchtitan.evaluation.config import AutoencoderConfig
from torchtitan.latents.index import StoreIndex
from torchtitan.latents.store import LatentStore
from torchtitan.pictures.grids import class_labels, image_grid

if TYPE_CHECKING:
    from torchtitan.data.online import OnlineEncoder

HELD_OUT_IMAGES, HELD_OUT_COLUMNS = 32, 8


class LatentDecoder:
    """Decoder of normalised latents, as a model is trained on them; every rank decodes its share.

    Between calls the autoencoder is in the host's memory: on a GPU it takes no memory from training.
    """

    def __init__(
        self, autoencoder: Autoencoder, normalization: Normalization, batch_size: int, device: torch.device
    ) -> None:
        self._autoencoder = autoencoder
        self._normalization = normalization
        self._batch_size = batch_size
        self._device = device
        autoencoder.move(torch.device("cpu"))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode the same latents on all ranks together.

        Args:
            latents: normalised, [N, C, h, w] float32, equal on every rank.

        Returns:
            images [N, 3, H, W] float32 in [-1, 1] on the CPU, on every rank.
        """
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        share = math.ceil(len(latents) / ranks)
        images = torch.empty(0)
        with self.on_device():
            for places in torch.arange(share).split(self._batch_size):  # as many on every rank
                part = self._decoded(latents[(places + rank * share).clamp(max=len(latents) - 1)])
                if not len(images):
                    images = torch.empty(ranks * share, *part.shape[1:])
                for other, decoded in enumerate(_of_all_ranks(part, ranks)):
                    images[places + other * share] = decoded.cpu()
        return images[: len(latents)]

    @torch.no_grad()
    def decode_alone(self, latents: Tensor) -> Tensor:
        """Decode this rank's own latents [N, C, h, w], inside `on_device`: images [N, 3, H, W] float32 on the CPU."""
        return torch.cat([self._decoded(part).cpu() for part in latents.split(self._batch_size)])

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the autoencoder on the device for the block."""
        self._autoencoder.move(self._device)
        try:
            yield
        finally:
            self._autoencoder.move(torch.device("cpu"))
            if self._device.type == "cuda":  # what decoding needed is training's again
                torch.cuda.empty_cache()

    @property
    def downscale(self) -> int:
        """Pixels per latent position."""
        return self._autoencoder.downscale

    def identity(self) -> dict:
        """Identity of the autoencoder, as a latent store records it."""
        return self._autoencoder.identity()

    def _decoded(self, latents: Tensor) -> Tensor:
        with torch.autocast(self._device.type, enabled=False):  # of a sampler that draws in bfloat16
            return self._autoencoder.decode(denormalize(latents.to(self._device), self._normalization))


def open_decoder(config: AutoencoderConfig, index: StoreIndex, place: str, device: torch.device) -> LatentDecoder:
    """Open the autoencoder that latents were made with. Raises AutoencoderError: unusable, or made other latents."""
    autoencoder = open_autoencoder(config, index, place, device)
    normalization: Normalization = {"shift": index.normalization.shift, "scale": index.normalization.scale}
    return LatentDecoder(autoencoder, normalization, config.batch_size, device)


def run_decoder(autoencoder: AutoencoderConfig, store: LatentStore | None) -> LatentDecoder | None:
    """Open the decoder of a run's latents; None without latents or autoencoder. Raises AutoencoderError."""
    if autoencoder.name == "none" or store is None:
        return None
    return open_decoder(autoencoder, store.index, str(store.folder), compute_device())


def held_out_picture(
    dataset: Dataset, decoder: LatentDecoder, class_names: Sequence[str], encoder: "OnlineEncoder | None" = None
) -> Image.Image:
    """Picture of up to 32 decoded held-out latents, which shows a wrong scale, shift or autoencoder; collective.

    They are of the shape that most have: a batch is of one.
    """
    sizes = [len(dataset)] if dataset.buckets is None else list(dataset.buckets)
    largest = max(sizes)
    count = min(HELD_OUT_IMAGES, int(largest))
    numbers = int(sum(sizes[: sizes.index(largest)])) + torch.arange(count) * int(largest) // count
    batch = dataset.fetch(numbers.numpy())
    batch = batch if encoder is None else encoder.held_out(batch, numbers)
    columns = min(count, HELD_OUT_COLUMNS)
    return image_grid(
        decoder.decode(batch["images"]), -(-count // columns), columns, title="held-out latents, decoded",
        captions=class_labels(batch["class"].tolist(), class_names) if class_names else None,
    )  # fmt: skip


def _of_all_ranks(part: Tensor, ranks: int) -> list[Tensor]:
    if ranks == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    return parts
