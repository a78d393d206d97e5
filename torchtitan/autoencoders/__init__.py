"""Autoencoders between images and latents, by name."""

from collections.abc import Callable

import torch

from torchtitan.autoencoders.base import Autoencoder, AutoencoderError
from torchtitan.autoencoders.tiling import in_tiles
from torchtitan.settings import Registry

AUTOENCODERS: Registry[Callable[[str, torch.dtype | None, torch.device], Autoencoder]] = Registry("torchtitan.autoencoders", {
    "identity": "identity.IdentityAutoencoder",
    "cosmos": "cosmos.CosmosTokenizer",
    "diffusers": "diffusers_models.DiffusersAutoencoder",
    "rae": "rae.RepresentationAutoencoder",
    "taef2": "taef2.Taef2",
})


def build_autoencoder(
    name: str, path: str = "", dtype: torch.dtype | None = None, device: torch.device | str = "cpu", tile: int | None = None,
    overlap: int | None = None,
) -> Autoencoder:  # fmt: skip
    """Open an autoencoder for use.

    Args:
        path: folder of its weights, or for cosmos, diffusers and rae a name on the Hugging Face hub; none for identity.
        dtype: of compute, float32 or bfloat16; None is float32, and for cosmos the dtype that its files are traced in.
        device: meta: the layers without the weights, which are not read.
        tile: side in pixels of the tiles that larger images are cut into; 0 or None: none.
        overlap: pixels shared by neighbouring tiles; None: a quarter of the tile.

    Raises:
        AutoencoderError: an unknown name, no package, missing, wrong or damaged weights, unsuitable tile or overlap.
    """
    if name not in AUTOENCODERS:
        raise AutoencoderError(f"no autoencoder is called {name!r} (there are {', '.join(AUTOENCODERS)})")
    with torch.random.fork_rng(devices=[]):  # networks are filled with random numbers before their weights
        autoencoder = AUTOENCODERS[name](path, dtype, torch.device(device))
    return in_tiles(autoencoder, tile, overlap) if tile else autoencoder
