"""Statistics of each channel, mean and standard deviation, exact in float64 for any number of images."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from torchtitan.errors import LatentStoreError
from torchtitan.latents.index import Normalization, rounded

IMAGES_AT_A_TIME = 64  # bounds the memory of float64 copies


@dataclass(frozen=True)
class ChannelMoments:
    """Count, mean and sum of squared deviations of each channel's values.

    Of latents with mean m and deviation s the moments are those of the posterior's samples: mean E[m], variance
    Var[m] + E[s^2].

    Attributes:
        mean, squares: float64 [C].
    """

    count: int
    mean: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, values: Tensor) -> "ChannelMoments":
        """Moments of latents float32 [N, V, P, C, h, w], N >= 1; all views count.

        The sums are NumPy's, whose order does not depend on the number of threads.
        """
        total: ChannelMoments | None = None
        for part in values.split(IMAGES_AT_A_TIME):
            part = part.double().numpy()
            means = np.moveaxis(part[:, :, 0], 2, 0).reshape(part.shape[3], -1)  # [C, N V h w]
            mean = means.mean(axis=1)
            squares = np.square(means - mean[:, None]).sum(axis=1)
            if part.shape[2] == 2:
                squares += np.square(np.moveaxis(part[:, :, 1], 2, 0)).reshape(part.shape[3], -1).sum(axis=1)
            moments = cls(means.shape[1], mean, squares)
            total = moments if total is None else total.joined(moments)
        if total is None:
            raise ValueError("no values")
        return total

    def joined(self, other: "ChannelMoments") -> "ChannelMoments":
        """Join the moments of two sets of values. Source: Chan, Golub and LeVeque (1979), equation 2.1."""
        count, difference = self.count + other.count, other.mean - self.mean
        return ChannelMoments(
            count,
            self.mean + difference * (other.count / count),
            self.squares + other.squares + difference**2 * (self.count * other.count / count),
        )

    @property
    def std(self) -> np.ndarray:
        """Standard deviation, float64 [C], of the whole population."""
        return np.sqrt(self.squares / self.count)

    def normalization(self) -> Normalization:
        """Normalisation of each channel to mean 0 and variance 1. Raises LatentStoreError: a channel is constant."""
        constant = np.flatnonzero(self.std == 0)
        if len(constant):
            raise LatentStoreError(f"channel {constant[0]} is constant and cannot be normalised; give a normalization")
        return Normalization(
            shift=[rounded(float(value)) for value in self.mean],
            scale=[rounded(float(value)) for value in 1 / self.std],
            source="measured",
        )

    def to_json(self) -> dict:
        return {"count": self.count, "mean": self.mean.tolist(), "squares": self.squares.tolist()}

    @classmethod
    def from_json(cls, content: dict) -> "ChannelMoments":
        return cls(content["count"], np.array(content["mean"]), np.array(content["squares"]))
