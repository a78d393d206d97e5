"""What a metric is given besides features, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan.fidelity.feature_set import FeatureSet
from torchtitan.statistics.interval import Interval


@dataclass(frozen=True)
class Options:
    """Settings of all metrics.

    Attributes:
        confidence: of intervals, in (0, 1).
        seed: of subsets and of the bootstrap, through numpy's PCG64; a named protocol of a tool has the tool's own.
        device: torch device of products of rows with rows.
        neighbours: k of precision, recall, density and coverage, at least 1.
        prdc_samples, prdc_reference: images that these take of each set, at most.
        held_out: images of the distribution of the reference that no generator was trained on, for memorisation.
        held_out_share: share of held-out images that are nearer to a training image than its threshold, in (0, 1).
    """

    confidence: float = 0.95
    seed: int = 0
    device: str = "cpu"
    neighbours: int = 3
    prdc_samples: int = 50_000
    prdc_reference: int = 10_000
    splits: int = 10
    held_out: FeatureSet | None = None
    held_out_share: float = 0.01


@dataclass(frozen=True)
class Measurement:
    """Values of a metric by name, with intervals, and notes for the reader in a sentence each."""

    values: Mapping[str, Interval]
    notes: Sequence[str] = ()
