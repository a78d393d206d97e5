"""Student's t distribution, by scipy."""

from typing import Any


def student_quantile(probability: float, degrees: Any) -> Any:
    """Quantile of Student's t.

    Args:
        probability: above 0.5.
        degrees: of freedom, also fractional: a number, or a tensor of any shape.

    Returns:
        t in float64, of the same shape; infinity below one degree of freedom, where it is useless.
    """
    from scipy.special import stdtrit  # a quarter of a second, not needed by those who read runs without repeats

    if isinstance(degrees, int | float):
        return float(stdtrit(degrees, probability)) if degrees >= 1 else float("inf")
    import torch

    quantile = torch.as_tensor(stdtrit(degrees.double().cpu().clamp_min(1.0).numpy(), probability), device=degrees.device)
    return torch.where(degrees >= 1.0, quantile, torch.inf)
