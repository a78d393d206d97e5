"""Tiling of large images, so that memory depends on the tile and not on the image."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError, Latents


class TiledAutoencoder(Autoencoder):
    """Autoencoder in tiles of at most `tile` x `tile` pixels; neighbours are blended linearly.

    An image that fits one tile is encoded and decoded exactly as without tiling. For larger images a network with a
    receptive field of radius r gives the same values farther than r from every cut; nearer, the blend gives an edge
    small weight. Sums over the whole image, as in group norms and attention, are sums over the tile instead.
    """

    def __init__(self, autoencoder: Autoencoder, tile: int, overlap: int) -> None:
        """
        Args:
            tile: side of a tile in pixels, a multiple of the autoencoder's downscale.
            overlap: minimum of pixels shared by neighbours, also a multiple, at most half of the tile.

        Raises:
            AutoencoderError: tile or overlap is not such a number.
        """
        super().__init__(autoencoder.dtype, autoencoder.device)
        step = autoencoder.downscale
        for name, value in (("tile", tile), ("overlap", overlap)):
            if value < step or value % step:
                raise AutoencoderError(f"the {name} must be a multiple of {step} pixels, is {value}")
        if overlap > tile // 2:
            raise AutoencoderError(f"tiles of {tile} pixels can overlap by {tile // 2} at most, not by {overlap}")
        self.autoencoder = autoencoder
        self.name, self.channels, self.downscale = autoencoder.name, autoencoder.channels, autoencoder.downscale
        self.normalization, self.weights_sha256 = autoencoder.normalization, autoencoder.weights_sha256
        self.tile, self.overlap = tile // step, overlap // step  # in latent positions

    def identity(self) -> dict:
        """Identity of the autoencoder inside: the latents are of its kind, and equal where an image fits a tile."""
        return self.autoencoder.identity()

    def encode(self, images: Tensor) -> Latents:
        """Encode as the autoencoder inside; mean and standard deviation are blended alike."""
        self.check_images(images)
        step = self.downscale
        has_std = True

        def encode_tile(top: int, bottom: int, left: int, right: int) -> Tensor:
            nonlocal has_std
            latents = self.autoencoder.encode(images[..., top * step : bottom * step, left * step : right * step])
            has_std = latents.std is not None
            return latents.mean if latents.std is None else torch.cat((latents.mean, latents.std), 1)  # [B, C or 2 C, h, w]

        height, width = images.shape[2] // step, images.shape[3] // step
        blended = blend_tiles(encode_tile, height, width, self.tile, self.overlap, zoom=1)
        return Latents(*blended.chunk(2, dim=1)) if has_std else Latents(blended)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode as the autoencoder inside."""
        self.check_latents(latents)

        def decode_tile(top: int, bottom: int, left: int, right: int) -> Tensor:
            return self.autoencoder.decode(latents[..., top:bottom, left:right])

        height, width = latents.shape[2:]
        return blend_tiles(decode_tile, height, width, self.tile, self.overlap, zoom=self.downscale)


def in_tiles(autoencoder: Autoencoder, tile: int, overlap: int | None = None) -> TiledAutoencoder:
    """Wrap an autoencoder in tiles of `tile` pixels that share `overlap`; None: a quarter. Raises AutoencoderError."""
    quarter = max(tile // 4 // autoencoder.downscale, 1) * autoencoder.downscale
    return TiledAutoencoder(autoencoder, tile, quarter if overlap is None else overlap)


def blend_tiles(
    run: Callable[[int, int, int, int], Tensor], height: int, width: int, tile: int, overlap: int, zoom: int
) -> Tensor:
    """Join the results of overlapping tiles, each weighted by a ramp that rises linearly from its cut edges.

    Args:
        run: (top, bottom, left, right) in [0, height] and [0, width] -> result [B, C, (bottom - top) * zoom,
            (right - left) * zoom].
        tile: side of a tile; a shorter whole is one tile on that side.
        overlap: minimum of positions shared by neighbours; the last tile of a row shares more.
        zoom: positions of the result per position of the tile.

    Returns:
        [B, C, height * zoom, width * zoom]; where one tile covers all, its result bit for bit.
    """
    rows, columns = spans(height, tile, overlap), spans(width, tile, overlap)
    if len(rows) == len(columns) == 1:
        return run(0, height, 0, width)
    total, weights = torch.empty(0), torch.zeros(height * zoom, width * zoom)
    for top, bottom in rows:
        for left, right in columns:
            part = run(top, bottom, left, right)
            weight = torch.outer(
                ramp(top, bottom, height, overlap, zoom), ramp(left, right, width, overlap, zoom)
            ).to(part.device)
            if not total.numel():
                total = part.new_zeros(*part.shape[:2], height * zoom, width * zoom)
                weights = weights.to(part.device)
            place = slice(top * zoom, bottom * zoom), slice(left * zoom, right * zoom)
            total[:, :, *place] += part * weight
            weights[place] += weight
    return total / weights


def spans(length: int, tile: int, overlap: int) -> list[tuple[int, int]]:
    """Spans (begin, end) of the tiles along one side: all of full length if there are several, the last at the end."""
    if length <= tile:
        return [(0, length)]
    begins = [*range(0, length - tile, tile - overlap), length - tile]
    return [(begin, begin + tile) for begin in begins]


def ramp(begin: int, end: int, length: int, overlap: int, zoom: int) -> Tensor:
    """Ramp of weights along a tile's side, [(end - begin) * zoom]: 1 inside, linear to 0 over a cut edge's overlap."""
    weights = torch.ones((end - begin) * zoom)
    size = overlap * zoom
    rise = (torch.arange(size) + 0.5) / size
    if begin > 0:
        weights[:size] = rise
    if end < length:
        weights[-size:] = rise.flip(0)
    return weights
