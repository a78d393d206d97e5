"""Pools of noise scales over many steps: every estimator and the sums that it takes."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from torchtitan.gns.capture import FREE_PARTS, GEOMETRIES, StepSums
from torchtitan.gns.composite import Composite, FreeSums
from torchtitan.gns.control_variate import ControlledSums
from torchtitan.gns.decayed import WINDOW_SHARES, BinEstimates, DecayedSums, narrowest
from torchtitan.gns.outliers import OutlierRule
from torchtitan.gns.statistics import whole_objective

# sketch: the whole model on measured steps, pairs of the whole step
# composite: the whole model, from measured steps and what the free parts say on all others, see torchtitan.gns.composite
# modulation: adaLN alone on every step, pairs within microbatches
ESTIMATORS = ("sketch", "composite", "modulation")

# Estimators of the whole model, without bias; of equally narrow ones the first counts.
WHOLE_MODEL = ESTIMATORS[:2]


class Pool:
    """Decayed sums of every geometry and estimator, by bin and over all bins; on the host, in float64.

    The steps between measured steps are one entry of all sums: the mean gradient swings from step to step, and
    intervals take entries as independent. All estimators of a geometry count half after the same samples trained, and
    estimate from the same window, which follows the drift of the sketch: see `DecayedSums.window`.
    """

    def __init__(self, num_bins: int, num_geometries: int, half_life: float) -> None:
        """`half_life`: samples trained of a bin after which a step counts half, at most."""
        self.num_bins = num_bins
        self.geometries = GEOMETRIES[:num_geometries]
        self._half_life = half_life
        self._losses = torch.zeros(2, num_bins, dtype=torch.float64)  # samples, sum of squared losses
        # Of the bins, and of all of them as one.
        of_composites = (num_bins, half_life), (1, half_life * num_bins)
        geometries = range(num_geometries)
        self._composites = [[Composite(bins, index, life) for index in geometries] for bins, life in of_composites]
        self._controlled = [
            [ControlledSums(bins, life, WINDOW_SHARES) for _ in geometries] for bins, life in of_composites
        ]
        keys = [(geometry, estimator) for geometry in self.geometries for estimator in ("sketch", "modulation")]
        self._by_bin = {key: DecayedSums(num_bins, half_life, WINDOW_SHARES) for key in keys}
        self._whole = {key: DecayedSums(1, half_life * num_bins, WINDOW_SHARES) for key in keys}
        # Of the steps since the last measured one; none before the geometry's first.
        self._entries = {geometry: FreeSums.zeros(num_bins) for geometry in self.geometries}
        # Of the free parts on every step, and of the whole model on measured ones, in plain geometry: the other's scale
        # changes with its factors.
        self._free_outliers, self._whole_outliers = OutlierRule(num_bins), OutlierRule(num_bins)

    @property
    def outliers(self) -> int:
        """Count of steps left out as outliers, see `OutlierRule`."""
        return self._free_outliers.count + self._whole_outliers.count

    def add(self, sums: StepSums) -> bool:
        """Add one step unless its gradients are outliers; return whether it was counted."""
        squares = sums.squares[:, 0] / sums.count  # [P, K]
        if self._free_outliers.stands_out(squares[: len(FREE_PARTS)].sum(0)):
            return False
        if sums.measured and self._whole_outliers.stands_out(squares.sum(0)):
            return False
        if sums.square_losses.isfinite().all():
            self._losses = self._losses * 0.5 ** (sums.count / self._half_life)
            self._losses += torch.stack((sums.count, sums.square_losses))
        for index, geometry in enumerate(self.geometries):
            free = FreeSums.of(sums, index)
            if free.squares.any() and free.is_finite():  # or no second moment yet
                self._entries[geometry] = self._entries[geometry] + free
                if sums.measured:
                    self._close_entry(index, sums)
        return True

    def _close_entry(self, index: int, sums: StepSums) -> None:
        """Add the entry that a measured step ends to the sums of a geometry, all of it or, where a sum is not finite, nothing."""
        geometry, as_one = self.geometries[index], torch.zeros(self.num_bins, dtype=torch.int64)
        entry, self._entries[geometry] = self._entries[geometry], FreeSums.zeros(self.num_bins)
        by_bin, whole = (
            kind[index].add(of_entry, of_step)
            for kind, of_entry, of_step in zip(
                self._composites, (entry, entry.combined()), (sums, sums.combined()), strict=True
            )
        )
        if by_bin is None or whole is None:
            return
        of_all = entry.count.sum(0, keepdim=True)
        for estimator, found in (("sketch", by_bin[0]), ("modulation", entry.modulation())):
            self._by_bin[geometry, estimator].add(found, entry.count)
            self._whole[geometry, estimator].add(found.combined(as_one, 1), of_all)
        self._controlled[0][index].add(*by_bin, entry.count)
        self._controlled[1][index].add(*whole, of_all)

    def window(self, geometry: str) -> int:
        """Window that all estimates of a geometry are from."""
        return self._by_bin[geometry, "sketch"].window()

    def headline(self, geometry: str) -> str:
        """Name of the estimator of the whole model whose intervals by bin are the narrowest: see `narrowest`."""
        return narrowest({name: self.by_bin(geometry, name) for name in WHOLE_MODEL})

    def by_bin(self, geometry: str, estimator: str) -> BinEstimates:
        """Estimates by bin."""
        return self._estimate(self._by_bin, 0, geometry, estimator)

    def _estimate(self, sums: dict[tuple[str, str], DecayedSums], kind: int, geometry: str, estimator: str) -> BinEstimates:
        """Estimates of the bins (kind 0) or of all as one (1), from `sums` of that kind."""
        window = self.window(geometry)
        if estimator != "composite":
            return sums[geometry, estimator].estimate(window=window)
        plain = sums[geometry, "sketch"].estimate(window=window)
        return self._controlled[kind][self.geometries.index(geometry)].estimate(plain, window)

    def whole(self, geometry: str, estimator: str, mass: Tensor | None = None, stratified: bool = False) -> BinEstimates:
        """Estimates of the whole objective as a single bin.

        Without `mass` samples are taken as independent draws of the objective's timesteps. With it the bins are put
        together by `whole_objective`, which accounts for stratified batches and for shares that are not the masses; the
        interval keeps its relative width, since the samples are the same; where either signal is not positive, all are
        NaN.

        Args:
            geometry, estimator: names.
            mass: probability of each bin in the objective, [K].
            stratified: whether every batch has its share of each bin.
        """
        found = self._estimate(self._whole, 1, geometry, estimator)
        if mass is None:
            return found
        # Between bins the composite has the sketch's inner products: what masses change is taken from there.
        base = "sketch" if estimator == "composite" else estimator
        as_drawn = self._estimate(self._whole, 1, geometry, base)
        parts = whole_objective(self._by_bin[geometry, base].sums(self.window(geometry)), mass, stratified)
        ratio = parts.b_simple / as_drawn.b_simple
        known = (ratio > 0) & (found.b_simple > 0)  # or else no interval follows from the other's
        return replace(
            found, signal=found.signal * (parts.signal / as_drawn.signal), noise=found.noise * (parts.noise / as_drawn.noise),
            b_simple=found.b_simple * ratio,
            lower=torch.where(known, found.lower * ratio, 0.0), upper=torch.where(known, found.upper * ratio, torch.inf),
            unbounded=found.unbounded | ~known,
        )  # fmt: skip

    def parts_of_whole(self, geometry: str, mass: Tensor, stratified: bool) -> dict[str, float]:
        """Noise of the objective split into within and between bins, from measured steps; see `whole_objective`."""
        whole = whole_objective(self._by_bin[geometry, "sketch"].sums(self.window(geometry)), mass, stratified)
        return {"noise_within": whole.within.item(), "noise_between": whole.between.item()}

    def mean_square_loss(self) -> Tensor:
        """Mean square loss E[L^2] of each bin [K]; NaN without samples."""
        return self._losses[1] / self._losses[0]

    def state_dict(self) -> dict:
        def named(values: dict) -> dict:
            return {"/".join(key): value for key, value in values.items()}

        return {
            "num_bins": self.num_bins,
            "windows": list(WINDOW_SHARES),
            "losses": self._losses.tolist(),
            "composites": [composite.state_dict() for kind in self._composites for composite in kind],
            "controlled": [sums.state_dict() for kind in self._controlled for sums in kind],
            "by_bin": named({key: sums.state_dict() for key, sums in self._by_bin.items()}),
            "whole": named({key: sums.state_dict() for key, sums in self._whole.items()}),
            "entries": {
                key: {name: tensor.tolist() for name, tensor in vars(sums).items()} for key, sums in self._entries.items()
            },
            "outliers": [rule.state_dict() for rule in (self._free_outliers, self._whole_outliers)],
        }

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; one of other bins, geometries or windows is dropped."""
        keys = {"/".join(key): key for key in self._by_bin}
        if state["num_bins"] != self.num_bins or set(state["by_bin"]) != set(keys):
            return
        if state.get("windows") != list(WINDOW_SHARES):
            return
        self._losses = torch.tensor(state["losses"], dtype=torch.float64)
        for name, parts in (("composites", self._composites), ("controlled", self._controlled)):
            for part, found in zip((part for kind in parts for part in kind), state[name], strict=True):
                part.load_state_dict(found)
        for name, key in keys.items():
            self._by_bin[key].load_state_dict(state["by_bin"][name])
            self._whole[key].load_state_dict(state["whole"][name])
        for key, of_geometry in state["entries"].items():
            self._entries[key] = FreeSums(**{
                name: torch.tensor(values, dtype=torch.float64) for name, values in of_geometry.items()
            })  # fmt: skip
        for rule, found in zip((self._free_outliers, self._whole_outliers), state["outliers"], strict=True):
            rule.load_state_dict(found)


def to_host(sums: StepSums) -> StepSums:
    """Copy the sums to the host's memory; waits for the device."""
    values = (getattr(sums, field.name) for field in fields(StepSums))
    on_host: list[Any] = [None if value is None else value.to("cpu", torch.float64) for value in values]
    return StepSums(*on_host)
