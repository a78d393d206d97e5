"""Magnitude preservation: layers, sums and concatenations that keep the root mean square of activations at 1.

Inputs of unit mean square that are independent of one another give an output of unit mean square, whatever the weights
were trained to, because a weight counts by the direction of its rows alone. Raw weights are normalised in place before
each step of training (`normalize_rows`), so that a learning rate is a relative one; no decay is needed.

Source: Karras et al., "Analyzing and improving the training dynamics of diffusion models", arXiv 2312.02696, section 2
and appendix B.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Added to the root mean square of a weight's row, by which the row is divided.
WEIGHT_EPSILON = 1e-4
# Root mean square of silu and of gelu in its tanh form for standard normal inputs. The first has three digits in the paper.
_SILU_RMS = 0.596
_GELU_RMS = 0.652


class NormalizedWeight(nn.Module):
    """Layer with a weight [out, ...] (raw from N(0, 1), no bias) of which only the direction of each row counts."""

    weight: nn.Parameter

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def init_weights(self) -> None:
        """Draw the raw weight."""
        nn.init.normal_(self.weight)

    def raw_weight(self) -> Tensor:
        """Weight before its rows are normalised."""
        return self.weight

    def scaled_weight(self, dtype: torch.dtype) -> Tensor:
        """Weight as it is used: rows of norm 1 (nearly: see WEIGHT_EPSILON), which keep the mean square of inputs."""
        fan_in = self.weight[0].numel()
        return (normalized(self.raw_weight(), dim=None, eps=WEIGHT_EPSILON) / math.sqrt(fan_in)).to(dtype)


class MPLinear(NormalizedWeight):
    """Linear that preserves magnitudes."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(out_features, in_features)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.scaled_weight(x.dtype))


class MPConv2d(NormalizedWeight):
    """Convolution that preserves magnitudes, of odd kernel size, zero-padded to the size of its input."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(out_channels, in_channels, kernel_size, kernel_size)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.scaled_weight(x.dtype), padding=self.kernel_size // 2)


class MPFourier(nn.Module):
    """Random waves of a number, of unit mean square: sqrt(2) cos(frequency x + phase), as the published weights have them.

    Attributes:
        freqs: 2 pi N(0, 1) [channels]; saved with the weights, neither trained nor averaged.
        phases: 2 pi times uniform in [0, 1), alike.
    """

    freqs: Tensor
    phases: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.empty(channels))
        self.register_buffer("phases", torch.empty(channels))

    def init_weights(self) -> None:
        """Draw frequencies and phases."""
        nn.init.normal_(self.freqs).mul_(2.0 * math.pi)
        nn.init.uniform_(self.phases).mul_(2.0 * math.pi)

    def forward(self, x: Tensor) -> Tensor:
        """Waves [B, channels] of x [B], float32 or x's dtype, whichever is finer."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        angle = x[:, None] * self.freqs.to(x.dtype) + self.phases.to(x.dtype)
        return math.sqrt(2.0) * angle.cos()


def normalized(x: Tensor, dim: int | tuple[int, ...] | None, eps: float) -> Tensor:
    """x / (eps + rms), of unit root mean square over `dim` (None: all but the first), in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = tuple(range(1, x.ndim)) if dim is None else dim
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    return x / (eps + norm * math.sqrt(norm.numel() / x.numel()))


def pixel_norm(x: Tensor, dim: int) -> Tensor:
    """Normalise each pixel or token over its channels `dim`; of x's dtype."""
    return normalized(x, dim, 1e-4).to(x.dtype)


def mp_silu(x: Tensor) -> Tensor:
    """SiLU that preserves magnitudes."""
    return F.silu(x) / _SILU_RMS


def mp_gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form that preserves magnitudes."""
    return F.gelu(x, approximate="tanh") / _GELU_RMS


def mp_sum(a: Tensor, b: Tensor, share: float) -> Tensor:
    """Sum ((1 - share) a + share b) over its magnitude for independent a and b of unit mean square."""
    return torch.lerp(a, b, share) / math.hypot(1.0 - share, share)


def mp_cat(a: Tensor, b: Tensor, share: float, dim: int) -> Tensor:
    """Concatenate a and b so that b has the part share^2 / ((1 - share)^2 + share^2) of the mean square, a the rest.

    Weighted parts have the mean square of all channels together, however many channels each has.
    """
    of_a, of_b = a.shape[dim], b.shape[dim]
    scale = math.sqrt((of_a + of_b) / ((1.0 - share) ** 2 + share**2))
    return torch.cat((a * (scale * (1.0 - share) / math.sqrt(of_a)), b * (scale * share / math.sqrt(of_b))), dim=dim)


def normalized_weights(model: nn.Module) -> list[nn.Parameter]:
    """Raw weights of a model that train and are normalised before each step."""
    found = [module.weight for module in model.modules() if isinstance(module, NormalizedWeight)]
    return [weight for weight in found if weight.requires_grad]


@torch.no_grad()
def normalize_rows(weights: Sequence[Tensor]) -> None:
    """Normalise every row of raw weights to unit root mean square, in place.

    Args:
        weights: plain tensors with whole rows, as every rank holds them under FSDP2, or none of a small weight.
    """
    for weight in weights:
        if weight.numel():
            weight.copy_(normalized(weight, dim=None, eps=WEIGHT_EPSILON))


def init_magnitude_preserving(model: nn.Module) -> None:
    """Draw the weights of every layer of this file in a model, from torch's global random state."""
    for module in model.modules():
        if isinstance(module, NormalizedWeight | MPFourier):
            module.init_weights()
