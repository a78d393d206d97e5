"""Factors on the per-sample squared error as functions of the noise level."""

from collections.abc import Callable

import torch
from torch import Tensor

# name -> weight as a function of sigma = b / a, applied to the squared error of the prediction itself
WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
}
