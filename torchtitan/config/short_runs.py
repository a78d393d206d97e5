"""Settings that act later than a run ends."""

from collections.abc import Iterator

from torchtitan.config.job import JobConfig


def too_short_for(config: JobConfig) -> Iterator[str]:
    """Yield a warning for each setting that never acts in a run of so few steps or images."""
    gns, training = config.gns, config.training
    images = training.steps * training.global_batch_size
    if gns.enable and gns.single_pass and gns.interval > training.steps:
        yield f"gns.interval: {gns.interval} is more than training.steps = {training.steps}: no step is measured (lower it)"
    later = {
        "gns.allocation_warmup": (gns.enable and gns.allocate_timesteps, gns.allocation_warmup, "the allocation"),
        "training.double_batch_after": (
            training.double_batch_after, min(training.double_batch_after, default=0), "the batch size",
        ),
    }  # fmt: skip
    for key, (used, start, what) in later.items():
        if used and start >= images:
            yield f"{key}: {start:,} is no less than the run's {images:,} images: {what} never changes (lower it)"
