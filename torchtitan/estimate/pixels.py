"""Warning where a transformer is to be trained on many pixels: what it costs, and the two ways out."""

from torchtitan.config.job import JobConfig

MANY_TOKENS = 1024  # of an image: 64 x 64 in patches of 2, 256 x 256 in patches of 8
_DEVICE = "H100"


def pixel_warning(config: JobConfig, world_size: int) -> str:
    """Warn of a transformer on more than MANY_TOKENS tokens an image, of pixels.

    Args:
        config: resolved.
        world_size: processes.

    Returns:
        one line with tokens, memory and hours on H100s, and what to do; "" where there is nothing to warn of.
    """
    side, patch = getattr(config.data, "image_size", None) or 0, getattr(config.model, "patch_size", None) or 0
    if config.cache.enable or not patch or (side / patch) ** 2 <= MANY_TOKENS:
        return ""
    # Here, for a start that needs no warning imports nothing heavy.
    from torchtitan.estimate.devices import DEVICES
    from torchtitan.estimate.memory import estimate_memory, model_on_meta
    from torchtitan.estimate.roofline import Efficiency, estimate_step_time

    model = model_on_meta(config)
    _, height, width = model.image_shape
    tokens = model.tokens_per_image(model.image_shape)
    memory = estimate_memory(config, world_size)
    time = estimate_step_time(config, model, memory, DEVICES[_DEVICE], Efficiency())
    devices = _DEVICE if world_size == 1 else f"{world_size} {_DEVICE}s"
    larger = next((size for size in (2 * patch, 4 * patch, 8 * patch) if tokens * (patch / size) ** 2 <= MANY_TOKENS), 8 * patch)
    return (
        f"warning: {height} x {width} pixels in patches of {patch} are {tokens:,} tokens an image, for which this training needs "
        f"about {memory.total / 2**30:,.0f} GiB and {time.hours:,.1f} hours on {devices} (train on latents, "
        f"docs/latents.md, or set model.patch_size = {larger})"
    )
