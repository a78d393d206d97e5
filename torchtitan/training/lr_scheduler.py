"""Learning-rate schedule, a pure function of the step."""

import math

from torchtitan.training.config import LRSchedulerConfig


def lr_factor(config: LRSchedulerConfig, step: int, total_steps: int) -> float:
    """Learning rate of a step as a fraction of the peak.

    Args:
        config: warm-up and shape.
        step: 1 for the first optimizer step, total_steps for the last.
        total_steps: steps of the run, 1 or more.

    Returns:
        step / warmup_steps during warm-up; then 1, or a line or half cosine that would reach min_lr_factor
        one step after the last. inverse_sqrt multiplies the warm-up by 1 / sqrt(max((step - 1) / reference_steps, 1))
        and doesn't know the length of the run.

    Source of inverse_sqrt: Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models".
    """
    if config.decay_type == "inverse_sqrt":
        warmup = min(step / config.warmup_steps, 1.0) if config.warmup_steps else 1.0
        return warmup / math.sqrt(max((step - 1) / config.reference_steps, 1.0))
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.decay_type == "constant":
        return 1.0
    progress = (step - 1 - config.warmup_steps) / (total_steps - config.warmup_steps)
    shape = 1.0 - progress if config.decay_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * shape
