"""Size of drawn images, where a network takes images of any."""

from torchtitan.evaluation.decoding import LatentDecoder
from torchtitan.models import MODELS
from torchtitan.weights.trained_model import TrainedModel, WeightsError


def sampled_shape(pixels: tuple[int, int] | None, trained: TrainedModel, decoder: LatentDecoder | None) -> tuple[int, int, int]:
    """Shape (C, H, W) of what a network draws: images, or latents.

    Args:
        pixels: height and width of the images, also of latents; None: those of the model.

    Raises:
        WeightsError: the network does not draw images of that size.
    """
    channels, *own = trained.model.image_shape
    if pixels is None:
        return trained.model.image_shape
    config = trained.config
    family = MODELS[config.model.name]
    factor = _pixels_per_latent(trained, decoder)
    if not family.many_shapes and (only := [side * factor for side in own]) != list(pixels):
        raise WeightsError(
            f"--size: model.name = {config.model.name} draws {only[0]}x{only[1]} only, as it was trained (leave it out)"
        )
    size = "x".join(map(str, pixels))
    patch = getattr(config.model, "patch_size", 1)
    multiple = factor * (patch if isinstance(patch, int) else 1)
    if any(side % multiple for side in pixels):
        nearest = "x".join(str(max(round(side / multiple), 1) * multiple) for side in pixels)
        raise WeightsError(f"--size: {size}: height and width must be multiples of {multiple} pixels (give {nearest})")
    shape = channels, pixels[0] // factor, pixels[1] // factor
    if found := family.problems(config.model, shape):
        raise WeightsError(f"--size: {size}: {found[0]}")
    return shape


def _pixels_per_latent(trained: TrainedModel, decoder: LatentDecoder | None) -> int:
    """Pixels of an image's side per value of the network's; 1 for a network of images. Raises WeightsError."""
    index = trained.record.latents
    if index is None:
        return 1
    if decoder:
        return decoder.identity()["downscale"]
    known = index.autoencoder.get("downscale")
    if isinstance(known, int) and known > 0:
        return known
    if index.image_size and index.image_size % index.shape[1] == 0:
        return index.image_size // index.shape[1]
    raise WeightsError("--size: the store does not know the pixels of a latent (give --autoencoder, or leave it out)")
