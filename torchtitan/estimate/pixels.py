"""Warning where a transformer is to be trained on many pixels: what it costs, and the two ways out."""

import time

import torch

from torchtitan.config.job import JobConfig
from torchtitan.models.base import DiffusionModel

MANY_TOKENS = 1024  # of an image: 64 x 64 in patches of 2, 256 x 256 in patches of 8
_DEVICE = "H100"
_SIDE, _PRODUCTS = 256, 100  # matrices by which the processor is measured: 50 ms


def pixel_warning(config: JobConfig, world_size: int) -> str:
    """Warn of a transformer on more than MANY_TOKENS tokens an image, of pixels.

    Returns:
        one line with tokens, memory and hours on H100s, and on this machine's processor if it has no GPU, and what to do; ""
        where there is nothing to warn of.
    """
    side, patch = getattr(config.data, "image_size", None) or 0, getattr(config.model, "patch_size", None) or 0
    if config.cache.enable or config.autoencoder.encode or not patch or (side / patch) ** 2 <= MANY_TOKENS:
        return ""
    # Here, for a start that needs no warning imports nothing heavy.
    from torchtitan.estimate.devices import DEVICES
    from torchtitan.estimate.memory import estimate_memory, model_on_meta
    from torchtitan.estimate.roofline import Efficiency, estimate_step_time

    model = model_on_meta(config)
    _, height, width = model.image_shape
    tokens = model.tokens_per_image(model.image_shape)
    memory = estimate_memory(config, world_size, on_gpu=True)  # the warning speaks of H100s
    step = estimate_step_time(config, model, memory, DEVICES[_DEVICE], Efficiency())
    devices = _DEVICE if world_size == 1 else f"{world_size} {_DEVICE}s"
    hours = f"{step.hours:,.1f} hours on {devices} (speed assumed)"
    if not torch.cuda.is_available():
        hours += f", about {_processor_hours(config, model):,.1f} on this machine's processor"
    sizes = [size for size in (2 * patch, 4 * patch, 8 * patch) if height % size == width % size == 0]
    larger = next((size for size in sizes if tokens * (patch / size) ** 2 <= MANY_TOKENS), max(sizes, default=0))
    patches = f", or give --model.patch_size {larger}" if larger else ""
    return (
        f"warning: {height} x {width} pixels in patches of {patch} are {tokens:,} tokens an image, for which this training needs "
        f"about {memory.total / 2**30:,.0f} GiB a device and {hours} (train on latents, docs/latents.md{patches})"
    )


def _processor_hours(config: JobConfig, model: DiffusionModel) -> float:
    """Hours of the training on this machine's processor, at the rate of a product of matrices measured now."""
    from torchtitan.estimate.roofline import Efficiency, training_flops_per_image

    images = config.training.steps * config.training.global_batch_size
    return images * training_flops_per_image(config, model) / (_processor_flops() * Efficiency().compute) / 3600


def _processor_flops() -> float:
    """Floating-point operations a second of all threads: of one, the fastest of many products of matrices in float32.

    Short products of one thread, since other programs that work at the time, but not for all of a training, slow the others.
    """
    threads = torch.get_num_threads()
    matrix = torch.ones(_SIDE, _SIDE)
    seconds = []
    torch.set_num_threads(1)
    try:
        for _ in range(_PRODUCTS):
            start = time.perf_counter()
            matrix @ matrix
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * _SIDE**3 / min(seconds)
