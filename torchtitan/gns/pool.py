"""Pools of noise scales over many steps: every estimator and the sums that it takes."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from torchtitan.gns.capture import FREE_PARTS, GEOMETRIES, PARTS, StepSums
from torchtitan.gns.composite import Composite
from torchtitan.gns.decayed import BinEstimates, DecayedSums
from torchtitan.gns.outliers import OutlierRule
from torchtitan.gns.statistics import PairSums, whole_objective

# sketch: the whole model on measured steps, pairs of the whole step
# composite: the whole model, from measured steps and what the free parts say on all others, see torchtitan.gns.composite
# modulation: adaLN alone on every step, pairs within microbatches
ESTIMATORS = ("sketch", "composite", "modulation")

_MODULATION = PARTS.index("modulation")


# The half-life is at most this share of the samples seen, see DecayedSums.
_RAMP = 0.25


class Pool:
    """Decayed sums of every geometry and estimator, by bin and over all bins; on the host, in float64.

    The steps between measured steps are one entry of all sums: the mean gradient swings from step to step, and
    intervals take entries as independent.
    """

    def __init__(self, num_bins: int, num_geometries: int, half_life: float) -> None:
        """`half_life`: samples of a bin after which a step counts half."""
        self.num_bins = num_bins
        self.geometries = GEOMETRIES[:num_geometries]
        self._half_life = half_life
        self._losses = torch.zeros(2, num_bins, dtype=torch.float64)  # samples, sum of squared losses
        self._composites = [Composite(num_bins, index, half_life, _RAMP) for index in range(num_geometries)]
        keys = [(geometry, estimator) for geometry in self.geometries for estimator in ("sketch", "modulation")]
        self._by_bin = {key: DecayedSums(num_bins, half_life, _RAMP) for key in keys}
        self._whole = {key: DecayedSums(1, half_life * num_bins, _RAMP) for key in keys}
        self._entry = {key: PairSums.zeros(num_bins) for key in keys}
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
            if not sums.squares[: len(FREE_PARTS), index].any():
                continue  # no second moment yet
            if sums.all_pairs is not None:
                squares, products = sums.squares[:, index].sum(0), sums.all_products[:, index].sum(0)
                self._enter((geometry, "sketch"), PairSums(sums.count, squares, products, sums.all_pairs))
            self._composites[index].add(sums)
            squares, products = sums.squares[_MODULATION, index], sums.products[_MODULATION, index]
            self._enter((geometry, "modulation"), PairSums(sums.count, squares, products, sums.pairs))
        if sums.measured:
            self._close_entry()
        return True

    def _enter(self, key: tuple[str, str], sums: PairSums) -> None:
        if sums.is_finite():
            self._entry[key] = self._entry[key] + sums

    def _close_entry(self) -> None:
        as_one = torch.zeros(self.num_bins, dtype=torch.int64)
        for key, sums in self._entry.items():
            if sums.count.any():
                self._by_bin[key].add(sums)
                self._whole[key].add(sums.combined(as_one, 1))
                self._entry[key] = PairSums.zeros(self.num_bins)

    def by_bin(self, geometry: str, estimator: str) -> BinEstimates:
        """Estimates by bin."""
        if estimator == "composite":
            return self._composites[self.geometries.index(geometry)].estimate()
        return self._by_bin[geometry, estimator].estimate()

    def whole(self, geometry: str, estimator: str, mass: Tensor | None = None, stratified: bool = False) -> BinEstimates:
        """Estimates of the whole objective as a single bin, from the sketch or the modulation.

        Without `mass` samples are taken as independent draws of the objective's timesteps. With it the bins are put
        together by `whole_objective`, which accounts for stratified batches and for shares that are not the masses; the
        interval keeps its relative width, since the samples are the same; where either signal is not positive, all are
        NaN.

        Args:
            geometry, estimator: names.
            mass: probability of each bin in the objective, [K].
            stratified: whether every batch has its share of each bin.
        """
        found = self._whole[geometry, estimator].estimate()
        if mass is None:
            return found
        parts = whole_objective(self._by_bin[geometry, estimator].sums(), mass, stratified)
        ratio = parts.b_simple / found.b_simple
        known = ratio > 0  # or else a signal is not positive, and no interval follows from the other's
        return replace(
            found, signal=parts.signal[None], noise=parts.noise[None], b_simple=parts.b_simple[None],
            lower=torch.where(known, found.lower * ratio, 0.0), upper=torch.where(known, found.upper * ratio, torch.inf),
            unbounded=found.unbounded | ~known,
        )  # fmt: skip

    def parts_of_whole(self, geometry: str, mass: Tensor, stratified: bool) -> dict[str, float]:
        """Noise of the objective split into within and between bins, from measured steps; see `whole_objective`."""
        whole = whole_objective(self._by_bin[geometry, "sketch"].sums(), mass, stratified)
        return {"noise_within": whole.within.item(), "noise_between": whole.between.item()}

    def mean_square_loss(self) -> Tensor:
        """Mean square loss E[L^2] of each bin [K]; NaN without samples."""
        return self._losses[1] / self._losses[0]

    def state_dict(self) -> dict:
        def named(values: dict) -> dict:
            return {"/".join(key): value for key, value in values.items()}

        entries = {key: [tensor.tolist() for tensor in vars(sums).values()] for key, sums in self._entry.items()}
        return {
            "num_bins": self.num_bins,
            "losses": self._losses.tolist(),
            "composites": [composite.state_dict() for composite in self._composites],
            "by_bin": named({key: sums.state_dict() for key, sums in self._by_bin.items()}),
            "whole": named({key: sums.state_dict() for key, sums in self._whole.items()}),
            "entry": named(entries),
            "outliers": [rule.state_dict() for rule in (self._free_outliers, self._whole_outliers)],
        }

    def load_state_dict(self, state: dict) -> None:
        """Resume from a state; one of other bins or geometries is dropped."""
        keys = {"/".join(key): key for key in self._by_bin}
        if state["num_bins"] != self.num_bins or set(state["by_bin"]) != set(keys):
            return
        self._losses = torch.tensor(state["losses"], dtype=torch.float64)
        for composite, found in zip(self._composites, state["composites"], strict=True):
            composite.load_state_dict(found)
        for name, key in keys.items():
            self._by_bin[key].load_state_dict(state["by_bin"][name])
            self._whole[key].load_state_dict(state["whole"][name])
            self._entry[key] = PairSums(*(torch.tensor(values, dtype=torch.float64) for values in state["entry"][name]))
        for rule, found in zip((self._free_outliers, self._whole_outliers), state.get("outliers", ({}, {})), strict=True):
            rule.load_state_dict(found)


def to_host(sums: StepSums) -> StepSums:
    """Copy the sums to the host's memory; waits for the device."""
    values = (getattr(sums, field.name) for field in fields(StepSums))
    on_host: list[Any] = [None if value is None else value.to("cpu", torch.float64) for value in values]
    return StepSums(*on_host)
