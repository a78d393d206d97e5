"""Feature vectors of a set of images, in the forms that metrics read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from torchtitan.fidelity.disjoint_sets import SETS, MomentsOfSets
from torchtitan.fidelity.errors import FidelityError
from torchtitan.fidelity.moments import Moments, check_rows, merged_moments


@dataclass(frozen=True)
class FeatureSet:
    """Features of a set of images, by the extractor's output ("pooled", "logits", "spatial").

    Attributes:
        name: of the set in messages, such as "samples" or "reference".
        extractor: name of the extractor behind the features.
        rows: feature vectors in the images' order, float32 or float64 [N, D]; a memory map will do.
        moments: of all images.
        sets: moments of disjoint sets that together are all images (`MomentsOfSets`), for intervals; may be missing.
        classes: number of the class that each image was drawn for, int [N]; None: not known.
    """

    name: str
    extractor: str
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    moments: Mapping[str, Moments] = field(default_factory=dict)
    sets: Mapping[str, tuple[Moments, ...]] = field(default_factory=dict)
    classes: np.ndarray | None = None

    def rows_of(self, output: str) -> np.ndarray:
        """Rows of an output, checked to be finite."""
        if output not in self.rows:
            raise FidelityError(f"{self.name}: has no rows of {output} features, only {self._contents()}")
        check_rows(f"{self.name}: {output}", self.rows[output])
        return self.rows[output]

    def moments_of(self, output: str) -> Moments:
        """Moments of an output, merged from those of the sets where they are not there."""
        if output in self.moments:
            return self.moments[output]
        if output not in self.sets:
            raise FidelityError(f"{self.name}: has no moments of {output} features, only {self._contents()}")
        return merged_moments(self.sets[output])

    def _contents(self) -> str:
        forms = (("rows", self.rows), ("moments", self.moments), ("moments of sets", self.sets))
        return ", ".join(f"{form} of {output}" for form, found in forms for output in found) or "nothing"


def feature_set_of_rows(
    name: str, extractor: str, rows: Mapping[str, np.ndarray], sets: int = SETS, seed: int = 0
) -> FeatureSet:
    """Feature set of rows in memory, with the moments of `sets` disjoint sets of each output."""
    of_sets = {}
    for output, values in rows.items():
        accumulators = MomentsOfSets(values.shape[1], len(values), sets, seed)
        accumulators.add(values)
        of_sets[output] = accumulators.moments()
    moments = {output: merged_moments(parts) for output, parts in of_sets.items()}
    return FeatureSet(name, extractor, dict(rows), moments, of_sets)
