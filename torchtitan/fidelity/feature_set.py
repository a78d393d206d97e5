"""Feature vectors of a set of images, in the forms that metrics read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from torchtitan.fidelity.moments import Moments, check_rows, moments_of_rows


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of images, by the extractor's output ("pooled", "logits", "spatial").

    Attributes:
        rows: feature vectors in the images' order, float32 or float64 [N, D].
        moments: of all images, for outputs without rows.
        classes: number of the class that each image was drawn for, int [N]; None: not known.
    """

    name: str
    extractor: str
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    moments: Mapping[str, Moments] = field(default_factory=dict)
    classes: np.ndarray | None = None

    def rows_of(self, output: str) -> np.ndarray:
        """Rows of an output, checked to be finite."""
        check_rows(f"{self.name}: {output}", self.rows[output])
        return self.rows[output]

    def moments_of(self, output: str) -> Moments:
        """Moments of an output, those of its rows where there are no others."""
        return self.moments[output] if output in self.moments else moments_of_rows(self.rows_of(output))
