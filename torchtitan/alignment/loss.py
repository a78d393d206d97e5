"""Loss of an alignment: the cosine between projected tokens and a teacher's features.

Sources: Yu et al., "Representation alignment for generation" (REPA), arXiv 2410.06940, eq. 8; Singh et al., "What matters
for representation alignment" (iREPA), arXiv 2512.10794, for the normalisation of the features.
"""

import torch.nn.functional as F
from torch import Tensor

from torchtitan.models.layers import at_least_float32

# Of norms and of standard deviations; in float16 a smaller one is zero.
EPSILON = 1e-6


def cosine_loss(projected: Tensor, features: Tensor) -> Tensor:
    """Mean of -cos over an image's tokens, [B] in [-1, 1], float32 at least; both [B, T, C], normalised over channels."""
    one, other = (F.normalize(at_least_float32(each), dim=-1, eps=EPSILON) for each in (projected, features))
    return -(one * other).sum(-1).mean(1)


def spatially_normalised(features: Tensor, gamma: float) -> Tensor:
    """Features [B, T, C] less gamma times their mean over an image's T tokens, over their standard deviation (of T - 1).

    The deviation is of the features themselves, and EPSILON is added to it; float32 at least.
    """
    features = at_least_float32(features)
    return (features - gamma * features.mean(1, keepdim=True)) / (features.std(1, keepdim=True) + EPSILON)
